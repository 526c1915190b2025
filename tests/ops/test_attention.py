"""Attention: every case within the error budget, and the properties that models rely on."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hasten.base.errors import ShapeError
from hasten.ops import native
from hasten.ops.attention import attention, blocked, cpu, flash, ranges_from_mask
from hasten.ops.attention import reference as meaning
from hasten.ops.attention.cases import CASES
from hasten.ops.attention.plan import plan, runs, visible_intervals
from hasten.ops.cases import Case, check_backward, check_forward, select

DTYPES = [torch.float32, torch.bfloat16]
both_bodies = pytest.mark.usefixtures("body")


def draw(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int = 16, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, queries, heads, dim, **options).transpose(1, 2)
    k = torch.randn(batch, keys, kv_heads, dim, **options).transpose(1, 2)
    v = torch.randn(batch, keys, kv_heads, dim, **options).transpose(1, 2)
    return q, k, v


def gradients(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out, _ = attention(*leaves, **options)
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    return (out.detach(), *torch.autograd.grad(out, leaves, seed))


@both_bodies
@pytest.mark.parametrize(("case", "dtype"), select(CASES), ids=str)
def test_forward(case: Case, dtype: torch.dtype) -> None:
    check_forward(case, dtype)


@both_bodies
@pytest.mark.parametrize(("case", "dtype"), select(CASES, backward=True), ids=str)
def test_backward(case: Case, dtype: torch.dtype) -> None:
    check_backward(case, dtype)


@pytest.mark.parametrize("case", [c for c in CASES if not c.benchmark], ids=str)
def test_float64_equals_the_definition(case: Case) -> None:
    check_forward(case, torch.float64)
    check_backward(case, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_tiles_give_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splitting over batch rows, heads and query rows changes nothing, and bounds the largest buffer."""
    q, k, v = draw(3, 6, 3, 130, 130, dtype=dtype)
    monkeypatch.setattr(cpu, "refusal", lambda *arguments: "not in this test")
    expected = gradients(q, k, v, causal=True)
    monkeypatch.setattr(flash, "plan", lambda *arguments: None)
    monkeypatch.setattr(blocked, "TILE_SCORES", 2**14)
    monkeypatch.setattr(blocked, "BLOCK_ROWS", 32)
    sizes: list[int] = []
    take = blocked._Scratch.take

    def recorded(self: Any, name: str, kind: torch.dtype, *shape: int) -> Tensor:
        sizes.append(math.prod(shape))
        return take(self, name, kind, *shape)

    monkeypatch.setattr(blocked._Scratch, "take", recorded)
    for a, b in zip(gradients(q, k, v, causal=True), expected, strict=True):
        tolerance = 2e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert max(sizes) <= 2**14


@both_bodies
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (14, 2), (28, 4), (32, 8), (4, 4), (8, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_query_head_reads_its_kv_head(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    q, k, v = draw(1, heads, kv_heads, 5, 5, dtype=dtype)
    v = torch.arange(1, kv_heads + 1, dtype=dtype).view(1, -1, 1, 1).expand_as(v)
    out, _ = attention(q, k, v, causal=True)
    expected = torch.arange(1, kv_heads + 1).repeat_interleave(heads // kv_heads)
    torch.testing.assert_close(out[0, :, :, 0].float(), expected.float().expand(5, heads), rtol=4e-3, atol=0)


@both_bodies
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"window": 4}], ids=str)
def test_prefill_in_two_parts_equals_one(dtype: torch.dtype, options: dict[str, Any]) -> None:
    q, k, v = draw(2, 4, 2, 10, 10, dtype=dtype)
    whole, whole_lse = attention(q, k, v, causal=True, **options)
    first, first_lse = attention(q[:, :, :7], k[:, :, :7], v[:, :, :7], causal=True, **options)
    last, last_lse = attention(q[:, :, 7:], k, v, causal=True, **options)
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(torch.cat((first, last), 1), whole, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.cat((first_lse, last_lse), 2), whole_lse, rtol=1e-4, atol=1e-4)


