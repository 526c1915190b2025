"""The two limits that every share is measured against: the matrix-product peak and the memory bandwidth.

Both are what this machine reaches through torch with all its threads, not what its data sheet says: a share
of 100 % means "as fast as the library's bare matrix product".
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hasten.bench.report import Limits
from hasten.ops.limits import READ_BYTES, median_time, read_bytes_per_s

GEMM_SHAPES = (
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (1024, 1024, 8192),
)
"""(M, K, N): square and tall ones, because no library is at its best in all of them."""


def measure(
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    *,
    shapes: tuple[tuple[int, int, int], ...] = GEMM_SHAPES,
    read_bytes: int = READ_BYTES,
    advance: Callable[[str], None] = lambda what: None,
) -> Limits:
    """Measures the limits in about three seconds on two cores.

    Args:
        dtypes: which matrix products to measure; leave out bf16 where the processor emulates it.
        shapes: (M, K, N) of the products.
        read_bytes: size of the buffer that is read; at most an eighth of the free memory is taken.
        advance: called before each measurement with its name, for a progress bar; see `stages`.

    Returns:
        Limits: FLOP/s (a multiply-add is two) and bytes/s.
    """
    rates: dict[str, float] = {}
    for dtype in dtypes:
        name = _name(dtype)
        advance(f"matrix products in {name}")
        rates[name] = max(_gemm_rate(shape, dtype) for shape in shapes)
    advance("memory bandwidth")
    return Limits(
        gemm_flops_per_s=max(rates.values()),
        gemm_flops_per_s_by_dtype=rates,
        read_bytes_per_s=read_bytes_per_s(read_bytes),
        threads=torch.get_num_threads(),
    )


def stages(dtypes: tuple[torch.dtype, ...]) -> int:
    """How often `measure` calls `advance`."""
    return len(dtypes) + 1


def _gemm_rate(shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    m, k, n = shape
    a = torch.randn(m, k, dtype=dtype)
    # Weights of linear layers lie transposed, and so does this one.
    b = torch.randn(n, k, dtype=dtype).t()
    out = torch.empty(m, n, dtype=dtype)
    return 2.0 * m * k * n / median_time(lambda: torch.mm(a, b, out=out))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
