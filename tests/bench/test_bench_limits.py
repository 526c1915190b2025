"""The two measured limits are positive, plausible, and announced."""

from __future__ import annotations

import torch

from hasten.bench import limits


def test_limits_are_measured_and_plausible():
    said: list[str] = []
    dtypes = (torch.float32,)
    got = limits.measure(
        dtypes, shapes=((64, 64, 64), (256, 256, 256)), read_bytes=1 << 22, advance=said.append
    )
    assert len(said) == limits.stages(dtypes)
    # Between a microcontroller and a rack: catches a wrong unit, not a slow machine.
    assert 1e7 < got.gemm_flops_per_s < 1e16
    assert 1e7 < got.read_bytes_per_s < 1e14
    assert got.gemm_flops_per_s == got.gemm_flops_per_s_by_dtype["float32"]
    assert got.threads == torch.get_num_threads()


def test_the_best_shape_counts(monkeypatch):
    rates = {(8, 8, 8): 1e9, (16, 16, 16): 5e9, (32, 32, 32): 3e9}
    monkeypatch.setattr(limits, "_gemm_rate", lambda shape, dtype: rates[shape])
    got = limits.measure((torch.bfloat16,), shapes=tuple(rates), read_bytes=1 << 20)
    assert got.gemm_flops_per_s_by_dtype == {"bfloat16": 5e9}
