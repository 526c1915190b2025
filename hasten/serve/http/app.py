"""The HTTP door: OpenAI's API over one engine, as an ASGI application.

    GET  /                      a chat page
    GET  /health                200 while requests are taken, else 503
    GET  /metrics               Prometheus
    GET  /v1/models             and /v1/models/NAME
    POST /v1/chat/completions
    POST /v1/completions
    POST /v1/embeddings

A client's mistake is a 4xx with an error object, never a 500.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import uuid
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import TypeVar
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hasten.base.errors import EngineStopped, HastenError
from hasten.serve.http.chat import chat
from hasten.serve.http.completions import complete
from hasten.serve.http.embeddings import embed
from hasten.serve.http.errors import ApiError, draining, internal, of_hasten
from hasten.serve.http.limits import HttpSettings
from hasten.serve.http.protocol import Body, ChatBody, CompletionBody, EmbeddingBody, parse
from hasten.serve.http.responses import ClientGone
from hasten.serve.http.state import State

_B = TypeVar("_B", bound=Body)
_PAGE_POLICY = (
    "default-src 'none'; img-src data:; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_MOST_ID_CHARACTERS = 128


def make_app(state: State) -> ASGIApp:
    """The application for one server."""
    post = [
        Route("/v1/chat/completions", _reading(state, ChatBody, chat), methods=["POST"]),
        Route("/v1/completions", _reading(state, CompletionBody, complete), methods=["POST"]),
        Route("/v1/embeddings", _reading(state, EmbeddingBody, embed), methods=["POST"]),
    ]
    get = [
        Route("/", _page, methods=["GET"]),
        Route("/health", _bound(state, _health), methods=["GET"]),
        Route("/metrics", _bound(state, _metrics), methods=["GET"]),
        Route("/v1/models", _bound(state, _models), methods=["GET"]),
        Route("/v1/models/{name:path}", _bound(state, _model), methods=["GET"]),
    ]
    handlers = {
        HastenError: _bound_error(state),
        HTTPException: _http_error,
        ClientDisconnect: _nobody,
        ClientGone: _nobody,
        Exception: _fault,
    }
    inner = Starlette(routes=[*post, *get], exception_handlers=handlers)  # type: ignore[arg-type]
    inner.router.redirect_slashes = False
    app: ASGIApp = _Guard(inner, state.settings)
    if state.settings.allow_origins:
        app = CORSMiddleware(
            app,
            allow_origins=state.settings.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return _Outside(app, state)


def _bound(
    state: State, answer: Callable[[State, Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    async def handler(request: Request) -> Response:
        return await answer(state, request)

    return handler


def _reading(
    state: State, kind: type[_B], answer: Callable[[State, _B, Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    async def handler(request: Request) -> Response:
        if state.draining:
            raise draining()
        _check_content_type(request.headers)
        data = await _read_body(request, state.settings)
        return await answer(state, parse(kind, data, state.settings.strict), request)

    return handler


def _check_content_type(headers: Headers) -> None:
    """A page of another site can post anything but JSON without asking the server first."""
    given = headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json" and not given.endswith("+json"):
        raise ApiError(415, f"the body must be JSON; send Content-Type: application/json, got {given!r}")


async def _read_body(request: Request, settings: HttpSettings) -> bytes:
    most = settings.limits.body_bytes
    too_large = ApiError(
        413, f"the body has more than {most} bytes", code="body_too_large", headers={"Connection": "close"}
    )
    length = request.headers.get("content-length", "0")
    if length.isascii() and length.isdigit() and int(length[:20]) > most:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(settings.limits.body_s):
            async for piece in request.stream():
                data += piece
                if len(data) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not come within {settings.limits.body_s:g} s",
            code="body_timeout",
            headers={"Connection": "close"},
        ) from None
    return bytes(data)


async def _page(request: Request) -> Response:
    text = resources.files("hasten.serve.http").joinpath("page.html").read_text("utf-8")
    return HTMLResponse(
        text, headers={"content-security-policy": _PAGE_POLICY, "referrer-policy": "no-referrer"}
    )


async def _health(state: State, request: Request) -> Response:
    if state.draining:
        raise draining()
    stopped = state.text.engine.stats().stopped if state.text is not None else None
    if stopped is not None:
        raise EngineStopped(f"the engine takes no requests: {stopped}")
    return JSONResponse({"status": "ok"})


async def _metrics(state: State, request: Request) -> Response:
    text, content_type = state.metrics.page(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": content_type})


async def _models(state: State, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": list(_cards(state).values())})


async def _model(state: State, request: Request) -> Response:
    name = request.path_params["name"]
    state.check_model(name)
    return JSONResponse(_cards(state)[name])


def _cards(state: State) -> dict[str, dict[str, object]]:
    """OpenAI's card of each model, with vLLM's name for the context."""
    contexts = {}
    if state.text is not None:
        contexts[state.text.id] = state.text.context_tokens
    if state.embedder is not None:
        contexts[state.embedder.id] = state.embedder.most_tokens
    return {
        name: {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "hasten",
            "max_model_len": contexts[name],
        }
        for name, created in state.model_ids()
    }


def _bound_error(state: State) -> Callable[[Request, HastenError], Awaitable[Response]]:
    async def handler(request: Request, error: HastenError) -> Response:
        waiting = state.text.engine.stats().waiting if state.text is not None else 0
        return of_hasten(error, waiting).response()

    return handler


async def _http_error(request: Request, error: HTTPException) -> Response:
    said = {
        404: f"there is no {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
    }.get(error.status_code, error.detail)
    return ApiError(error.status_code, said, headers=error.headers).response()


async def _nobody(request: Request, error: Exception) -> Response:
    """The client has gone; what is returned here reaches nobody."""
    return Response(status_code=499)


async def _fault(request: Request, error: Exception) -> Response:
    """Starlette raises the fault again after this answer, so that the log has it."""
    return internal().response()


class _Guard:
    """Who may come in: an API key for `/v1`, and no other site's page."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._app = app
        self._keys = [key.encode() for key in settings.api_keys]
        self._origins = settings.allow_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["path"], Headers(scope=scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is not None and not self._is_ours(origin, headers.get("host", "")):
            raise ApiError(
                403, f"pages of {origin} may not use this server; allow them with --allow-origin {origin}"
            )
        if not self._keys or not (path == "/v1" or path.startswith("/v1/")):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")
        # Every key is compared, so that time does not tell which one was close.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "the API key is wrong" if given else "give an API key: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _is_ours(self, origin: str, host: str) -> bool:
        """Whether a page of `origin` may call: it is allowed by name, or it is our own page.

        Without a key, a name in `host` must be that of this machine, because any site can let its own name
        point here (DNS rebinding); an address cannot be bent like that.
        """
        if "*" in self._origins or origin in self._origins:
            return True
        try:
            own = urlsplit(origin).netloc.lower() == host.lower()
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return own and (bool(self._keys) or name == "localhost" or _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Outside:
    """Names each request and counts it."""

    def __init__(self, app: ASGIApp, state: State) -> None:
        self._app, self._state = app, state
        self._paths = frozenset(
            {
                "/",
                "/health",
                "/metrics",
                "/v1/models",
                "/v1/chat/completions",
                "/v1/completions",
                "/v1/embeddings",
            }
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        fits = 0 < len(given) <= _MOST_ID_CHARACTERS and given.isascii() and given.isprintable()
        request_id = given if fits else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._state.metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, named)
