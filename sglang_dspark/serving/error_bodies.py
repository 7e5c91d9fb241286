"""Errors of the OpenAI routes carry an `error` object, where the clients of that API look for one.

The engine puts message, type and code at the top of the body, where its own clients read them; there they stay.
"""

from __future__ import annotations

import json

PREFIX = "/v1/"


class NamedErrors:
    """ASGI middleware: a JSON error without `error` gets one, with the same message, type, parameter and code."""

    def __init__(self, app) -> None:
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self.app(scope, receive, send)
            return
        start, body = None, b""

        async def rewrite(message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start" and _is_json_error(message):
                start = message
                return
            if start is None:
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                answer = named(start["status"], body)
                headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
                await send({**start, "headers": [*headers, (b"content-length", str(len(answer)).encode())]})
                await send({"type": "http.response.body", "body": answer})

        await self.app(scope, receive, rewrite)


def _is_json_error(start: dict) -> bool:
    kinds = [value for name, value in start.get("headers", ()) if name.lower() == b"content-type"]
    return start["status"] >= 400 and any(kind.startswith(b"application/json") for kind in kinds)


def named(status: int, body: bytes) -> bytes:
    """An error's body with an `error` object; as it was where it has one, or is no object."""
    try:
        content = json.loads(body)
    except ValueError:
        return body
    if not isinstance(content, dict) or "error" in content:
        return body
    message = content.get("message") or content.get("detail") or ""
    error = {
        "message": message if isinstance(message, str) else json.dumps(message),
        "type": content.get("type", "invalid_request_error"),
        "param": content.get("param"),
        "code": content.get("code", status),
    }
    return json.dumps({**content, "error": error}).encode()
