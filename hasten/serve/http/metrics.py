"""Numbers for Prometheus, under vLLM's names with `hasten:` in front, so that its dashboards fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from hasten.serve.engine import Observer
from hasten.serve.stream import FinishReason

_FIRST_TOKEN_S = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_BETWEEN_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_WHOLE_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5),
    *(5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Metrics(Observer):
    """One registry for each server, and the observer of its engine. `name` labels the model."""

    def __init__(self, name: str = "") -> None:
        self.registry = CollectorRegistry()
        self._name = name
        self.requests = Counter(
            "hasten:http_requests", "Requests by path and status.", ("path", "status"), registry=self.registry
        )
        self.embedded = Counter(
            "hasten:embedding_tokens", "Tokens embedded.", ("model_name",), registry=self.registry
        )
        self._first_token = self._histogram(
            "hasten:time_to_first_token_seconds", "Submission to first token.", _FIRST_TOKEN_S
        )
        self._between = self._histogram(
            "hasten:inter_token_latency_seconds", "Time between the tokens of a choice.", _BETWEEN_S
        )
        self._whole = self._histogram(
            "hasten:e2e_request_latency_seconds", "Submission to the end.", _WHOLE_S
        )
        self._queued = self._histogram("hasten:request_queue_time_seconds", "Time in the queue.", _WHOLE_S)
        self._prompts = self._histogram("hasten:request_prompt_tokens", "Prompt tokens of a choice.", _TOKENS)
        self._answers = self._histogram(
            "hasten:request_generation_tokens", "Generated tokens of a choice.", _TOKENS
        )
        self._steps = self._histogram(
            "hasten:iteration_tokens_total", "Tokens of an engine step.", _STEP_TOKENS
        )

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Any:
        histogram = Histogram(name, text, ("model_name",), buckets=tuple(buckets), registry=self.registry)
        return histogram.labels(self._name)

    def watch(self, engine: Any) -> None:
        """Reads the engine's own counts whenever Prometheus asks."""
        self.registry.register(_EngineNumbers(self._name, engine))

    def page(self, accept: str) -> tuple[bytes, str]:
        """The text for a scrape, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def started(self, queue_s: float) -> None:
        self._queued.observe(queue_s)

    def first_token(self, since_submitted_s: float) -> None:
        self._first_token.observe(since_submitted_s)

    def tokens(self, since_last_s: float, count: int) -> None:
        for _ in range(count):
            self._between.observe(since_last_s / count)

    def finished(
        self, reason: FinishReason, total_s: float, prompt_tokens: int, completion_tokens: int
    ) -> None:
        self._whole.observe(total_s)
        self._prompts.observe(prompt_tokens)
        self._answers.observe(completion_tokens)

    def step(self, rows: int, sequences: int, duration_s: float) -> None:
        self._steps.observe(rows)


class _EngineNumbers(Collector):
    def __init__(self, name: str, engine: Any) -> None:
        self._name, self._engine = name, engine

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        gauges = (
            ("hasten:num_requests_running", "Sequences in the batch.", stats.running),
            ("hasten:num_requests_waiting", "Requests in the queue.", stats.waiting),
            ("hasten:kv_cache_usage_perc", "Share of the cache's blocks in use, 0 to 1.", stats.cache_usage),
        )
        counters = (
            ("hasten:prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens),
            ("hasten:generation_tokens", "Tokens generated.", stats.generated_tokens),
            (
                "hasten:prefix_cache_queries",
                "Prompt tokens looked up in the cache.",
                stats.prefix_query_tokens,
            ),
            ("hasten:prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_hit_tokens),
            ("hasten:num_preemptions", "Sequences put back for want of blocks.", stats.preemptions),
            ("hasten:spec_decode_num_draft_tokens", "Tokens drafted.", stats.drafted_tokens),
            ("hasten:spec_decode_num_accepted_tokens", "Drafted tokens kept.", stats.accepted_tokens),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=("model_name",))
            gauge.add_metric((self._name,), value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(name, text, labels=("model_name",))
            counter.add_metric((self._name,), value)
            yield counter
        ended = CounterMetricFamily(
            "hasten:request_success",
            "Choices by the reason of their end.",
            labels=("model_name", "finished_reason"),
        )
        for reason, count in sorted(stats.finished.items()):
            ended.add_metric((self._name, reason), count)
        yield ended
