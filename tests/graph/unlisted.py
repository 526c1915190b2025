"""Small random models of families that hasten has no list of: they are recognised by what they compute."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

_BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DECODER = _BASE | {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 256}
_ENCODER = _BASE | {
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_MLA = _DECODER | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}
_MOE = _DECODER | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPTJ = {
    "vocab_size": 256,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "n_ctx": 256,
    "rotary_dim": 8,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# name: (module, prefix of the configuration's class, model's class, settings)
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "olmo2": ("olmo2", "Olmo2", "Olmo2ForCausalLM", _DECODER),
    "stablelm": ("stablelm", "StableLm", "StableLmForCausalLM", _DECODER | {"hidden_dropout": 0.0}),
    "cohere": ("cohere", "Cohere", "CohereForCausalLM", _DECODER),
    "granite": (
        "granite",
        "Granite",
        "GraniteForCausalLM",
        _DECODER | {"residual_multiplier": 0.5, "logits_scaling": 4.0},
    ),
    "starcoder2": (
        "starcoder2",
        "Starcoder2",
        "Starcoder2ForCausalLM",
        _DECODER | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    "gemma": ("gemma", "Gemma", "GemmaForCausalLM", _DECODER | {"head_dim": 16}),
    "glm4": ("glm4", "Glm4", "Glm4ForCausalLM", _DECODER | {"head_dim": 16}),
    "gptj": ("gptj", "GPTJ", "GPTJForCausalLM", _GPTJ),
    "codegen": ("codegen", "CodeGen", "CodeGenForCausalLM", _GPTJ),
    "falcon": (
        "falcon",
        "Falcon",
        "FalconForCausalLM",
        _BASE
        | {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "hidden_dropout": 0.0,
            "alibi": False,
            "bias": False,
        },
    ),
    "mpt": (
        "mpt",
        "Mpt",
        "MptForCausalLM",
        {"vocab_size": 256, "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    ),
    "t5_encoder": (
        "t5",
        "T5",
        "T5EncoderModel",
        {
            "vocab_size": 256,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
        },
    ),
    "distilbert": (
        "distilbert",
        "DistilBert",
        "DistilBertForMaskedLM",
        {
            "vocab_size": 256,
            "dim": 64,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 96,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "roberta": ("roberta", "Roberta", "RobertaForMaskedLM", _ENCODER),
    "deberta": (
        "deberta_v2",
        "DebertaV2",
        "DebertaV2ForMaskedLM",
        _ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "vit": (
        "vit",
        "ViT",
        "ViTModel",
        {
            k: v
            for k, v in _ENCODER.items()
            if "token" not in k and k not in ("vocab_size", "max_position_embeddings", "attention_dropout")
        }
        | {"image_size": 32, "patch_size": 8},
    ),
    "llama_bias": (
        "llama",
        "Llama",
        "LlamaForCausalLM",
        _DECODER | {"attention_bias": True, "mlp_bias": True},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        "Qwen2Moe",
        "Qwen2MoeForCausalLM",
        _MOE | {"shared_expert_intermediate_size": 32},
    ),
    "mixtral": ("mixtral", "Mixtral", "MixtralForCausalLM", _DECODER | {"num_local_experts": 4}),
    "gpt_oss": (
        "gpt_oss",
        "GptOss",
        "GptOssForCausalLM",
        _DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8},
    ),
    "exaone4": ("exaone4", "Exaone4", "Exaone4ForCausalLM", _DECODER | {"sliding_window": 8}),
    "nemotron": ("nemotron", "Nemotron", "NemotronForCausalLM", _DECODER | {"hidden_dropout": 0.0}),
    "gpt_neo": (
        "gpt_neo",
        "GPTNeo",
        "GPTNeoForCausalLM",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 256,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
        },
    ),
    "gpt_neox_japanese": (
        "gpt_neox_japanese",
        "GPTNeoXJapanese",
        "GPTNeoXJapaneseForCausalLM",
        _BASE | {"max_position_embeddings": 256, "hidden_dropout": 0.0},
    ),
    "xglm": (
        "xglm",
        "XGLM",
        "XGLMForCausalLM",
        {
            "vocab_size": 256,
            "d_model": 64,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 96,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "nanochat": ("nanochat", "NanoChat", "NanoChatForCausalLM", _DECODER),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2", "DeepseekV2ForCausalLM", _MLA),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3", "DeepseekV3ForCausalLM", _MLA),
    # Puts another attention in at run time, for sequences as short as here.
    "bigbird_pegasus": (
        "bigbird_pegasus",
        "BigBirdPegasus",
        "BigBirdPegasusForConditionalGeneration",
        {
            "vocab_size": 256,
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "max_position_embeddings": 256,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "block_size": 4,
            "num_random_blocks": 1,
        },
    ),
    # Reads its queries and keys by strides.
    "longformer": (
        "longformer",
        "Longformer",
        "LongformerForMaskedLM",
        _ENCODER | {"attention_window": [8, 8]},
    ),
    "helium": ("helium", "Helium", "HeliumForCausalLM", _DECODER | {"head_dim": 16}),
}

# Of which only the programs are tested (tests/serve).
SERVED: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "falcon_alibi": (
        "falcon",
        "Falcon",
        "FalconForCausalLM",
        _BASE | {"multi_query": True, "hidden_dropout": 0.0, "alibi": True, "bias": True},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3Moe",
        "Qwen3MoeForCausalLM",
        _MOE | {"norm_topk_prob": True, "head_dim": 16},
    ),
    "olmoe": ("olmoe", "Olmoe", "OlmoeForCausalLM", _MOE),
    # Odd sizes: experts end within a panel.
    "granitemoe": (
        "granitemoe",
        "GraniteMoe",
        "GraniteMoeForCausalLM",
        _DECODER | {"intermediate_size": 36, "num_local_experts": 5, "num_experts_per_tok": 3},
    ),
    # Makes a mask for an encoder that it does not have.
    "bart": (
        "bart",
        "Bart",
        "BartForCausalLM",
        {
            "vocab_size": 256,
            "d_model": 64,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 96,
            "max_position_embeddings": 256,
            "dropout": 0.0,
        },
    ),
    "bert": ("bert", "Bert", "BertLMHeadModel", _ENCODER),
    "apertus": ("apertus", "Apertus", "ApertusForCausalLM", _DECODER),
    "rwkv": (
        "rwkv",
        "Rwkv",
        "RwkvForCausalLM",
        {"vocab_size": 256, "hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 2},
    ),
    "jetmoe": (
        "jetmoe",
        "JetMoe",
        "JetMoeForCausalLM",
        _BASE
        | {"num_key_value_heads": 2, "kv_channels": 16, "intermediate_size": 96, "num_local_experts": 4},
    ),
    "deepseek_v2_moe": (
        "deepseek_v2",
        "DeepseekV2",
        "DeepseekV2ForCausalLM",
        _MLA
        | {"first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}
        | {"topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3_moe": (
        "deepseek_v3",
        "DeepseekV3",
        "DeepseekV3ForCausalLM",
        _MLA | {"first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    ),
    # A window that the first, short trace does not reach.
    "gpt_neo_wide": (
        "gpt_neo",
        "GPTNeo",
        "GPTNeoForCausalLM",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 256,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 100,
        },
    ),
}


def unlisted_model(name: str) -> nn.Module:
    """The model in fp32 and train mode, with weights that are the same for the same name."""
    module, prefix, model_class, settings = (MODELS | SERVED)[name]
    package = f"transformers.models.{module}"
    config_class = getattr(importlib.import_module(f"{package}.configuration_{module}"), f"{prefix}Config")
    make = getattr(importlib.import_module(f"{package}.modeling_{module}"), model_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(config_class(**settings))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # off their initial 1 and 0, where a wrong formula could still agree
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                elif not torch.isfinite(parameter).all() or parameter.abs().max() == 0:
                    parameter.normal_(std=0.02)
    return model.train()
