"""A server's beginning and end: metrics start with the scheduler's loop, and what was learned is saved at its end.

SGLang drains on SIGTERM: it waits for running requests and then tells its schedulers to leave their loop. It goes on
accepting requests meanwhile, so an instance behind a router may never become empty; `Draining` refuses new ones.
"""

from __future__ import annotations

import json

from sglang_dspark.contract.hooks import BEFORE, Hook


def _before_loop(scheduler, *args, **kwargs) -> None:
    worker = scheduler.draft_worker
    if hasattr(worker, "speculation"):
        from sglang_dspark.serving import metrics

        worker.meter.settings(worker.speculation.config)
        metrics.start(worker.meter, worker.speculation)


def _before_shutdown(scheduler, *args, **kwargs) -> None:
    speculation = getattr(scheduler.draft_worker, "speculation", None)
    if speculation is not None:
        speculation.save()


class Draining:
    """ASGI middleware that answers new work with 503 once the server was told to end; `ending` says whether it was."""

    def __init__(self, app, ending) -> None:
        self.app, self.ending = app, ending

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT") or not self.ending():
            await self.app(scope, receive, send)
            return
        body = json.dumps(
            {
                "error": {
                    "message": "this server is shutting down: send the request to another one",
                    "type": "shutting_down",
                    "code": 503,
                }
            }
        ).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"retry-after", b"1"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})


HOOKS = (
    Hook("sglang.srt.managers.scheduler:Scheduler.run_event_loop", BEFORE, _before_loop, ()),
    Hook("sglang.srt.managers.scheduler:Scheduler.handle_shutdown", BEFORE, _before_shutdown, ("recv_req",)),
)
