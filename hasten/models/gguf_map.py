"""From a GGUF file's metadata and tensors to a transformers configuration and state dictionary, as data.

One `Architecture` says how a GGUF architecture is called in transformers, which metadata keys become which
settings, and what llama.cpp's converter did to the tensors that has to be undone. Tensor names come from the
`gguf` package's own table, so a tensor is found by its role and not by a list kept here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hasten.base.errors import InputError, nearest
from hasten.models.gguf_file import GgufFile

Array = NDArray[Any]
Undo = Callable[[Array, Mapping[str, Any]], Array]

_LLAMA_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_GEMMA_KEYS = _LLAMA_KEYS | {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GPT2_KEYS = {
    "context_length": "n_positions",
    "block_count": "n_layer",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
# Settings that a file may leave out because transformers or llama.cpp derives them.
_OPTIONAL = {
    "head_dim",
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "num_key_value_heads",
}
# What a file carries beside the weights: rotary tables that the configuration describes.
_ROTARY_TABLES = re.compile(
    r"(rope_freqs|rope_factors_long|rope_factors_short)\.weight|blk\.\d+\.attn_rot_embd"
)
# llama3 scaling as Meta published it; the factor differs between models and is read from the table.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Gemma's local layers keep this base whatever the file says of the global ones (Gemma 3 report, section 2).
_GEMMA3_LOCAL_THETA = 10_000.0
# The 27B models scale queries by hidden / heads, not by the head size; told by their depth, as in llama.cpp.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def _unpermute(heads_key: str) -> Undo:
    """Undoes llama.cpp's order of rotary rows: interleaved pairs become the two halves that HF rotates."""

    def undo(array: Array, config: Mapping[str, Any]) -> Array:
        heads = config[heads_key]
        pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
        return pairs.swapaxes(1, 2).reshape(array.shape)

    return undo


def _minus_one(array: Array, config: Mapping[str, Any]) -> Array:
    return array - np.ones((), array.dtype)


def _transpose(array: Array, config: Mapping[str, Any]) -> Array:
    return array.T


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture reads in transformers."""

    model_type: str
    keys: Mapping[str, str]
    undo: tuple[tuple[str, Undo], ...] = ()
    head_dim: bool = False
    """Whether the configuration has a `head_dim` of its own."""
    biases: Mapping[str, str] = field(default_factory=dict)
    """Setting -> the tensor whose presence turns it on."""


_ROTARY_ROWS = (
    (r"blk\.\d+\.attn_q\.(weight|bias)", _unpermute("num_attention_heads")),
    (r"blk\.\d+\.attn_k\.(weight|bias)", _unpermute("num_key_value_heads")),
)
_GEMMA_NORMS = ((r".*norm\.weight", _minus_one),)
_CONV1D = ((r"blk\.\d+\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight", _transpose),)
_BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _LLAMA_KEYS, _ROTARY_ROWS, head_dim=True, biases=_BIASES),
    "qwen2": Architecture("qwen2", _LLAMA_KEYS),
    "qwen3": Architecture(
        "qwen3", _LLAMA_KEYS, head_dim=True, biases={"attention_bias": "blk.0.attn_q.bias"}
    ),
    "gemma2": Architecture("gemma2", _GEMMA_KEYS, _GEMMA_NORMS, head_dim=True),
    "gemma3": Architecture("gemma3_text", _GEMMA_KEYS, _GEMMA_NORMS, head_dim=True),
    "phi3": Architecture("phi3", _LLAMA_KEYS | {"attention.sliding_window": "sliding_window"}),
    "smollm3": Architecture("smollm3", _LLAMA_KEYS, _ROTARY_ROWS, biases=_BIASES),
    "gpt2": Architecture("gpt2", _GPT2_KEYS, _CONV1D),
}


def settings_of(file: GgufFile) -> dict[str, Any]:
    """The transformers settings that a file describes, `model_type` included.

    Raises InputError for an architecture that is not in `ARCHITECTURES`, a split file, a mixture of experts,
    a missing key, or a rotary scaling that cannot be expressed.
    """
    name = file.architecture
    if name not in ARCHITECTURES:
        raise InputError(
            f"{file.path}: architecture {name!r} cannot be opened; {nearest(name, ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 1) > 1:
        raise InputError(
            f"{file.path} is one part of a split model; join the parts with llama-gguf-split --merge"
        )
    if file.metadata.get(f"{name}.expert_count", 0):
        raise InputError(f"{file.path} is a mixture of experts; allowed: dense models")
    architecture = ARCHITECTURES[name]
    settings: dict[str, Any] = {"model_type": architecture.model_type}
    for key, setting in architecture.keys.items():
        value = file.metadata.get(f"{name}.{key}")
        if value is not None:
            settings[setting] = _single(file, key, value)
        elif setting not in _OPTIONAL:
            raise InputError(f"{file.path}: the metadata has no {name}.{key}")
    if "token_embd.weight" not in file.tensors:
        raise InputError(f"{file.path}: tensor 'token_embd.weight' is missing")
    settings["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    settings["tie_word_embeddings"] = _tied(file)
    for token in ("bos", "eos", "pad"):
        settings[f"{token}_token_id"] = file.metadata.get(
            f"tokenizer.ggml.{'padding' if token == 'pad' else token}_token_id"
        )
    for setting, tensor in architecture.biases.items():
        settings[setting] = tensor in file.tensors
    if name == "gpt2":
        return settings
    settings.setdefault("num_key_value_heads", settings["num_attention_heads"])
    _add_head_size(file, architecture, settings)
    _add_rotary(file, settings)
    if name in _GEMMA_27B_LAYERS:
        _add_gemma(file, settings)
    return settings


def undo_conversion(name: str, array: Array, architecture: str, settings: Mapping[str, Any]) -> Array:
    """A tensor as transformers stores it, from one as llama.cpp stores it. `name` is the file's."""
    for pattern, undo in ARCHITECTURES[architecture].undo:
        if re.fullmatch(pattern, name):
            return undo(array, settings)
    return array


