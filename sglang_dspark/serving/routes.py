"""Our HTTP routes beside the engine's: `GET /dspark`, `GET /dspark/status` and `POST /dspark/config`."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_dspark.contract.hooks import AROUND, BEFORE, Hook
from sglang_dspark.serving.bodies import Bounded, add_handlers
from sglang_dspark.serving.control import encode
from sglang_dspark.serving.error_bodies import NamedErrors
from sglang_dspark.serving.operation import Draining
from sglang_dspark.settings.config import ConfigError, DSparkConfig, check_draft
from sglang_dspark.settings.flags import config_of, speculates

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

PAGE = Path(__file__).with_name("page.html")
PAGE_PATH = "/dspark"
MAX_BODY = 4096  # bytes; the longest settings are under 300
# The page is one file that loads nothing; the browser shall hold it to that.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class HttpRefusal(Exception):
    """A request that is answered with `status` and a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def _before_launch(server_args: ServerArgs, *args, **kwargs):
    add_routes(server_args)


def _let_page_pass(original, *args, **kwargs):
    """The page itself holds no data and a browser cannot send a key for it; what it then asks for needs the keys."""
    if kwargs.get("method") == "GET" and kwargs.get("path") == PAGE_PATH:
        from sglang.srt.utils.auth import AuthDecision

        return AuthDecision(allowed=True)
    return original(*args, **kwargs)


def add_routes(server_args: ServerArgs) -> None:
    """Add to the engine's application our routes and what stands before its own: bounds of a body, errors, draining."""
    from fastapi import Request
    from fastapi.responses import HTMLResponse, JSONResponse
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level

    speculating = speculates(server_args)

    def manager():
        return http_server.get_global_state().tokenizer_manager

    async def ranks() -> list[dict]:
        states = [state["dspark"] for state in await manager().get_internal_state()]  # in the order of their arrival
        return sorted(states, key=lambda state: state["rank"])

    @http_server.app.get(PAGE_PATH)
    async def dspark_page():
        """The live page; it asks /dspark/status for its numbers."""
        return HTMLResponse(PAGE.read_text(), headers=PAGE_HEADERS)

    @http_server.app.get("/dspark/status")
    async def dspark_status():
        """The numbers of every data-parallel rank (schema: docs/metrics.md)."""
        if not speculating:
            return {"mode": "off", "ranks": [], "reason": "this server was started without a draft"}
        return {
            "mode": "on",
            "ranks": await ranks(),
            "may_configure": may_configure(server_args),
            "needs_key": bool(server_args.admin_api_key or server_args.api_key),
        }

    async def dspark_config(request: Request):
        """Switch mode, rule, policy or bounds between two steps, on every rank."""
        try:
            return await _configure(request, server_args, speculating, manager(), ranks)
        except HttpRefusal as refusal:
            return JSONResponse(
                status_code=refusal.status, content={"error": {"message": str(refusal), "type": "dspark_config"}}
            )

    dspark_config.__annotations__["request"] = Request  # FastAPI looks names up in the module, which does not import it
    http_server.app.post("/dspark/config")(auth_level(AuthLevel.ADMIN_OPTIONAL)(dspark_config))
    add_handlers(http_server.app)
    http_server.app.add_middleware(NamedErrors)
    http_server.app.add_middleware(Bounded, model_config=lambda: manager().model_config)
    http_server.app.add_middleware(Draining, ending=lambda: manager().gracefully_exit)


async def _configure(request, server_args: ServerArgs, speculating: bool, manager, ranks) -> dict:
    from sglang.srt.managers.io_struct import SetInternalStateReq

    if not speculating:
        raise HttpRefusal(
            409,
            "this server was started with --verify-mode off and holds no draft: restart it with another --verify-mode",
        )
    if not may_configure(server_args):
        raise HttpRefusal(
            403,
            "no admin key is set and the server listens beyond this machine: start it with "
            "--admin-api-key, or with --host 127.0.0.1",
        )
    refuse_other_sites(request.headers)
    changes = await read_object(request)
    try:
        numbers = encode(changes)
        running = (await ranks())[0]["config"]
        check_draft(DSparkConfig.from_dict(running).changed(changes), _draft_of(server_args))
    except ConfigError as error:
        raise HttpRefusal(400, str(error)) from error
    updated = await manager.set_internal_state(SetInternalStateReq(server_args=numbers))
    if not all(updated):
        raise HttpRefusal(500, f"{updated.count(False)} of {len(updated)} ranks refused; see the log")
    return {
        "config": (await ranks())[0]["config"],
        "ranks": len(updated),
        "started_as": config_of(server_args).verify_mode,
    }


def refuse_other_sites(headers) -> None:
    """Raise HttpRefusal where a browser asks for another site's page: the engine's CORS settings let every site ask."""
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        raise HttpRefusal(403, f"settings are changed from this server's own page, not from {origin[:200]}")


async def read_object(request) -> dict:
    """The JSON object in a request's body of at most MAX_BODY bytes.

    Raises:
        HttpRefusal: 413 for a longer body (which is not read to its end), 400 for anything but an object.
    """
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise HttpRefusal(413, f"a body of at most {MAX_BODY} bytes is read here")
    try:
        value = json.loads(body)
    except ValueError as error:
        raise HttpRefusal(400, f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise HttpRefusal(400, "the body must be a JSON object of settings")
    return value


def may_configure(server_args: ServerArgs) -> bool:
    """Whether the configuration route is open: with a key it asks for it; without, only on a loopback address."""
    if server_args.admin_api_key or server_args.api_key:
        return True
    if server_args.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(server_args.host).is_loopback
    except ValueError:
        return False


def _draft_of(server_args: ServerArgs):
    from sglang_dspark.engine.algorithm import draft_config_of

    return draft_config_of(server_args)


HOOKS = (
    Hook(
        "sglang.srt.entrypoints.http_server:launch_server",
        BEFORE,
        _before_launch,
        (
            "server_args",
            "init_tokenizer_manager_func",
            "run_scheduler_process_func",
            "run_detokenizer_process_func",
            "execute_warmup_func",
            "launch_callback",
        ),
    ),
    Hook(
        "sglang.srt.utils.auth:decide_request_auth",
        AROUND,
        _let_page_pass,
        ("method", "path", "authorization_header", "api_key", "admin_api_key", "auth_level"),
    ),
)