def empty_row_options(how: str) -> dict[str, Any]:
    """Batch row 1 sees nothing, and query row 2 of batch row 0 neither (all but `whole-row`)."""
    ranges = torch.tensor([[0, 6], [0, 0]]).repeat_interleave(6, dim=0).view(2, 6, 2)
    if how != "whole-row":
        ranges[0, 2] = 0
    visible = torch.arange(6) < ranges[..., 1:]
    if how == "bool":
        return {"bias": visible[:, None]}
    if how == "float":
        return {"bias": torch.zeros(2, 1, 6, 6).masked_fill(~visible[:, None], -math.inf)}
    return {"ranges": ranges.to(torch.int32)}


@both_bodies
@pytest.mark.parametrize("how", ["whole-row", "ranges", "bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_rows_without_a_key(how: str, causal: bool, with_sinks: bool) -> None:
    q, k, v = draw(2, 4, 2, 6, 6)
    options = {**empty_row_options(how), "causal": causal}
    options["sinks"] = torch.tensor([0.5, 1.0, -1.0, 2.0]) if with_sinks else None
    out, dq, dk, dv = gradients(q, k, v, **options)
    lse = attention(q, k, v, **options)[1]
    empty = [(1, slice(None))] if how == "whole-row" else [(1, slice(None)), (0, 2)]
    nothing = options["sinks"] if with_sinks else torch.full((4,), -math.inf)
    for b, row in empty:
        assert torch.equal(out[b, row], torch.zeros_like(out[b, row]))
        assert torch.equal(dq[b, :, row], torch.zeros_like(dq[b, :, row]))
        assert torch.equal(
            lse[b, :, row].reshape(4, -1), nothing[:, None].expand(4, lse[b, :, row].numel() // 4)
        )
    assert torch.equal(dk[1], torch.zeros_like(dk[1]))
    assert all(bool(t.isfinite().all()) for t in (out, dq, dk, dv))
    assert bool((out[0, 0] != 0).any())


@both_bodies
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_hidden_by_a_huge_finite_mask(dtype: torch.dtype) -> None:
    """The lowest float in place of -inf: a row of nothing else is even over its keys, as in plain torch."""
    q, k, v = draw(1, 2, 1, 9, 9, dtype=dtype)
    hidden = torch.arange(9) >= torch.tensor([0, 9, 5, 1, 9, 9, 2, 9, 9])[:, None]
    bias = torch.zeros(1, 1, 9, 9).masked_fill(hidden, torch.finfo(torch.float32).min)
    found = gradients(q, k, v, bias=bias)
    with native.switched_off():
        expected = gradients(q.double(), k.double(), v.double(), bias=bias.double())
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


@both_bodies
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nan_stays_where_it_is_seen(dtype: torch.dtype, which: str) -> None:
    """NaN at position 3 of a causal sequence: rows from 3 on see it in k and v, row 3 alone in q."""
    q, k, v = draw(1, 2, 1, 8, 8, dtype=dtype)
    clean, *clean_grads = gradients(q, k, v, causal=True)
    {"q": q, "k": k, "v": v}[which][:, :, 3] = math.nan
    out, dq, dk, dv = gradients(q, k, v, causal=True)
    # The kernel leaves such inputs to the torch body, which rounds elsewhere.
    close = {"rtol": 1.6e-2, "atol": 1.6e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    seen = [3] if which == "q" else [3, 4, 5, 6, 7]
    unseen = [i for i in range(8) if i not in seen]
    assert bool(out[:, seen].isnan().all())
    torch.testing.assert_close(out[:, unseen], clean[:, unseen], **close)
    assert bool(dq[:, :, 3].isnan().all())
    torch.testing.assert_close(dq[:, :, unseen], clean_grads[0][:, :, unseen], **close)
    if which == "q":
        assert bool(dk[:, :, :4].isnan().all())
        torch.testing.assert_close(dk[:, :, 4:], clean_grads[1][:, :, 4:], **close)
        torch.testing.assert_close(dv[:, :, 4:], clean_grads[2][:, :, 4:], **close)


@both_bodies
@pytest.mark.parametrize("hide", ["ranges", "bias"])
def test_nan_in_a_hidden_key_does_not_leak(hide: str) -> None:
    q, k, v = draw(2, 2, 1, 6, 6)
    options: dict[str, Any] = {"ranges": torch.tensor([[0, 4], [0, 4]])}
    if hide == "bias":
        options = {"bias": (torch.arange(6) < 4).expand(1, 1, 6, 6)}
    expected = gradients(q, k, v, **options)
    k[:, :, 4:], v[:, :, 4:] = math.nan, math.nan
    for a, b in zip(gradients(q, k, v, **options), expected, strict=True):
        torch.testing.assert_close(a, b)


@both_bodies
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_window_hides_what_is_outside(causal: bool, dtype: torch.dtype) -> None:
    q, k, v = draw(1, 4, 2, 64, 64, dtype=dtype)
    before = attention(q, k, v, causal=causal, window=16)[0]
    k[:, :, 20], v[:, :, 20] = 5.0, -3.0
    changed = (attention(q, k, v, causal=causal, window=16)[0] != before).any(-1).any(-1)[0]
    expected = [20 <= i < 36 if causal else 4 < i < 36 for i in range(64)]
    assert changed.tolist() == expected


@both_bodies
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_documents_do_not_see_each_other(dtype: torch.dtype) -> None:
    """Outputs and gradients of a document: bit-equal when another changes, and equal to it alone."""
    lengths = (5, 40, 3, 90, 162)
    edges = np.cumsum((0, *lengths)).tolist()
    pairs = [(a, b) for a, b in pairwise(edges) for _ in range(b - a)]
    ranges = torch.tensor(pairs, dtype=torch.int32)[None]
    q, k, v = draw(1, 4, 2, 300, 300, dtype=dtype)
    before = gradients(q, k, v, ranges=ranges, causal=True)
    a, b = edges[3], edges[4]
    alone = attention(*(t[:, :, a:b] for t in (q, k, v)), causal=True)[0]
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(before[0][:, a:b], alone, rtol=tolerance, atol=tolerance)
    for t in (q, k, v):
        t[:, :, : edges[2]] = torch.randn_like(t[:, :, : edges[2]])
    after = gradients(q, k, v, ranges=ranges, causal=True)
    assert torch.equal(before[0][:, edges[2] :], after[0][:, edges[2] :])
    assert not torch.equal(before[0], after[0])
    for x, y in zip(before[1:], after[1:], strict=True):
        assert torch.equal(x[:, :, edges[2] :], y[:, :, edges[2] :])


@both_bodies
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left", [True, False])
def test_padded_row_equals_the_row_alone(dtype: torch.dtype, left: bool) -> None:
    q, k, v = draw(2, 4, 2, 40, 40, dtype=dtype)
    first, last = (11, 40) if left else (0, 29)
    ranges = torch.tensor([[first, last], [0, 40]])
    out, *grads = gradients(q, k, v, ranges=ranges, causal=True)
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    alone = attention(*(t[:1, :, first:last] for t in (q, k, v)), causal=True)[0]
    torch.testing.assert_close(out[:1, first:last], alone, rtol=tolerance, atol=tolerance)
    hidden = slice(0, first) if left else slice(last, 40)
    for gradient in grads[1:]:
        assert torch.equal(gradient[0, :, hidden], torch.zeros_like(gradient[0, :, hidden]))


@both_bodies
def test_autocast_changes_the_operands_and_not_the_gradient_dtype() -> None:
    leaves = [t.requires_grad_() for t in draw(1, 4, 2, 8, 8)]
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attention(*leaves, causal=True)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
    assert lse.dtype == torch.float32
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in leaves)
    inside = [t.detach().bfloat16() for t in leaves]
    assert torch.equal(out, attention(*inside, causal=True)[0])


@both_bodies
def test_saves_the_inputs_the_output_and_the_log_sum_exp() -> None:
    q, k, v = (t.requires_grad_() for t in draw(2, 4, 2, 50, 50))
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        out, lse = attention(q, k, v, causal=True)
    assert sorted(saved) == sorted(tuple(t.shape) for t in (q, k, v, out, lse))


@both_bodies
def test_layouts() -> None:
    """The output reshapes to [B, S, H * D] without a copy; gradients come in the inputs' own layout."""
    q, k, v = draw(2, 4, 2, 9, 9)
    out, dq, dk, dv = gradients(q, k, v)
    assert out.shape == (2, 9, 4, 16)
    assert out.is_contiguous()
    assert [t.stride() for t in (dq, dk, dv)] == [t.stride() for t in (q, k, v)]


@both_bodies
def test_same_input_same_bits() -> None:
    q, k, v = draw(2, 6, 2, 200, 200, dtype=torch.bfloat16)
    first, second = (gradients(q, k, v, causal=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@both_bodies
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_large_scores_keep_float32_accuracy(scale: float) -> None:
    """Scores of 100 and more, where a score rounded to bfloat16 would be off by 0.25."""
    q, k, v = draw(1, 3, 1, 96, 96, dim=64, dtype=torch.bfloat16)
    q = q * scale
    truth = meaning.attention(q.double(), k.double(), v.double(), causal=True)
    out, lse = attention(q, k, v, causal=True)
    given = meaning.attention(q, k, v, causal=True)[0]
    torch.testing.assert_close(lse.double(), truth[1], rtol=3e-5, atol=3e-5)
    error, allowed = (out.double() - truth[0]).abs().max(), (given.double() - truth[0]).abs().max()
    assert error <= 2 * allowed + 2**-8


@both_bodies
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"ranges": torch.tensor([[0, 3], [1, 7]], dtype=torch.int32), "window": 3},
        {"sinks": torch.randn(4, requires_grad=True), "softcap": 2.0},
        {"bias": torch.randn(1, 1, 7, 7, requires_grad=True), "scale": 0.2},
    ],
    ids=lambda options: "-".join(options),
)
def test_opcheck(options: dict[str, Any]) -> None:
    q, k, v = (t.requires_grad_() for t in draw(2, 4, 2, 7, 7))
    torch.library.opcheck(torch.ops.hasten.attention.default, (q, k, v), options)


@both_bodies
def test_plan_covers_what_is_visible_and_no_more() -> None:
    generator = np.random.default_rng(0)
    for trial in range(30):
        queries, keys = generator.integers(1, 60, size=2).tolist()
        start = generator.integers(0, keys + 1, size=(2, queries))
        ranges = np.stack((start, start + generator.integers(0, keys, size=start.shape)), axis=-1).clip(
            0, keys
        )
        causal, window = bool(trial % 2), int(generator.choice([0, 1, 7]))
        expected = visible_intervals(ranges, queries, keys, causal, window)
        seen = np.zeros((2, queries, keys), dtype=int)
        the_plan = plan(torch.from_numpy(ranges), 2, queries, keys, causal, window, 16)
        for segment in the_plan.segments:
            for block in segment.blocks:
                assert block.q1 - block.q0 <= 16
                visible = np.ones((block.q1 - block.q0, block.k1 - block.k0), dtype=int)
                if block.hidden is not None:
                    visible[:, block.c0 : block.c1] -= block.hidden.numpy()
                seen[segment.b0 : segment.b1, block.q0 : block.q1, block.k0 : block.k1] += visible
        column = np.arange(keys)
        assert np.array_equal(seen, (column >= expected[..., :1]) & (column < expected[..., 1:]))


@both_bodies
@pytest.mark.parametrize("causal", [False, True])
def test_runs_cover_what_is_visible_and_no_more(causal: bool) -> None:
    lengths = torch.tensor([33, 27, 36])
    ranges = torch.zeros(4, 96, 2, dtype=torch.int64)
    ranges[0, 10:] = torch.tensor([10, 96])
    ranges[1] = torch.tensor([0, 70])
    ranges[3] = torch.tensor([[0, 33], [33, 60], [60, 96]]).repeat_interleave(lengths, dim=0)
    calls = runs(ranges, 4, 96, 96, causal, 0)
    assert calls is not None
    assert 5 <= len(calls) <= 7
    seen = np.zeros((4, 96, 96), dtype=int)
    for b, q0, q1, k0, k1, is_causal in calls:
        rectangle = np.ones((q1 - q0, k1 - k0), dtype=int)
        seen[b, q0:q1, k0:k1] += np.tril(rectangle) if is_causal else rectangle
    expected = visible_intervals(ranges.numpy(), 96, 96, causal, 0)
    column = np.arange(96)
    assert np.array_equal(seen, (column >= expected[..., :1]) & (column < expected[..., 1:]))


@both_bodies
def test_runs_leave_other_shapes_alone() -> None:
    assert runs(None, 1, 3, 10, True, 0) is None
    assert runs(None, 1, 96, 96, True, 8) is None
    assert runs(None, 2, 1, 10, True, 0) == ((0, 0, 1, 0, 10, False), (1, 0, 1, 0, 10, False))


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_torch_bodies_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cases without the native narrow products, and without torch's kernel, stay in the budget."""
    plain = [c for c in CASES if c.name in ("causal-63", "strided", "padding-left-right", "documents")]
    monkeypatch.setattr(cpu, "refusal", lambda *arguments: "not in this test")
    monkeypatch.setattr(blocked, "native", lambda q: False)
    for case in plain:
        check_forward(case, dtype)
        check_backward(case, dtype)
    monkeypatch.setattr(flash, "plan", lambda *arguments: None)
    for case in plain:
        check_forward(case, dtype)
        check_backward(case, dtype)


def test_plan_skips_hidden_keys() -> None:
    """A causal window of 16 over 2048 tokens touches a small part of the square."""
    blocks = plan(None, 1, 2048, 2048, True, 16, 128).segments[0].blocks
    assert sum((b.q1 - b.q0) * (b.k1 - b.k0) for b in blocks) < 0.08 * 2048**2


def test_ranges_from_mask() -> None:
    mask = torch.zeros(2, 1, 3, 5, dtype=torch.bool)
    mask[0, 0, 0, :1] = mask[0, 0, 1, :2] = mask[0, 0, 2, 1:4] = mask[1, 0, 1, 4:] = True
    ranges = ranges_from_mask(mask)
    assert ranges is not None
    assert ranges.dtype == torch.int32
    assert ranges.tolist() == [[[0, 1], [0, 2], [1, 4]], [[0, 0], [4, 5], [0, 0]]]
    mask[1, 0, 1, 0] = True
    assert ranges_from_mask(mask) is None
    with pytest.raises(ShapeError, match="bool"):
        ranges_from_mask(mask.float())


@both_bodies
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.randn(1, 3, 5, 16)}, "4 query heads cannot share 3 KV heads; allowed: \\[1, 2, 4\\]"),
        ({"k": torch.randn(1, 2, 5, 8)}, "share B and D"),
        ({"v": torch.randn(1, 2, 6, 16)}, "share B, Hkv and Sk"),
        ({"q": torch.randn(4, 5, 16)}, "attention takes"),
        ({"q": torch.randn(1, 4, 5, 16).bfloat16()}, "share a floating dtype"),
        ({"ranges": torch.zeros(1, 4, 2, dtype=torch.int32)}, "ranges must be"),
        ({"ranges": torch.zeros(1, 2)}, "ranges must be"),
        ({"bias": torch.zeros(1, 3, 5, 5)}, "bias must be"),
        ({"bias": torch.zeros(1, 1, 5, 5, dtype=torch.int64)}, "floating or bool"),
        ({"sinks": torch.zeros(3)}, "sinks must have"),
        ({"window": -1}, "must be >= 0"),
    ],
)
def test_refuses_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.randn(1, 4, 5, 16),
        "k": torch.randn(1, 2, 5, 16),
        "v": torch.randn(1, 2, 5, 16),
    }
    if "k" in change and change["k"].shape[1] == 3:
        arguments["v"] = change["k"]
    with pytest.raises(ShapeError, match=message):
        attention(**{**arguments, **change})
