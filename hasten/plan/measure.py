"""What `hasten calibrate` measures: matrix products by size and format, memory bandwidth, collectives.

Imports torch, so only the command that measures imports this module. Sizes are bytes, rates bytes/s and
FLOP/s (a multiply-add is two), times seconds. The fastest of several calls counts, after one that does not:
whatever else runs on the machine only adds. Collectives are medians of the slowest rank.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from hasten.base.errors import HastenError

# (M, K, N): cubes for the rise with size; tall and flat ones as in a transformer's layers.
SHAPES = (
    (128, 128, 128),
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (1024, 512, 2048),
    (1024, 2048, 512),
    (256, 1024, 4096),
    (4096, 1024, 1024),
)
# Accelerators need more work in flight before they reach their peak.
SHAPES_ACCELERATOR = (
    *SHAPES,
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (4096, 8192, 28672),
    (8192, 12288, 12288),
)
MESSAGE_BYTES = (4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
# A product that takes longer is measured once more and no larger one after it: two minutes for everything.
_SLOW_S = 1.0
_AT_LEAST_S = 0.03
_MOST_REPEATS = 50
_PROCESS_TIMEOUT_S = 60.0


class Product(NamedTuple):
    """One matrix product (M, K) x (K, N) and how fast it was."""

    dtype: str
    m: int
    k: int
    n: int
    flops_per_s: float


class Message(NamedTuple):
    """One collective: `size_bytes` is the buffer that every rank ends up with (all-reduce, all-gather) or
    starts from (reduce-scatter)."""

    operation: str
    ranks: int
    size_bytes: int
    seconds: float


class Step(NamedTuple):
    """One optimizer step of a model so small that nothing but its operators' fixed costs takes time."""

    layers: int
    micro_batches: int
    seconds: float


class Line(NamedTuple):
    """time = latency_s + moved bytes / bytes_per_s; moved bytes are those that each rank must send."""

    latency_s: float
    bytes_per_s: float


def products(
    dtypes: Sequence[str],
    device: str = "cpu",
    shapes: Sequence[tuple[int, int, int]] | None = None,
    advance: Callable[[str], None] = lambda what: None,
) -> list[Product]:
    """Measures every shape in every dtype (torch's names); shapes that would take minutes are left out."""
    if shapes is None:
        shapes = SHAPES if device == "cpu" else SHAPES_ACCELERATOR
    found = []
    for name in dtypes:
        advance(f"matrix products in {name}")
        rate = 0.0
        for m, k, n in sorted(shapes, key=lambda shape: shape[0] * shape[1] * shape[2]):
            flops = 2.0 * m * k * n
            if rate and flops / rate > _SLOW_S:
                break
            dtype = getattr(torch, name)
            a = torch.randn(m, k, device=device).to(dtype)
            # Weights of linear layers lie transposed, and so does this one.
            b = torch.randn(n, k, device=device).to(dtype).t()
            out = torch.empty(m, n, dtype=dtype, device=device)
            seconds = timed(_product(a, b, out), device)
            rate = flops / seconds
            found.append(Product(name, m, k, n, rate))
    return found


def small_operator(device: str = "cpu") -> float:
    """Seconds of an addition that has nothing to add: what every operator costs on top of its work."""
    a = torch.zeros(1, device=device)

    def hundred() -> None:
        for _ in range(100):
            torch.add(a, a)

    return timed(hundred, device) / 100


# A Llama in which every product is tiny; `SMALL_SHAPE` is the same for the planner.
SMALL_SHAPE = {
    "hidden": 64,
    "heads": 4,
    "kv_heads": 4,
    "inner": 128,
    "vocabulary": 256,
}
SMALL_TOKENS = 32
# (layers, micro batches): two differ in each, which separates the costs of a layer, a micro batch and a step.
SMALL_STEPS = ((2, 1), (6, 1), (2, 3))


