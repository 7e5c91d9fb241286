"""Everything a server can be told about speculation: one frozen object, checked when it is made.

It is plain data (strings, numbers, None), so it travels to SGLang's scheduler processes on the server arguments.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from sglang_dspark.errors import UserError
from sglang_dspark.models.draft_config import DraftConfig

VERIFY_MODES = ("static", "compact", "cap-accept", "off")
ACCEPT_RULES = ("token", "block", "coupled")
WINDOW_POLICIES = ("causal", "lagged", "ahead")
CHOICES = {"verify_mode": VERIFY_MODES, "accept_rule": ACCEPT_RULES, "window_policy": WINDOW_POLICIES}
DEFAULT_VERIFY_MODE = "compact"
# What a running server may be told to change between two steps.
SWITCHABLE = (*CHOICES, "min_window", "max_window", "max_step_ms")
COST_KEYWORDS = ("auto", "measure")

# What a mode never reads. Static takes --max-window: it verifies that many drafts for everybody.
IDLE_SETTINGS = {
    "static": ("window_policy", "min_window", "max_step_ms"),
    "off": ("window_policy", "min_window", "max_step_ms", "max_window", "cost_model", "calibration"),
}


class ConfigError(UserError):
    """A setting, or two settings together, that cannot be meant; the message names the flag and the fix."""


@dataclass(frozen=True)
class DSparkConfig:
    """How drafts are verified. Field names are the flags' names with underscores.

    Args:
        verify_mode: `static` verifies `max_window` drafts of every block; `compact` gives each request a window;
            `cap-accept` verifies whole blocks and emits what `compact` would; `off` is plain SGLang decoding without
            a draft.
        accept_rule: `token`, `block` or `coupled`; greedy requests are judged by argmax under every rule.
        window_policy: `causal`, `lagged` or `ahead`; None lets the platform and the draft decide.
        min_window: drafts verified at least, per request and step.
        max_window: drafts verified at most; None means the draft's block size.
        cost_model: `auto` (measured at the first start, kept up, and found again), `measure` (as `auto`, but measured
            anew) or the path of a cost file, which stays as it is.
        calibration: `online`, the path of a calibration file, or `off` (raw confidence).
        max_step_ms: ceiling for one engine step in milliseconds; None means no ceiling.
        record: file that raw confidence and outcomes are written to (used by `sglang-dspark calibrate`; no flag).

    Raises:
        ConfigError: a value outside its range, or settings that contradict each other.
    """

    verify_mode: str = DEFAULT_VERIFY_MODE
    accept_rule: str = "block"
    window_policy: str | None = None
    min_window: int = 0
    max_window: int | None = None
    cost_model: str = "auto"
    calibration: str = "online"
    max_step_ms: float | None = None
    record: str | None = None

    def __post_init__(self) -> None:
        self._check_values()
        self._check_bounds()
        self._check_combination()

    def _check_values(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices and (name, value) != ("window_policy", None):
                raise ConfigError(f"{flag_of(name)} {value}: choose one of {', '.join(choices)}")
        for name in ("cost_model", "calibration"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ConfigError(f"{flag_of(name)} {value!r}: give a path or a keyword")
        if self.record is not None and not isinstance(self.record, str):
            raise ConfigError(f"record {self.record!r}: give a path")

    def _check_bounds(self) -> None:
        _whole_number("min_window", self.min_window, at_least=0, instead="use 0 to let windows close entirely")
        if self.max_window is not None:
            _whole_number(
                "max_window", self.max_window, at_least=1, instead="use --verify-mode off to verify no drafts at all"
            )
            if self.min_window > self.max_window:
                raise ConfigError(
                    f"--min-window {self.min_window} is above --max-window {self.max_window}: lower the first or raise "
                    "the second"
                )
        if self.max_step_ms is not None and not (_is_number(self.max_step_ms) and 0 < self.max_step_ms < float("inf")):
            raise ConfigError(f"--max-step-ms {self.max_step_ms}: a time in milliseconds above 0, or leave it out")

    def _check_combination(self) -> None:
        """A setting that the mode would never read is a mistake, not a preference."""
        default = {field.name: field.default for field in fields(self)}
        for name in IDLE_SETTINGS.get(self.verify_mode, ()):
            if getattr(self, name) != default[name]:
                why = "verifies whole blocks" if self.verify_mode == "static" else "verifies nothing"
                raise ConfigError(
                    f"{flag_of(name)} {getattr(self, name)} has no effect with --verify-mode {self.verify_mode}, which "
                    f"{why}: leave it out, or choose another mode"
                )

    def changed(self, changes: Mapping) -> DSparkConfig:
        """This config with `changes`; what a newly chosen mode never reads goes back to its default.

        Raises:
            ConfigError: as the constructor and `from_dict`.
        """
        mode = changes.get("verify_mode", self.verify_mode)
        default = {field.name: field.default for field in fields(self)}
        unread = {name: default[name] for name in IDLE_SETTINGS.get(mode, ())}
        return DSparkConfig.from_dict({**self.to_dict(), **unread, **changes})

    def check_files(self) -> None:
        """Raise ConfigError where a cost or calibration file is named that does not exist."""
        for name, keywords in (("cost_model", COST_KEYWORDS), ("calibration", ("online", "off"))):
            value = getattr(self, name)
            if value not in keywords and not os.path.isfile(value):  # False too where the name or its folder is no good
                raise ConfigError(f"{flag_of(name)} {value}: no such file, and not {' or '.join(keywords)}")

    def to_dict(self) -> dict:
        """The settings as JSON-ready data; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: Mapping) -> DSparkConfig:
        """Build a config from a mapping of field names; missing ones take their defaults.

        Raises:
            ConfigError: no mapping, an unknown key (the known ones are listed), or whatever the constructor refuses.
        """
        if not isinstance(settings, Mapping):
            raise ConfigError(f"settings are an object of names and values, not {settings!r:.80}")
        known = [field.name for field in fields(cls)]
        if unknown := sorted(str(key) for key in settings if key not in known):
            raise ConfigError(f"unknown setting {', '.join(unknown)}: the known ones are {', '.join(known)}")
        return cls(**settings)


def check_draft(config: DSparkConfig, draft: DraftConfig) -> None:
    """Refuse settings that a draft cannot serve.

    Raises:
        ConfigError: naming the flag, the draft's key and the fix.
    """
    if config.max_window is not None and config.max_window > draft.block_size:
        raise ConfigError(
            f"--max-window {config.max_window}: the draft's block_size is {draft.block_size}; at most that"
        )
    if config.min_window > draft.block_size:
        raise ConfigError(
            f"--min-window {config.min_window}: the draft's block_size is {draft.block_size}; at most that"
        )
    if config.verify_mode in ("compact", "cap-accept") and not draft.enable_confidence_head:
        raise ConfigError(
            f"--verify-mode {config.verify_mode} sizes windows by the draft's confidence, and this draft has "
            "none (enable_confidence_head: false): use --verify-mode static or off"
        )
    if config.window_policy == "ahead" and not draft.has_hidden_confidence:
        raise ConfigError(
            "--window-policy ahead needs a confidence that reads no drafted token, and this draft has "
            "confidence_head_with_markov: true and no hidden_confidence_head: use causal or lagged"
        )


def flag_of(name: str) -> str:
    """The command-line flag of a field: `min_window` is `--min-window`."""
    return "--" + name.replace("_", "-")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole_number(name: str, value: object, *, at_least: int, instead: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{flag_of(name)} {value!r}: a whole number is needed")
    if value < at_least:
        raise ConfigError(f"{flag_of(name)} {value}: at least {at_least} ({instead})")
