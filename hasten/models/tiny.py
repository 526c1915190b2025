"""Small random models of many families, built from configurations alone: no download, milliseconds each.

They have what makes a family different (grouped keys, sliding windows, soft caps, partial rotary, parallel
residuals, norms before or after) and nothing that makes it large. Shapes: hidden 64, 4 heads, 3 layers,
vocabulary 256.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from hasten.base.errors import ConfigError, nearest

VOCABULARY = 256
HIDDEN = 64
HEADS = 4
KV_HEADS = 2
LAYERS = 3
POSITIONS = 2048
WINDOW = 32

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DECODER = _COMMON | {
    "intermediate_size": 160,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": POSITIONS,
}
_GEMMA = _DECODER | {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}


class _Family(NamedTuple):
    module: str
    config: str
    model: str
    settings: dict[str, Any]


_FAMILIES: dict[str, _Family] = {
    "llama": _Family("llama", "LlamaConfig", "LlamaForCausalLM", _DECODER | {"tie_word_embeddings": True}),
    "mistral": _Family(
        "mistral", "MistralConfig", "MistralForCausalLM", _DECODER | {"sliding_window": WINDOW}
    ),
    "qwen2": _Family("qwen2", "Qwen2Config", "Qwen2ForCausalLM", _DECODER | {"tie_word_embeddings": True}),
    "qwen3": _Family(
        "qwen3", "Qwen3Config", "Qwen3ForCausalLM", _DECODER | {"head_dim": 24, "tie_word_embeddings": True}
    ),
    # Small caps, so that the caps change the numbers of a tiny model at all.
    "gemma2": _Family(
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3_text": _Family(
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _GEMMA | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "phi3": _Family(
        "phi3",
        "Phi3Config",
        "Phi3ForCausalLM",
        _DECODER
        | {
            "original_max_position_embeddings": POSITIONS,
            "sliding_window": WINDOW,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
    ),
    "smollm3": _Family(
        "smollm3", "SmolLM3Config", "SmolLM3ForCausalLM", _DECODER | {"no_rope_layers": [1, 1, 0]}
    ),
    "gpt2": _Family(
        "gpt2",
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": POSITIONS,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    ),
    "gpt_neox": _Family(
        "gpt_neox",
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        _COMMON
        | {
            "intermediate_size": 256,
            "max_position_embeddings": POSITIONS,
            "hidden_dropout": 0.0,
            # The published models rotate the first quarter; 16 channels a head make that 4.
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "opt": _Family(
        "opt",
        "OPTConfig",
        "OPTForCausalLM",
        _COMMON
        | {
            "ffn_dim": 256,
            "max_position_embeddings": POSITIONS,
            "dropout": 0.0,
            "word_embed_proj_dim": HIDDEN,
        },
    ),
    "bloom": _Family(
        "bloom",
        "BloomConfig",
        "BloomForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
    ),
    "bert": _Family(
        "bert",
        "BertConfig",
        "BertForMaskedLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": 256,
            "max_position_embeddings": POSITIONS,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "pad_token_id": 0,
        },
    ),
    "modernbert": _Family(
        "modernbert",
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        _COMMON
        | {
            "intermediate_size": 128,
            "max_position_embeddings": POSITIONS,
            # transformers halves this: each token sees WINDOW // 2 to either side.
            "local_attention": WINDOW,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
}

TORCH_ENCODER = "torch_encoder"
FAMILIES: tuple[str, ...] = (*_FAMILIES, TORCH_ENCODER)
MASKED_FAMILIES: tuple[str, ...] = ("bert", "modernbert", TORCH_ENCODER)


class TorchEncoder(nn.Module):
    """A plain PyTorch encoder: embedding, learned positions, `nn.TransformerEncoderLayer`s, norm, head.

    `forward(input_ids, attention_mask=None)`: `input_ids` int64 (B, S); `attention_mask` (B, S), 1 or True
    where a token counts. Returns logits (B, S, vocabulary), in the dtype of the weights.
    """

    def __init__(
        self,
        vocab_size: int = VOCABULARY,
        hidden_size: int = HIDDEN,
        num_hidden_layers: int = LAYERS,
        num_attention_heads: int = HEADS,
        intermediate_size: int = 256,
        max_position_embeddings: int = POSITIONS,
        activation: str = "gelu",
        norm_first: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.positions = nn.Embedding(max_position_embeddings, hidden_size)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                hidden_size,
                num_attention_heads,
                intermediate_size,
                dropout=dropout,
                activation=activation,
                batch_first=True,
                norm_first=norm_first,
            )
            for _ in range(num_hidden_layers)
        )
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x_BSD = self.embed(input_ids) + self.positions(places)
        padding_BS = None if attention_mask is None else attention_mask == 0
        for layer in self.layers:
            x_BSD = layer(x_BSD, src_key_padding_mask=padding_BS)
        return self.head(self.norm(x_BSD))


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> nn.Module:
    """A small random model of `family` in fp32 and in train mode, the same for the same seed.

    `overrides` go into the family's transformers configuration (for `torch_encoder`: into `TorchEncoder`).
    The caller's random state is left as it was. Raises ConfigError for a family that is not in `FAMILIES`
    and for an override that the family does not have.
    """
    if family not in FAMILIES:
        raise ConfigError(f"unknown model family {family!r}; {nearest(family, FAMILIES)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if family == TORCH_ENCODER:
            return _torch_encoder(overrides)
        entry = _FAMILIES[family]
        package = f"transformers.models.{entry.module}"
        config_class = getattr(
            importlib.import_module(f"{package}.configuration_{entry.module}"), entry.config
        )
        model_class = getattr(importlib.import_module(f"{package}.modeling_{entry.module}"), entry.model)
        known = config_class()
        for name in overrides:
            if not hasattr(known, name):
                raise ConfigError(f"{entry.config} has no setting {name!r}; {nearest(name, known.to_dict())}")
        config = config_class(**(entry.settings | overrides))
        return _spread(model_class(config)).train()


def _torch_encoder(overrides: dict[str, Any]) -> nn.Module:
    allowed = list(inspect.signature(TorchEncoder).parameters)
    for name in overrides:
        if name not in allowed:
            raise ConfigError(f"TorchEncoder has no setting {name!r}; {nearest(name, allowed)}")
    return _spread(TorchEncoder(**overrides)).train()


def _spread(model: nn.Module) -> nn.Module:
    """Moves norm weights and biases off their initial 1 and 0, where a wrong formula could still agree."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model
