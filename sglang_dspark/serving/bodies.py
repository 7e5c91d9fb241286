"""A body that cannot be read as its route's request is a 400, whatever reading it raises.

The engine's request models look into a body before they know that it is an object, so a list, or an object where a list
belongs, ends there in a TypeError, which FastAPI takes for a fault of the server. While a body is read, every error is
about the body.
"""

from __future__ import annotations

import traceback

READERS = ("request_body_to_args", "request_params_to_args")  # FastAPI's functions that turn a request into arguments
ERRORS = (TypeError, AttributeError, KeyError, IndexError, RecursionError, OverflowError)


def add_handlers(app) -> None:
    """Answer 400 to what reading a body raises; the same errors of the server itself stay a 500."""
    from fastapi.responses import JSONResponse

    async def answer(request, error: Exception) -> JSONResponse:
        if not while_reading(error):
            raise error
        reason = f"the body cannot be read as this route's request ({type(error).__name__}: {error})"
        return JSONResponse({"error": {"message": reason, "type": "invalid_request_error", "code": 400}}, 400)

    for kind in ERRORS:
        app.add_exception_handler(kind, answer)


def while_reading(error: Exception) -> bool:
    """Whether an error was raised in the reading of a body."""
    return any(frame.f_code.co_name in READERS for frame, _ in traceback.walk_tb(error.__traceback__))
