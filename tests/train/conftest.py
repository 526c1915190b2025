"""A tiny Llama with dropout, a byte-level tokenizer, a folder of text, and settings that use them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hasten.models.tiny import tiny_model
from hasten.train.config import RunConfig, load_config

os.environ["HF_HUB_OFFLINE"] = "1"
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, an end token and a padding token; 258 entries."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "<end>", "<pad>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def write_texts(folder: Path, count: int = 12) -> Path:
    """`count` files of different lengths, some longer than a row of 32 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        words = [WORDS[(number + i * i) % len(WORDS)] for i in range(2 + 3 * number)]
        (folder / f"text{number:02d}.txt").write_text(" ".join(words))
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama", vocab_size=258, attention_dropout=0.2, tie_word_embeddings=True).save_pretrained(
        folder
    )
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture
def settings(tmp_path: Path, model_folder: Path, text_folder: Path) -> Callable[..., RunConfig]:
    """A function from dotted names to a small run: 6 steps of 2 x 2 x 32 tokens, plain torch."""

    def make(**changes: Any) -> RunConfig:
        values: dict[str, Any] = {
            "model.id": str(model_folder),
            "data.path": str(text_folder),
            "data.cache_folder": str(tmp_path / "cache"),
            "batch.sequence_tokens": 32,
            "batch.batch_tokens": 128,
            "batch.micro_batch_tokens": 64,
            "steps": 6,
            "seed": 7,
            "precision": "fp32",
            "optimize": False,
            "optimizer.lr": 1e-2,
            "schedule.warmup_steps": 2,
            "output.folder": str(tmp_path / "run"),
            "output.tensorboard": False,
        }
        values.update({name.replace("__", "."): value for name, value in changes.items()})
        return load_config(None, values)

    return make


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A function that mounts a file system of so many bytes; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount(size_bytes: int) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a small file system needs root")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)
