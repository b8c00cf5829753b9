"""Bin tokenizers: the published numbers, exact errors, edges, ties, padding, and the way through text ids."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vola.cite import bibliography
from vola.errors import CheckpointError, ConfigError, InputError
from vola.theory.quantisation import CONVENTIONS
from vola.tokenizers.actions import Tokens
from vola.tokenizers.bins import (
    BinTokenizer,
    QuantileBins,
    UniformBins,
    from_text_ids,
    integers_from_text,
    integers_text,
    state_bins,
    to_text_ids,
)

H, A = 4, 3


def chunks(B: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (B, H, A))


def line(tokenizer: BinTokenizer, values) -> tuple[np.ndarray, np.ndarray]:
    """Ids and decoded numbers of single values."""
    x = np.asarray(values, float).reshape(-1, 1, 1)
    tokens = tokenizer.encode(x)
    return tokens.ids[:, 0], tokenizer.decode(tokens, 1, 1).chunks[:, 0, 0]


ONE = np.zeros((1, 1, 1))


def test_golden_openvla() -> None:
    ids, values = line(UniformBins(256, "edges").fit(ONE), [-1, -0.5, 0, 0.5, 0.9999, 1.0])
    np.testing.assert_array_equal(to_text_ids(ids, 32000), [31999, 31936, 31872, 31808, 31745, 31744])
    np.testing.assert_allclose(values, [-0.996078, -0.501961, 0, 0.501961, 0.996078, 0.996078], atol=5e-7)


def test_golden_rt1() -> None:
    ids, values = line(UniformBins(256, "truncated").fit(ONE), [-1, -0.5, 0, 0.5, 1])
    np.testing.assert_array_equal(ids, [0, 63, 127, 191, 255])
    np.testing.assert_allclose(values, [-1, -0.505882, -0.003922, 0.498039, 1], atol=5e-7)


def test_edges_are_numpy_digitize() -> None:
    x = np.concatenate([np.random.default_rng(0).uniform(-1, 1, 500), np.linspace(-1, 1, 256)])
    ids, _ = line(UniformBins(256, "edges").fit(ONE), x)
    np.testing.assert_array_equal(ids + 1, np.digitize(x, np.linspace(-1, 1, 256)))


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("K", [2, 7, 16])
def test_floor_is_the_exact_integral(convention, K) -> None:
    tokenizer = UniformBins(K, convention).fit(ONE)

    def error(x: float) -> float:
        return float(x - tokenizer.centres[0, np.searchsorted(tokenizer.edges[0], x, side="right")])

    cuts = [-1.0, *(e for e in tokenizer.edges[0] if e < 1), 1.0]
    square = sum(quad(lambda x: error(x) ** 2, a, b)[0] for a, b in zip(cuts[:-1], cuts[1:], strict=True)) / 2
    bias = sum(quad(error, a, b)[0] for a, b in zip(cuts[:-1], cuts[1:], strict=True)) / 2
    rms, worst = tokenizer.floor()
    assert rms[0] == pytest.approx(np.sqrt(square))
    assert bias == pytest.approx(1 / (K - 1) if convention == "truncated" else 0, abs=1e-9)
    dense = np.linspace(-1, 1, 20_001)
    assert max(abs(error(x)) for x in dense) <= worst[0] + 1e-12
    assert max(abs(error(x)) for x in dense) > 0.99 * worst[0]


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_order_is_step_by_step_and_dimension_by_dimension(convention) -> None:
    tokenizer = UniformBins(16, convention).fit(chunks())
    x = chunks(1)
    base = tokenizer.encode(x).ids
    assert tokenizer.longest(H, A) == base.shape[1] == H * A
    for h in range(H):
        for a in range(A):
            moved = x.copy()
            moved[0, h, a] = -1.0 if x[0, h, a] > 0 else 0.99
            changed = np.flatnonzero((tokenizer.encode(moved).ids != base)[0])
            np.testing.assert_array_equal(changed, [h * A + a])


@given(st.integers(2, 40), st.sampled_from([*CONVENTIONS, "quantile"]), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_decoded_values_are_fixed_points_and_errors_stay_below_worst(K, convention, seed) -> None:
    x = chunks(seed=seed)
    config = QuantileBins(K) if convention == "quantile" else UniformBins(K, convention)
    tokenizer = config.fit(x)
    once = tokenizer.decode(tokenizer.encode(x), H, A).chunks
    assert np.isfinite(once).all()
    assert (np.abs(once - x).max((0, 1)) <= tokenizer.floor()[1] + 1e-6).all()
    # decoded in float64: a decoded value that is an edge must fall into its own bin again
    exact = tokenizer.centres[np.arange(A), tokenizer.encode(x).ids.reshape(-1, H, A)]
    again = tokenizer.centres[np.arange(A), tokenizer.encode(exact).ids.reshape(-1, H, A)]
    np.testing.assert_array_equal(again, exact)


def test_quantile_floor_is_the_round_trip_of_the_training_values() -> None:
    x = np.random.default_rng(0).standard_t(2, (200, H, A))
    tokenizer = QuantileBins(16).fit(x)
    error = tokenizer.decode(tokenizer.encode(x), H, A).chunks - x
    rms, worst = tokenizer.floor()
    np.testing.assert_allclose(np.sqrt((error**2).mean((0, 1))), rms, rtol=1e-5)
    np.testing.assert_allclose(np.abs(error).max((0, 1)), worst, rtol=1e-5)
    counts = np.stack([np.bincount(tokenizer.encode(x).ids.reshape(-1, A)[:, a], minlength=16) for a in range(A)])
    assert (np.abs(counts - 50) <= 1).all()
    # Heavy tails: the bulk is finer than with equal widths over the same range, the tails are coarser.
    width = np.ptp(x, axis=(0, 1)) / 16
    assert (np.median(np.abs(error), (0, 1)) < width / 20).all()
    assert (worst > width).all()


def test_quantile_ties_and_constants() -> None:
    """A gripper that is open or closed, a constant, and an almost constant dimension with one outlier."""
    x = np.zeros((10, H, A))
    x[::2, :, 0] = 1.0
    x[:, :, 1] = 0.25
    x[3, 2, 2] = 9.0
    tokenizer = QuantileBins(8).fit(x)
    np.testing.assert_array_equal(tokenizer.decode(tokenizer.encode(x), H, A).chunks[..., :2], x[..., :2])
    assert (tokenizer.centres[:, 0] == [0, 0.25, 9 / 40]).all()
    every = Tokens(np.tile(np.arange(8)[:, None], (1, A)), np.ones((8, A), bool))
    decoded = tokenizer.decode(every, 1, A)
    assert not decoded.malformed.any()
    np.testing.assert_array_equal(decoded.chunks[:, 0, 1], 0.25)
    np.testing.assert_array_equal(decoded.chunks[:, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1])


@pytest.mark.parametrize("config", [UniformBins(16), QuantileBins(16)])
def test_padded_steps_have_no_influence(config) -> None:
    x, valid = chunks(), np.ones((5, H), bool)
    valid[1, 2:] = valid[4, 3:] = False
    poisoned = x.copy()
    poisoned[~valid] = np.nan
    clean, dirty = config.fit(x, valid), config.fit(poisoned, valid)
    assert clean.to_json() == dirty.to_json()
    a, b = clean.encode(x, valid), dirty.encode(poisoned, valid)
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.valid, np.repeat(valid, A, 1))
    assert not a.ids[~a.valid].any()
    for first, second in zip(clean.count_clipped(x, valid), dirty.count_clipped(poisoned, valid), strict=True):
        np.testing.assert_array_equal(first, second)
    if isinstance(config, QuantileBins):
        assert config.fit(x).to_json() != clean.to_json()


@pytest.mark.parametrize("config", [*(UniformBins(16, c) for c in CONVENTIONS), QuantileBins(16)])
def test_json_is_exact(config) -> None:
    x = chunks()
    x[..., 1] = 0.5
    tokenizer = config.fit(x)
    text = json.dumps(tokenizer.to_json(), allow_nan=False)
    again = BinTokenizer.from_json(json.loads(text))
    assert again.to_json() == tokenizer.to_json()
    np.testing.assert_array_equal(again.encode(x).ids, tokenizer.encode(x).ids)
    np.testing.assert_array_equal(again.edges, tokenizer.edges)


def test_damaged_json_is_refused() -> None:
    data = UniformBins(4).fit(ONE).to_json()
    for change in ({"kind": "fast"}, {"centres": []}, {"edges": [[0.5, 0.1]]}, {"edges": [[0.1] * 9]}):
        with pytest.raises(CheckpointError):
            BinTokenizer.from_json(data | change)
    with pytest.raises(CheckpointError, match="limits"):
        BinTokenizer.from_json({k: v for k, v in data.items() if k != "limits"})


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_T03_edges_outside_values_and_foreign_ids(convention) -> None:
    tokenizer = UniformBins(256, convention).fit(ONE)
    inside = [-1, 1, -0.999999, 0.999999, 0.3]
    _, values = line(tokenizer, inside)
    half = 2 / 255 * (1 if convention == "truncated" else 0.5)
    assert np.abs(values - inside).max() <= half + 1e-6
    ids, values = line(tokenizer, [1.7, -3.0])
    top, bottom = line(tokenizer, [1.0, -1.0])[1]
    np.testing.assert_array_equal(values, [top, bottom])
    counts, total = tokenizer.count_clipped(np.array([1.7, -3.0, *inside]).reshape(-1, 1, 1))
    assert (counts.tolist(), total) == ([2], 7)
    with pytest.raises(InputError, match=r"nan in chunk 0, step 0, dimension 0"):
        tokenizer.encode(np.full((1, 1, 1), np.nan))
    decoded = tokenizer.decode(Tokens(np.array([[-1], [256], [31999], [0]]), np.ones((4, 1), bool)), 1, 1)
    np.testing.assert_array_equal(decoded.malformed, [True, True, True, False])
    np.testing.assert_array_equal(decoded.decided, [False, False, False, True])
    assert np.isnan(decoded.chunks[:3]).all()
    assert "256" in decoded.reasons[1]


def test_T03_a_wrong_number_of_tokens_is_flagged() -> None:
    tokenizer = UniformBins(8).fit(chunks())
    tokens = tokenizer.encode(chunks(2))
    valid = tokens.valid.copy()
    valid[1, -1] = False
    decoded = tokenizer.decode(Tokens(tokens.ids, valid), H, A)
    np.testing.assert_array_equal(decoded.malformed, [False, True])
    assert decoded.reasons[1] == "length: expected 12 tokens, got 11"


def test_T03_text_ids_around_the_action_range() -> None:
    bins, foreign = from_text_ids(np.array([31999, 31744, 31743, 32000, 5]), 32000, 256)
    np.testing.assert_array_equal(bins, [0, 255, -1, -1, -1])
    np.testing.assert_array_equal(foreign, [False, False, True, True, True])
    tokenizer = UniformBins(256, "edges").fit(ONE)
    assert tokenizer.decode(Tokens(bins[:, None], np.ones((5, 1), bool)), 1, 1).malformed.tolist() == foreign.tolist()
    with pytest.raises(InputError):
        to_text_ids(np.array([300]), 256)


def test_T01_ids_survive_where_their_strings_do_not() -> None:
    """A text vocabulary whose last 256 words hold white space, multi-byte characters and words that merge."""
    words = {f"w{i}": i for i in range(1000)}
    odd = [" ", "\u00e9", "\u4f60\u597d", "ab", "a", "b", "\t", "\u00a0"]
    last = odd + [chr(0x4E00 + i) + (" " if i % 3 else "") for i in range(256 - len(odd))]
    words |= {w: 1000 + i for i, w in enumerate(last)}
    library = Tokenizer(models.WordLevel(words | {"?": len(words)}, unk_token="?"))
    library.pre_tokenizer, library.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    tokenizer = UniformBins(256).fit(np.zeros((1, 1, 8)))
    ids = np.tile(np.arange(256)[:, None], (1, 8))
    text_ids = to_text_ids(ids, len(words))
    damaged = library.encode(library.decode(text_ids[:, 0].tolist())).ids
    assert damaged != text_ids[:, 0].tolist()
    back, foreign = from_text_ids(text_ids, len(words), 256)
    assert not foreign.any()
    np.testing.assert_array_equal(back, ids)
    decoded = tokenizer.decode(Tokens(back, np.ones((256, 8), bool)), 1, 8)
    np.testing.assert_array_equal(tokenizer.encode(decoded.chunks).ids, ids)


def test_rt2_text() -> None:
    text = "1 128 91 241 5 101 127"
    ids = integers_from_text(text, 256, 7)
    assert integers_text(ids) == text
    for wrong in ("1 2 3", "1 128 91 241 5 101 256", "1 128 91 241 5 101 -1", "1 128 91 241 5 101 x", "", "1 " * 8):
        with pytest.raises(InputError):
            integers_from_text(wrong, 256, 7)


def test_T13_state_bins() -> None:
    found = state_bins(np.array([[-1, 1, -1.0001, 1.7, -2, 0]]).T.repeat(2, 1) * [1, 0.1], ("x", "y"))
    np.testing.assert_array_equal(found.ids[:, 0], [0, 255, 0, 255, 0, 128])
    assert found.outside == {"x": 3, "y": 0}
    assert state_bins(np.array([[0.9922, 0.9999]]), ("x", "y")).ids.tolist() == [[255, 255]]
    with pytest.raises(InputError, match="dimension y"):
        state_bins(np.array([[0, np.nan]]), ("x", "y"))
    with pytest.raises(ConfigError):
        state_bins(np.zeros((1, 2)), ("x", "x"))


def test_T13_state_bins_are_pi05_s_inside_the_range() -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (500, 1))
    published = np.digitize(x, np.linspace(-1, 1, 257)[:-1]) - 1
    np.testing.assert_array_equal(state_bins(x, ("x",)).ids, published)


def test_what_does_not_fit_is_refused() -> None:
    tokenizer = UniformBins(8).fit(chunks())
    tokens = tokenizer.encode(chunks())
    for bad in (
        lambda: tokenizer.encode(np.zeros((2, H, A + 1))),
        lambda: tokenizer.encode(np.zeros((H, A))),
        lambda: tokenizer.encode(chunks(), np.ones((5, H + 1), bool)),
        lambda: tokenizer.encode(chunks(), np.ones((5, H))),
        lambda: tokenizer.decode(tokens, H, A + 1),
        lambda: tokenizer.decode(tokens, 0, A),
        lambda: tokenizer.decode(Tokens(tokens.ids.astype(float), tokens.valid), H, A),
        lambda: QuantileBins(8).fit(chunks(), np.zeros((5, H), bool)),
    ):
        with pytest.raises(InputError):
            bad()
    for bad in (lambda: UniformBins(1), lambda: UniformBins(8, "floor"), lambda: QuantileBins(0)):
        with pytest.raises(ConfigError):
            bad()


def test_sources_are_found() -> None:
    assert [s.paper[:3] for s in bibliography((UniformBins(), QuantileBins()))] == ["Bro", "Kim", "Max"]
