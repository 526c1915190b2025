"""Faults as clients of the OpenAI API expect them: `{"error": {message, type, param, code}}`.

The client library retries 408, 409, 429 and 5xx on its own, so a user's mistake is never one of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from hasten.base.errors import ContextError, EngineStopped, HastenError, QueueFull, UserError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
# Parts of a pydantic location that name a type of a union and not a key of the body.
_TYPE_NAME = re.compile(r"(str|int|float|bool|none|nullable|\w*\[.*\]|function-.*|json-.*|[A-Z]\w*)$")


class ApiError(HastenError):
    """Ends a request with `status`; `param` names the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return JSONResponse(self.body(), self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def draining() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})


def of_hasten(error: HastenError, waiting: int = 0) -> ApiError:
    """What a fault from below is to a client; `waiting` requests make it come again later or sooner."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextError):
        return bad_request(str(error), None, "context_length_exceeded")
    if isinstance(error, UserError):
        return bad_request(str(error))
    if isinstance(error, QueueFull):
        again_s = min(30, 1 + waiting // 8)
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(again_s)})
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), code="engine_stopped", headers={"Retry-After": "5"})
    return ApiError(500, str(error), code="generation_failed")


def internal() -> ApiError:
    """What a client learns of a fault of ours; the log has the rest."""
    return ApiError(500, "the server failed on this request; its log has the reason", code="internal_error")


def from_validation(error: ValidationError) -> ApiError:
    """The most specific of pydantic's complaints, with the field named as in the body: `messages[0].role`."""
    complaint = max(error.errors(include_url=False, include_context=False), key=lambda item: len(item["loc"]))
    if complaint["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {complaint['msg']}", code="invalid_json")
    param = ""
    for part in complaint["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif not _TYPE_NAME.match(part):
            param += f".{part}" if param else part
    said = complaint["msg"].removeprefix("Value error, ")
    if complaint["type"] == "missing":
        return bad_request(f"the field {param!r} is required", param, "missing_required_parameter")
    if not param:
        return bad_request(f"the body must be a JSON object: {said}", code="invalid_type")
    return bad_request(f"{param}: {said}{_given(complaint.get('input'))}", param, "invalid_value")


def _given(value: Any) -> str:
    """What was given, where it can be shown; a whole list or object can be megabytes."""
    if isinstance(value, list | dict):
        return ""
    if isinstance(value, str) and len(value) > 60:
        return f", got {value[:60]!r}..."
    return f", got {value!r}"
