"""Models and token blocks by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hasten.base.errors import ConfigError, InputError
from hasten.base.screen import Screen
from hasten.bench import workload

QUIET = Screen(enabled=False)


def test_blocks_are_the_same_each_time_and_keep_documents_apart(text_folder: Path):
    one = workload.make_blocks("tiny:llama", str(text_folder), 3, 2, 32, 0, QUIET)
    two = workload.make_blocks("tiny:llama", str(text_folder), 3, 2, 32, 0, QUIET)
    assert one.input_ids.shape == (6, 32)
    for left, right in zip(one[:3], two[:3], strict=True):
        assert np.array_equal(left, right)
    assert one.documents == int((one.position_ids == 0).sum()) > 6
    assert (one.labels[one.position_ids == 0] == -100).all()
    assert one.input_ids.max() < 256


def test_visible_keys_by_hand(text_folder: Path):
    blocks = workload.make_blocks("tiny:llama", str(text_folder), 1, 2, 16, 0, QUIET)
    expected = 0
    for row in blocks.position_ids:
        for query in range(16):
            # Keys at or before the query, back to the last token with position 0.
            start = max(key for key in range(query + 1) if row[key] == 0)
            expected += query - start + 1
    assert blocks.visible_keys_per_step(2, sees_documents=True) == expected
    assert blocks.visible_keys_per_step(2, sees_documents=False) == 2 * 16 * 17 / 2


def test_model_size_counts_products_only():
    model, tokenizer = workload.open_workload_model("tiny:llama", 0)
    size = workload.model_size(model)
    assert tokenizer is None
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    # Llama's head is tied to the table, so all but the norms take part in products.
    assert size.product_parameters == size.parameters - norms
    assert size.attention_width == 3 * 64
    untied, _ = workload.open_workload_model("tiny:gpt_neox", 0)
    table = untied.get_input_embeddings().weight
    assert table is not untied.get_output_embeddings().weight
    matrices = sum(parameter.numel() for parameter in untied.parameters() if parameter.dim() >= 2)
    assert workload.model_size(untied).product_parameters == matrices - table.numel()


def test_settings_reach_a_tiny_model():
    model, _ = workload.open_workload_model("tiny:llama:num_hidden_layers=1", 0)
    assert len(model.model.layers) == 1


def test_random_weights_in_a_folders_shape(tmp_path: Path):
    model, _ = workload.open_workload_model("tiny:llama", 0)
    model.config.save_pretrained(tmp_path)
    one, tokenizer = workload.open_workload_model(f"random:{tmp_path}", 3)
    two, _ = workload.open_workload_model(f"random:{tmp_path}", 3)
    assert tokenizer is None
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("tiny:lama", ConfigError, "did you mean 'llama'"),
        ("tiny:torch_encoder", ConfigError, "no family of language models"),
        ("tiny:llama:hidden_size", ConfigError, "WHOLE NUMBER"),
        ("random:/nowhere", InputError, "no config.json"),
    ],
)
def test_names_that_cannot_be_opened(name: str, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        workload.open_workload_model(name, 0)


def test_a_row_longer_than_the_context_is_refused(text_folder: Path):
    with pytest.raises(ConfigError, match="2048 positions"):
        workload.make_blocks("tiny:llama", str(text_folder), 1, 1, 4096, 0, QUIET)


@pytest.mark.parametrize("text", ["512", "0x512", "2x1", "2*512", "-1x8", ""])
def test_a_batch_of_another_form_is_refused(text: str):
    with pytest.raises(ConfigError, match="2x512"):
        workload.parse_batch(text)


def test_a_batch_is_rows_and_tokens():
    assert workload.parse_batch("2x512") == (2, 512)
    assert workload.parse_batch(" 1X2048 ") == (1, 2048)


def test_a_step_without_a_loss_is_refused_before_the_run(tmp_path: Path):
    """A document of one token predicts nothing; two are enough, however often they are read again."""
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(InputError, match=r"1 tokens in 1 documents .* no token follows another"):
        workload.make_blocks("tiny:llama", str(tmp_path), 3, 1, 8, 0, QUIET)
    (tmp_path / "a.txt").write_text("ab")
    labels = workload.make_blocks("tiny:llama", str(tmp_path), 3, 1, 8, 0, QUIET).labels
    assert (labels[:, 1:] != -100).any(axis=1).all()


def test_pairs_that_a_query_sees():
    assert workload.visible_keys(2, 4, None, causal=False) == 2 * 16
    assert workload.visible_keys(2, 4, None, causal=True) == 2 * 10
    documents = np.array([[0, 1, 0, 1], [0, 1, 2, 0]])
    assert workload.visible_keys(2, 4, documents, causal=True) == (3 + 3) + (6 + 1)
