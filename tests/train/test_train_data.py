"""From files to rows: document boundaries, the cache, the order, and every kind of bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.base.errors import InputError
from hasten.base.screen import Screen
from hasten.train.config import DataSection
from hasten.train.data import (
    IGNORE,
    Order,
    Rows,
    TokenStream,
    load_tokens,
    permutation,
    shifted_labels,
)
from hasten.train.text import documents, find_source

END = 256


def section(tmp_path: Path, path: Path | str, **changes: Any) -> DataSection:
    return DataSection(path=str(path), cache_folder=tmp_path / "cache", **changes)


def stream_of(*lengths: int) -> TokenStream:
    """Documents of these lengths; token i of the stream is i + 1, so that every token tells its place."""
    starts = np.cumsum([0, *lengths[:-1]]).astype(np.int64)
    return TokenStream(np.arange(1, sum(lengths) + 1, dtype=np.uint16), starts, "x")


def test_packed_rows_restart_with_each_document() -> None:
    batch = Rows(stream_of(3, 6, 3), 5, pad_id=0).batch([0, 1, 2])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 0, 0, 0]]
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0], [0, 1, 0, 1, 2]]
    assert batch.labels.tolist() == [
        [IGNORE, 2, 3, IGNORE, 5],
        [IGNORE, 7, 8, 9, IGNORE],
        [IGNORE, 12, IGNORE, IGNORE, IGNORE],
    ]
    assert batch.tokens == 12
    assert shifted_labels(batch.labels).tolist()[0] == [2, 3, IGNORE, 5, IGNORE]


def test_rows_without_packing_hold_one_piece_each() -> None:
    rows = Rows(stream_of(3, 7), 5, packing=False, pad_id=99)
    batch = rows.batch([0, 1, 2])
    assert len(rows) == 3
    assert batch.position_ids is None
    assert batch.input_ids.tolist() == [[1, 2, 3, 99, 99], [4, 5, 6, 7, 8], [9, 10, 99, 99, 99]]
    assert batch.labels[2].tolist() == [IGNORE, 10, IGNORE, IGNORE, IGNORE]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=10),
    sequence_tokens=st.integers(2, 9),
    packing=st.booleans(),
)
def test_every_token_is_in_exactly_one_row(lengths: list[int], sequence_tokens: int, packing: bool) -> None:
    stream = stream_of(*lengths)
    rows = Rows(stream, sequence_tokens, packing=packing, pad_id=0)
    batch = rows.batch(list(range(len(rows))))
    seen = batch.input_ids[batch.input_ids != 0]
    assert sorted(seen.tolist()) == stream.tokens.tolist()
    first_of_documents = set((stream.starts + 1).tolist())
    assert not first_of_documents & set(batch.labels[batch.labels != IGNORE].tolist())
    assert bool(((batch.labels == batch.input_ids) | (batch.labels == IGNORE)).all())


def test_split_keeps_all_tokens_and_boundaries() -> None:
    whole = stream_of(4, 4, 4)
    head, tail = whole.split(0.5)
    assert (head.tokens.tolist(), tail.tokens.tolist()) == ([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12])
    assert (head.starts.tolist(), tail.starts.tolist()) == ([0, 4], [0, 2])
    assert whole.split(0.0)[1].tokens.size == 0


def test_longer_than_counts_documents() -> None:
    assert stream_of(5, 6, 12).longer_than(5) == 2


@given(count=st.integers(1, 200), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 50))
@settings(max_examples=40, deadline=None)
def test_permutation_is_one(count: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(count, seed, epoch)) == list(range(count))


def test_permutation_does_not_change_between_versions() -> None:
    """Fixed values: a resumed run must see the order that the run before it saw."""
    assert permutation(8, 0, 0).tolist() == [0, 1, 6, 3, 5, 4, 2, 7]
    assert permutation(8, 0, 1).tolist() == [3, 0, 1, 5, 2, 7, 4, 6]


def test_order_is_told_by_one_integer() -> None:
    order = Order(rows=7, seed=3)
    whole = order.take(0, 21)
    assert [sorted(part) for part in np.split(whole, 3)] == [list(range(7))] * 3
    assert np.concatenate([order.take(0, 4), order.take(4, 8), order.take(12, 9)]).tolist() == whole.tolist()
    assert whole[:7].tolist() != whole[7:14].tolist()


def test_documents_end_with_the_end_token(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "ab"}\n\n{"text": "  "}\n{"text": "cde"}\n')
    stream = load_tokens(section(tmp_path, tmp_path / "t.jsonl"), tokenizer)
    assert tokenizer.decode(stream.tokens.tolist()) == "ab<end>cde<end>"
    assert stream.starts.tolist() == [0, 3]


def test_cache_is_used_and_noticed_when_stale(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "t").mkdir()
    file = tmp_path / "t" / "a.txt"
    file.write_text("hello")
    data = section(tmp_path, tmp_path / "t")
    calls: list[Any] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def __len__(self) -> int:
            return len(tokenizer)

        def __call__(self, texts: list[str], **options: Any) -> Any:
            calls.append(texts)
            return tokenizer(texts, **options)

    first = load_tokens(data, Counting())
    texts_once = [texts for texts in calls if texts != ["a"]]
    again = load_tokens(data, Counting())
    assert [texts for texts in calls if texts != ["a"]] == texts_once == [["hello"]]
    assert (first.tokens == again.tokens).all()
    assert first.fingerprint == again.fingerprint
    file.write_text("hello, changed")
    changed = load_tokens(data, tokenizer)
    assert changed.fingerprint != first.fingerprint
    assert changed.tokens.size == len("hello, changed") + 1


def test_damaged_cache_is_made_again(tmp_path: Path, tokenizer: Any, text_folder: Path) -> None:
    data = section(tmp_path, text_folder)
    stream = load_tokens(data, tokenizer)
    expected = stream.tokens.tolist()
    (file,) = (tmp_path / "cache" / "tokens").glob("*/tokens.bin")
    file.write_bytes(file.read_bytes()[:-4])
    assert load_tokens(data, tokenizer).tokens.tolist() == expected


def test_limit_is_exact_and_part_of_the_key(tmp_path: Path, tokenizer: Any, text_folder: Path) -> None:
    whole = load_tokens(section(tmp_path, text_folder), tokenizer)
    capped = load_tokens(section(tmp_path, text_folder, max_tokens=100), tokenizer)
    assert capped.tokens.tolist() == whole.tokens[:100].tolist()
    assert capped.reached_limit
    assert not whole.reached_limit


def test_one_long_text_is_one_document(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.train.data.PART_CHARS", 50)
    monkeypatch.setattr("hasten.train.data.CALL_CHARS", 120)
    text = "a line of text\n" * 40 + "x" * 130
    (tmp_path / "long.txt").write_text(text)
    stream = load_tokens(section(tmp_path, tmp_path / "long.txt"), tokenizer)
    assert stream.starts.tolist() == [0]
    assert tokenizer.decode(stream.tokens[:-1].tolist()) == text


def test_parquet(tmp_path: Path, tokenizer: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"body": ["ab", None, "c"], "n": [1, 2, 3]}), file)
    stream = load_tokens(section(tmp_path, file, field="body"), tokenizer)
    assert tokenizer.decode(stream.tokens.tolist()) == "ab<end>c<end>"
    with pytest.raises(InputError, match=r"no column 'boddy'.*did you mean 'body'"):
        load_tokens(section(tmp_path, file, field="boddy"), tokenizer)
    with pytest.raises(InputError, match="holds int, not text"):
        load_tokens(section(tmp_path, file, field="n"), tokenizer)
    file.write_bytes(b"PAR1 this is not parquet PAR1")
    with pytest.raises(InputError, match="cannot be read as parquet"):
        load_tokens(section(tmp_path, file), tokenizer)


def test_standard_library_without_tests() -> None:
    source = find_source(DataSection(path="python-stdlib"))
    names = {file.relative_to(source.root).as_posix() for file in source.files}
    assert {"json/decoder.py", "argparse.py"} <= names
    assert not [name for name in names if "site-packages" in name or name.startswith("test/")]


def test_folder_skips_what_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.bin").write_bytes(b"\0\1\2")
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "d.txt").write_text("hidden")
    found = [document.text for document in documents(find_source(DataSection(path=str(tmp_path))))]
    assert found == ["text"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", '{"text": "a"}\n{"text": ', "line 2: not valid JSON"),
        ("t.jsonl", '{"txt": "a"}\n', "line 1: no field 'text'; allowed: txt; did you mean 'txt'"),
        ("t.jsonl", "[1, 2]\n", "line 1: no field 'text'"),
        ("t.jsonl", '{"text": 3}\n', "holds int, not text"),
        ("t.jsonl", "", "no text in 1 file"),
        ("t.txt", " \n ", "no text in 1 file"),
        ("t.txt", b"\x00\x01", "not UTF-8 text"),
        ("t.jsonl", '{"text": ' + "[" * 99_999, "line 1: not valid JSON"),
        ("t.parquet", b"PAR1 and no more", "cannot be read as parquet"),
    ],
)
def test_bad_file_is_refused(
    tmp_path: Path, tokenizer: Any, name: str, content: str | bytes, message: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        load_tokens(section(tmp_path, file), tokenizer)
    assert message in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_missing_path_and_pattern(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "texts").mkdir()
    with pytest.raises(InputError, match=r"no such file or folder.*did you mean 'texts'"):
        load_tokens(section(tmp_path, tmp_path / "text"), tokenizer)
    with pytest.raises(InputError, match="did you mean 'python-stdlib'"):
        load_tokens(section(tmp_path, "python-stlib"), tokenizer)
    with pytest.raises(InputError, match="texts': there is no file in it"):
        load_tokens(section(tmp_path, tmp_path / "texts"), tokenizer)
    with pytest.raises(InputError, match=r"no file matches data.glob = '\*.md'"):
        load_tokens(section(tmp_path, tmp_path / "texts", glob="*.md"), tokenizer)
    for pattern in ("../*", "/etc/*", "a**b"):
        with pytest.raises(InputError, match=r"data\.glob = .*for example"):
            load_tokens(section(tmp_path, tmp_path / "texts", glob=pattern), tokenizer)
    with pytest.raises(InputError, match="cannot be read: File name too long"):
        load_tokens(section(tmp_path, "x" * 300), tokenizer)
    (tmp_path / "t.txt").write_text("text")
    with pytest.raises(InputError, match=r"cannot make .*HASTEN_CACHE_DIR"):
        load_tokens(
            DataSection(path=str(tmp_path / "t.txt"), cache_folder=tmp_path / "t.txt" / "c"), tokenizer
        )


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude00"}\n')
    source = find_source(DataSection(path=str(tmp_path / "t.jsonl")))
    assert [document.text for document in documents(source)] == ["a\ufffdb \U0001f600"]
    load_tokens(section(tmp_path, tmp_path / "t.jsonl"), tokenizer)


def test_predicted_counts_what_the_labels_hold(tmp_path: Path) -> None:
    stream = TokenStream(np.arange(23, dtype=np.uint16), np.asarray([0, 1, 2, 9, 16, 22]), "")
    for packing in (True, False):
        rows = Rows(stream, 8, packing=packing)
        counts = [rows.predicted(row) for row in range(len(rows))]
        assert counts == [int((rows.batch([row]).labels != -100).sum()) for row in range(len(rows))]


def test_tokens_are_ready_for_torch(tmp_path: Path, tokenizer: Any, text_folder: Path) -> None:
    stream = load_tokens(section(tmp_path, text_folder), tokenizer, screen=Screen(enabled=False))
    batch = Rows(stream, 32).batch(np.array([0, 1]))
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert json.loads(next((tmp_path / "cache").rglob("meta.json")).read_text())["dtype"] == "uint16"
