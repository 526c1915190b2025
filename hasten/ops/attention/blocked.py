"""The body that runs: attention over blocks of query rows, each against only the keys it can see.

One block holds all keys of its rows, so the softmax is exact in one pass and memory stays bounded: a block's
scores are the largest temporary. Scores and softmax are in float32 (float64 for float64 inputs); the product
with V, and in the backward pass all products but the scores, take operands in the input's dtype where the
hardware multiplies it natively, with float32 accumulation inside the product.

Legend: N = batch rows x KV heads of a tile, G = query heads for one KV head, R = query rows, K = keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.ops.attention.plan import Block, Plan, plan

BLOCK_ROWS = 192
MIN_BLOCK_ROWS = 16
_SHIFTS = 3
"""Columns that hold a float32 value in bf16 exactly: three times eight significant bits."""
TILE_SCORES = 4 * 2**20
"""Scores in a block at most: 16 MB in float32, of which a pass holds two, and two in the narrow dtype."""


@dataclass(frozen=True)
class Options:
    """The arguments of the operator that are not q, k, v; `scale` is resolved."""

    ranges: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None
    alibi: Tensor | None
    scale: float
    causal: bool
    window: int
    softcap: float


@dataclass(frozen=True)
class _Tile:
    """Batch rows [b0, b1) and KV heads [h0, h1) that are computed together, and their blocks."""

    b0: int
    b1: int
    h0: int
    h1: int
    group: int
    blocks: tuple[Block, ...]

    def of(self, x_BHSD: Tensor) -> Tensor:
        """The tile's part of a key or value tensor."""
        return x_BHSD[self.b0 : self.b1, self.h0 : self.h1]

    def rows_of(self, x_BHSD: Tensor, block: Block) -> Tensor:
        """[nb, nh, G, R, D]: the part of a query-side tensor that belongs to a block of the tile."""
        heads = x_BHSD[self.b0 : self.b1, self.h0 * self.group : self.h1 * self.group, block.q0 : block.q1]
        return heads.unflatten(1, (self.h1 - self.h0, self.group))

    def bias_of(self, bias: Tensor, block: Block) -> Tensor:
        """[nb | 1, nh | 1, G | 1, R, K]: the part of a [B | 1, Hq | 1, Sq, Sk] bias."""
        if bias.shape[0] > 1:
            bias = bias[self.b0 : self.b1]
        part = bias[:, :, block.q0 : block.q1, block.k0 : block.k1]
        if bias.shape[1] == 1:
            return part.unsqueeze(1)
        return part[:, self.h0 * self.group : self.h1 * self.group].unflatten(1, (-1, self.group))

    def per_head(self, x: Tensor) -> Tensor:
        """[1, nh, G, 1, 1]: the tile's part of one value for each query head."""
        return x[self.h0 * self.group : self.h1 * self.group].view(1, -1, self.group, 1, 1)

    def heads(self, block: Block) -> tuple[int, int, int, int]:
        """(nb, nh, G, R)"""
        return self.b1 - self.b0, self.h1 - self.h0, self.group, block.q1 - block.q0

    @property
    def n(self) -> int:
        """Batch rows x KV heads."""
        return (self.b1 - self.b0) * (self.h1 - self.h0)


