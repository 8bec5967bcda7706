# How a client is told what went wrong.

from __future__ import annotations

import json
import traceback
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from servanda.engines.server.request import Refused
from servanda.engines.server.scheduler import Full
from servanda.errors import ServandaError

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 429: "TooManyRequestsError"}


def failed(error: Exception) -> dict[str, Any]:
    """The JSON of an error: the client's own, the queue's, or the engine's."""
    param, status, message = None, 500, f"{type(error).__name__}: {error}"
    if isinstance(error, Refused):
        param, status = error.param, error.status
    elif isinstance(error, Full):
        status = 429
    if isinstance(error, ServandaError):
        message = "\n".join(map(str, error.problems))
    else:
        traceback.print_exception(error)
    kind = _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


async def not_found(_: Request, error: HTTPException) -> Response:
    return json_reply(failed(Refused(str(error.detail), status=error.status_code)))


def json_reply(data: dict[str, Any]) -> Response:
    status = data["error"]["code"] if "error" in data else 200
    headers = {"retry-after": "1"} if status == 429 else None
    body = json.dumps(data, allow_nan=False)
    return Response(body, status, headers, media_type="application/json")
