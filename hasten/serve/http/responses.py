"""Responses that end with their client: whoever hangs up cancels the work in whatever state it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hasten.serve.http.errors import ApiError, internal

_T = TypeVar("_T")

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):  # noqa: N818
    """The client closed the connection; nobody is left to be told."""


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """The result of `work`, which is cancelled when the client hangs up; then raises ClientGone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _end(task, gone)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events out of `events`; an ApiError before the first event is an ordinary error response, a
    later one is a chunk with an error object, which clients raise.

    Every `keep_alive_s` without an event a comment is sent. `close` is called in the end in any case, also
    where the client left before the first event was asked for.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        close: Callable[[], None],
        keep_alive_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events, self._close = events, close
        self._keep_alive_s = keep_alive_s
        self._started = False
        self._sent = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._send_all(scope, receive, send))
        alive = asyncio.ensure_future(self._keep_alive(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self._close()
            await _end(work, alive, gone)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    await self._send(send, data)
        except ApiError as error:
            if not self._started:
                await error.response()(scope, receive, send)
                return
            await self._send(send, event(error.body()))
        except Exception:
            # The client gets an object that it understands; the log gets the fault.
            if self._started:
                await self._send(send, event(internal().body()))
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, data: bytes) -> None:
        self._sent = True
        if not self._started:
            self._started = True
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self._sent = False
            await asyncio.sleep(self._keep_alive_s)
            if not self._sent:
                await self._send(send, b": still working\n\n")