class _Scratch:
    """Buffers that the blocks of one call share, so that fresh pages are asked for once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        size = math.prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < size:
            flat = self._flat[name, dtype] = torch.empty(size, dtype=dtype, device=self._device)
        return flat[:size].view(shape)

    def dense(self, name: str, part: Tensor) -> Tensor:
        """`part` without gaps, copied by rows: the matrix product would copy it transposed, which is slow."""
        return part if part.is_contiguous() else self.take(name, part.dtype, *part.shape).copy_(part)

    def rows(self, name: str, dtype: torch.dtype, part: Tensor) -> Tensor:
        """[nb, nh, G, R, D] copied to contiguous [N, G * R, D]."""
        nb, nh, group, rows, dim = part.shape
        buffer = self.take(name, dtype, nb, nh, group, rows, dim)
        return buffer.copy_(part).view(nb * nh, group * rows, dim)


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """out [B, Sq, Hq, Dv] in q.dtype and lse [B, Hq, Sq] in float32 (float64 for float64)."""
    batch, heads, queries, _ = q.shape
    dim_v = v.shape[3]
    wide, narrow = _dtypes(q)
    the_plan = _plan(q, k, options)
    # A row in no block sees no key, and its output is zero.
    new = q.new_empty if the_plan.covered else q.new_zeros
    out = new((batch, queries, heads, dim_v))
    lse = torch.full((batch, heads, queries), -math.inf, dtype=wide, device=q.device)
    if options.sinks is not None:
        lse.copy_(options.sinks[None, :, None].expand_as(lse))
    finite = all_finite(v)
    calm = all_finite(q) and all_finite(k)
    scratch = _Scratch(q.device)
    for tile in _tiles(the_plan, q, k):
        k_NKD, v_NKD = _keys(tile.of(k), narrow), _keys(tile.of(v), narrow)
        for block in reversed(tile.blocks):
            s, _ = _scores(q, k_NKD, wide, tile, block, options, calm, scratch)
            p, lse_rows = _softmax(s, tile, block, options)
            tile.rows_of(lse[..., None], block).copy_(lse_rows[..., None])
            weights = p if narrow == wide else scratch.take("product", narrow, *p.shape).copy_(p)
            values = scratch.dense("v", v_NKD[:, block.k0 : block.k1])
            o = scratch.take("o", narrow, tile.n, p.shape[1], dim_v)
            if finite:
                torch.bmm(weights, values, out=o)
            else:
                o = _visible_product(weights, values, _visible(tile, block, options, q.device))
            target = tile.rows_of(out.transpose(1, 2), block)
            target.copy_(o.view(target.shape))
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: Options,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v (in their dtypes and layouts), of sinks and of a bias (empty where not asked).

    With P the probabilities and delta_i = sum_d dO_id out_id (Dao et al. 2022, FlashAttention, appendix B):
    dV = P^T dO, dS = P * (dO V^T - delta), dQ = scale dS K, dK = scale dS^T Q,
    dsink = -sum_i exp(sink - lse_i) delta_i.
    """
    wide, narrow = _dtypes(q)
    dim, dim_v = q.shape[3], v.shape[3]
    the_plan = _plan(q, k, options)
    dq = torch.empty_like(q) if the_plan.covered else torch.zeros_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    bias, sinks = options.bias, options.sinks
    dsinks = torch.zeros(q.shape[1] if sinks is not None else 0, dtype=wide, device=q.device)
    dbias = torch.zeros(bias.shape if bias_grad and bias is not None else 0, dtype=wide, device=q.device)
    finite = all_finite(q) and all_finite(k) and all_finite(v) and all_finite(grad_out)
    # dO V^T - delta comes out of one product: delta rides as extra columns of dO against ones next to V. In a
    # narrow dtype it takes two columns, the rounded value and the rest.
    extra = 1 if narrow == wide else 2
    direct = narrow != wide and _score_is_product(options)
    grad_BHSD, out_BHSD = grad_out.transpose(1, 2), out.transpose(1, 2)
    scratch = _Scratch(q.device)
    for tile in _tiles(the_plan, q, k):
        k_NKD = _keys(tile.of(k), narrow)
        v_ones = _keys(tile.of(v), narrow, extra)
        k_ones = _keys(tile.of(k), narrow, _SHIFTS) if direct else None
        dk_NKD = torch.zeros(tile.n, k.shape[2], dim, dtype=wide, device=q.device)
        dv_NKD = torch.zeros(tile.n, k.shape[2], dim_v, dtype=wide, device=q.device)
        for block in reversed(tile.blocks):
            keys = slice(block.k0, block.k1)
            visible, slope = None, None
            if k_ones is not None:
                p = _probabilities(q, k_ones, lse, tile, block, options, finite, scratch)
            else:
                s, slope = _scores(q, k_NKD, wide, tile, block, options, finite, scratch)
                p = _softmax_again(s, lse, tile, block, options)
            if not finite:
                visible = _visible(tile, block, options, q.device)
                p.masked_fill_(~visible, 0.0)
            q_rows = scratch.rows("q", narrow, tile.rows_of(q, block))
            do_wide = scratch.rows("do", wide, tile.rows_of(grad_BHSD, block))
            o_wide = scratch.rows("o", wide, tile.rows_of(out_BHSD, block))
            delta = o_wide.mul_(do_wide).sum(dim=-1, keepdim=True)
            if sinks is not None:
                mass = (tile.per_head(sinks.to(wide)) - tile.rows_of(lse[..., None], block)).exp_()
                share = (mass * delta.view(mass.shape)).sum(dim=(0, 3, 4)).flatten()
                dsinks[tile.h0 * tile.group : tile.h1 * tile.group] -= share
            weights = p if narrow == p.dtype else scratch.take("product", narrow, *p.shape).copy_(p)
            do_rows = do_wide if narrow == wide else scratch.take("do", narrow, *do_wide.shape).copy_(do_wide)
            minus = scratch.take("do_delta", narrow, tile.n, p.shape[1], dim_v + extra)
            minus[..., :dim_v] = do_rows
            minus[..., dim_v : dim_v + 1] = -delta
            if extra == 2:
                minus[..., dim_v + 1 :] = -delta - minus[..., dim_v : dim_v + 1]
            dv_NKD[:, keys] += _product(weights.transpose(1, 2), do_rows, visible, transposed=True)
            ds = scratch.take("ds", narrow, *p.shape)
            torch.bmm(minus, scratch.dense("v", v_ones[:, keys]).transpose(1, 2), out=ds)
            ds.mul_(weights)
            if visible is not None:
                ds.masked_fill_(~visible, 0.0)
            if bias_grad and bias is not None:
                target = tile.bias_of(dbias, block)
                target += ds.view(*tile.heads(block), -1).to(wide).sum_to_size(target.shape)
            if slope is not None:
                ds.mul_(slope)
            target = tile.rows_of(dq, block)
            target.copy_(
                _product(ds, scratch.dense("k", k_NKD[:, keys]), visible, scale=options.scale).view(
                    target.shape
                )
            )
            dk_NKD[:, keys] += _product(ds.transpose(1, 2), q_rows, visible, transposed=True)
        tile.of(dk).copy_(dk_NKD.mul_(options.scale).view(tile.of(dk).shape))
        tile.of(dv).copy_(dv_NKD.view(tile.of(dv).shape))
    return dq, dk, dv, dsinks, dbias


