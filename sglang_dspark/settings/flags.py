"""Our command-line flags, in our own launcher's parser and in SGLang's.

SGLang has no interface for a plugin's flags. Hooks on its two parser functions (`engine/arguments.py`) add a group of ours
and carry the parsed settings on the server arguments, so that `sglang serve --speculative-algorithm DSPARK_LOAD_AWARE`
and `sglang-dspark serve` understand the same flags. Nothing of SGLang is imported at the top of this file.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_dspark.settings.config import (
    ACCEPT_RULES,
    DEFAULT_VERIFY_MODE,
    VERIFY_MODES,
    WINDOW_POLICIES,
    ConfigError,
    DSparkConfig,
    flag_of,
)

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

ALGORITHM = "DSPARK_LOAD_AWARE"
ATTRIBUTE = "dspark"  # where the settings ride on SGLang's ServerArgs
_DEST = "dspark_"  # keeps our names apart from SGLang's in the parsed namespace


@dataclass(frozen=True)
class Flag:
    """One flag: the field of `DSparkConfig` it sets, how its text is read, and what it means."""

    name: str
    help: str
    type: type = str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None

    @property
    def option(self) -> str:
        return flag_of(self.name)


FLAGS = (
    Flag(
        "verify_mode",
        f"How drafts are verified: whole blocks, load-aware windows, the measuring mode, or no drafts "
        f"(default: {DEFAULT_VERIFY_MODE}).",
        choices=VERIFY_MODES,
    ),
    Flag("accept_rule", "Which rule accepts a draft at temperature above 0 (default: block).", choices=ACCEPT_RULES),
    Flag(
        "window_policy",
        "Which survival sizes the windows (default: what suits the platform and the draft).",
        choices=WINDOW_POLICIES,
    ),
    Flag("min_window", "Drafts verified at least, per request and step (default: 0).", int, metavar="N"),
    Flag(
        "max_window",
        "Drafts verified at most, per request and step (default: the draft's block size).",
        int,
        metavar="N",
    ),
    Flag(
        "cost_model",
        "'auto' measures step times at the first start and keeps them up; 'measure' measures them anew; "
        "a path loads a cost file (default: auto).",
        metavar="auto|measure|PATH",
    ),
    Flag(
        "calibration",
        "'online' learns from live outcomes; a path loads a calibration file; 'off' uses raw "
        "confidence (default: online).",
        metavar="online|PATH|off",
    ),
    Flag(
        "max_step_ms",
        "Ceiling for one engine step in milliseconds, for an inter-token latency goal (default: none).",
        float,
        metavar="X",
    ),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add our flags to `parser`, in a group of their own; a parser that has them already is left as it is."""
    if FLAGS[0].option in parser._option_string_actions:
        return
    group = parser.add_argument_group(f"sglang-dspark (with --speculative-algorithm {ALGORITHM})")
    for flag in FLAGS:
        group.add_argument(
            flag.option,
            dest=_DEST + flag.name,
            type=flag.type,
            choices=flag.choices,
            metavar=flag.metavar,
            default=None,
            help=flag.help,
        )


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the command line named, by field name; flags that were left out are absent."""
    values = {flag.name: getattr(args, _DEST + flag.name, None) for flag in FLAGS}
    return {name: value for name, value in values.items() if value is not None}


def config_of_namespace(args: argparse.Namespace) -> DSparkConfig:
    """The checked config that a parsed command line asks for.

    Raises:
        ConfigError: settings that cannot be meant, a file that does not exist, or settings for a server that runs
            another algorithm, which would never read them.
    """
    settings = given_settings(args)
    config = DSparkConfig.from_dict(settings)
    config.check_files()
    algorithm = getattr(args, "speculative_algorithm", None)
    if settings and config.verify_mode != "off" and not speculates(args):
        raise ConfigError(
            f"{flag_of(next(iter(settings)))} has no effect with --speculative-algorithm {algorithm or '(none)'}: add "
            f"--speculative-algorithm {ALGORITHM}, or leave the flag out"
        )
    if config.verify_mode == "off" and algorithm and not speculates(args):
        raise ConfigError(f"--verify-mode off contradicts --speculative-algorithm {algorithm}: leave out one of them")
    return config


def speculates(args: ServerArgs | argparse.Namespace) -> bool:
    """Whether these arguments, parsed or resolved, start a server that runs our algorithm."""
    return (getattr(args, "speculative_algorithm", None) or "").upper() == ALGORITHM


def attach(server_args: ServerArgs, config: DSparkConfig) -> ServerArgs:
    """Put `config` on SGLang's server arguments and return them; `off` also removes every speculative argument.

    Call it before SGLang resolves the arguments. This is also the way in for the Python engine, which never parses a
    command line: `Engine(server_args=attach(ServerArgs(model_path=..., ...), DSparkConfig(...)))`.
    """
    setattr(server_args, ATTRIBUTE, config.to_dict())
    if config.verify_mode == "off":
        import msgspec

        for field in msgspec.structs.fields(type(server_args)):
            if field.name.startswith("speculative_"):
                fresh = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
                setattr(server_args, field.name, fresh)
    return server_args


def config_of(server_args: ServerArgs) -> DSparkConfig:
    """The config that rides on `server_args`, or the default one where nobody attached any (`Engine(**kwargs)`)."""
    settings: Mapping | None = getattr(server_args, ATTRIBUTE, None)
    return DSparkConfig() if settings is None else DSparkConfig.from_dict(settings)
