"""Clients of an OpenAI server: one streamed completion at a time each, with the clock running.

Threads and the standard library's client: they cost the same for every server, and little beside it.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hasten.base.errors import first_line

TIMEOUT_S = 600.0


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int


@dataclass
class Reply:
    """What one request got; times are `time.perf_counter()`."""

    text: str = ""
    begin_s: float = 0.0
    end_s: float = 0.0
    at_s: list[float] = field(default_factory=list)
    """When each piece with text arrived."""
    usage_tokens: int | None = None
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Of the answer, as the server counts them; else the pieces with text."""
        return self.usage_tokens if self.usage_tokens is not None else len(self.at_s)


class Level(NamedTuple):
    """The numbers of one level of concurrency."""

    requests: int
    failures: int
    wall_s: float
    tokens: int
    tokens_per_s: float
    first_token_p50_s: float
    first_token_p95_s: float
    inter_token_p50_s: float
    inter_token_p95_s: float


def get_json(address: Address, path: str, timeout_s: float = 10.0) -> Any:
    """The JSON of a GET that was answered with 200.

    Raises:
        OSError: no answer, or another status.
    """
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        if response.status != 200:
            raise OSError(f"GET {path}: status {response.status}")
        return json.loads(body)
    except (http.client.HTTPException, json.JSONDecodeError) as error:
        raise OSError(f"GET {path}: {first_line(error)}") from error
    finally:
        connection.close()


def complete(address: Address, body: dict[str, Any]) -> Reply:
    """POST /v1/completions with `stream`, read to its end. A failure is in the reply's `error`."""
    reply = Reply(begin_s=time.perf_counter())
    connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_S)
    try:
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        if response.status != 200:
            reply.error = f"status {response.status}: {response.read(300).decode(errors='replace')}"
        else:
            ended = _read_events(response, reply)
            if not ended and reply.error is None:
                reply.error = "the stream ended without [DONE]"
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        reply.error = first_line(error)
    finally:
        connection.close()
    reply.end_s = time.perf_counter()
    return reply


def run_level(
    address: Address, bodies: Sequence[dict[str, Any]], concurrency: int
) -> tuple[list[Reply], Level]:
    """All requests by `concurrency` clients, each taking the next one as soon as it is free."""
    begin = time.perf_counter()
    clients = ThreadPoolExecutor(concurrency)
    try:
        replies = list(clients.map(lambda body: complete(address, body), bodies))
    except BaseException:
        # A signal: the server is ended by whoever started it, and that ends the requests that run.
        clients.shutdown(wait=False, cancel_futures=True)
        raise
    clients.shutdown()
    return replies, summary(replies, time.perf_counter() - begin)


def summary(replies: Sequence[Reply], wall_s: float) -> Level:
    """Percentiles over the replies that did not fail; zeros where there are none."""
    good = [reply for reply in replies if reply.error is None and reply.at_s]
    first = [reply.at_s[0] - reply.begin_s for reply in good]
    gaps = [
        after - before for reply in good for before, after in zip(reply.at_s, reply.at_s[1:], strict=False)
    ]
    tokens = sum(reply.tokens for reply in good)
    return Level(
        requests=len(replies),
        failures=len(replies) - len(good),
        wall_s=wall_s,
        tokens=tokens,
        tokens_per_s=tokens / wall_s,
        first_token_p50_s=percentile(first, 0.5),
        first_token_p95_s=percentile(first, 0.95),
        inter_token_p50_s=percentile(gaps, 0.5),
        inter_token_p95_s=percentile(gaps, 0.95),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, between the two nearest; 0 of none."""
    if len(values) < 2:
        return float(values[0]) if values else 0.0
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[round(share * 100) - 1]


def _read_events(response: http.client.HTTPResponse, reply: Reply) -> bool:
    """Reads server-sent events into `reply`; whether the stream ended as it should."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return True
        event = json.loads(data)
        if "error" in event:
            reply.error = str(event["error"])
            return False
        piece = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
        if piece:
            reply.at_s.append(time.perf_counter())
            reply.text += piece
        if event.get("usage"):
            reply.usage_tokens = int(event["usage"]["completion_tokens"])
    return False
