"""What a benchmark compares: arms, each a way to run a server, and how a name on the command line becomes one."""

from __future__ import annotations

import json
from dataclasses import dataclass

from sglang_dspark.errors import UserError
from sglang_dspark.settings.config import ACCEPT_RULES, SWITCHABLE, VERIFY_MODES, WINDOW_POLICIES, DSparkConfig

# A treatment starts from these, so that nothing of the arm before it is left.
CLEAN = {name: getattr(DSparkConfig(), name) for name in SWITCHABLE}
GRAMMAR = """an arm is MODE[+OPTION...][@URL]: MODE is off, static, static-K, compact, cap-accept,
schedule=[[FROM,TO,K],...] or any name with @URL of a server started for it;
OPTION is an accept rule, a window policy, min-K or max-K"""


class ArmError(UserError):
    """An arm that cannot be read; the message holds the grammar."""


@dataclass(frozen=True)
class Arm:
    """One arm.

    Args:
        name: as written, without the address.
        settings: for `POST /dspark/config`; None for a server that is left as it was started.
        url: of its own server; None for the one that is benchmarked.
        schedule: (from, to, drafts) by concurrency, for a fixed length that follows the load; empty otherwise.
    """

    name: str
    settings: dict | None
    url: str | None = None
    schedule: tuple[tuple[int, int, int], ...] = ()

    def settings_at(self, concurrency: int) -> dict | None:
        """The settings of a cell with so many clients.

        Raises:
            ArmError: a schedule that says nothing about this concurrency.
        """
        if not self.schedule:
            return self.settings
        for low, high, drafts in self.schedule:
            if low <= concurrency <= high:
                if drafts == 0:
                    return {**CLEAN, "verify_mode": "off"}
                return {**CLEAN, "verify_mode": "static", "max_window": drafts}
        raise ArmError(f"{self.name} has no entry for {concurrency} clients")


def parse_arm(text: str) -> Arm:
    """Read an arm from the command line (see GRAMMAR).

    Raises:
        ArmError: it is no arm.
    """
    text, _, address = text.partition("@")
    url = address.rstrip("/") or None
    if text.startswith("schedule="):
        return Arm(text, None, url, _schedule(text.removeprefix("schedule=")))
    mode, *options = text.split("+")
    settings = _mode(mode)
    if settings is None:
        if url is None or options:
            raise ArmError(f"unknown arm {text!r}: {GRAMMAR}")
        return Arm(text, None, url)
    for option in options:
        settings |= _option(option, text)
    # A server of its own may be of another algorithm, which has no settings route.
    return Arm(text, None if url else {**CLEAN, **settings}, url)


def _mode(mode: str) -> dict | None:
    if mode.startswith("static-") and mode[7:].isdigit() and int(mode[7:]) > 0:
        return {"verify_mode": "static", "max_window": int(mode[7:])}
    return {"verify_mode": mode} if mode in VERIFY_MODES else None


def _option(option: str, arm: str) -> dict:
    if option in ACCEPT_RULES:
        return {"accept_rule": option}
    if option in WINDOW_POLICIES:
        return {"window_policy": option}
    bound, _, number = option.partition("-")
    if bound in ("min", "max") and number.isdigit():
        return {f"{bound}_window": int(number)}
    raise ArmError(f"unknown option {option!r} in {arm!r}: {GRAMMAR}")


def _schedule(text: str) -> tuple[tuple[int, int, int], ...]:
    try:
        rows = tuple((int(low), int(high), int(drafts)) for low, high, drafts in json.loads(text))
    except (ValueError, TypeError) as error:
        raise ArmError(f"schedule={text}: write [[FROM,TO,DRAFTS],...], as [[1,4,5],[5,8,3]]") from error
    if not rows or any(not 1 <= low <= high or drafts < 0 for low, high, drafts in rows):
        raise ArmError(f"schedule={text}: every entry needs 1 <= FROM <= TO and DRAFTS >= 0")
    return rows
