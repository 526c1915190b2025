"""From an opened model to one that can be trained: what fits the settings is checked, adapters are put on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

import hasten
from hasten.base.errors import ConfigError, InputError, nearest
from hasten.base.screen import Screen
from hasten.train.config import LoraSection, RunConfig
from hasten.train.data import Rows, TokenStream
from hasten.train.packing import check_causal, check_packing
from hasten.train.result import replace_folder, save_model


def check_model(config: RunConfig, model: nn.Module, tokenizer: Any) -> int:
    """The number of rows in the model's embedding table, after checking that text and rows fit the model.

    Raises:
        ConfigError: rows are longer than the model's context, the model is not causal, or packing would let
            documents see each other.
        InputError: there is no tokenizer, or it has more entries than the model.
    """
    if tokenizer is None:
        raise InputError(f"{config.model.id} comes without a tokenizer; put the tokenizer's files beside it")
    longest = getattr(model.config, "max_position_embeddings", None)
    S = config.batch.sequence_tokens
    if isinstance(longest, int) and longest < S:
        raise ConfigError(
            f"batch.sequence_tokens = {S}: {config.model.id} has a context of {longest} tokens; "
            f"the nearest valid value is {longest}"
        )
    vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    if len(tokenizer) > vocabulary:
        raise InputError(
            f"{config.model.id}: the tokenizer has {len(tokenizer)} entries, the model's embedding table "
            f"{vocabulary}; they do not belong together"
        )
    check_causal(model, vocabulary)
    if config.data.packing:
        check_packing(model, vocabulary)
    return vocabulary


def rows_of(
    config: RunConfig, tokenizer: Any, stream: TokenStream, screen: Screen
) -> tuple[Rows, Rows | None]:
    """Rows for training and, if asked for, held-out rows; says once what the data are.

    Raises:
        InputError: the held-out share leaves nothing to train on, or nothing to evaluate.
    """
    S = config.batch.sequence_tokens
    pad_id = next(
        (token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0
    )
    parts = stream.split(config.data.validation_fraction)
    rows, held_out = (Rows(part, S, packing=config.data.packing, pad_id=pad_id) for part in parts)
    if len(rows) == 0 or (config.data.validation_fraction and len(parts[1].tokens) < 2):
        raise InputError(
            f"data.validation_fraction = {config.data.validation_fraction} of {len(stream.tokens)} tokens "
            f"leaves {len(parts[0].tokens)} to train on and {len(parts[1].tokens)} to evaluate on; "
            "give more text"
        )
    if all(rows.predicted(first) == 0 for first in range(len(rows))):
        raise InputError(
            f"the text has {len(stream.tokens)} token(s) in {len(stream.starts)} document(s), and none "
            "follows another in its document, so there is nothing to learn; give more text"
        )
    limit = ", cut off by data.max_tokens" if stream.reached_limit else ""
    screen.note(
        f"data: {len(stream.tokens):,} tokens in {len(stream.starts):,} documents{limit}; {len(rows):,} rows "
        f"of {S} to train on, {config.steps * config.batch.rows / len(rows):.2f} epochs"
    )
    if longer := stream.longer_than(S):
        screen.note(
            f"data: {longer:,} documents are longer than {S} tokens; each is cut into pieces, and each piece "
            "is a document of its own"
        )
    return rows, (held_out if config.data.validation_fraction else None)


def adapt(config: RunConfig, model: nn.Module) -> nn.Module:
    """Puts LoRA adapters on, and switches gradient checkpointing on, where asked for.

    Raises:
        ConfigError: PEFT is not installed, or a target module does not exist (with the nearest).
    """
    if config.gradient_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise ConfigError(f"gradient_checkpointing = true: {type(model).__name__} does not support it")
        model.activation_checkpointing_enable()  # type: ignore[operator]
    return model if config.lora is None else _with_lora(config.lora, config.model.id, model)


@contextmanager
def optimized(config: RunConfig, model: nn.Module) -> Iterator[None]:
    """The model is rewritten by hasten inside the block, and as before after it, if `config.optimize`."""
    if not config.optimize:
        yield
        return
    # `precision` of the run is part of what a checkpoint fixes: the environment does not change it here.
    level = {} if config.level is None else {"level": config.level}
    # Timing could choose otherwise after a resume, and the bits would differ: proof decides alone.
    hasten.optimize(model, precision="follow", measure=False, **level)
    try:
        yield
    finally:
        hasten.restore(model)


def write_result(config: RunConfig, model: nn.Module, tokenizer: Any) -> tuple[Path | None, Path | None]:
    """Saves `model/`, or `adapter/` and with `lora.merge` both; returns (model folder, adapter folder)."""
    folder = config.output.folder
    if config.lora is None:
        return save_model(model, tokenizer, folder / "model"), None

    def write(temporary: Path) -> None:
        # The embedding is not trained; left to itself PEFT asks the hub whether it was resized.
        model.save_pretrained(temporary, save_embedding_layers=False)  # type: ignore[operator]
        tokenizer.save_pretrained(temporary)

    adapter = replace_folder(folder / "adapter", write)
    if not config.lora.merge:
        return None, adapter
    merged = model.merge_and_unload()  # type: ignore[operator]
    return save_model(merged, tokenizer, folder / "model"), adapter


def _with_lora(section: LoraSection, model_id: str, model: nn.Module) -> nn.Module:
    try:
        import peft
    except ImportError:
        raise ConfigError("[lora] needs PEFT; install it with: pip install 'hasten[lora]'") from None
    if not isinstance(section.target_modules, str):
        names = [name for name, _ in model.named_modules()]
        for target in section.target_modules:
            if not any(name == target or name.endswith(f".{target}") for name in names):
                leaves = {
                    name.rpartition(".")[2] for name, part in model.named_modules() if hasattr(part, "weight")
                }
                raise ConfigError(
                    f"lora.target_modules: no module is called {target!r}; {nearest(target, leaves)}"
                )
    targets = (
        section.target_modules if isinstance(section.target_modules, str) else list(section.target_modules)
    )
    lora = peft.LoraConfig(
        r=section.r,
        lora_alpha=section.alpha,  # type: ignore[arg-type]
        lora_dropout=section.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # PEFT 0.19 reads a property that transformers 5.24 has renamed.
        warnings.filterwarnings(
            "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
        )
        adapted = peft.get_peft_model(model, lora)
    # For a model opened from a GGUF file PEFT would write no name, or the name of a temporary folder.
    adapted.peft_config["default"].base_model_name_or_path = model_id
    return adapted