def small_steps(dtype: str, repeats: int = 12) -> list[Step]:
    """Optimizer steps of small models, rewritten by hasten as `hasten train` does; CPU only."""
    import hasten
    from hasten.models import tiny_model

    found = []
    for layers, micro_batches in SMALL_STEPS:
        model = tiny_model(
            "llama",
            num_hidden_layers=layers,
            hidden_size=SMALL_SHAPE["hidden"],
            num_attention_heads=SMALL_SHAPE["heads"],
            num_key_value_heads=SMALL_SHAPE["kv_heads"],
            intermediate_size=SMALL_SHAPE["inner"],
            vocab_size=SMALL_SHAPE["vocabulary"],
        )
        tokens = torch.arange(SMALL_TOKENS).view(1, -1) % SMALL_SHAPE["vocabulary"]
        hasten.optimize(model, precision="follow", measure=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step(
            model: Any = model,
            optimizer: Any = optimizer,
            count: int = micro_batches,
            x: torch.Tensor = tokens,
        ) -> None:
            for _ in range(count):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
                    loss = model(input_ids=x, labels=x, use_cache=False).loss
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        hasten.restore(model)
        found.append(Step(layers, micro_batches, min(times[2:])))
    return found


def read_bandwidth(device: str = "cpu", size_bytes: int = 1 << 29) -> float:
    """Bytes/s of a sum over a buffer that no cache holds."""
    if device == "cpu":
        from hasten.ops.limits import read_bytes_per_s

        return read_bytes_per_s(size_bytes)
    buffer = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    return size_bytes / timed(buffer.sum, device)


def update_bandwidth(device: str = "cpu", size_bytes: int = 1 << 27) -> float:
    """Bytes/s, read and written together, of b += a: what optimizer steps and residual sums do."""
    a = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    b = torch.zeros_like(a)
    return 3 * size_bytes / timed(lambda: b.add_(a), device)


def timed(call: Callable[[], object], device: str = "cpu") -> float:
    """Seconds of the fastest of several calls, after one that is not counted: more calls of short ones."""
    _finished(call, device)
    begin = time.perf_counter()
    _finished(call, device)
    first = time.perf_counter() - begin
    repeats = 3 if first > _AT_LEAST_S else min(_MOST_REPEATS, 3 + int(_AT_LEAST_S / max(first, 1e-6)))
    times = []
    for _ in range(2 if first > _SLOW_S else repeats):
        begin = time.perf_counter()
        _finished(call, device)
        times.append(time.perf_counter() - begin)
    return min(first, *times)


def collectives(ranks: int = 2, sizes: Sequence[int] = MESSAGE_BYTES, backend: str = "gloo") -> list[Message]:
    """Measures every operation and size among `ranks` processes of this machine, one thread each.

    `backend`: gloo (CPU) or nccl (one GPU each).

    Raises HastenError if a process failed or did not end within a minute; none is left behind.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="hasten-calibrate-") as folder:
        queue = context.SimpleQueue()
        processes = [
            context.Process(target=_rank, args=(rank, ranks, tuple(sizes), backend, folder, queue))
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            deadline = time.monotonic() + _PROCESS_TIMEOUT_S
            while queue.empty():
                failed = next((p for p in processes if p.exitcode not in (None, 0)), None)
                if failed is not None:
                    raise HastenError(f"a process that measures collectives ended with {failed.exitcode}")
                if time.monotonic() > deadline:
                    raise HastenError(
                        f"collectives over {backend} did not finish within {_PROCESS_TIMEOUT_S:.0f} s"
                    )
                time.sleep(0.02)
            rows = queue.get()
            for process in processes:
                process.join(timeout=_PROCESS_TIMEOUT_S)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
    return [Message(*row) for row in rows]


def fit_line(messages: Sequence[Message]) -> Line:
    """The latency and the bandwidth that explain the times best, by least squares of the relative error.

    Neither is negative: where the best latency would be, it is 0.
    """
    moved = np.array([moved_bytes(message) for message in messages])
    seconds = np.array([message.seconds for message in messages])
    columns = np.stack([np.ones_like(seconds), moved], axis=1) / seconds[:, None]
    (latency, slope), *_ = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)
    if latency < 0:
        latency = 0.0
        slope = float((moved / seconds).sum() / ((moved / seconds) ** 2).sum())
    if slope <= 0:
        slope = float(np.min(seconds / moved))
    return Line(float(latency), float(1.0 / slope))


def moved_bytes(message: Message) -> float:
    """Bytes that each rank has to send in the best algorithm: (n-1)/n of the buffer, twice for all-reduce.

    Source: the bus bandwidth of nccl-tests, doc/PERFORMANCE.md.
    """
    share = (message.ranks - 1) / message.ranks
    return message.size_bytes * share * (2 if message.operation == "all_reduce" else 1)


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.mm(a, b, out=out)


def _finished(call: Callable[[], object], device: str) -> None:
    call()
    if device != "cpu":
        getattr(torch, device.partition(":")[0]).synchronize()


def _rank(rank: int, ranks: int, sizes: tuple[int, ...], backend: str, folder: str, queue: Any) -> None:
    """One process of the group; rank 0 hands over the medians of the slowest rank."""
    torch.set_num_threads(1)
    device = "cpu" if backend == "gloo" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=(Path(folder) / "store").as_uri(),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_PROCESS_TIMEOUT_S),
    )
    rows: list[tuple[str, int, int, float]] = []
    for operation in OPERATIONS:
        for size_bytes in sizes:
            count = max(size_bytes // 4 // ranks * ranks, ranks)
            seconds = torch.tensor([_collective_s(operation, count, ranks, device)], dtype=torch.float64)
            seconds = seconds.to(device)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            rows.append((operation, ranks, 4 * count, float(seconds)))
    dist.barrier()
    if rank == 0:
        queue.put(rows)
    dist.destroy_process_group()


def _collective_s(operation: str, count: int, ranks: int, device: str) -> float:
    whole = torch.ones(count, device=device)
    part = torch.ones(count // ranks, device=device)

    def call() -> None:
        if operation == "all_reduce":
            dist.all_reduce(whole)
        elif operation == "all_gather":
            dist.all_gather_single(whole, part)
        else:
            dist.reduce_scatter_single(part, whole)

    times = []
    # The same number on every rank: a rank that stops earlier would leave the others waiting.
    for _ in range(3 + min(12, (1 << 20) // (4 * count))):
        dist.barrier()
        begin = time.perf_counter()
        _finished(call, device.partition(":")[0])
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
