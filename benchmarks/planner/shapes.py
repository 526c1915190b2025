"""Shapes of public models that files name without describing them. Sources: the models' published configs."""

from __future__ import annotations

import re

from hasten.plan.model import Latent, ModelShape

# DeepSeek-V3 (arXiv 2412.19437 section 4.2); Kimi-K2 has the same attention with half the heads (2507.20534).
_LATENT = Latent(query_rank=1536, key_value_rank=512, rotary_size=64, plain_size=128, value_size=128)


def _gpt(layers: int, hidden: int, heads: int, vocabulary: int = 51200) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        inner=4 * hidden,
        gated=False,
        vocabulary=vocabulary,
        positions="learned",
        max_positions=2048,
        biases=True,
        norm="layer",
    )


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocabulary: int) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, inner=inner, vocabulary=vocabulary
    )


def _deepseek(heads: int, experts: int, dense: int, vocabulary: int, predicted: int) -> ModelShape:
    return ModelShape(
        layers=61,
        hidden=7168,
        heads=heads,
        inner=18432,
        vocabulary=vocabulary,
        experts=experts,
        experts_per_token=8,
        expert_inner=2048,
        shared_inner=2048,
        dense_layers=dense,
        latent=_LATENT,
        predicted_tokens=predicted,
    )


def _qwen3(layers: int, hidden: int, heads: int, expert_inner: int) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=4,
        head_size=128,
        inner=3 * hidden,
        vocabulary=151936,
        experts=128,
        experts_per_token=8,
        expert_inner=expert_inner,
    )


_NEMOTRON_340B = ModelShape(
    layers=96, hidden=18432, heads=96, kv_heads=8, inner=73728, gated=False, vocabulary=256000, norm="layer"
)
# Every second layer has the window; the published FLOPs count it in each.
_GPT_OSS = ModelShape(
    layers=36,
    hidden=2880,
    heads=64,
    kv_heads=8,
    head_size=64,
    inner=2880,
    vocabulary=201088,
    experts=128,
    experts_per_token=4,
    expert_inner=2880,
    window=128,
)

_BY_NAME: tuple[tuple[str, ModelShape], ...] = (
    (r"deepseekv3 \(w/o mtp\)", _deepseek(128, 256, 3, 129280, 0)),
    (r"deepseekv3", _deepseek(128, 256, 3, 129280, 1)),
    (r"kimi.k2", _deepseek(64, 384, 1, 163840, 0)),
    (r"gpt.?oss.120b", _GPT_OSS),
    (r"gpt3.175b", _gpt(96, 12288, 96)),
    (r"gpt3.20b", _gpt(44, 6144, 48)),
    (r"gpt3.5b", _gpt(24, 4096, 32)),
    (r"llama2.7b", _llama(32, 4096, 32, 32, 11008, 32000)),
    (r"llama2.13b", _llama(40, 5120, 40, 40, 13824, 32000)),
    (r"llama2.70b", _llama(80, 8192, 64, 8, 28672, 32000)),
    (r"llama3(\.1)?.8b", _llama(32, 4096, 32, 8, 14336, 128256)),
    (r"llama3(\.1)?.70b", _llama(80, 8192, 64, 8, 28672, 128256)),
    (r"llama3(\.1)?.405b", _llama(126, 16384, 128, 8, 53248, 128256)),
    (r"nemotron.8b", _gpt(32, 4096, 32, 256000)),
    (r"nemotron.22b", _gpt(40, 6144, 48, 256000)),
    (r"nemotron.340b", _NEMOTRON_340B),
    (r"qwen3.30b.a3b", _qwen3(48, 2048, 32, 768)),
    (r"qwen3.235b.a22b", _qwen3(94, 4096, 64, 1536)),
)


def named(name: str) -> ModelShape | None:
    """The shape of a public model, or None."""
    text = name.strip().lower()
    return next((found for pattern, found in _BY_NAME if re.match(pattern, text)), None)
