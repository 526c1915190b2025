"""Masks as intervals of keys, and attention through transformers' registries, against transformers' own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, masking_utils

import hasten
from hasten.graph.attention_bridge import NAME, attention_forward, mask_forward, masks_by_name, register
from hasten.models.tiny import tiny_model
from hasten.ops.attention import window_ranges

CAUSAL = masking_utils.causal_mask_function
BOTH = masking_utils.bidirectional_mask_function
MASKS: dict[str, Callable[..., torch.Tensor]] = {
    "causal": CAUSAL,
    "sliding": masking_utils.and_masks(masking_utils.sliding_window_overlay(5), CAUSAL),
    "both ways": BOTH,
    "both ways, sliding": masking_utils.and_masks(
        BOTH, lambda batch, head, query, key: abs(query - key) <= 4
    ),
    "packed": masking_utils.and_masks(
        CAUSAL,
        masking_utils.packed_sequence_mask_function(
            torch.tensor([[0] * 7 + [1] * 9, [0] * 3 + [1] * 8 + [2] * 5])
        ),
    ),
    "chunked": masking_utils.and_masks(
        masking_utils.chunked_overlay(4, torch.zeros(2, dtype=torch.int)), CAUSAL
    ),
}
PADDING = {
    "": None,
    "left": torch.tensor([[0] * 6 + [1] * 10, [1] * 16]),
    "right": torch.tensor([[1] * 9 + [0] * 7, [1] * 16]),
}


def visible(ranges: torch.Tensor, keys: int) -> torch.Tensor:
    position = torch.arange(keys)
    return ((position >= ranges[..., :1]) & (position < ranges[..., 1:]))[:, None]


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", MASKS)
def test_intervals_mean_the_same_as_the_dense_mask(name: str, padding: str) -> None:
    if name == "chunked" and padding == "left":
        pytest.skip("transformers' chunks start at the padding, which this test does not set up")
    mask = PADDING[padding]
    mask = None if mask is None else mask.bool()
    arguments = {
        "batch_size": 2,
        "q_length": 16,
        "kv_length": 16,
        "mask_function": MASKS[name],
        "attention_mask": mask,
    }
    dense = masking_utils.sdpa_mask(
        **arguments, allow_is_causal_skip=False, allow_is_bidirectional_skip=False
    )
    ours = mask_forward(**arguments)
    assert ours.dtype == torch.int32
    assert ours.shape == (2, 16, 2)
    assert torch.equal(visible(ours, 16), dense.expand(2, 1, 16, 16))


@pytest.mark.parametrize("offset", [0, 5])
def test_queries_behind_a_cache(offset: int) -> None:
    arguments = {
        "batch_size": 2,
        "q_length": 3,
        "kv_length": 3 + offset,
        "q_offset": offset,
        "mask_function": CAUSAL,
    }
    dense = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert torch.equal(visible(mask_forward(**arguments), 3 + offset), dense.expand(2, 1, 3, 3 + offset))


def test_a_mask_of_holes_stays_dense() -> None:
    holes = masking_utils.and_masks(CAUSAL, lambda batch, head, query, key: (key % 3) != 1)
    arguments = {"batch_size": 2, "q_length": 8, "kv_length": 8, "mask_function": holes}
    dense = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    ours = mask_forward(**arguments)
    assert ours.dtype == torch.bool
    assert torch.equal(ours, dense.expand(2, 1, 8, 8))


def qkv(queries: int = 6, keys: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4, queries, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 8)


class Causal(nn.Module):
    is_causal = True


def test_attention_over_intervals_is_attention_under_the_mask() -> None:
    q, k, v = qkv()
    ranges = mask_forward(
        2, 6, 6, mask_function=CAUSAL, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]).bool()
    )
    out, weights = attention_forward(Causal(), q, k, v, ranges, scaling=0.3)
    assert weights is None
    own = F.scaled_dot_product_attention(q, k, v, visible(ranges, 6), scale=0.3, enable_gqa=True).transpose(
        1, 2
    )
    torch.testing.assert_close(out[0, 2:], own[0, 2:])
    torch.testing.assert_close(out[1], own[1])
    assert (out[0, :2] == 0).all(), "a query that sees no key"


@pytest.mark.parametrize(
    ("module_causal", "asked", "queries"),
    [(True, None, 6), (False, None, 6), (True, False, 6), (True, None, 1)],
)
def test_without_a_mask_the_module_says_whether_it_is_causal(
    module_causal: bool, asked: bool | None, queries: int
) -> None:
    q, k, v = qkv(queries)
    module = Causal()
    module.is_causal = module_causal
    out, _ = attention_forward(module, q, k, v, None, is_causal=asked)
    causal = (module_causal if asked is None else asked) and queries > 1
    own = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, own)


def test_soft_cap_and_sinks() -> None:
    q, k, v = qkv()
    sinks = torch.randn(4)
    out, _ = attention_forward(Causal(), q, k, v, None, softcap=2.0, s_aux=sinks)
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5
    scores = 2.0 * torch.tanh(scores / 2.0)
    scores = scores.masked_fill(~torch.ones(6, 6).tril().bool(), float("-inf"))
    scores = torch.cat([scores, sinks[None, :, None, None].expand(2, 4, 6, 1)], -1)
    own = scores.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, own.transpose(1, 2))


def test_a_position_bias_is_added_under_the_mask() -> None:
    q, k, v = qkv()
    bias = torch.randn(1, 4, 6, 6)
    ranges = mask_forward(2, 6, 6, mask_function=CAUSAL)
    out, _ = attention_forward(Causal(), q, k, v, ranges, position_bias=bias)
    mask = bias.masked_fill(~visible(ranges, 6), float("-inf"))
    torch.testing.assert_close(
        out, F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)
    )


def test_dropout_runs_torchs_attention_with_the_same_numbers() -> None:
    q, k, v = qkv()
    ranges = mask_forward(2, 6, 6, mask_function=CAUSAL)
    torch.manual_seed(1)
    out, _ = attention_forward(Causal(), q, k, v, ranges, dropout=0.5)
    torch.manual_seed(1)
    own = F.scaled_dot_product_attention(q, k, v, visible(ranges, 6), 0.5, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, own)


def test_registering_changes_no_other_name() -> None:
    before = {name: AttentionInterface()[name] for name in ("sdpa", "flash_attention_2")}
    register()
    register()
    assert {name: AttentionInterface()[name] for name in before} == before
    assert AttentionInterface()[NAME] is attention_forward


def test_models_that_chose_their_attention_keep_it() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    hasten.optimize(model, measure=False)
    assert hasten.report(model).doors["attention"].startswith("on")
    hasten.restore(model)
    assert model.config._attn_implementation == "eager"


def test_a_layer_that_computes_with_its_mask_gets_a_dense_one() -> None:
    """It would take intervals of keys for a mask of its own."""
    from transformers import DogeConfig, DogeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = DogeForCausalLM(DogeConfig(**sizes, **heads, pad_token_id=0))
    ids = torch.randint(3, 64, (2, 9))
    own = model(input_ids=ids, labels=ids).loss
    hasten.optimize(model, measure=False)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, own, rtol=1e-4, atol=1e-5)
    assert "DogeAttention computes with the attention mask" in hasten.report(model).doors["attention"]
    assert "left" not in hasten.report(hasten.optimize(tiny_model("gpt2"))).doors["attention"]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("mask", ["ranges", "bool", "float", "causal"])
def test_attention_with_dropout_counts_everything(mask: str, softcap: float | None, sinks: bool) -> None:
    """With a dropout that drops next to nothing the result is the operator's."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 6, 8, generator=generator) for heads in (4, 2, 2))
    ranges = torch.tensor([[0, end] for end in range(1, 7)], dtype=torch.int32).expand(2, -1, -1)
    dense = visible(ranges, 6)
    given = {"ranges": ranges, "bool": dense, "float": torch.zeros(2, 1, 6, 6).masked_fill(~dense, -1e30)}
    arguments = (nn.Module(), q, k, v, given.get(mask))
    options = {"softcap": softcap, "s_aux": torch.randn(4, generator=generator) if sinks else None}
    own, none = attention_forward(*arguments, is_causal=True, **options)
    ours, _ = attention_forward(*arguments, is_causal=True, dropout=1e-12, **options)
    assert none is None
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_with_one_row_for_all_queries(dtype: torch.dtype) -> None:
    q = torch.randn(2, 4, 6, 8)
    seen = torch.tensor([[1, 1, 1, 0, 0, 0], [1] * 6]).bool()[:, None, None]
    mask = seen if dtype == torch.bool else torch.zeros(2, 1, 1, 6).masked_fill(~seen, -1e30)
    out, _ = attention_forward(nn.Module(), q, q, q, mask)
    own = F.scaled_dot_product_attention(q, q, q, mask).transpose(1, 2)
    torch.testing.assert_close(out, own, rtol=1e-4, atol=1e-5)


