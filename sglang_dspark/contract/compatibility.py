"""Whether the installed SGLang is as we expect it: every name of it that we touch, checked before a server starts.

SGLang promises no stable interface to plugins, so a changed signature would surface as a crash in the middle of a
request, or not at all. Each row is compared with the installed SGLang by `inspect.signature`; one mismatch refuses the
start with the version, the list and the fix. The rows are those of `compatibility_table` and one of every hook.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import sys
from collections.abc import Iterable

from sglang_dspark.contract.names import SglangName

EXPECTED_VERSION = "0.5.23"


def check(rows: Iterable[SglangName], *, importing: bool = True) -> list[str]:
    """Compare rows with the installed SGLang.

    Args:
        rows: what is expected.
        importing: import modules that are not loaded yet; False checks only what is loaded, which costs no time.

    Returns: one sentence per mismatch; an empty list means compatible.
    """
    checked = (row for row in rows if importing or row.module in sys.modules)
    return [f"{row.path}: {problem} (used by {row.used_by})" for row in checked if (problem := problem_of(row))]


def problem_of(row: SglangName) -> str | None:
    """What is wrong with one row, or None."""
    try:
        module = importlib.import_module(row.module)
    except Exception as error:  # noqa: BLE001 - a module that fails to import, however, is as good as missing
        return f"its module cannot be imported: {type(error).__name__}: {error}"
    owner: object = module
    *owners, name = row.path.partition(":")[2].split(".")
    for step in owners:
        if not hasattr(owner, step):
            return f"there is no {step}"
        owner = getattr(owner, step)
    if row.kind == "field":
        return None if isinstance(owner, type) and has_field(owner, name) else f"its instances have no {name}"
    if not hasattr(owner, name):
        return f"there is no {name}"
    return None if row.kind == "attribute" else _signature_problem(row, owner, name)


def _signature_problem(row: SglangName, owner: object, name: str) -> str | None:
    found = parameters_of(owner, name)
    names = tuple(p.name for p in found)
    if row.kind in ("hook", "override"):
        expected = ", ".join(row.parameters)
        return None if names == row.parameters else f"expected ({expected}), found ({', '.join(names)})"
    takes_any = any(p.kind is p.VAR_KEYWORD for p in found)
    if not takes_any and (missing := [p for p in row.parameters if p not in names]):
        return f"takes no {', '.join(missing)}; found ({', '.join(names)})"
    required = [p.name for p in found if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    extra = [p for p in required if p not in row.parameters]
    return f"now requires {', '.join(extra)}" if extra else None


def parameters_of(owner: object, name: str) -> list[inspect.Parameter]:
    """The parameters that a caller of `owner.name` passes: without `self` of a plain method."""
    parameters = list(inspect.signature(getattr(owner, name)).parameters.values())
    raw = inspect.getattr_static(owner, name)
    plain_method = isinstance(owner, type) and inspect.isfunction(raw)
    return parameters[1:] if plain_method else parameters


def has_field(cls: type, name: str) -> bool:
    """Whether instances of `cls` carry `name`: declared as a field, or mentioned as an attribute by a method."""
    for base in cls.__mro__:
        if name in base.__dict__ or name in inspect.get_annotations(base):
            return True
        if dataclasses.is_dataclass(base) and name in {field.name for field in dataclasses.fields(base)}:
            return True
        functions = (value for value in base.__dict__.values() if inspect.isfunction(value))
        if any(name in inspect.unwrap(function).__code__.co_names for function in functions):
            return True
    return False


def installed_version() -> str:
    """The version of the installed SGLang, or `none`."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def explain(problems: list[str]) -> str:
    """The message that refuses a start: versions, the list, the fix."""
    lines = "\n".join(f"  - {problem}" for problem in problems)
    return (
        f"sglang-dspark does not fit the installed SGLang {installed_version()} (made for {EXPECTED_VERSION}):\n{lines}\n"
        f"Fix: pip install sglang=={EXPECTED_VERSION}; or uninstall sglang-dspark to run SGLang without it."
    )


class CompatibilityError(SystemExit):
    """The installed SGLang is not the one this was written for. SGLang logs and forgets a plugin's ordinary exceptions
    and would start without us; this one ends the process, with its message on stderr."""


def require_compatible(rows: Iterable[SglangName], *, importing: bool = False) -> None:
    """End the process where a row does not hold.

    Our plugin calls it in every SGLang process for what is loaded by then, which costs no time, and with `importing` when
    a scheduler asks for our worker, when all that we use is loaded or about to be.

    Raises:
        CompatibilityError: with the message of `explain`.
    """
    if problems := check(rows, importing=importing):
        raise CompatibilityError(explain(problems))
