"""FAST: golden coefficients, strings, ids and reconstructions; damage is flagged; saturation is counted."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from scipy.fft import idct

from vola.errors import CheckpointError, ConfigError, InputError
from vola.tokenizers.actions import Tokens, packed
from vola.tokenizers.fast import BytePairs, FastConfig, FastTokenizer, coefficients, whole_numbers

GOLDEN = Path(__file__).parent / "golden" / "fast_tokenizer"
CHUNKS = (
    *("smooth", "constant", "step", "noise", "single_step", "one_dim", "fourteen_dim", "fifty_steps", "zeros", "ramp"),
    *("out_of_range", "two_steps"),
)
H, A = 8, 3


@pytest.fixture(scope="module")
def io() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "io.safetensors")


@pytest.fixture(scope="module")
def published(io) -> FastTokenizer:
    """The golden BPE, read from its file."""
    return FastTokenizer.published((GOLDEN / "tokenizer.json").read_text(), -48, 16, 7)


@pytest.fixture(scope="module")
def trained(io) -> FastTokenizer:
    """The same, trained here on the golden training set."""
    return FastConfig(on_malformed="repair").fit(io["input.bpe_train"])


def smooth(B: int = 40, seed: int = 0) -> np.ndarray:
    """Random chunks with decaying spectra, normalised units."""
    spectrum = np.random.default_rng(seed).standard_normal((B, H, A)) / (1 + np.arange(H))[:, None] ** 1.5
    return idct(spectrum, axis=1, norm="ortho")


@pytest.fixture(scope="module")
def small() -> FastTokenizer:
    return FastConfig(vocabulary=300).fit(smooth())


def characters(reach: int = 400) -> FastTokenizer:
    """One token per coefficient -354..reach and no merges: shows the coefficients behind the ids."""
    pairs = BytePairs(tuple(chr(i) for i in range(354 + reach + 1)), (), "whole")
    return FastTokenizer(pairs, 10.0, -354, reach, 10, 3, 0)


@pytest.mark.parametrize("name", CHUNKS)
def test_golden_coefficients_strings_and_reconstructions(io, name) -> None:
    chunk = io[f"input.chunk_{name}"][None]
    _, h, a = chunk.shape
    np.testing.assert_array_equal(coefficients(chunk, 10.0).ravel(), io[f"expected.{name}_coefficients"])
    tokenizer = characters()
    tokens = tokenizer.encode(chunk)
    np.testing.assert_array_equal(tokens.ids[0, :-1], io[f"expected.{name}_codepoints"])
    text = json.loads((GOLDEN / "spec.json").read_text())["strings"][name]
    assert "".join(map(chr, tokens.ids[0, :-1])) == text
    found = tokenizer.decode(tokens, h, a)
    assert not found.malformed.any()
    expected = io[f"expected.{name}_reconstruction"]
    np.testing.assert_allclose(found.chunks[0], expected, atol=1e-6, rtol=1e-6)
    counts, total = tokenizer.count_clipped(chunk)
    saturated = (io[f"expected.{name}_coefficients"] < -354).reshape(h, a).sum(0)
    np.testing.assert_array_equal(counts, saturated)
    assert total == h


def test_golden_rounding_goes_to_the_even_integer(io) -> None:
    np.testing.assert_array_equal(whole_numbers(io["input.rounding_values"]), io["expected.rounding"])


def test_golden_of_the_paper_s_example() -> None:
    chunk = np.stack([np.sin(np.linspace(0, 1, 10)), np.linspace(-1, 1, 10)], -1)[None]
    whole = coefficients(chunk, 10.0)
    np.testing.assert_array_equal(whole.ravel(), [14, 0, -9, -20, -1, 0, -1, -2, 0, 0, 0, -1, *[0] * 8])
    assert np.abs(idct(whole / 10, axis=1, norm="ortho") - chunk).max() == pytest.approx(0.0601, abs=5e-5)


@pytest.mark.parametrize("which", ["published", "trained"])
def test_golden_bpe_ids_and_reconstructions(io, which, request) -> None:
    """Read from the file and trained again from the data: the same ids."""
    tokenizer = request.getfixturevalue(which)
    x = np.concatenate([io["input.bpe_test"], io["input.bpe_train"][:10]])
    tokens = tokenizer.encode(x)
    expected = io["expected.bpe_ids"]
    ids = np.where(tokens.valid & (tokens.ids != tokenizer.end), tokens.ids, -1)[:, : expected.shape[1]]
    np.testing.assert_array_equal(ids, expected)
    found = tokenizer.decode(tokens, 16, 7)
    np.testing.assert_array_equal(~found.malformed, io["expected.bpe_decodable"])
    np.testing.assert_allclose(found.chunks, io["expected.bpe_reconstruction"], atol=1e-6, rtol=1e-6)


def test_golden_damaged_sequence_is_flagged_and_never_silently_zero(io, published) -> None:
    row = io["expected.bpe_ids"][0]
    row = row[row >= 0][:-1]
    assert not io["expected.damaged_decodable"][0]
    for policy, check in (("repair", np.isfinite), ("repeat", np.isnan)):
        found = replace(published, on_malformed=policy).decode(packed([[*row, published.end]]), 16, 7)
        assert found.malformed.all()
        assert check(found.chunks).all()
        assert found.reasons[0].startswith("length: expected 112 coefficients")
    # The published decoder gives zeros here; repaired, the head of the spectrum survives.
    repaired = replace(published, on_malformed="repair").decode(packed([[*row, published.end]]), 16, 7).chunks
    assert np.abs(repaired[0] - io["input.bpe_test"][0]).mean() < 0.5 * np.abs(io["input.bpe_test"][0]).mean()
    with pytest.raises(InputError, match="length"):
        replace(published, on_malformed="raise").decode(packed([[*row, published.end]]), 16, 7)


def test_training_is_reproducible_and_json_is_exact(io, trained) -> None:
    assert FastConfig(on_malformed="repair").fit(io["input.bpe_train"]) == trained
    text = json.dumps(trained.to_json())
    again = FastTokenizer.from_json(json.loads(text))
    assert again == trained
    assert json.dumps(again.to_json()) == text
    tokens, other = trained.encode(io["input.bpe_test"]), again.encode(io["input.bpe_test"])
    np.testing.assert_array_equal(tokens.ids, other.ids)
    np.testing.assert_array_equal(trained.decode(tokens, 16, 7).chunks, again.decode(other, 16, 7).chunks)


def test_the_vocabulary_and_the_longest_chunk(io, trained) -> None:
    assert trained.vocabulary == 1025
    lengths = trained.encode(io["input.bpe_train"]).valid.sum(1)
    assert lengths.max() <= trained.longest(16, 7) <= 1.25 * lengths.max() + 1
    assert trained.longest(20, 7) == 20 * 7 + 1  # characters below 128: one byte each
    assert trained.encode(io["input.bpe_test"]).ids.max() < trained.vocabulary


@pytest.mark.parametrize("pieces", ["byte_level", "whole"])
@pytest.mark.parametrize("scale", [3.0, 10.0, 40.0])
def test_round_trip_error_is_that_of_rounding(pieces, scale) -> None:
    x = smooth(400)
    tokenizer = FastConfig(scale=scale, pieces=pieces).fit(x)
    tokens = tokenizer.encode(x)
    found = tokenizer.decode(tokens, H, A)
    assert not found.malformed.any()
    expected = idct(coefficients(x, scale) / scale, axis=1, norm="ortho")
    np.testing.assert_allclose(found.chunks, expected, atol=1e-6)
    error = found.chunks - x
    rms, worst = tokenizer.floor()
    assert (np.abs(error).max((0, 1)) <= worst + 1e-6).all()
    np.testing.assert_allclose(np.sqrt((error**2).mean((0, 1))), rms, rtol=1e-5)
    assert (rms < 1.05 / (scale * np.sqrt(12))).all()


def test_floor_holds_for_wide_spectra_and_its_worst_is_reached() -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (500, H, A))
    tokenizer = FastConfig(vocabulary=2048, scale=100.0).fit(x)
    rms, worst = tokenizer.floor()
    formula = replace(tokenizer, rms=()).floor()[0]
    np.testing.assert_allclose(formula, 1 / (100 * np.sqrt(12)))
    np.testing.assert_allclose(rms, formula, rtol=0.02)
    basis = idct(np.eye(H), axis=0, norm="ortho")  # [h, j]
    hardest = np.abs(basis).sum(1).argmax()
    spectrum = 0.4999 / 100 * np.sign(basis[hardest])
    chunk = np.tile((basis @ spectrum)[:, None], (1, A))[None]
    assert np.abs(chunk).max() == pytest.approx(worst[0], rel=1e-3)
    assert not coefficients(chunk, 100.0).any()


def test_whole_pieces_are_never_longer_here(io) -> None:
    """Splitting at letters and digits, which the published pipeline does, costs tokens."""
    x = io["input.bpe_train"]
    lengths = {p: FastConfig(pieces=p).fit(x).encode(x).valid.sum(1).mean() for p in ("byte_level", "whole")}
    assert lengths["whole"] < lengths["byte_level"]


def test_padded_steps_repeat_the_last_valid_action() -> None:
    x, valid = smooth(), np.ones((40, H), bool)
    valid[::3, 5:] = False
    poisoned, held = x.copy(), x.copy()
    poisoned[~valid] = np.nan
    held[::3, 5:] = x[::3, 4:5]
    clean, dirty = FastConfig(vocabulary=300).fit(x, valid), FastConfig(vocabulary=300).fit(poisoned, valid)
    assert clean == dirty == FastConfig(vocabulary=300).fit(held)
    np.testing.assert_array_equal(clean.encode(x, valid).ids, clean.encode(poisoned, valid).ids)
    np.testing.assert_array_equal(clean.encode(x, valid).ids, clean.encode(held).ids)
    assert clean.count_clipped(poisoned, valid)[0].tolist() == clean.count_clipped(held)[0].tolist()
    with pytest.raises(InputError, match="chunk 1 has no valid step"):
        clean.encode(x[:2], np.array([[True] * H, [False] * H]))


def test_invalid_steps_at_the_start_repeat_the_first_valid_action(small) -> None:
    x, valid = smooth(1), np.ones((1, H), bool)
    valid[:, :3] = False
    held = x.copy()
    held[:, :3] = x[:, 3:4]
    np.testing.assert_array_equal(
        small.encode(np.where(valid[..., None], x, np.inf), valid).ids, small.encode(held).ids
    )


def test_rows_do_not_depend_on_each_other_and_shapes_are_not_remembered(small) -> None:
    x = smooth(6, seed=3)
    together = small.encode(x)
    for b in range(6):
        alone = small.encode(x[b : b + 1])
        np.testing.assert_array_equal(alone.ids[0], together.ids[b][together.valid[b]])
    before = small.decode(together, H, A).chunks
    other = small.encode(x.reshape(6, H * A, 1))
    small.decode(other, H * A, 1)
    np.testing.assert_array_equal(small.decode(together, H, A).chunks, before)
    # The same coefficients read with other H and A: the caller's decision alone.
    assert not small.decode(together, H * A, 1).malformed.any()
    assert small.decode(together, H, A + 1).malformed.all()


def test_T05_every_damage_has_its_reason(small) -> None:
    good = small.encode(smooth(1)).ids[0].tolist()
    end, body = small.end, good[:-1]
    damaged = {
        "length": [*body[:-3], end],
        "length: expected 24 coefficients, got": [*body, *body[:3], end],
        "unknown id": [*body[:-1], small.vocabulary + 7, end],
        "no end token": body,
        "behind the end token": [*body, end, end],
        "got 0": [end],
    }
    tokens = packed(list(damaged.values()))
    for policy in ("repair", "repeat"):
        found = replace(small, on_malformed=policy).decode(tokens, H, A)
        assert found.malformed.all()
        assert found.decided.tolist() == [policy == "repair"] * len(damaged)
        for reason, wanted in zip(found.reasons, damaged, strict=True):
            assert wanted in reason
    repaired = replace(small, on_malformed="repair").decode(tokens, H, A).chunks
    whole = small.decode(packed([good]), H, A).chunks[0]
    np.testing.assert_array_equal(repaired[3], whole)
    np.testing.assert_array_equal(repaired[1], whole)
    nothing = small.decode(Tokens(np.zeros((1, 1), np.int64), np.zeros((1, 1), bool)), H, A)
    assert nothing.reasons == ("no end token, length: expected 24 coefficients, got 0",)


def test_T06_malformed_rows_are_counted_beside_good_ones(small) -> None:
    rows = [small.encode(smooth(1, seed)).ids[0].tolist() for seed in range(10)]
    for b in (3, 9):
        rows[b] = rows[b][1:]
    found = small.decode(packed(rows), H, A)
    assert np.flatnonzero(found.malformed).tolist() == [3, 9]
    assert [r != "" for r in found.reasons] == found.malformed.tolist()
    assert np.flatnonzero(~found.decided).tolist() == [3, 9]


def test_broken_bytes_are_no_coefficient() -> None:
    """Half of a two-byte character decodes to U+FFFD; read as a coefficient it would be an action of thousands."""
    x = 4 * smooth(200)
    tokenizer = FastConfig(scale=20.0, vocabulary=2000, on_malformed="repair").fit(x)
    assert tokenizer.high - tokenizer.low > 128
    lead = tokenizer.pairs.tokens.index("\u00c2")  # the first byte of U+0080..U+00BF, in the byte-level alphabet
    found = tokenizer.decode(packed([[lead] * (H * A) + [tokenizer.end]]), H, A)
    assert "no coefficient" in found.reasons[0]
    assert np.abs(found.chunks).max() == 0
    assert found.malformed.all()


@given(st.lists(st.integers(-2, 400), max_size=40), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_any_ids_give_a_chunk_or_a_flag(small, ids, h, a) -> None:
    found = replace(small, on_malformed="repair").decode(packed([ids, [0]]), h, a)
    assert found.chunks.shape == (2, h, a)
    assert np.isfinite(found.chunks).all()
    bound = (small.high - small.low) / small.scale * np.sqrt(h * 2)
    assert np.abs(found.chunks).max() <= bound


def test_T07_outliers_saturate_and_are_counted(small) -> None:
    """Coefficients that would be surrogates (0xD800..0xDFFF) or beyond the last code point (0x10FFFF)."""
    for coefficient in (0xD800 + small.low + 5, 0xDFFF, 0x110000, 10**9, -(10**9), 1e300):
        value = coefficient / small.scale / np.sqrt(H)
        x = np.zeros((1, H, A))
        x[..., 1] = value
        counts, total = small.count_clipped(x)
        assert (counts.tolist(), total) == ([0, 1, 0], H)
        found = small.decode(small.encode(x), H, A)
        assert not found.malformed.any()
        reached = (small.high if value > 0 else small.low) / small.scale / np.sqrt(H)
        np.testing.assert_allclose(found.chunks[0, :, 1], reached, rtol=0.05)
        assert np.abs(found.chunks[0, :, [0, 2]]).max() == 0


def test_T07_an_outlier_in_the_training_set_cannot_fill_the_alphabet() -> None:
    x = smooth()
    x[0, :, 0] = 1e5
    tokenizer = FastConfig(vocabulary=300).fit(x)
    assert tokenizer.high == np.ceil(4 * np.sqrt(H) * 10)
    assert tokenizer.count_clipped(x)[0].tolist() == [1, 0, 0]
    with pytest.raises(ConfigError, match="Lower scale"):
        FastConfig(vocabulary=300, reach=1e4).fit(x)
    with pytest.raises(ConfigError):
        FastTokenizer(tokenizer.pairs, 10.0, 0, 0xD800, H, A, 0)


def test_a_coefficient_that_training_never_saw_is_not_lost(io, published) -> None:
    """Byte-level BPE knows only bytes it has met: coefficient -47 (character 1) is none of them. The library drops it
    in silence and the chunk no longer decodes; here it becomes a neighbour and is counted."""
    assert published.pairs.library.encode(chr(1)).ids == []
    x = np.zeros((1, 16, 7))
    x[0, :, 2] = -47 / 10 / 4
    found = published.decode(published.encode(x), 16, 7)
    assert not found.malformed.any()
    np.testing.assert_allclose(found.chunks[0, :, 2], x[0, :, 2], atol=0.1 / 4 + 1e-6)
    assert published.count_clipped(x)[0].tolist() == [0, 0, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("pieces", ["byte_level", "whole"])
def test_a_margin_writes_what_training_did_not_show(pieces) -> None:
    x = smooth(200)
    wide = FastConfig(pieces=pieces, margin=1.0).fit(x)
    assert wide._writable.all()
    larger = 2 * smooth(50, seed=5)
    assert FastConfig(pieces=pieces).fit(x).count_clipped(larger)[0].sum() > 0
    assert wide.count_clipped(larger)[0].sum() == 0
    found = wide.decode(wide.encode(larger), H, A)
    assert not found.malformed.any()
    assert (np.abs(found.chunks - larger) <= wide.floor()[1] + 1e-6).all()


def test_T08_more_scale_is_less_error_and_more_tokens() -> None:
    x = smooth(300)
    errors, lengths = [], []
    for scale in (1.0, 3.0, 10.0, 30.0, 100.0):
        tokenizer = FastConfig(scale=scale, vocabulary=2048).fit(x)
        tokens = tokenizer.encode(x)
        errors.append(np.sqrt(((tokenizer.decode(tokens, H, A).chunks - x) ** 2).mean()))
        lengths.append(tokens.valid.sum(1).mean())
    assert errors == sorted(errors, reverse=True)
    assert lengths == sorted(lengths)


def test_T10_every_sequence_ends_with_the_end_token(small) -> None:
    tokens = small.encode(smooth(20, seed=1))
    assert small.end == small.vocabulary - 1
    last = tokens.valid.sum(1) - 1
    assert (tokens.ids[np.arange(20), last] == small.end).all()
    assert ((tokens.ids == small.end).sum(1) == 1).all()
    assert not tokens.ids[~tokens.valid].any()
    assert (tokens.valid[:, :-1] >= tokens.valid[:, 1:]).all()


def test_settings_and_files_that_mean_nothing_are_refused(small) -> None:
    for bad in (
        {"scale": 0.0},
        {"scale": float("nan")},
        {"vocabulary": 0},
        {"min_frequency": 1.5},
        {"reach": -1.0},
        {"margin": -0.5},
        {"pieces": "words"},
        {"on_malformed": "zeros"},
    ):
        with pytest.raises(ConfigError):
            FastConfig(**bad)
    with pytest.raises(InputError):
        FastConfig().fit(smooth(), np.zeros((40, H), bool))
    data = small.to_json()
    for change in (
        {"kind": "bins"},
        {"merges": [["a", "nothing"]]},
        {"merges": 3},
        {"tokens": ["a", "a"]},
        {"pieces": "words"},
    ):
        with pytest.raises(CheckpointError):
            FastTokenizer.from_json(data | change)
    with pytest.raises(CheckpointError, match="scale"):
        FastTokenizer.from_json({k: v for k, v in data.items() if k != "scale"})
    library = json.loads((GOLDEN / "tokenizer.json").read_text())
    for wrong in (
        "x",
        "{}",
        json.dumps(library | {"pre_tokenizer": None}),
        json.dumps(library | {"added_tokens": [1]}),
    ):
        with pytest.raises(CheckpointError):
            FastTokenizer.published(wrong, -48, 16, 7)