def stored_order(
    name: str, rows: int, architecture: str, settings: Mapping[str, Any]
) -> tuple[NDArray[np.int64] | None, bool]:
    """What `undo_conversion` does to a matrix, without its numbers.

    Returns for each row of the parameter the stored row (None: rows are as stored), and whether the parameter
    is the transpose of what is stored. Raises InputError where the numbers themselves are changed.
    """
    for pattern, undo in ARCHITECTURES[architecture].undo:
        if re.fullmatch(pattern, name):
            if undo is _transpose:
                return None, True
            if undo is _minus_one:
                raise InputError(f"tensor {name!r} of {architecture} is not stored as it is used")
            return undo(np.arange(rows)[:, None], settings)[:, 0], False
    return None, False


def names_in_file(file: GgufFile, hf_names: list[str], layers: int) -> dict[str, str]:
    """For each transformers name the file's name of the same tensor.

    Raises InputError for a name without a counterpart, a tensor that the file lacks, and a tensor of the file
    that would be left over.
    """
    import gguf

    kinds = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[file.architecture], layers)
    found: dict[str, str] = {}
    for hf_name in hf_names:
        stored = table.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if stored is None or stored not in file.tensors:
            raise InputError(f"{file.path}: tensor {stored or '?'!r} for {hf_name!r} is missing")
        found[hf_name] = stored
    spare = set(file.tensors) - set(found.values())
    left = sorted(name for name in spare if not _ROTARY_TABLES.match(name) and name != "output.weight")
    if "output.weight" in spare and not _tied(file):
        left.append("output.weight")
    if left:
        raise InputError(
            f"{file.path}: unexpected tensors {', '.join(left[:5])}{' ...' if len(left) > 5 else ''}"
        )
    return found


def _single(file: GgufFile, key: str, value: Any) -> Any:
    """One value for all layers; floats as the shortest decimal that float32 reads back."""
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise InputError(f"{file.path}: {file.architecture}.{key} differs between layers: {value}")
        value = value[0]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _tied(file: GgufFile) -> bool:
    """Whether the output head is the embedding: not stored, or stored a second time byte for byte."""
    if "output.weight" not in file.tensors:
        return True
    head, embedding = file.tensors["output.weight"], file.tensors["token_embd.weight"]
    if (head.kind, head.shape) != (embedding.kind, embedding.shape):
        return False
    return bool(np.array_equal(file.stored("output.weight"), file.stored("token_embd.weight")))


