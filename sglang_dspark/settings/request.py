"""What one request may ask of speculation: `custom_params: {"dspark": {...}}`."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

KEY = "dspark"
_NO_LIMIT = 1 << 30


class RequestSettings(BaseModel):
    """Bounds of one request's verify windows; `enabled: false` decodes it plainly."""

    model_config = ConfigDict(extra="forbid", strict=True)

    enabled: bool = True
    min_window: int = Field(default=0, ge=0)
    max_window: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> RequestSettings:
        if self.max_window is not None and self.min_window > self.max_window:
            raise ValueError(f"min_window {self.min_window} is above max_window {self.max_window}")
        return self


def read_settings(custom_params: Mapping | None) -> RequestSettings:
    """The checked settings of a request.

    Raises:
        ValueError: an unknown key or a bad value, each named; the engine turns it into a 400.
    """
    if custom_params is not None and not isinstance(custom_params, Mapping):
        raise ValueError(f"custom_params must be an object, got {custom_params!r:.80}")
    for key in custom_params or ():
        if key != KEY and str(key).replace("_", "").casefold() == KEY:
            raise ValueError(f"custom_params.{key}: the key is written {KEY}")
    given = custom_params.get(KEY) if custom_params else None
    if given is None:
        return RequestSettings()
    if not isinstance(given, Mapping):
        raise ValueError(f"custom_params.{KEY} must be an object, got {given!r}")  # noqa: TRY004 (the engine answers 400 to it)
    try:
        return RequestSettings.model_validate(dict(given))
    except ValidationError as error:
        faults = "; ".join(".".join([KEY, *map(str, e["loc"])]) + f": {e['msg']}" for e in error.errors())
        raise ValueError(f"custom_params.{faults}") from None


def request_bounds(custom_params: Mapping | None) -> tuple[int, int]:
    """(min, max) window that a request asks for."""
    settings = read_settings(custom_params)
    if not settings.enabled:
        return 0, 0
    return settings.min_window, _NO_LIMIT if settings.max_window is None else settings.max_window


def check_sampling_params(params, *args, **kwargs) -> None:
    """Runs before the engine's own check of a request's parameters, in the process that answers HTTP.

    Raises:
        ValueError: see `read_settings`.
    """
    read_settings(params.custom_params)