def test_batches_with_and_without_documents_share_their_graphs() -> None:
    """Packed text has batches in which no document ends; nothing is captured for the first of them."""
    model = hasten.optimize(tiny_model("llama"), verify=False, measure=False).train()
    ids = torch.randint(0, 90, (2, 130))
    positions = torch.arange(130).expand(2, -1).clone()
    packed = positions.clone()
    packed[0, 40:] -= 40
    engine = model.__dict__["_hasten"].engine
    counts = []
    for given in (packed, positions, packed):
        model(input_ids=ids, labels=ids, position_ids=given, use_cache=False).loss.backward()
        counts.append(len(engine.graphs))
    assert len(set(counts)) == 1


@pytest.mark.parametrize(("window", "mask"), [(0, CAUSAL), (5, MASKS["sliding"]), (-1, BOTH)])
def test_a_mask_by_name_is_the_mask(window: int, mask: Callable[..., torch.Tensor]) -> None:
    rows = torch.zeros(2, 11)
    with masks_by_name(rows):
        named = mask_forward(2, 11, 11, mask_function=mask)
    assert torch.equal(named, window_ranges(rows, window))
    keys, queries = torch.arange(11), torch.arange(11)[:, None]
    dense = torch.as_tensor(mask(torch.tensor(0), torch.tensor(0), queries, keys)).expand(11, 11)
    first, last = named[1].long().unbind(-1)
    assert torch.equal((keys >= first[:, None]) & (keys < last[:, None]), dense)
