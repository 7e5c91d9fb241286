"""Files of measured numbers, and the fingerprint that says what they were measured on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

VERSION = 2  # of the format; costs of format 1 may say that a row takes hours


@dataclass(frozen=True)
class Fingerprint:
    """What a cost table or a calibration is valid for; two are interchangeable iff every field is equal.

    Attributes:
        target: digest of the target checkpoint.
        draft: digest of the draft checkpoint.
        gamma: block size.
        device: device name as the driver or the CPU tells it.
        dtype: of the target's weights, for example "bfloat16".
        tp: tensor-parallel size.
        engine: engine and version, for example "sglang 0.5.23".
    """

    target: str
    draft: str
    gamma: int
    device: str
    dtype: str
    tp: int
    engine: str

    def __post_init__(self) -> None:
        if self.gamma < 1 or self.tp < 1:
            raise ValueError(f"gamma and tp must be at least 1, got {self.gamma} and {self.tp}")


class FingerprintMismatch(ValueError):
    """A file was made for something else; the message lists the fields that differ."""


def save_measurement(path: str | Path, kind: str, fingerprint: Fingerprint, body: dict) -> None:
    """Write `body` (JSON types) as a file of this kind; the file appears whole or not at all."""
    text = json.dumps({"kind": kind, "version": VERSION, "fingerprint": asdict(fingerprint), "body": body}, indent=1)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")  # two servers may save at once
    partial.write_text(text)
    partial.replace(path)


def load_measurement(path: str | Path, kind: str, fingerprint: Fingerprint | None) -> dict:
    """Read the body of a file written by `save_measurement`.

    Args:
        path: the file.
        kind: what it must hold ("cost" or "calibration").
        fingerprint: what it must have been measured on. None skips the comparison: for printing a file, not for use.

    Raises:
        FingerprintMismatch: it was measured on something else.
        FileNotFoundError: there is no file.
        ValueError: not such a file, one that cannot be read, or one of another format version.
    """
    try:
        content = json.loads(_text(Path(path)))
        found_kind, version, body = content["kind"], content["version"], content["body"]
        found = Fingerprint(**content["fingerprint"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not a {kind} file: {error}") from error
    if found_kind != kind:
        raise ValueError(f"{path} is a {found_kind} file, not a {kind} file")
    if version != VERSION:
        raise ValueError(f"{path} was written by another version of this program (format {version}, not {VERSION})")
    if fingerprint is not None and found != fingerprint:
        differing = [
            f"{field.name} {getattr(found, field.name)!r} instead of {getattr(fingerprint, field.name)!r}"
            for field in fields(Fingerprint)
            if getattr(found, field.name) != getattr(fingerprint, field.name)
        ]
        raise FingerprintMismatch(f"{path} was measured on something else: {', '.join(differing)}")
    return body


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise
    except OSError as error:  # to whoever wanted its numbers, a file that may not be read is like one that is damaged
        raise ValueError(f"it cannot be read ({error})") from error
