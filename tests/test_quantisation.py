"""Quantisation mathematics against brute force: integrals, sampling, exhaustive search."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.fft import dct
from scipy.integrate import quad
from scipy.linalg import toeplitz
from scipy.stats import norm

from vola.errors import ConfigError, InputError
from vola.theory.quantisation import (
    CONVENTIONS,
    SHAPE_LOSS,
    bin_bias,
    bin_distortion,
    bin_width,
    bin_worst,
    bits_per_chunk,
    coding_gain,
    dct_variances,
    entropy,
    gaussian_distortion,
    gaussian_rate,
    reverse_water_filling,
    success_within,
)

SPECTRA = st.lists(st.floats(0, 10), min_size=1, max_size=8).filter(lambda v: sum(v) > 1e-3)


def decoded(x: np.ndarray, K: int, R: float, convention: str) -> np.ndarray:
    """The published rules, written out, on [0, R)."""
    if convention == "truncated":
        return np.trunc(x / R * (K - 1)) * R / (K - 1)
    n = K if convention == "midpoint" else K - 1
    return (np.floor(x / R * n) + 0.5) * R / n


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize(("K", "R"), [(2, 2.0), (16, 2.0), (255, 0.5)])
def test_distortion_bias_and_worst_by_sampling_a_uniform(convention, K, R) -> None:
    x = (np.arange(400_000) + 0.5) / 400_000 * R
    error = x - decoded(x, K, R, convention)
    w = bin_width(K, R, convention)
    assert (error**2).mean() == pytest.approx(bin_distortion(K, R, convention), rel=1e-3)
    assert error.mean() == pytest.approx(bin_bias(K, R, convention), abs=1e-3 * w)
    assert np.abs(error).max() == pytest.approx(bin_worst(K, R, convention), rel=2e-3)
    assert bin_distortion(K, 3 * R, convention) == pytest.approx(9 * bin_distortion(K, R, convention))


def test_round_trip_figures_of_the_insert_task() -> None:
    for K, rms in ((16, 0.0361), (32, 0.0180), (64, 0.0090), (256, 0.00226)):
        assert np.sqrt(bin_distortion(K)) == pytest.approx(rms, abs=5e-5)


# shared/reference/calibration.md section 5, rows "predicted".
PREDICTED = {
    16: (0.16, 0.24, 0.32, 0.48, 0.64, 0.79, 0.92),
    32: (0.32, 0.48, 0.63, 0.87, 0.98, 1.0, 1.0),
    64: (0.55, 0.75, 0.88, 0.99, 1.0, 1.0, 1.0),
    256: (0.72, 0.89, 0.97, 1.0, 1.0, 1.0, 1.0),
}


@pytest.mark.parametrize("K", PREDICTED)
def test_success_within_reproduces_the_measured_table_s_predictions(K) -> None:
    found = [success_within(t, K, 2.0, 0.009) for t in (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06)]
    np.testing.assert_allclose(found, PREDICTED[K], atol=0.0075)


@given(st.floats(0, 0.3), st.integers(2, 300), st.floats(1e-6, 0.3))
@settings(max_examples=40, deadline=None)
def test_success_within_is_the_integral(tolerance, K, sigma) -> None:
    a = 1 / K

    def inside(u: float) -> float:
        return float(norm.cdf((tolerance - u) / sigma) - norm.cdf((-tolerance - u) / sigma)) / (2 * a)

    corners = [c for c in (-tolerance, tolerance) if -a < c < a]
    nodes = sorted({-a, a, *(np.clip(c + d * sigma, -a, a) for c in corners for d in (-8, -2, 0, 2, 8))})
    expected = sum(quad(inside, low, high)[0] for low, high in zip(nodes[:-1], nodes[1:], strict=True))
    assert success_within(tolerance, K, 2.0, sigma) == pytest.approx(expected, abs=1e-7)


def test_success_within_limits() -> None:
    assert success_within(0.03, 16) == pytest.approx(0.03 * 16)
    assert success_within(0.03, 16, sigma=1e-9) == pytest.approx(0.48, abs=1e-6)
    assert success_within(1.0, 16, sigma=1e-3) == 1.0
    assert success_within(0.0, 16, sigma=0.1) == pytest.approx(0.0, abs=1e-12)
    # The two branches meet where the bin is far narrower than sigma.
    for K in (10**6, 2 * 10**6):
        assert success_within(0.1, K, sigma=0.1) == pytest.approx(2 * norm.cdf(1) - 1, abs=1e-9)
    rates = [success_within(0.03, K, sigma=0.009) for K in (8, 16, 32, 64)]
    assert rates == sorted(rates)


@given(st.floats(1e-6, 1e6), st.floats(0, 20))
def test_rate_and_distortion_are_inverse(variance, rate) -> None:
    assert gaussian_rate(variance, gaussian_distortion(variance, rate)) == pytest.approx(rate, abs=1e-9)
    assert gaussian_rate(variance, 2 * variance) == 0
    assert gaussian_rate(0.0, 1.0) == 0


def test_shape_loss_is_the_gap_of_a_uniform_quantiser() -> None:
    """Entropy of a finely quantised Gaussian minus R(D) of the distortion that it has."""
    w = 0.01
    edges = (np.arange(-1200, 1202) - 0.5) * w
    mass = np.diff(norm.cdf(edges))
    assert entropy(mass) - gaussian_rate(1.0, w * w / 12) == pytest.approx(SHAPE_LOSS, abs=1e-3)


@given(SPECTRA, st.floats(0.01, 0.99))
@settings(deadline=None)
def test_reverse_water_filling_meets_its_conditions(values, share) -> None:
    variances = np.array(values)
    total = share * variances.sum()
    found = reverse_water_filling(variances, total)
    assert found.distortions.sum() == pytest.approx(total, rel=1e-9)
    np.testing.assert_allclose(found.distortions, np.minimum(found.level, variances), rtol=1e-12)
    active = variances > found.level
    np.testing.assert_allclose(found.rates[active], 0.5 * np.log2(variances[active] / found.distortions[active]))
    assert not found.rates[~active].any()


@given(SPECTRA, st.floats(0.05, 0.9), st.integers(0, 99))
@settings(deadline=None)
def test_no_other_allocation_needs_fewer_bits(values, share, seed) -> None:
    variances = np.array(values)
    total = share * variances.sum()
    best = reverse_water_filling(variances, total).bits
    weights = np.random.default_rng(seed).dirichlet(np.ones(len(variances)))
    other = np.minimum(variances, weights * total) + 1e-300
    rates = np.where(variances > 0, np.maximum(0, 0.5 * np.log2(np.maximum(variances, 1e-300) / other)), 0)
    assert rates.sum() >= best - 1e-6


def test_water_filling_of_nothing_and_of_one() -> None:
    assert reverse_water_filling(np.array([1.0, 2.0]), 3.0).bits == 0
    one = reverse_water_filling(np.array([4.0]), 1.0)
    assert (one.bits, one.level) == (1.0, 1.0)
    order = np.array([3.0, 0.0, 1.0, 2.0])
    np.testing.assert_array_equal(
        reverse_water_filling(order, 1.0).rates, reverse_water_filling(np.sort(order), 1.0).rates[[3, 0, 1, 2]]
    )


def test_dct_variances_are_those_of_sampled_sequences() -> None:
    rng = np.random.default_rng(0)
    root = rng.standard_normal((8, 8))
    samples = rng.standard_normal((200_000, 8)) @ root.T
    found = dct_variances(root @ root.T)
    np.testing.assert_allclose(found, dct(samples, axis=1, norm="ortho").var(0), rtol=0.02)
    assert found.sum() == pytest.approx(np.trace(root @ root.T))


def test_coding_gain_of_known_sources() -> None:
    assert coding_gain(dct_variances(np.eye(16))) == pytest.approx(1.0)
    # Jayant, Noll 1984: AR(1) with correlation 0.95, block 8: 8.83 dB for the DCT.
    ar = dct_variances(toeplitz(0.95 ** np.arange(8)))
    assert 10 * np.log10(coding_gain(ar)) == pytest.approx(8.83, abs=0.01)
    assert coding_gain(np.array([1.0, 0.0])) == np.inf
    # Never above the prediction gain 1/(1 - rho^2), which long blocks approach.
    gains = [coding_gain(dct_variances(toeplitz(0.9 ** np.arange(H)))) for H in (2, 8, 32, 128)]
    assert gains == sorted(gains)
    assert gains[-1] < 1 / (1 - 0.81)


def test_entropy_and_bits() -> None:
    assert entropy(np.array([5, 5, 5, 5])) == pytest.approx(2.0)
    assert entropy(np.array([7, 0])) == 0.0
    assert bits_per_chunk(np.array([10, 20]), np.array([1, 1])) == pytest.approx(15.0)


def test_what_means_nothing_is_refused() -> None:
    for bad in (lambda: bin_width(1), lambda: bin_width(2.5), lambda: bin_width(8, -1.0), lambda: bin_width(8, 2, "x")):
        with pytest.raises(ConfigError):
            bad()
    for bad in (
        lambda: success_within(-1, 8),
        lambda: success_within(0.1, 8, sigma=np.nan),
        lambda: gaussian_rate(1, 0),
        lambda: gaussian_distortion(-1, 0),
        lambda: reverse_water_filling(np.array([]), 1.0),
        lambda: reverse_water_filling(np.array([1.0]), 0.0),
        lambda: reverse_water_filling(np.array([-1.0, 2.0]), 0.5),
        lambda: dct_variances(np.array([[1.0, 0.0], [0.5, 1.0]])),
        lambda: coding_gain(np.zeros(3)),
        lambda: entropy(np.zeros(3)),
        lambda: bits_per_chunk(np.array([]), np.array([1])),
    ):
        with pytest.raises(InputError):
            bad()