def _dtypes(q: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """(dtype of scores and statistics, dtype of the operands of the other products)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return wide, q.dtype if native(q) else wide


def native(q: Tensor) -> bool:
    """q's dtype is narrower than float32 and its device multiplies it faster than float32."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return False
    if q.device.type != "cpu":
        return True
    return q.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()


def _plan(q: Tensor, k: Tensor, options: Options) -> Plan:
    batch, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    rows = TILE_SCORES // max(1, heads // kv_heads * keys)
    rows = max(MIN_BLOCK_ROWS, min(BLOCK_ROWS, rows))
    return plan(options.ranges, batch, queries, keys, options.causal, options.window, rows)


def _tiles(the_plan: Plan, q: Tensor, k: Tensor) -> Iterator[_Tile]:
    """Splits each segment over batch rows, then heads, so that a block's scores stay under TILE_SCORES."""
    heads, kv_heads = q.shape[1], k.shape[1]
    group = heads // kv_heads
    for segment in the_plan.segments:
        largest = max(((x.q1 - x.q0) * (x.k1 - x.k0) for x in segment.blocks), default=0)
        if largest == 0:
            continue
        rows = max(1, TILE_SCORES // (largest * heads))
        step = kv_heads if largest * heads <= TILE_SCORES else max(1, TILE_SCORES // (largest * group))
        for b in range(segment.b0, segment.b1, rows):
            for h in range(0, kv_heads, step):
                b1, h1 = min(b + rows, segment.b1), min(h + step, kv_heads)
                yield _Tile(b, b1, h, h1, group, segment.blocks)


def _score_is_product(options: Options) -> bool:
    """Whether a score is scale * q.k alone, so that the product can hold the shift by the lse too."""
    plain = options.softcap == 0 and options.alibi is None and options.bias is None
    return plain and options.scale != 0


def _probabilities(
    q: Tensor,
    k_ones: Tensor,
    lse: Tensor,
    tile: _Tile,
    block: Block,
    options: Options,
    calm: bool,
    scratch: _Scratch,
) -> Tensor:
    """exp(scale q.k - lse) [N, G * R, K] in the narrow dtype, without a score in float32.

    -lse rides as extra columns of q against ones next to k, so the shift is part of the float32 sum. What the
    rounding of the product loses is had from a second product, as in `_scores`, and enters to first order:
    exp(high + low) = exp(high) (1 + low), with |low| below 2^-9 |high|. Rows without a key keep a shift of
    zero; all their keys are hidden.
    """
    narrow, dim = k_ones.dtype, q.shape[3]
    rest = scratch.rows("shift", lse.dtype, tile.rows_of(lse[..., None], block)).div_(-options.scale)
    rest.masked_fill_(rest.isinf(), 0.0)
    rows = scratch.take("q_shift", narrow, tile.n, rest.shape[1], dim + _SHIFTS)
    rows.view(*tile.heads(block), dim + _SHIFTS)[..., :dim].copy_(tile.rows_of(q, block))
    for column in range(dim, dim + _SHIFTS):
        rows[..., column : column + 1] = rest
        rest = rest - rows[..., column : column + 1]
    keys = scratch.dense("k", k_ones[:, block.k0 : block.k1]).transpose(1, 2)
    p = scratch.take("product", narrow, tile.n, rows.shape[1], block.k1 - block.k0)
    p.baddbmm_(rows, keys, beta=0, alpha=options.scale)
    low = scratch.take("low", narrow, *p.shape).copy_(p)
    low.baddbmm_(rows, keys, beta=-1, alpha=options.scale)
    _hide(p.view(*tile.heads(block), -1), block, calm)
    p.exp_()
    return p.addcmul_(p, low)


def _keys(part: Tensor, dtype: torch.dtype, ones: int = 0) -> Tensor:
    """[nb, nh, K, D] copied to contiguous [N, K, D + ones], the added columns filled with 1."""
    nb, nh, keys, dim = part.shape
    copy = torch.empty(nb, nh, keys, dim + ones, dtype=dtype, device=part.device)
    copy[..., :dim] = part
    copy[..., dim:] = 1
    return copy.view(nb * nh, keys, dim + ones)


def _scores(
    q: Tensor,
    k_NKD: Tensor,
    wide: torch.dtype,
    tile: _Tile,
    block: Block,
    options: Options,
    calm: bool,
    scratch: _Scratch,
) -> tuple[Tensor, Tensor | None]:
    """The final scores [N, G * R, K], -inf where hidden, and the soft-cap's derivative (None without one)."""
    rows, keys = tile.group * (block.q1 - block.q0), block.k1 - block.k0
    q_rows = scratch.rows("q", k_NKD.dtype, tile.rows_of(q, block))
    s = scratch.take("scores", wide, tile.n, rows, keys)
    k_block = scratch.dense("k", k_NKD[:, block.k0 : block.k1]).transpose(1, 2)
    if k_NKD.dtype == wide:
        s.baddbmm_(q_rows, k_block, beta=0, alpha=options.scale)
    else:
        # The product is summed in float32 but leaves in the narrow dtype. A second product that starts from
        # minus the first one's result leaves what the rounding lost: together they hold twice the digits, and
        # cost less than one float32 product.
        product = scratch.take("product", k_NKD.dtype, *s.shape)
        s.copy_(product.baddbmm_(q_rows, k_block, beta=0, alpha=options.scale))
        product.baddbmm_(q_rows, k_block, beta=-1, alpha=options.scale)
        s.add_(scratch.take("lost", wide, *s.shape).copy_(product))
    slope = None
    if options.softcap > 0:
        s.div_(options.softcap).tanh_()
        slope = s.square().neg_().add_(1)
        s.mul_(options.softcap)
    s_heads = s.view(*tile.heads(block), keys)
    if options.alibi is not None:
        position = torch.arange(block.q0, block.q1, device=q.device)[:, None] + (k_NKD.shape[1] - q.shape[2])
        distance = torch.arange(block.k0, block.k1, device=q.device) - position
        s_heads += tile.per_head(options.alibi.to(s.dtype)) * distance
    if options.bias is not None:
        bias = tile.bias_of(options.bias, block)
        if bias.dtype == torch.bool:
            s_heads.masked_fill_(~bias, -math.inf)
        else:
            s_heads += bias
    floating = options.bias is not None and options.bias.is_floating_point()
    _hide(s_heads, block, calm and not floating)
    return s, slope


def _hide(s: Tensor, block: Block, calm: bool) -> None:
    """Sets the scores [nb, nh, G, R, K] of hidden keys to -inf; `calm` says that no score is NaN.

    A minimum does what a masked fill does in a fifth of its time (AVX-512: 25 us against 200 us for 275,000
    float32, 29 us against 143 us in bf16), but keeps NaN.
    """
    if block.hidden is None:
        return
    part = s[..., block.c0 : block.c1]
    if calm and s.device.type == "cpu":
        torch.minimum(part, block.limit(s.dtype), out=part)
    else:
        part.masked_fill_(block.hidden.to(s.device), -math.inf)


def _softmax(s: Tensor, tile: _Tile, block: Block, options: Options) -> tuple[Tensor, Tensor]:
    """Turns scores [N, G * R, K] into probabilities in place; also their log-sum-exp [nb, nh, G, R]."""
    top = s.amax(dim=-1)
    p = torch.softmax(s, dim=-1, out=s)
    # The largest probability is exp(0) / sum, which gives the sum without another pass over exponentials.
    lse = (top - p.amax(dim=-1).log_()).view(tile.heads(block))
    if _may_be_empty(block, options):
        empty = top == -math.inf
        p.masked_fill_(empty[..., None], 0.0)
        lse.masked_fill_(empty.view(lse.shape), -math.inf)
    if options.sinks is not None:
        total = torch.logaddexp(lse, tile.per_head(options.sinks.to(s.dtype)).squeeze(-1))
        p.view(*lse.shape, -1).mul_((lse - total).exp_()[..., None])
        lse = total
    return p, lse


def _softmax_again(s: Tensor, lse: Tensor, tile: _Tile, block: Block, options: Options) -> Tensor:
    """As `_softmax`, where the log-sum-exp [B, Hq, Sq] is known; it only counts when there are sinks."""
    empty = (s.amax(dim=-1) == -math.inf)[..., None] if _may_be_empty(block, options) else None
    p = torch.softmax(s, dim=-1, out=s)
    if empty is not None:
        p.masked_fill_(empty, 0.0)
    if options.sinks is not None:
        known = tile.rows_of(lse[..., None], block)
        sunk = tile.per_head(options.sinks.to(s.dtype)) - known
        p.view(*known.shape[:-1], -1).mul_(-torch.expm1(sunk))
    return p


def _may_be_empty(block: Block, options: Options) -> bool:
    return block.empty_rows or options.bias is not None


def _product(
    weights: Tensor, values: Tensor, visible: Tensor | None, *, scale: float = 1.0, transposed: bool = False
) -> Tensor:
    """scale * weights @ values; with `visible`, a value that is not finite counts only for who sees it."""
    if visible is not None:
        seen = visible.transpose(1, 2) if transposed else visible
        return _visible_product(weights, values, seen).mul_(scale)
    if scale == 1.0:
        return torch.bmm(weights, values)
    out = weights.new_empty(weights.shape[0], weights.shape[1], values.shape[2])
    return out.baddbmm_(weights, values, beta=0, alpha=scale)


def _visible_product(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """weights @ values where a value that is not finite makes NaN of the rows that see it only."""
    finite = values.isfinite()
    out = torch.bmm(weights, values.masked_fill(~finite, 0.0))
    touched = torch.bmm(visible.to(weights.dtype), (~finite).to(weights.dtype))
    return out.masked_fill_(touched > 0, math.nan)


def _visible(tile: _Tile, block: Block, options: Options, device: torch.device) -> Tensor:
    """bool [N, G * R, K]: True where the row sees the key."""
    visible = torch.ones(*tile.heads(block), block.k1 - block.k0, dtype=torch.bool, device=device)
    if block.hidden is not None:
        visible[..., block.c0 : block.c1] = ~block.hidden.to(device)
    if options.bias is not None and options.bias.dtype == torch.bool:
        visible &= tile.bias_of(options.bias, block)
    return visible.view(tile.n, -1, block.k1 - block.k0)


def all_finite(x: Tensor) -> bool:
    """No NaN and no infinity in x."""
    # A sum is the cheapest witness; one that overflows takes the careful way for nothing, which is harmless.
    # Only float16 is widened: bfloat16 has float32's range, and torch widens by a copy.
    return math.isfinite(x.sum(dtype=torch.float32 if x.dtype == torch.float16 else None).item())