def _add_head_size(file: GgufFile, architecture: Architecture, settings: dict[str, Any]) -> None:
    even = settings["hidden_size"] // settings["num_attention_heads"]
    head_dim = file.metadata.get(f"{file.architecture}.attention.key_length", even)
    if head_dim != even and not architecture.head_dim:
        raise InputError(f"{file.path}: heads of {head_dim}; {file.architecture} has hidden / heads = {even}")
    if architecture.head_dim:
        settings["head_dim"] = head_dim
    rotated = file.metadata.get(f"{file.architecture}.rope.dimension_count", head_dim)
    if architecture.model_type == "phi3":
        settings["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise InputError(
            f"{file.path}: rotates {rotated} of {head_dim} channels; {file.architecture} rotates all"
        )


def _add_rotary(file: GgufFile, settings: dict[str, Any]) -> None:
    prefix = f"{file.architecture}.rope."
    rotary: dict[str, Any] = {"rope_type": "default"}
    if (theta := file.metadata.get(prefix + "freq_base")) is not None:
        rotary["rope_theta"] = _single(file, "rope.freq_base", theta)
    kind = file.metadata.get(prefix + "scaling.type", "none")
    original = file.metadata.get(prefix + "scaling.original_context_length")
    if kind in ("linear", "yarn"):
        rotary |= {
            "rope_type": kind,
            "factor": _single(file, "rope.scaling.factor", file.metadata[prefix + "scaling.factor"]),
        }
    elif kind not in ("none", "longrope"):
        raise InputError(
            f"{file.path}: rotary scaling {kind!r}; {nearest(kind, ['none', 'linear', 'yarn', 'longrope'])}"
        )
    if kind == "yarn" and original:
        rotary["original_max_position_embeddings"] = original
    if "rope_factors_long.weight" in file.tensors:
        rotary |= {
            "rope_type": "longrope",
            "long_factor": file.read("rope_factors_long.weight").tolist(),
            "short_factor": file.read("rope_factors_short.weight").tolist(),
        }
    if original and file.architecture == "phi3":
        settings["original_max_position_embeddings"] = rotary["original_max_position_embeddings"] = original
    if "partial_rotary_factor" in settings:
        rotary["partial_rotary_factor"] = settings.pop("partial_rotary_factor")
    if "rope_freqs.weight" in file.tensors:
        rotary |= _llama3_scaling(file, rotary.get("rope_theta", 10_000.0), settings)
    settings["rope_parameters"] = rotary


def _llama3_scaling(file: GgufFile, theta: float, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling parameters behind a table of frequency divisors, proven by computing the table again.

    llama3's divisors: 1 for short waves, `factor` for waves longer than the original context over
    `low_freq_factor`, and between the two 1 / ((1 - s) / factor + s), s rising linearly in context /
    wavelength.
    """
    table = file.read("rope_freqs.weight").astype(np.float64)
    if np.all(table == 1.0):
        return {}
    factor = round(float(table.max()), 4)
    head_dim = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, context = (
        _LLAMA3["low_freq_factor"],
        _LLAMA3["high_freq_factor"],
        _LLAMA3["original_max_position_embeddings"],
    )
    smooth = np.clip((context / waves - low) / (high - low), 0.0, 1.0)
    if table.shape != waves.shape or not np.allclose(table, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise InputError(
            f"{file.path}: rope_freqs.weight is not a llama3 scaling; its table cannot be expressed"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _add_gemma(file: GgufFile, settings: dict[str, Any]) -> None:
    name = file.architecture
    if settings["num_hidden_layers"] == _GEMMA_27B_LAYERS[name]:
        settings["query_pre_attn_scalar"] = settings["hidden_size"] // settings["num_attention_heads"]
    else:
        settings["query_pre_attn_scalar"] = settings["head_dim"]
    pattern = file.metadata.get(f"{name}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        settings["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
    elif pattern:
        settings["layer_types"] = [
            "full_attention" if (layer + 1) % pattern == 0 else "sliding_attention"
            for layer in range(settings["num_hidden_layers"])
        ]
    if name == "gemma3":
        local = file.metadata.get("gemma3.rope.freq_base_swa", _GEMMA3_LOCAL_THETA)
        settings["rope_parameters"] = {
            "full_attention": settings["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": _single(file, "rope.freq_base_swa", local),
            },
        }
