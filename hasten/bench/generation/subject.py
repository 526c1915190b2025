"""The model that generation is measured on: where it lies, its sizes, its tokenizer, and prompts for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hasten.base.cache import cache_folder
from hasten.base.errors import ConfigError, InputError
from hasten.base.screen import Screen
from hasten.bench.report import ModelSize
from hasten.bench.workload import BERT_LARGE, RANDOM, TINY, model_size, open_workload_model
from hasten.train.config import DataSection
from hasten.train.data import load_tokens

BITS = {"float32": 32.0, "bfloat16": 16.0, "int8": 8.125, "int4": 4.0}
"""Bits of a weight: 8 bits with an fp16 scale for 128 of them, and the budget of 4 bits all in."""


class Layer(NamedTuple):
    """What a decode step reads of one layer's cache."""

    values: int
    """Keys and values of one token."""
    window: int | None


class Subject(NamedTuple):
    """One model."""

    name: str
    path: str
    """What every contender opens."""
    gguf: str | None
    size: ModelSize
    head_parameters: int
    tied: bool
    """The output head is the table of embeddings."""
    layers: tuple[Layer, ...]
    context_tokens: int
    """The longest sequence that the model is made for."""
    tokenizer: Any
    end_tokens: tuple[int, ...]

    def cache_values(self, tokens: int) -> int:
        """Keys and values that a step reads with `tokens` in the cache."""
        return sum(layer.values * min(tokens, layer.window or tokens) for layer in self.layers)

    def cache_bytes(self, weights: str, tokens: int, cache: str = "bfloat16") -> int:
        """The same in bytes: one a value in int8 (scales not counted), four beside fp32 weights, else two."""
        return self.cache_values(tokens) * (1 if cache == "int8" else 4 if weights == "float32" else 2)

    def weight_bytes(self, weights: str) -> int:
        """What a step reads of the weights: every matrix once, an untied table of embeddings not."""
        if weights != "stored":
            return int(self.size.product_parameters * BITS[weights.partition(":")[0]] / 8)
        if self.gguf is None:
            raise ValueError("a model without a GGUF file stores no kinds of its own")
        from hasten.models.gguf_file import GgufFile

        tensors = GgufFile(self.gguf).tensors
        table = "token_embd.weight" if "output.weight" in tensors else None
        return sum(
            tensor.size_bytes for name, tensor in tensors.items() if len(tensor.shape) > 1 and name != table
        )

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt: 2 * parameters in products * tokens, the head once, causal attention."""
        body = 2.0 * (self.size.product_parameters - self.head_parameters) * tokens
        return body + 2.0 * self.head_parameters + 2.0 * tokens * (tokens + 1) * self.size.attention_width


def open_subject(name: str, seed: int, folder: Path) -> Subject:
    """Opens the model once for what the bench must know of it.

    A `tiny:` or `random:` model (see `hasten.bench.workload`) is written to `folder` with a tokenizer of
    bytes.

    Raises:
        ConfigError: a masked model, or a name that does not exist.
        InputError: the model or its tokenizer cannot be opened.
    """
    if name == BERT_LARGE:
        raise ConfigError(f"model = {name!r}: a masked model does not generate; give a causal one")
    path = name
    if name.startswith((TINY, RANDOM)):
        path = str(folder / "model")
        model, _ = open_workload_model(name, seed)
        model.save_pretrained(path)
        tokenizer = _byte_tokenizer()
        tokenizer.save_pretrained(path)
    else:
        model, tokenizer = open_workload_model(name, seed)
    if any(kind.endswith("ForMaskedLM") for kind in model.config.architectures or ()):
        raise ConfigError(f"model = {name!r}: a masked model does not generate; give a causal one")
    if tokenizer is None:
        raise InputError(f"model = {name!r}: it has no tokenizer, so there are no prompts for it")
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    ends = model.generation_config.eos_token_id
    return Subject(
        name=name,
        path=path,
        gguf=gguf_file(name),
        size=model_size(model),
        head_parameters=0 if head is None else head.weight.numel(),
        tied=head is not None and head.weight is model.get_input_embeddings().weight,
        layers=_layers(config),
        context_tokens=int(getattr(config, "max_position_embeddings", None) or 1 << 30),
        tokenizer=tokenizer,
        end_tokens=tuple([ends] if isinstance(ends, int) else ends or ()),
    )


def gguf_file(name: str) -> str | None:
    """The GGUF file behind a model's name, or None if it is no such file."""
    from hasten.models.presets import PRESETS, fetch

    path = Path(name).expanduser()
    if name in PRESETS and not path.exists():
        path = fetch(name, PRESETS[name], cache_folder().value)
    return str(path) if path.is_file() else None


def prompts_of(subject: Subject, data: str, counts: list[int], screen: Screen) -> list[list[int]]:
    """Prompts of the given numbers of tokens, one after the other out of the text, so no two begin alike.

    Raises:
        InputError: the text cannot be read or is too short.
    """
    wanted = sum(counts)
    stream = load_tokens(DataSection(path=data, max_tokens=wanted), subject.tokenizer, screen=screen)
    if len(stream.tokens) < wanted:
        raise InputError(
            f"data = {data!r}: its {len(stream.tokens):,} tokens are fewer than the {wanted:,} of all "
            "prompts; give more text, or shorter or fewer prompts"
        )
    prompts, begin = [], 0
    for count in counts:
        prompts.append([int(token) for token in stream.tokens[begin : begin + count]])
        begin += count
    return prompts


def _layers(config: Any) -> tuple[Layer, ...]:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    values = 2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(Layer(values, window if kind == "sliding_attention" else None) for kind in kinds)


def _byte_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
