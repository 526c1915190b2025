"""The gate: its figures against plain formulas, and what it refuses."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hasten.base.errors import ConfigError, GateError, InputError, UserError
from hasten.models import tiny_model
from hasten.serve.gate import Gate, compare, default_text, model_logits, piece_tokens, text_chunks

CHUNKS = [torch.arange(30) * 11 % 50, torch.arange(200) * 7 % 50, torch.tensor([3])]


def table(seed: int) -> torch.Tensor:
    return torch.randn(50, 50, generator=torch.Generator().manual_seed(seed))


def of(table_VV: torch.Tensor):
    return lambda tokens: table_VV[tokens]


def test_figures_are_the_formulas() -> None:
    first, second = table(0), table(0) + 0.3 * table(1)
    gate = compare(of(first), of(second), CHUNKS, "int4")
    places = torch.cat([chunk[:-1] for chunk in CHUNKS])
    following = torch.cat([chunk[1:] for chunk in CHUNKS])
    p, q = first[places].double().log_softmax(-1), second[places].double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    losses = [-x.gather(1, following[:, None]).mean() for x in (p, q)]
    assert gate.tokens == len(places) == 228
    assert gate.mean_kl == pytest.approx(float(kl.mean()), rel=1e-5)
    assert gate.tail_kl == pytest.approx(float(kl.quantile(0.999)), rel=1e-5)
    assert gate.top1_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert 0.3 < gate.top1_agreement < 1
    assert gate.perplexity == pytest.approx(math.exp(losses[0]), rel=1e-5)
    assert gate.perplexity_ratio == pytest.approx(math.exp(losses[1] - losses[0]), rel=1e-5)
    assert "top-1 agreement" in str(gate)
    assert gate.as_dict()["what"] == "int4"


def test_the_same_model_passes_and_is_equal() -> None:
    gate = compare(of(table(0)), of(table(0)), CHUNKS)
    assert (gate.mean_kl, gate.tail_kl, gate.top1_agreement, gate.perplexity_ratio) == (0, 0, 1, 1)
    gate.refuse(1.0)


@pytest.mark.parametrize("ratio", [1.051, 3.0, math.inf, math.nan])
def test_refusal_names_figure_limit_and_way_on(ratio: float) -> None:
    gate = Gate(100, 0.1, 0.2, 0.9, 12.0, ratio, "int4")
    with pytest.raises(
        GateError, match=r"int4 .* times .* the limit is 1\.05.*int8, bfloat16.*--max-perplexity"
    ):
        gate.refuse()
    assert issubclass(GateError, UserError)
    if math.isfinite(ratio):
        gate.refuse(math.ceil(ratio * 100) / 100)
    with pytest.raises(ConfigError, match=r"0\.9"):
        gate.refuse(0.9)


def test_logits_that_are_no_numbers_are_refused() -> None:
    broken = table(0)
    broken[3] = math.nan
    gate = compare(of(table(0)), of(broken), CHUNKS)
    with pytest.raises(GateError, match="nan"):
        gate.refuse(100.0)


def test_texts_that_say_nothing_and_other_models_are_refused() -> None:
    with pytest.raises(InputError, match="4 places"):
        compare(of(table(0)), of(table(0)), [torch.arange(5)])
    with pytest.raises(InputError, match="same model"):
        compare(of(table(0)), of(table(0)[:, :40]), CHUNKS)


def test_logits_of_a_model_follow_the_tokens() -> None:
    model = tiny_model("llama").eval()
    logits = model_logits(model)
    tokens = torch.arange(20)
    assert logits(tokens).shape == (20, 256)
    assert not logits(tokens).requires_grad
    torch.testing.assert_close(logits(tokens)[:10], logits(tokens[:10]), rtol=1e-4, atol=1e-5)
    gate = compare(logits, model_logits(tiny_model("llama", seed=1).eval()), [tokens])
    assert gate.mean_kl > 1e-3


def test_default_text_has_parts_without_a_document_in_common() -> None:
    parts = [set(default_text(part)) for part in (0, 1)]
    assert parts[0].isdisjoint(parts[1])
    assert all(len(part) > 30 for part in parts)
    assert list(itertools.islice(default_text(), 5)) == list(itertools.islice(default_text(), 5))


def test_chunks_of_texts() -> None:
    chunks = text_chunks(
        lambda text: list(text.encode()), default_text(), chunks=3, chunk_tokens=100, first_token=1
    )
    assert [len(chunk) for chunk in chunks] == [100, 100, 100]
    assert all(chunk[0] == 1 for chunk in chunks)
    assert all(chunk[1] != 1 for chunk in chunks)
    marked = text_chunks(
        lambda text: [1, *text.encode()], default_text(), chunks=3, chunk_tokens=100, first_token=1
    )
    assert all(torch.equal(one, other) for one, other in zip(chunks, marked, strict=True))
    assert text_chunks(lambda text: list(text.encode()), iter(["short"])) == []


def test_pieces_of_text_fit_the_model() -> None:
    few = tiny_model("gpt2", n_positions=96)
    assert piece_tokens(few) == 96
    assert piece_tokens(tiny_model("llama", max_position_embeddings=4096)) == 512


def test_several_pieces_of_one_text() -> None:
    texts = iter([bytes([n]).decode() * n for n in (70, 40, 95)])
    found = text_chunks(lambda text: list(text.encode()), texts, 10, 32, of_each=2)
    assert [(int(chunk[0]), len(chunk)) for chunk in found] == [
        (70, 32),
        (70, 32),
        (40, 32),
        (95, 32),
        (95, 32),
    ]
