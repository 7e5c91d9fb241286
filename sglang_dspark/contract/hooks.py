"""A function of ours that runs before, after, around or in place of one of SGLang's.

A module that hooks SGLang declares `HOOKS`, a tuple of these. A hook names the parameters it was written for, so it is
its own row of the compatibility check (`row`), and there is no other way to register one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from sglang_dspark.contract.names import SglangName

When = Literal["BEFORE", "AFTER", "AROUND", "REPLACE"]
BEFORE: When = "BEFORE"
AFTER: When = "AFTER"
AROUND: When = "AROUND"
REPLACE: When = "REPLACE"


@dataclass(frozen=True)
class Hook:
    """One hook.

    Args:
        path: of SGLang's function, `module:attribute.attribute`.
        when: what `function` is called with. `BEFORE`: the call's arguments, and it may return others as (args, kwargs);
            `AFTER`: the result and the arguments, and it may return another result; `AROUND`: the original and the
            arguments; `REPLACE`: the arguments.
        function: ours.
        parameters: of SGLang's function as it is expected, without `self` or `cls`.
    """

    path: str
    when: When
    function: Callable
    parameters: tuple[str, ...]

    @property
    def row(self) -> SglangName:
        """The row by which the installed SGLang is compared with what this hook was written for."""
        return SglangName(self.path, "hook", self.function.__module__, self.parameters)


def register(hooks: Iterable[Hook]) -> None:
    """Hand hooks to SGLang, which puts them in place when all of its plugins have loaded; call it while they load."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.path.replace(":", "."), hook.function, HookType[hook.when])
