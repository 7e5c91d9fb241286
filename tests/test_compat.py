"""A changed name or signature of SGLang stops the start, instead of surfacing in the middle of a request.

The mechanism is tried on a module of our own making, one planted change per kind of row, so that a check that cannot
fail would be seen; then the whole table is held against the installed SGLang.
"""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
from sglang.srt.plugins import load_plugins

from sglang_dspark import plugin
from sglang_dspark.contract import compatibility as compat
from sglang_dspark.contract import hooks
from sglang_dspark.contract.compatibility import CompatibilityError, check
from sglang_dspark.contract.names import SglangName


class Thing:
    declared: int

    def __init__(self, size, depth=1):
        self.size = size

    def method(self, first, second, *, third=3):
        pass

    @classmethod
    def make(cls, source):
        pass

    @staticmethod
    def plain(parser):
        pass


def takes_anything(first, **others):
    pass


@pytest.fixture
def module(monkeypatch):
    fake = types.ModuleType("sglang.fake_for_compat")
    fake.Thing, fake.takes_anything, fake.CONSTANT = Thing, takes_anything, 1
    monkeypatch.setitem(sys.modules, "sglang.fake_for_compat", fake)


def row(name: str, kind: str, *parameters: str) -> SglangName:
    return SglangName(f"sglang.fake_for_compat:{name}", kind, "a test", parameters)


HOLDS = [
    row("CONSTANT", "attribute"),
    row("Thing", "call", "size"),
    row("Thing", "call", "size", "depth"),
    row("Thing.method", "call", "first", "second"),
    row("Thing.method", "override", "first", "second", "third"),
    row("Thing.make", "override", "source"),
    row("Thing.plain", "override", "parser"),
    row("Thing.size", "field"),
    row("Thing.declared", "field"),
    row("takes_anything", "call", "first", "whatever"),
]
BROKEN = [
    (row("GONE", "attribute"), "there is no GONE"),
    (row("Gone.method", "call"), "there is no Gone"),
    (row("Thing.method", "call", "first"), "now requires second"),
    (row("Thing.method", "call", "first", "second", "fourth"), "takes no fourth"),
    (row("Thing.method", "override", "first", "second"), r"found \(first, second, third\)"),
    (row("Thing.method", "override", "second", "first", "third"), "expected"),
    (row("Thing.make", "override", "cls", "source"), "expected"),
    (row("Thing.weight", "field"), "have no weight"),
    (row("CONSTANT.weight", "field"), "have no weight"),
]


@pytest.mark.parametrize("good", HOLDS, ids=str)
def test_a_row_that_holds_is_no_problem(module, good):
    assert check([good]) == []


@pytest.mark.parametrize(("bad", "message"), BROKEN, ids=str)
def test_a_row_that_does_not_hold_names_what_changed_and_who_breaks(module, bad, message):
    (problem,) = check([bad])
    assert re.search(message, problem) and "used by a test" in problem and bad.path in problem


def test_a_module_that_is_gone_is_a_problem_unless_only_loaded_ones_are_checked():
    gone = SglangName("sglang.no_such_module:name", "attribute", "a test")
    assert "cannot be imported" in check([gone])[0]
    assert check([gone], importing=False) == []


def test_every_name_in_the_table_is_as_the_installed_sglang_has_it():
    load_plugins()  # some names are hooked by us: the check must see through our own hooks
    rows = plugin.rows()
    assert check(rows) == []
    assert len({(r.path, r.kind, r.used_by) for r in rows}) == len(rows), "a row stands twice"


def test_a_mismatch_ends_the_process_with_version_list_and_fix(module):
    with pytest.raises(CompatibilityError) as refusal:
        compat.require_compatible([row("GONE", "attribute")])
    message = str(refusal.value)
    assert compat.installed_version() in message and "there is no GONE" in message
    assert f"pip install sglang=={compat.EXPECTED_VERSION}" in message
    # SGLang catches a plugin's `Exception` and starts without the plugin.
    assert not isinstance(refusal.value, Exception)


@pytest.mark.parametrize("wrong", [("sglang.a.b", "call"), ("torch:nn", "call"), ("sglang:a", "method")])
def test_a_row_that_cannot_be_checked_is_refused_when_it_is_written(wrong):
    with pytest.raises(ValueError):
        SglangName(wrong[0], wrong[1], "a test")


def test_the_expected_version_is_the_one_that_is_installed_with_us():
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'"sglang=={compat.EXPECTED_VERSION}"' in pyproject


def test_every_function_that_we_hook_is_a_row_of_the_table():
    from sglang.srt.plugins.hook_registry import HookRegistry

    load_plugins()
    rows = {row.path.replace(":", ".") for row in plugin.rows() if row.kind == "hook"}
    hooked = {target for target in HookRegistry._hooks if target.startswith("sglang.")}
    assert len(hooked) > 10, "the registry was not read"
    assert hooked <= rows, f"hooked without a row: {sorted(hooked - rows)}"
    declared = {hook.path.replace(":", ".") for module in plugin.hooked_everywhere() for hook in module.HOOKS}
    assert declared <= hooked, f"declared and not in place: {sorted(declared - hooked)}"


def test_every_hook_that_a_module_declares_is_registered_and_checked_and_there_is_no_other_way_to_register_one():
    declaring, registering = set(), set()
    for file in Path(plugin.__file__).parent.rglob("*.py"):
        text = file.read_text()
        name = ".".join(file.relative_to(Path(plugin.__file__).parents[1]).with_suffix("").parts)
        if re.search(r"^HOOKS\b", text, re.MULTILINE):
            declaring.add(name)
        if "import HookRegistry" in text:
            registering.add(name)
    modules = (*plugin.hooked_everywhere(), *plugin.hooked_on_cpu())
    assert declaring == {module.__name__ for module in modules}
    assert registering == {hooks.__name__}
    assert all(isinstance(hook, hooks.Hook) for module in modules for hook in module.HOOKS)


def test_a_hook_is_checked_by_the_parameters_that_it_was_written_for(module):
    written_for = hooks.Hook("sglang.fake_for_compat:Thing.method", hooks.AFTER, takes_anything, ("first", "second"))
    (problem,) = check([written_for.row])
    assert "expected (first, second), found (first, second, third)" in problem and __name__ in problem
