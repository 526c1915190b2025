"""What one request may ask for and how long the server waits; every number can be set."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from hasten.base.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Upper bounds of one request. What lies above is refused with 400 or 413, before any work is done."""

    body_bytes: int = 8 << 20
    body_s: float = 60.0
    """The longest that a client may take to send its body."""
    choices: int = 16
    """`n`, and prompts times `n` of one completions request."""
    stops: int = 4
    stop_characters: int = 1024
    top_logprobs: int = 20
    """Of chat completions; completions take a quarter of it, as OpenAI's do."""
    tools: int = 128
    inputs: int = 2048
    """Texts of one embeddings request."""


@dataclass(frozen=True)
class HttpSettings:
    """How the door behaves.

    `api_keys`: any of them opens `/v1`; empty: no key is asked for. `allow_origins`: web pages of these
    origins may call the server (CORS); empty: only the built-in page. `strict`: an unknown field is a 400.
    `drain_s`: the time that running requests get after SIGTERM. `keep_alive_s`: a stream that has nothing to
    say sends a comment this often, so that proxies do not cut it. `access_log`: a line on stderr for each
    request: client, method, path with its query, status; no body of a request or an answer.

    Raises ConfigError for a key that is no key and an origin that is no origin.
    """

    limits: Limits = field(default_factory=Limits)
    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    strict: bool = False
    drain_s: float = 30.0
    keep_alive_s: float = 15.0
    access_log: bool = False

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key or not key.isprintable() or key != key.strip():
                raise ConfigError(
                    "an API key is empty, has spaces around it, or has characters that no header can carry"
                )
        for origin in self.allow_origins:
            parts = urlsplit(origin)
            right = f"{parts.scheme}://{parts.netloc}"
            if origin != "*" and (
                parts.scheme not in ("http", "https") or not parts.netloc or origin != right
            ):
                hint = f"; did you mean {right}?" if parts.netloc else ""
                raise ConfigError(
                    f"origin {origin!r}: allowed is * or a scheme and a host, as https://app.example{hint}"
                )
