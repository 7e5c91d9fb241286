"""Our HTTP routes beside the engine's: `GET /dspark/status` and `POST /dspark/config`."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from sglang_dspark.checkpoint import check_draft
from sglang_dspark.config import ConfigError, DSparkConfig
from sglang_dspark.flags import ALGORITHM, config_of
from sglang_dspark.serving.control import encode

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

LAUNCH = "sglang.srt.entrypoints.http_server.launch_server"


def install() -> None:
    """Register the routes when the engine launches its HTTP server; call it while plugins load."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(LAUNCH, _before_launch, HookType.BEFORE)


def _before_launch(server_args: ServerArgs, *args, **kwargs):
    add_routes(server_args)


def add_routes(server_args: ServerArgs) -> None:
    """Add our routes to the engine's FastAPI application."""
    from fastapi import Body
    from fastapi.responses import JSONResponse
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.io_struct import SetInternalStateReq
    from sglang.srt.utils.auth import AuthLevel, auth_level

    started = config_of(server_args)
    speculating = (server_args.speculative_algorithm or "").upper() == ALGORITHM

    async def internal_states() -> list[dict]:
        return await http_server.get_global_state().tokenizer_manager.get_internal_state()

    @http_server.app.get("/dspark/status")
    async def dspark_status():
        """The numbers of every data-parallel rank."""
        if not speculating:
            return {"mode": "off", "ranks": [], "reason": "this server was started without a draft"}
        return {"mode": "on", "ranks": [state["dspark"] for state in await internal_states()]}

    @http_server.app.post("/dspark/config")
    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def dspark_config(changes: dict = Body()):  # noqa: B008
        """Switch mode, rule, policy or bounds between two steps, on every rank."""
        if not speculating:
            return _refusal(JSONResponse, 409, "this server was started with --verify-mode off and holds no draft: "
                            "restart it with another --verify-mode")
        if not may_configure(server_args):
            return _refusal(JSONResponse, 403, "no admin key is set and the server listens beyond this machine: start it "
                            "with --admin-api-key, or with --host 127.0.0.1")
        try:
            numbers = encode(changes)
            ranks = [state["dspark"] for state in await internal_states()]
            config = DSparkConfig.from_dict(ranks[0]["config"]).changed(changes)
            check_draft(config, _draft_of(server_args))
        except ConfigError as error:
            return _refusal(JSONResponse, 400, str(error))
        updated = await http_server.get_global_state().tokenizer_manager.set_internal_state(
            SetInternalStateReq(server_args=numbers))
        if not all(updated):
            return _refusal(JSONResponse, 500, f"{updated.count(False)} of {len(updated)} ranks refused; see the log")
        return {"config": config.to_dict(), "ranks": len(updated), "started_as": started.verify_mode}


def may_configure(server_args: ServerArgs) -> bool:
    """Whether the configuration route is open: with a key it asks for it; without, only on this machine's own address."""
    if server_args.admin_api_key or server_args.api_key:
        return True
    if server_args.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(server_args.host).is_loopback
    except ValueError:
        return False


def _draft_of(server_args: ServerArgs):
    from sglang_dspark.algorithm import draft_config_of

    return draft_config_of(server_args)


def _refusal(response, status: int, reason: str):
    return response(status_code=status, content={"error": {"message": reason, "type": "dspark_config"}})
