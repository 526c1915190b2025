"""Shared by every folder of tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# No test depends on a table of this machine, nor measures one unasked; set before anything reads it.
os.environ["HASTEN_TUNE"] = "0"


@pytest.fixture(scope="session")
def small_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer of bytes, as a Hugging Face folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from hasten.models import tiny_model

    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    alphabet = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
