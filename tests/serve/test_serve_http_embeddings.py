"""Embeddings: pooling, batches of several requests, the API, and a real encoder's numbers."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from http_world import running, serving
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from hasten.base.errors import ContextError, EngineStopped, InputError, QueueFull, ServeError
from hasten.serve.embed import Embedder, open_embedder, pool, read_sentence_config
from hasten.serve.http.limits import HttpSettings, Limits
from hasten.serve.http.state import State

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{number}" for number in range(60))]


def word_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", None, [("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def forward(ids_BS: np.ndarray, mask_BS: np.ndarray) -> np.ndarray:
    """Four numbers that depend on the real tokens of a row alone."""
    x = (ids_BS + 1) * mask_BS
    return np.stack([x.sum(1), (x * x).sum(1), mask_BS.sum(1), x.max(1)], 1).astype(np.float32)


def embedder(**more: Any) -> Embedder:
    return Embedder("small", word_tokenizer(), more.pop("forward", forward), 4, 8, **more)


@pytest.fixture
def made() -> Iterator[list[Embedder]]:
    """Embedders to be stopped in the end."""
    made: list[Embedder] = []
    yield made
    for one in made:
        one.stop()


def alone(tokens: list[int]) -> np.ndarray:
    return forward(np.array([tokens]), np.ones((1, len(tokens)), np.int64))[0]


def test_every_text_gets_its_own_vector(made: list[Embedder]) -> None:
    batches = []

    def seen(ids_BS: np.ndarray, mask_BS: np.ndarray) -> np.ndarray:
        batches.append(ids_BS.shape)
        return forward(ids_BS, mask_BS)

    made.append(one := embedder(forward=seen, batch_tokens=16))
    tokens = one.encode(["w1", "w1 w2 w3 w4 w5", "", "w9 w9", [5, 6, 7]])
    assert tokens[0] == [1, 5, 2]
    assert tokens[4] == [5, 6, 7]
    vectors = one.submit(tokens).result(5)
    assert np.array_equal(vectors, np.stack([alone(item) for item in tokens]))
    assert all(rows * length <= 16 for rows, length in batches)


def test_a_small_request_does_not_wait_for_a_large_one(made: list[Embedder]) -> None:
    gate, order = threading.Event(), []

    def slow(ids_BS: np.ndarray, mask_BS: np.ndarray) -> np.ndarray:
        gate.wait(5)
        order.append(len(ids_BS))
        return forward(ids_BS, mask_BS)

    made.append(one := embedder(forward=slow, batch_tokens=8))
    large = one.submit([[5, 6]] * 40)
    small = one.submit([[7, 8]])
    small.add_done_callback(lambda _: order.append("small"))
    gate.set()
    assert np.array_equal(small.result(5)[0], alone([7, 8]))
    assert np.array_equal(large.result(5), np.stack([alone([5, 6])] * 40))
    assert order.index("small") <= 3


def test_a_cancelled_request_is_not_run(made: list[Embedder]) -> None:
    gate, rows = threading.Event(), []

    def slow(ids_BS: np.ndarray, mask_BS: np.ndarray) -> np.ndarray:
        rows.append(len(ids_BS))
        gate.wait(5)
        return forward(ids_BS, mask_BS)

    made.append(one := embedder(forward=slow, batch_tokens=4))
    first = one.submit([[5, 6]] * 30)
    while not rows:
        pass
    assert first.cancel()
    second = one.submit([[7]])
    gate.set()
    assert np.array_equal(second.result(5)[0], alone([7]))
    assert sum(rows) <= 4


def test_faults_and_limits(made: list[Embedder]) -> None:
    def failing(ids_BS: np.ndarray, mask_BS: np.ndarray) -> np.ndarray:
        if 40 in ids_BS:
            raise RuntimeError("out of memory")
        return forward(ids_BS, mask_BS)

    made.append(one := embedder(forward=failing, max_queue_tokens=10))
    with pytest.raises(ServeError, match="out of memory"):
        one.submit([[40]]).result(5)
    assert np.array_equal(one.submit([[5]]).result(5)[0], alone([5]))
    with pytest.raises(ContextError, match=r"input\[1\] has 9 tokens.*at most 8"):
        one.encode(["w1", "w1 w2 w3 w4 w5 w6 w7"])
    with pytest.raises(InputError, match="not among 0 to 63"):
        one.encode([[64]])
    gate = threading.Event()

    def held(ids_BS: np.ndarray, mask_BS: np.ndarray) -> np.ndarray:
        gate.wait(5)
        return forward(ids_BS, mask_BS)

    made.append(two := embedder(forward=held, max_queue_tokens=10))
    waiting = two.submit([[5] * 8])
    with pytest.raises(QueueFull, match="8 tokens wait"):
        two.submit([[5] * 8])
    gate.set()
    waiting.result(5)
    two.stop(1.0)
    with pytest.raises(EngineStopped):
        two.submit([[5]])


def test_pooling() -> None:
    import torch

    torch.manual_seed(0)
    hidden = torch.randn(2, 4, 3)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    rows = [hidden[0], hidden[1, :2]]
    expected = {
        "cls": [row[0] for row in rows],
        "max": [row.amax(0) for row in rows],
        "mean": [row.mean(0) for row in rows],
        "mean_sqrt_len_tokens": [row.sum(0) / len(row) ** 0.5 for row in rows],
        "lasttoken": [row[-1] for row in rows],
        "weightedmean": [
            (row * torch.arange(1, len(row) + 1)[:, None]).sum(0) / sum(range(1, len(row) + 1))
            for row in rows
        ],
    }
    for mode, vectors in expected.items():
        torch.testing.assert_close(pool(hidden, mask, [mode], False), torch.stack(vectors))
    both = pool(hidden, mask, ["mean", "cls"], True)
    assert both.shape == (2, 6)
    torch.testing.assert_close(both.norm(dim=1), torch.ones(2))


def test_settings_of_a_folder(tmp_path: Path) -> None:
    plain = read_sentence_config(tmp_path)
    assert (plain.pooling, plain.normalise, plain.encoder) == (("mean",), True, tmp_path)
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""},
               {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]  # fmt: skip
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    (tmp_path / "config_sentence_transformers.json").write_text(
        '{"prompts": {"q": "query: "}, "default_prompt_name": "q", "matryoshka_dimensions": [2]}'
    )
    read = read_sentence_config(tmp_path)
    assert (read.pooling, read.normalise, read.most_tokens) == (("cls",), False, 7)
    assert (read.prompt, read.may_truncate) == ("query: ", True)
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode": "average"}')
    with pytest.raises(InputError, match="'average'"):
        read_sentence_config(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([*modules, {"type": "x.Dense", "path": "2"}]))
    (tmp_path / "1_Pooling/config.json").write_text("{}")
    with pytest.raises(InputError, match="a module 'Dense'"):
        read_sentence_config(tmp_path)


def test_the_api(made: list[Embedder]) -> None:
    made.append(one := embedder())
    settings = HttpSettings(limits=Limits(inputs=5))
    with serving(settings, embedder=one) as world:
        client = world.client()
        answer = client.embeddings.create(model="small", input=["w1", "w2 w3"])
        assert answer.object == "list"
        assert [item.index for item in answer.data] == [0, 1]
        assert answer.data[1].embedding == alone([1, 6, 7, 2]).tolist()
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (7, 7)
        floats = client.embeddings.create(model="small", input="w1", encoding_format="float")
        assert floats.data[0].embedding == answer.data[0].embedding
        raw = world.http.post("/v1/embeddings", json={"input": "w1", "encoding_format": "base64"}).json()
        assert (
            np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4").tolist()
            == alone([1, 5, 2]).tolist()
        )
        assert (
            client.embeddings.create(model="small", input=[5, 6]).data[0].embedding == alone([5, 6]).tolist()
        )
        assert len(client.embeddings.create(model="small", input=[[5], [6, 7]]).data) == 2
        assert client.embeddings.create(model="small", input="w1", dimensions=4).data[0].index == 0
        assert {model.id for model in client.models.list()} == {"small", "scripted"}
        for wrong, param in (
            ({"input": "w1", "dimensions": 2}, "dimensions"),
            ({"input": ""}, "input"),
            ({"input": []}, "input"),
            ({"input": ["w1", ""]}, "input"),
            ({"input": [99]}, "input"),
            ({"input": ["w1"] * 6}, "input"),
            ({"input": "w1 " * 20}, "input"),
            ({"input": "w1", "encoding_format": "hex"}, "encoding_format"),
            ({"input": "w1", "model": "scripted"}, "model"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                client.embeddings.create(**({"model": "small"} | wrong))
            assert caught.value.param == param
        with pytest.raises(openai.BadRequestError, match="'small' makes embeddings"):
            client.chat.completions.create(model="small", messages=[{"role": "user", "content": "x"}])
        assert b'hasten:embedding_tokens_total{model_name="small"}' in world.http.get("/metrics").content
        one.stop()
        assert world.http.post("/v1/embeddings", json={"input": "w1"}).status_code == 503


def test_faults_of_the_embedder_over_http(made: list[Embedder]) -> None:
    gate = threading.Event()

    def held(ids_BS: np.ndarray, mask_BS: np.ndarray) -> np.ndarray:
        gate.wait(5)
        raise RuntimeError("out of memory")

    made.append(one := embedder(forward=held, max_queue_tokens=10))
    with serving(embedder=one) as world:
        waiting = one.submit([[5] * 8])
        refused = world.http.post("/v1/embeddings", json={"input": "w1"})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        gate.set()
        with pytest.raises(ServeError):
            waiting.result(5)
        failed = world.http.post("/v1/embeddings", json={"input": "w1"})
        assert failed.status_code == 500
        assert "out of memory" in failed.json()["error"]["message"]


def test_embeddings_alone_and_shorter_ones(made: list[Embedder]) -> None:
    made.append(one := embedder(may_truncate=True))
    import httpx2

    with running(State(HttpSettings(), None, one)) as (url, _), httpx2.Client(base_url=url) as client:
        short = client.post("/v1/embeddings", json={"input": "w1", "dimensions": 2}).json()["data"][0][
            "embedding"
        ]
        first = alone([1, 5, 2])[:2]
        assert np.allclose(short, first / np.linalg.norm(first))
        response = client.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 400
        assert "no model that generates" in response.json()["error"]["message"]
        assert client.get("/metrics").status_code == 200


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from hasten.models import tiny_model

    folder = tmp_path_factory.mktemp("encoder")
    tiny_model("bert").save_pretrained(folder)
    word_tokenizer().save(str(folder / "tokenizer.json"))
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""},
               {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
               {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return folder


def test_a_batch_through_hasten_is_each_text_through_transformers(
    encoder_folder: Path, made: list[Embedder]
) -> None:
    import torch
    from transformers import AutoModel

    made.append(one := open_embedder(encoder_folder))
    assert one.id == encoder_folder.name
    texts = ["w1", "w2 w3 w4 w5 w6 w7 w8", "w9 w9 w1", "w5"]
    tokens = one.encode(texts)
    vectors = one.submit(tokens).result(60)
    plain = AutoModel.from_pretrained(encoder_folder).eval()
    with torch.no_grad():
        for ids, vector in zip(tokens, vectors, strict=True):
            mean = plain(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
            expected = (mean / mean.norm()).numpy()
            assert np.abs(vector - expected).max() < 2e-5


def test_what_is_no_sentence_model(tmp_path: Path, encoder_folder: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'minilm-l6'"):
        open_embedder("minilm-l7")
    with pytest.raises(InputError, match="cannot open"):
        open_embedder(tmp_path)


@pytest.mark.e2e
def test_the_real_model_knows_what_is_alike(made: list[Embedder]) -> None:
    """Fetches 84 MB into the user's cache the first time."""
    made.append(one := open_embedder("minilm-l6"))
    texts = ["A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby."]
    vectors = one.submit(one.encode(texts)).result(60)
    assert vectors.shape == (3, 384)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > 0.6
    assert vectors[0] @ vectors[2] < 0.2
