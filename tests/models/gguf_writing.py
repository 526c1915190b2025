"""Writes tiny GGUF files the way llama.cpp's converter does, from models whose weights the test knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

# GGUF architecture -> the tiny family and settings that the converter would find in such a model.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {}),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "gpt2": ("gpt2", {"n_inner": 256}),
}


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's convert_hf_to_gguf: the two rotary halves of each head become interleaved pairs."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def converted(architecture: str, name: str, value: np.ndarray, config: Any) -> np.ndarray:
    if architecture in ("llama", "smollm3") and ".attn_q." in name:
        return permute(value, config.num_attention_heads)
    if architecture in ("llama", "smollm3") and ".attn_k." in name:
        return permute(value, config.num_key_value_heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return value + 1
    if architecture == "gpt2" and name.startswith("blk.") and value.ndim == 2:
        return np.ascontiguousarray(value.T)
    return value


def vocabulary(size: int) -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*["<unk>", "<s>", "</s>", *bytes_to_unicode().values()][: size - 2], "ĠĠ", "ab"]


def write_gguf(
    path: Path,
    architecture: str,
    model: Any,
    kind: Any = None,
    skip: str = "",
    extra: dict[str, Any] | None = None,
) -> None:
    """`kind`: quantise matrices to it. `skip`: a tensor to leave out. `extra`: metadata to add (int, float or
    str).
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_context_length(config.max_position_embeddings)
    if architecture == "gpt2":
        writer.add_feed_forward_length(config.n_inner)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        rotary = config.rope_parameters
        writer.add_rope_freq_base(rotary.get("full_attention", rotary)["rope_theta"])
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_key_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    if architecture.startswith("gemma") or architecture == "phi3":
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "gemma3":
        writer.add_array(
            "gemma3.attention.sliding_window_pattern",
            [kind == "sliding_attention" for kind in config.layer_types],
        )
    tokens = vocabulary(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ Ġ", "a b"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    for key, value in (extra or {}).items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
    kinds = {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    for hf_name, parameter in model.named_parameters():
        name = table.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if name == skip:
            continue
        value = converted(architecture, name, parameter.detach().numpy(), config)
        if kind is not None and value.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
