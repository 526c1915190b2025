"""What every contender works on: a model by name, and blocks of tokens written once and read by each process.

Model names: `smollm2-135m`, a hub id, an HF folder or a GGUF file (see `hasten.models.open_model`);
`tiny:FAMILY[:SETTING=VALUE,...]` for a small random model; `random:FOLDER` for random weights in the shape of
a folder's `config.json`; `bert-large-random` for random weights in the shape of BERT-Large (Devlin et al.
2019), a masked model, without dropout so that losses can be compared. The last three read bytes as tokens.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hasten.base.errors import ConfigError, InputError, nearest
from hasten.base.screen import Screen
from hasten.bench.report import ModelSize
from hasten.bench.tasks import mask_tokens
from hasten.train.config import DataSection
from hasten.train.data import IGNORE, Order, Rows, TokenStream, load_tokens
from hasten.train.text import documents, find_source

TINY, RANDOM, BERT_LARGE = "tiny:", "random:", "bert-large-random"
BERT_MASK_TOKEN = 103


class Blocks(NamedTuple):
    """The tokens of a run; every array is int64 [steps * batch, sequence_tokens]."""

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    """Of the documents; a masked model gets rows without documents."""
    documents: int
    """Pieces of documents in all rows."""

    def visible_keys_per_step(self, batch: int, sees_documents: bool, causal: bool = True) -> float:
        """Query-key pairs a step, a head: of a causal model within a document, or within a row; else all."""
        R, S = self.input_ids.shape
        return visible_keys(R, S, self.position_ids if sees_documents else None, causal) * batch / R


def visible_keys(rows: int, tokens: int, position_ids: Any, causal: bool) -> float:
    """Query-key pairs, a head, of `rows` rows; `position_ids`: array or tensor, of documents that see
    themselves alone, or None.
    """
    if not causal:
        return float(rows * tokens**2)
    if position_ids is None:
        return rows * tokens * (tokens + 1) / 2
    return float((position_ids + 1).sum())


def parse_batch(text: str) -> tuple[int, int]:
    """`"2x512"` as (rows, tokens a row).

    Raises:
        ConfigError: another form, or a size below 1 x 2.
    """
    match = re.fullmatch(r"(\d+)x(\d+)", text.strip().lower())
    if match is None or int(match[1]) < 1 or int(match[2]) < 2:
        raise ConfigError(
            f"batch = {text!r}: give ROWSxTOKENS with at least 1 row of 2 tokens, for example 2x512"
        )
    return int(match[1]), int(match[2])


def open_workload_model(name: str, seed: int) -> tuple[Any, Any]:
    """(model in fp32, tokenizer or None) for a model name as in the module's docstring.

    Raises:
        ConfigError: an unknown family or setting, or a family that is no causal language model.
        InputError: the folder, file or id cannot be opened.
    """
    if name.startswith(TINY):
        return _tiny(name, seed), None
    if name == BERT_LARGE:
        return _bert_large(seed), None
    if name.startswith(RANDOM):
        return _random(Path(name.removeprefix(RANDOM)), seed), None
    from hasten.models import open_model

    opened = open_model(name)
    return opened.model, opened.tokenizer


def model_size(model: nn.Module) -> ModelSize:
    """Counts of a transformers causal language model; shared tensors count once."""
    import inspect

    parameters = {id(parameter): parameter for parameter in model.parameters()}
    # A table of embeddings takes part in products only where the output head shares it.
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    owners = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    products = sum(
        parameter.numel()
        for key, parameter in parameters.items()
        if parameter.dim() >= 2 and not (key in tables and key not in owners)
    )
    config: Any = model.config
    config = config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelSize(
        parameters=sum(parameter.numel() for parameter in parameters.values()),
        product_parameters=products,
        attention_width=config.num_hidden_layers * heads * head_dim,
        sees_documents="position_ids" in inspect.signature(model.forward).parameters,
    )


def is_masked(model_name: str) -> bool:
    """Whether the model predicts masked tokens and sees both sides."""
    from hasten.models.tiny import MASKED_FAMILIES, TORCH_ENCODER

    family = model_name.removeprefix(TINY).partition(":")[0] if model_name.startswith(TINY) else ""
    return model_name == BERT_LARGE or (family in MASKED_FAMILIES and family != TORCH_ENCODER)


def make_blocks(
    model_name: str, data_path: str, steps: int, batch: int, sequence_tokens: int, seed: int, screen: Screen
) -> Blocks:
    """Packed blocks of `data_path` for `steps` steps, in the order that `hasten train` would take them.

    Text that is too short is read again from the start.

    Raises:
        InputError: the model or the text cannot be opened, or there is too little text.
    """
    rows_wanted = steps * batch
    data = DataSection(path=data_path, max_tokens=rows_wanted * sequence_tokens)
    model, tokenizer = open_workload_model(model_name, seed)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and sequence_tokens > longest:
        raise ConfigError(
            f"batch: {sequence_tokens} tokens a row are more than the {longest} positions of {model_name}; "
            f"allowed: 2 to {longest}"
        )
    stream = _bytes_as_tokens(data) if tokenizer is None else load_tokens(data, tokenizer, screen=screen)
    rows = Rows(stream, sequence_tokens)
    taken = rows.batch(Order(len(rows), seed).take(0, rows_wanted))
    positions = taken.position_ids
    if positions is None:
        raise InputError(f"data = {data_path!r}: the text was not packed")
    # Row r of step s: labels are not shifted, so a label in the first column is never predicted.
    predicted = (taken.labels[:, 1:] != IGNORE).reshape(steps, -1).any(dim=1)
    if not bool(predicted.all()):
        raise InputError(
            f"data = {data_path!r}: its {len(stream.tokens):,} tokens in {len(stream.starts):,} documents "
            f"give a step of {batch} x {sequence_tokens} in which no token follows another, so it has no "
            "loss; give more text"
        )
    documents_seen = int((positions == 0).sum().item())
    ids, labels = taken.input_ids.numpy(), taken.labels.numpy()
    if is_masked(model_name):
        vocabulary = model.config.vocab_size
        ids, labels = mask_tokens(ids, min(BERT_MASK_TOKEN, vocabulary - 1), vocabulary, seed)
    return Blocks(ids, labels, positions.numpy(), documents_seen)


def save_blocks(blocks: Blocks, path: Path, task: str = "clm") -> None:
    """Writes what a contender's process reads (`Spec.blocks_file`)."""
    columns: dict[str, Any] = {"input_ids": blocks.input_ids}
    if task != "infer":
        columns["labels"] = blocks.labels
    if task == "clm":
        columns["position_ids"] = blocks.position_ids
    np.savez(path, **columns)


