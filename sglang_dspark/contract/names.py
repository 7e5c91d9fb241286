"""One name of SGLang that we depend on, and what we expect of it; how rows of such names are written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["call", "hook", "override", "attribute", "field"]


@dataclass(frozen=True)
class SglangName:
    """One row of the compatibility check.

    Args:
        path: `module:attribute.attribute`.
        kind: `call` we call it (or make an instance) with these parameters, so each must exist and no other may be
            required; `hook` and `override`: a function of ours runs around it or in its place, so the parameters are
            exactly these, in this order; `attribute` it exists; `field` instances have it (a struct or dataclass field,
            or assigned in one of the methods).
        used_by: our file or module that would break.
        parameters: names without `self` or `cls`; unused for `attribute` and `field`.
    """

    path: str
    kind: Kind
    used_by: str
    parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.path.count(":") != 1 or not self.path.startswith("sglang."):
            raise ValueError(f"{self.path}: write sglang.module:attribute")
        if self.kind not in get_args(Kind):
            raise ValueError(f"{self.path}: unknown kind {self.kind}")
        if self.parameters and self.kind in ("attribute", "field"):
            raise ValueError(f"{self.path}: a row of kind {self.kind} has no parameters")

    @property
    def module(self) -> str:
        return self.path.partition(":")[0]


Rows = Callable[[str], tuple[SglangName, ...]]


def _functions(kind: Kind, module: str, signatures: tuple[str, ...]) -> Rows:
    """Rows of `Class.function(parameter, parameter)` in a module."""

    def rows(used_by: str) -> tuple[SglangName, ...]:
        parts = (signature.rstrip(")").partition("(") for signature in signatures)
        return tuple(
            SglangName(f"{module}:{name}", kind, used_by, tuple(inside.split(", ")) if inside else ())
            for name, _, inside in parts
        )

    return rows


def calls(module: str, *signatures: str) -> Rows:
    """Functions and classes that we call, with the parameters that we pass."""
    return _functions("call", module, signatures)


def overrides(module: str, *signatures: str) -> Rows:
    """Functions that a subclass or a function of ours takes the place of, with all their parameters."""
    return _functions("override", module, signatures)


def attributes(owner: str, names: str) -> Rows:
    """What a module (`sglang.module`) or a class in it (`sglang.module:Class`) has: names with spaces between them."""
    stem = f"{owner}." if ":" in owner else f"{owner}:"
    return lambda used_by: tuple(SglangName(stem + name, "attribute", used_by) for name in names.split())


def fields(owner: str, names: str) -> Rows:
    """What the instances of a class have: names with spaces between them."""
    return lambda used_by: tuple(SglangName(f"{owner}.{name}", "field", used_by) for name in names.split())


def used_by(file: str, *groups: Rows) -> tuple[SglangName, ...]:
    """The rows of one file of ours."""
    return tuple(row for rows in groups for row in rows(file))
