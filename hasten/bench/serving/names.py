"""The servers by name, and how each is started and asked. Imports no torch."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """One server."""

    description: str
    ours: bool
    arguments: tuple[str, ...]
    """Behind `python -m`; {model}, {port}, {context} and {threads} are filled in."""
    extra: dict[str, Any]
    """Added to the body of every request."""
    packages: tuple[str, ...]
    """Modules that must be there."""
    install: str
    """What pip is asked for where one is missing."""
    gguf_only: bool = False

    def command(self, model: str, port: int, context_tokens: int, threads: int) -> list[str]:
        """The command line of the server on 127.0.0.1."""
        values = {"model": model, "port": port, "context": context_tokens, "threads": threads}
        return [sys.executable, "-m", *(part.format(**values) for part in self.arguments)]


_SERVE = ("hasten", "serve", "{model}", "--port", "{port}")
_SERVE_PACKAGES = ("starlette", "uvicorn", "prometheus_client")
_SERVE_EXTRA = {"ignore_eos": True}

CONTENDERS: dict[str, Kind] = {
    "hasten": Kind(
        "hasten serve with the file's own weights, or 4 bits of a float model",
        True,
        _SERVE,
        _SERVE_EXTRA,
        _SERVE_PACKAGES,
        "hasten[serve]",
    ),
    "llama.cpp": Kind(
        "the server of llama-cpp-python, which answers one request at a time",
        False,
        (
            *("llama_cpp.server", "--model", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
            *("--n_ctx", "{context}", "--n_threads", "{threads}", "--n_threads_batch", "{threads}"),
            # Otherwise a new request cuts short the one that is being answered.
            *("--interrupt_requests", "false"),
        ),
        {},
        ("llama_cpp", "starlette_context", "sse_starlette", "pydantic_settings", "fastapi", "uvicorn"),
        "llama-cpp-python[server]",
        gguf_only=True,
    ),
}

DEFAULT = ("hasten", "llama.cpp")