def _tiny(name: str, seed: int) -> nn.Module:
    from hasten.models.tiny import FAMILIES, TORCH_ENCODER, tiny_model

    family, _, settings = name.removeprefix(TINY).partition(":")
    allowed = [entry for entry in FAMILIES if entry != TORCH_ENCODER]
    if family not in allowed:
        raise ConfigError(f"model = {name!r}: no family of language models; {nearest(family, allowed)}")
    overrides: dict[str, int] = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = setting.partition("=")
        if not equals or not value.isdigit():
            raise ConfigError(
                f"model = {name!r}: {setting!r} must be SETTING=WHOLE NUMBER, e.g. hidden_size=128"
            )
        overrides[key] = int(value)
    return tiny_model(family, seed, **overrides)


def _bert_large(seed: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    }
    config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = BertForMaskedLM(config)
    return model


def _random(folder: Path, seed: int) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise InputError(f"model = '{RANDOM}{folder}': no config.json in that folder")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return model.float()


def _bytes_as_tokens(data: DataSection) -> TokenStream:
    limit = data.max_tokens or 0
    starts, parts, total = [], [], 0
    for document in documents(find_source(data)):
        starts.append(total)
        parts.append(np.frombuffer(document.text.encode(), dtype=np.uint8))
        total += len(parts[-1])
        if total >= limit:
            break
    if not total:
        raise InputError(f"data = {data.path!r}: no text in it")
    tokens = np.concatenate(parts)[:limit].astype(np.uint16)
    fingerprint = hashlib.sha256(tokens.tobytes()).hexdigest()
    return TokenStream(tokens, np.asarray(starts, dtype=np.int64), fingerprint, total >= limit)
