"""Between the HTTP process and the scheduler processes: settings in, status out, over the engine's own channel.

The engine's channel carries numbers only, so a setting travels as one (`encode`) and is read back in every scheduler
process of every rank (`decode`), where it is applied whole or not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sglang_dspark.contract.hooks import AFTER, AROUND, Hook
from sglang_dspark.settings.config import CHOICES, SWITCHABLE, ConfigError

logger = logging.getLogger(__name__)

PREFIX = "dspark_set_"
_NONE = -1.0


def encode(changes: Mapping) -> dict[str, float]:
    """Settings as numbers for the engine's channel.

    Raises:
        ConfigError: a key that cannot be switched at run time, or a choice that does not exist.
    """
    numbers = {}
    for key, value in changes.items():
        if key not in SWITCHABLE:
            raise ConfigError(f"{key} cannot be switched at run time: {', '.join(SWITCHABLE)} can")
        if key in CHOICES and value is not None:
            if value not in CHOICES[key]:
                raise ConfigError(f"{key} {value!r}: choose one of {', '.join(CHOICES[key])}")
            value = CHOICES[key].index(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0):
            raise ConfigError(f"{key} {value!r}: a number of at least 0 is needed")
        numbers[PREFIX + key] = _NONE if value is None else float(value)
    return numbers


def decode(numbers: Mapping[str, float]) -> dict:
    """The inverse of `encode`, for the keys that are ours."""
    changes = {}
    for name, number in numbers.items():
        if not name.startswith(PREFIX):
            continue
        key = name.removeprefix(PREFIX)
        if number == _NONE:
            changes[key] = None
        elif key in CHOICES:
            changes[key] = CHOICES[key][int(number)]
        else:
            changes[key] = float(number) if key == "max_step_ms" else int(number)
    return changes


def _set_state(original, controller, recv_req):
    """Runs in the scheduler, between steps."""
    changes = decode(recv_req.server_args)
    if not changes:
        return original(controller, recv_req)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    speculation = getattr(controller.scheduler.draft_worker, "speculation", None)
    if speculation is None:
        return SetInternalStateReqOutput(updated=False)
    try:
        speculation.switch(changes)
    except ConfigError as refusal:
        logger.warning("settings refused: %s", refusal)
        return SetInternalStateReqOutput(updated=False)
    return SetInternalStateReqOutput(updated=True)


def _get_state(output, controller, recv_req):
    """Runs in the scheduler: our status beside the engine's own."""
    worker = controller.scheduler.draft_worker
    if hasattr(worker, "speculation"):
        from sglang_dspark.serving.status import status_of

        if worker.speculation.started.record is not None:
            worker.speculation.save()
        output.internal_state["dspark"] = status_of(worker)
    return output


_CONTROLLER = "sglang.srt.managers.scheduler_components.internal_state:SchedulerInternalStateController"
HOOKS = (
    Hook(f"{_CONTROLLER}.set_internal_state", AROUND, _set_state, ("recv_req",)),
    Hook(f"{_CONTROLLER}.get_internal_state", AFTER, _get_state, ("recv_req",)),
)
