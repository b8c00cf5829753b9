"""Instructions become ids and back: nothing is cut, nothing unknown is taken for something known."""

import json
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vola.errors import CheckpointError, InputError
from vola.tokenizers.text import PAD, UNKNOWN, TextTokenizer

TRAIN = ["Push the red disc to the left.", "push the BLUE ring!", "pick_up the ring"]
TEXT = TextTokenizer.fit(TRAIN)
sentences = st.lists(st.text(min_size=1, max_size=12).filter(lambda s: bool(s.strip())), min_size=1, max_size=4)


def words(ids: np.ndarray, valid: np.ndarray) -> list[list[str]]:
    return [[TEXT.words[i] for i in row[ok]] for row, ok in zip(ids, valid, strict=True)]


def test_vocabulary_is_alphabetic_behind_padding_and_unknown() -> None:
    assert TEXT.words[:2] == ("[PAD]", "[UNK]")
    assert (PAD, UNKNOWN) == (0, 1)
    expected = {"push", "the", "red", "disc", "to", "left", ".", "blue", "ring", "!", "pick", "_", "up"}
    assert list(TEXT.words[2:]) == sorted(expected)


def test_fit_depends_on_the_words_only() -> None:
    assert TextTokenizer.fit(reversed(TRAIN)) == TEXT
    assert TextTokenizer.fit(TRAIN * 3) == TEXT
    assert hash(TextTokenizer.fit(TRAIN)) == hash(TEXT)
    assert TextTokenizer.fit(TRAIN[:2]) != TEXT


def test_encode() -> None:
    ids, valid = TEXT.encode(["PUSH  the\tred ring.", "ring"])
    assert ids.dtype == np.int64
    assert ids.shape == valid.shape == (2, 5)
    assert words(ids, valid) == [["push", "the", "red", "ring", "."], ["ring"]]
    assert (ids[1, 1:] == PAD).all()
    np.testing.assert_array_equal(valid, [[True] * 5, [True] + [False] * 4])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("push the red disc", "Push The RED Disc"),
        ("push the red disc", "  push the red\n disc "),
        ("push the ring!", "push the ring !"),
        ("pick_up", "pick _ up"),
        ("push", "ｐｕｓｈ"),  # full-width letters, noqa: RUF001
        ("up", "\u00a0up\u3000"),
        ("the ring", "the\u200b ri\u00adng\ufeff"),  # zero-width space, soft hyphen, byte order mark
    ],
)
def test_same_sentence(one: str, other: str) -> None:
    for a, b in zip(TEXT.encode([one]), TEXT.encode([other]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_nothing_is_cut_off() -> None:
    ids, valid = TEXT.encode(["push " * 700 + "ring", "ring"])
    assert ids.shape == (2, 701)
    assert TEXT.words[ids[0, -1]] == "ring"
    assert valid[0].all()


def test_unknown_words_are_reported_in_order_and_once() -> None:
    texts = ["push the green disc", "lift the Green cube, please", "disc"]
    assert TEXT.unknown_words(texts) == ("green", "lift", "cube", ",", "please")
    assert TEXT.unknown_words(TRAIN) == ()
    ids, valid = TEXT.encode(texts)
    assert [[w == "[UNK]" for w in row] for row in words(ids, valid)] == [
        [False, False, True, False],
        [True, False, True, True, True, True],
        [False],
    ]


@pytest.mark.parametrize("text", ["[PAD]", "[UNK]", "push [PAD] [UNK] the"])
def test_special_words_cannot_be_typed(text: str) -> None:
    ids, valid = TEXT.encode([text])
    assert valid.all()
    assert PAD not in ids
    assert {"[", "]", "pad"} & set(TEXT.unknown_words([text])) or {"unk"} & set(TEXT.unknown_words([text]))


@given(sentences)
@settings(max_examples=50, deadline=None)
def test_any_text(texts: list[str]) -> None:
    """Padding is exactly what is not valid; ids are unknown exactly where a word is reported; batches do not matter."""
    try:
        ids, valid = TEXT.encode(texts)
    except InputError:
        assert any(not TEXT.unknown_words([t]) for t in texts)  # a sentence without any word
        return
    np.testing.assert_array_equal(ids == PAD, ~valid)
    assert valid.any(1).all()
    assert valid[:, -1].any()
    for text, row, ok in zip(texts, ids, valid, strict=True):
        alone, all_valid = TEXT.encode([text])
        assert all_valid.all()
        np.testing.assert_array_equal(row[ok], alone[0])
        assert (UNKNOWN in alone) == bool(TEXT.unknown_words([text]))


@given(sentences)
@settings(max_examples=40, deadline=None)
def test_a_fitted_tokenizer_knows_its_texts_and_survives_a_round_trip(texts: list[str]) -> None:
    try:
        made = TextTokenizer.fit(texts)
    except InputError:
        return
    assert made.unknown_words(texts) == ()
    back = TextTokenizer.from_json(made.to_json())
    assert back == made
    spoken = [t for t in texts if TextTokenizer.fit(texts)._library.encode(t).ids]
    for a, b in zip(made.encode(spoken), back.encode(spoken), strict=True):
        np.testing.assert_array_equal(a, b)
    assert UNKNOWN not in made.encode(spoken)[0]


def test_json_is_readable() -> None:
    made = TextTokenizer.fit(["schiebe die Würfel", "推红色圆盘"])
    assert json.loads(made.to_json()) == {"kind": "words", "words": list(made.words)}
    assert "würfel" in made.to_json()
    assert TextTokenizer.from_json(made.to_json()).unknown_words(["die 红色 wurfel"]) == ("wurfel",)


def test_chinese_needs_no_spaces() -> None:
    """Every character is a word: a new sentence of known characters is known."""
    made = TextTokenizer.fit(["推红色圆盘", "去蓝色圆环"])
    assert made.unknown_words(["推蓝色圆盘"]) == ()
    assert made.encode(["推蓝色圆盘"])[0].shape == (1, 5)
    assert made.unknown_words(["拿蓝色圆盘"]) == ("拿",)


def test_is_a_value() -> None:
    with pytest.raises(FrozenInstanceError):
        TEXT.words = ()


@pytest.mark.parametrize("texts", [[], [""], ["  ", "\n"], ["\u200b"]])
def test_training_without_words(texts: list[str]) -> None:
    with pytest.raises(InputError, match="at least one word in the training set.*--instruction"):
        TextTokenizer.fit(texts)


@pytest.mark.parametrize(
    ("texts", "needle"),
    [(["push", " "], "got ' '"), ([""], "got ''"), ([], "sentence in a list or tuple, got []"), ("push", "got 'push'")],
)
def test_encoding_without_words(texts: list[str], needle: str) -> None:
    with pytest.raises(InputError) as caught:
        TEXT.encode(texts)
    assert needle in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{}", '{"kind": "bpe", "words": []}', "[1]", '{"kind": "words", "words": ["a", "b"]}', "not json"]
)
def test_foreign_json(text: str) -> None:
    with pytest.raises(CheckpointError, match="tokenizer: expected"):
        TextTokenizer.from_json(text)
