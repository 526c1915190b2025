"""Runs the application on a socket until a signal, and ends it gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from hasten.base.errors import ConfigError
from hasten.serve.http.app import make_app
from hasten.serve.http.state import State

# After the drain time the engine has ended every stream; this much more lets the last chunks leave.
_LAST_WORDS_S = 5.0
_POLL_S = 0.02


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that a taken port is known before a model is opened.

    Raises ConfigError where the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host!r} is no address of this machine: {error}") from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        raise _refused(error, host, port) from error
    return bound


def _refused(error: Exception, host: str, port: int) -> ConfigError:
    return ConfigError(
        {
            errno.EADDRINUSE: f"port {port} of {host} is in use; give another with --port, or 0 for any",
            errno.EACCES: f"port {port} of {host} needs more rights; give one above 1023 with --port",
            errno.EADDRNOTAVAIL: f"--host {host!r} is no address of this machine",
        }.get(getattr(error, "errno", 0) or 0, f"cannot listen on {host}:{port}: {error}")
    )


def url_of(bound: socket.socket) -> str:
    """The address for a browser on this machine."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server, which on SIGTERM or Ctrl-C refuses new requests, gives running ones `drain_s`, ends
    the rest with an error that clients understand, and leaves with exit code 0. A second Ctrl-C leaves at
    once.
    """

    def __init__(self, state: State, on_ready: Callable[[], None] | None = None) -> None:
        self._state, self._on_ready = state, on_ready
        drain_s = state.settings.drain_s
        super().__init__(
            uvicorn.Config(
                make_app(state),
                log_config=None,
                access_log=state.settings.access_log,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=max(1, round(drain_s + _LAST_WORDS_S)),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._on_ready is not None:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.draining = True
        ending = threading.Thread(target=self._end_engine, name="hasten-drain", daemon=True)
        ending.start()
        await super().shutdown(sockets)
        while ending.is_alive() and not self.force_exit:
            await asyncio.sleep(_POLL_S)

    def _end_engine(self) -> None:
        if self._state.text is not None:
            self._state.text.engine.stop(self._state.settings.drain_s)
        if self._state.embedder is not None:
            self._state.embedder.stop(self._state.settings.drain_s)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but a signal that ended the server does not kill the process after that."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._state.draining = True
        super().handle_exit(sig, frame)


def run_server(state: State, bound: socket.socket, on_ready: Callable[[], None] | None = None) -> None:
    """Serves on `bound` until SIGTERM, Ctrl-C or a fault. Blocks.

    Raises ConfigError where another server has begun to listen on the port meanwhile.
    """
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    host, port = bound.getsockname()[:2]
    try:
        bound.listen(1)
    except OSError as error:
        raise _refused(error, host, port) from error
    with _access_log() if state.settings.access_log else contextlib.nullcontext():
        Server(state, on_ready).run(sockets=[bound])


@contextlib.contextmanager
def _access_log() -> Iterator[None]:
    """uvicorn's lines on stderr."""
    lines, access = logging.StreamHandler(), logging.getLogger("uvicorn.access")
    lines.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    level, propagate = access.level, access.propagate
    access.addHandler(lines)
    access.setLevel(logging.INFO)
    access.propagate = False
    try:
        yield
    finally:
        access.removeHandler(lines)
        access.setLevel(level)
        access.propagate = propagate
