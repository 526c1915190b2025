"""Text from tokens, piece by piece."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hasten.serve.text import REPLACEMENT, Detokenizer, StopStrings, TextOutput, TokenBytes

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level() -> Tokenizer:
    """A token for each byte, some longer ones, one special."""
    pieces = [*ALPHABET, "he", "hel", "Ġw", "\u00f0\u0141", "<|end|>"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2: words with a mark for the space before them, bytes for what is no word."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "\u2581a",
        "b",
        "\u2581the",
        ".",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()


def bytes_to_tokens(tokenizer: Tokenizer, data: bytes) -> list[int]:
    if tokenizer is BYTE_FALLBACK:
        return [1 + byte for byte in data]
    symbol_of = {value: symbol for symbol, value in _symbols().items()}
    return [tokenizer.token_to_id(symbol_of[byte]) for byte in data]


def _symbols() -> dict[str, int]:
    return {BYTE_LEVEL.id_to_token(token): TokenBytes(BYTE_LEVEL)(token)[0] for token in range(256)}


def pieces_of(tokenizer: Tokenizer, tokens: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet="ab €é😀\u4e2d\u0301\n", min_size=1, max_size=40))
@example(text="😀" * 20)
@example(text="\u4e2d" * 30)
def test_bytes_of_characters_come_whole(tokenizer: Tokenizer, text: str) -> None:
    pieces = pieces_of(tokenizer, bytes_to_tokens(tokenizer, ("x" + text).encode()))
    assert "".join(pieces) == "x" + text
    assert REPLACEMENT not in "".join(pieces)


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, len(ALPHABET) + 4), max_size=60))
def test_any_bytes_give_the_text_of_the_whole(tokens: list[int]) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, tokens)) == BYTE_LEVEL.decode(tokens)


@settings(max_examples=150, deadline=None)
@given(words=st.lists(st.sampled_from(["\u2581", "\u2581a", "b", "\u2581the", "."]), min_size=1, max_size=60))
def test_words_give_the_text_of_the_whole(words: list[str]) -> None:
    tokens = [BYTE_FALLBACK.token_to_id(word) for word in words]
    assert "".join(pieces_of(BYTE_FALLBACK, tokens)) == BYTE_FALLBACK.decode(tokens)


def test_a_character_waits_for_its_last_byte() -> None:
    pieces = pieces_of(BYTE_LEVEL, bytes_to_tokens(BYTE_LEVEL, "a😀b".encode()))
    assert pieces == ["a", "", "", "", "😀", "b", ""]


def test_text_before_an_incomplete_character_comes_at_once() -> None:
    tokens = [BYTE_LEVEL.token_to_id("hel"), *bytes_to_tokens(BYTE_LEVEL, "€".encode()[:1])]
    assert pieces_of(BYTE_LEVEL, tokens) == ["hel", "", REPLACEMENT]


def test_a_real_replacement_character_comes() -> None:
    pieces = pieces_of(BYTE_LEVEL, bytes_to_tokens(BYTE_LEVEL, f"a{REPLACEMENT}b".encode()))
    assert "".join(pieces) == f"a{REPLACEMENT}b"


def test_special_tokens_are_left_out_unless_wanted() -> None:
    tokens = [BYTE_LEVEL.token_to_id("he"), BYTE_LEVEL.token_to_id("<|end|>"), BYTE_LEVEL.token_to_id("hel")]
    assert "".join(pieces_of(BYTE_LEVEL, tokens)) == "hehel"
    detokenizer = Detokenizer(BYTE_LEVEL, (), skip_special_tokens=False)
    assert "".join([*map(detokenizer.push, tokens), detokenizer.flush()]) == "he<|end|>hel"


def test_the_space_between_prompt_and_answer_is_kept() -> None:
    a, the = BYTE_FALLBACK.token_to_id("\u2581a"), BYTE_FALLBACK.token_to_id("\u2581the")
    assert "".join(pieces_of(BYTE_FALLBACK, [the], prompt=(a,))) == " the"
    assert "".join(pieces_of(BYTE_FALLBACK, [the])) == "the"


def test_a_prompt_cut_within_a_character() -> None:
    prompt, rest = "x€".encode()[:2], "x€".encode()[2:]
    tokens = bytes_to_tokens(BYTE_LEVEL, rest + b"y")
    assert "".join(pieces_of(BYTE_LEVEL, tokens, tuple(bytes_to_tokens(BYTE_LEVEL, prompt)))) == "€y"
    # A character that the answer does not complete is the prompt's.
    tokens = bytes_to_tokens(BYTE_LEVEL, b"yz")
    assert pieces_of(BYTE_LEVEL, tokens, tuple(bytes_to_tokens(BYTE_LEVEL, prompt))) == ["y", "z", ""]
    assert pieces_of(BYTE_LEVEL, [], tuple(bytes_to_tokens(BYTE_LEVEL, prompt))) == [""]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize("unit", ["😀€a", "😀", "\u4e2d", "é", "x"])
def test_the_cost_of_a_token_does_not_grow(tokenizer: Tokenizer, unit: str) -> None:
    longest = 0

    class Counting:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            nonlocal longest
            longest = max(longest, len(tokens))
            return tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    tokens = bytes_to_tokens(tokenizer, (unit * 200).encode())
    detokenizer = Detokenizer(Counting(), ())  # type: ignore[arg-type]
    assert "".join(map(detokenizer.push, tokens)) == unit * 200
    assert longest < 32


@pytest.mark.parametrize(
    ("stops", "pieces", "expected", "found"),
    [
        (["END"], ["say E", "N", "D more"], "say ", True),
        (["END"], ["say E", "N", "ough"], "say ENough", False),
        (["END"], ["E", "EN", "D"], "E", True),
        (["\n\n", "\n"], ["one\n", "\ntwo"], "one", True),
        (["abcd", "bc"], ["xa", "bcd"], "xa", True),
        (["aab"], ["a", "a", "a", "b"], "a", True),
        (["stop"], ["st"], "st", False),
        ([""], ["text"], "text", False),
        ([], ["text"], "text", False),
        (["."], ["a.b"], "a", True),
    ],
)
def test_stop_strings(stops: list[str], pieces: list[str], expected: str, found: bool) -> None:
    assert _through(stops, pieces) == (expected, found)


def _through(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopStrings(stops)
    text = ""
    for piece in pieces:
        new, found = matcher.push(piece)
        text += new
        if found:
            return text, True
    return text + matcher.flush(), False


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    text=st.text(alphabet="abc", max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_pieces_change_nothing(stops: list[str], text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    whole = _through(stops, [text])
    assert _through(stops, pieces) == whole
    assert whole[1] == any(stop in text for stop in stops)
    assert not any(stop in whole[0] for stop in stops)
    assert text.startswith(whole[0])


def test_what_is_held_back_begins_a_stop_string() -> None:
    matcher = StopStrings(["<end>"])
    assert matcher.push("a<en") == ("a", False)
    assert matcher.push("x") == ("<enx", False)
    assert matcher.push("<end") == ("", False)
    assert matcher.flush() == "<end"


def test_the_end_right_after_held_text() -> None:
    output = TextOutput(Detokenizer(BYTE_LEVEL), ["hello"])
    assert output.push(BYTE_LEVEL.token_to_id("hel")) == ("", False)
    assert output.flush() == "hel"


def test_stop_strings_are_not_sought_before_their_time() -> None:
    output = TextOutput(Detokenizer(BYTE_LEVEL), ["he"])
    he = BYTE_LEVEL.token_to_id("he")
    assert output.push(he, may_stop=False) == ("he", False)
    assert output.push(he) == ("", True)


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = TextOutput(None, ["x"])
    assert output.push(3) == ("", False)
    assert output.flush() == ""


def test_bytes_of_tokens() -> None:
    of_level, of_fallback = TokenBytes(BYTE_LEVEL), TokenBytes(BYTE_FALLBACK)
    assert (
        b"".join(of_level(token) for token in bytes_to_tokens(BYTE_LEVEL, "a€ 😀".encode()))
        == "a€ 😀".encode()
    )
    assert of_level(BYTE_LEVEL.token_to_id("Ġw")) == b" w"
    assert of_level(BYTE_LEVEL.token_to_id("<|end|>")) == b"<|end|>"
    assert of_level(100_000) == b""
    assert of_fallback(1 + 0xE2) == b"\xe2"
    assert of_fallback(BYTE_FALLBACK.token_to_id("\u2581the")) == b" the"
