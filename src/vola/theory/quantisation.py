"""What it costs to write actions as integers: error of a uniform quantiser, rate-distortion bounds, transform coding.

Lengths carry whatever unit the range has (R = 2 for normalised actions in [-1, 1]); distortions are mean squared
errors in that unit squared; rates are in bits. A law that holds only where bins are narrow says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

import numpy as np
from scipy.fft import dct
from scipy.special import ndtr

from vola.cite import Source
from vola.errors import ConfigError, InputError

Convention = Literal["midpoint", "truncated", "edges"]
CONVENTIONS: tuple[str, ...] = get_args(Convention)

# Entropy-coded uniform quantisation needs this many bits per number more than R(D), at any smooth density and high
# rate: 1/2 log2(pi e / 6) = 0.2546 (Gish, Pierce 1968, IEEE Trans. Inf. Theory 14:676).
SHAPE_LOSS = float(0.5 * np.log2(np.pi * np.e / 6))

SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "uniform": Source(
            "Bennett, Spectra of quantized signals, 1948",
            "section III",
            "D = w^2/12 for midpoint decoding; w = R/K for K bins, R/(K - 1) for K edges",
        ),
        "rate_distortion": Source(
            "Cover, Thomas, Elements of Information Theory, 2nd edition, 2006",
            "theorems 10.3.2 and 10.3.3",
            "rates in bits, distortion = mean squared error",
        ),
        "coding_gain": Source(
            "Jayant, Noll, Digital Coding of Waveforms, 1984",
            "eq. 12.2 (transform coding gain)",
            "a ratio of variances; bits saved per number = log2(gain)/2",
        ),
    }
)


def bin_width(K: int, R: float = 2.0, convention: Convention = "midpoint") -> float:
    """w, the spacing of decoded values: R/K for K bins ("midpoint"), R/(K - 1) for K edges ("truncated", "edges").

    midpoint: K equal bins, decoded to their centres. truncated (RT-1): clip, scale to [0, K - 1], truncate, decode
    to the lower end. edges (OpenVLA): K equally spaced edges, K - 1 centres; the last id only stands for the maximum.

    Raises:
        ConfigError: K below 2 or no whole number, R not positive, an unknown convention.
    """
    if not isinstance(K, int) or isinstance(K, bool) or K < 2:
        raise ConfigError(f"K: expected a whole number of bins >= 2, got {K!r}")
    if not (np.isfinite(R) and R > 0):
        raise ConfigError(f"R: expected a positive range (2 for actions in [-1, 1]), got {R!r}")
    if convention not in CONVENTIONS:
        raise ConfigError(f"convention: expected one of {CONVENTIONS}, got {convention!r}")
    return R / K if convention == "midpoint" else R / (K - 1)


def bin_bias(K: int, R: float = 2.0, convention: Convention = "midpoint") -> float:
    """E[x - decoded]: w/2 for truncated (decoded values are too low), else 0. Same limits as ``bin_distortion``."""
    width = bin_width(K, R, convention)
    return width / 2 if convention == "truncated" else 0.0


def bin_distortion(K: int, R: float = 2.0, convention: Convention = "midpoint") -> float:
    """D(K) = E[(x - decoded)^2]: w^2/12, and w^2/12 + (w/2)^2 = w^2/3 for truncated; see ``bin_width``.

    Exact for a density that is uniform inside every bin; otherwise the limit of many bins. Values outside the range
    add their clipping error. Source: ``SOURCES["uniform"]``.
    """
    return bin_width(K, R, convention) ** 2 / 12 + bin_bias(K, R, convention) ** 2


def bin_worst(K: int, R: float = 2.0, convention: Convention = "midpoint") -> float:
    """Largest |x - decoded| inside the range: w/2, or w for truncated (a supremum, not reached). For any density."""
    width = bin_width(K, R, convention)
    return width if convention == "truncated" else width / 2


def success_within(tolerance: float, K: int, R: float = 2.0, sigma: float = 0.0) -> float:
    """P(|u + sigma z| <= tolerance), u uniform in +-R/2K (midpoint bins), z standard normal, independent.

    With a = R/2K and G(x) = x Phi(x) + phi(x), the antiderivative of Phi,
        P = sigma/2a [G((t+a)/sigma) - G((t-a)/sigma) - G((a-t)/sigma) + G((-a-t)/sigma)];
    sigma = 0: min(1, t/a). It is the success rate of a policy that must place one number within ``tolerance``, whose
    own error is N(0, sigma^2) and which answers in K bins; K = 16, R = 2, sigma = 0.009, t = 0.03 gives 0.48.
    Limits: one decisive number, executed open loop (with feedback or offsets the errors do not simply stay).
    Source: convolution of the two densities.

    Raises:
        ConfigError: as ``bin_width``. InputError: a negative or non-finite tolerance or sigma.
    """
    a = bin_width(K, R) / 2
    if not (np.isfinite(tolerance) and np.isfinite(sigma) and tolerance >= 0 and sigma >= 0):
        raise InputError(f"success_within: expected tolerance >= 0 and sigma >= 0, got {tolerance!r}, {sigma!r}")
    if sigma <= 1e-9 * a:
        return float(min(1.0, tolerance / a))
    if a <= 1e-5 * sigma:  # the differences of G would cancel; what is left out is of order (a/sigma)^2
        return float(ndtr(tolerance / sigma) - ndtr(-tolerance / sigma))
    x = np.array([tolerance + a, tolerance - a, a - tolerance, -a - tolerance]) / sigma
    G = x * ndtr(x) + np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    return float(np.clip(sigma / (2 * a) * (G[0] - G[1] - G[2] + G[3]), 0.0, 1.0))


def gaussian_rate(variance: float, distortion: float) -> float:
    """R(D) = max(0, log2(variance/D)/2) bits per number of a memoryless Gaussian source.

    No code does better for a Gaussian; any other source of that variance needs at most this much.
    Source: ``SOURCES["rate_distortion"]``. Raises InputError unless variance >= 0 and distortion > 0.
    """
    if not (variance >= 0 and distortion > 0):
        raise InputError(f"gaussian_rate: expected variance >= 0 and distortion > 0, got {variance}, {distortion}")
    return float(max(0.0, 0.5 * np.log2(variance / distortion))) if variance > 0 else 0.0


def gaussian_distortion(variance: float, rate: float) -> float:
    """D(R) = variance 2^(-2 rate): the inverse of ``gaussian_rate``; every bit takes 6.02 dB.

    Raises:
        InputError: a negative variance or rate.
    """
    if not (variance >= 0 and rate >= 0):
        raise InputError(f"gaussian_distortion: expected variance >= 0 and rate >= 0, got {variance}, {rate}")
    return float(variance * 2.0 ** (-2 * rate))


@dataclass(frozen=True)
class WaterFilling:
    """Optimal allocation to independent Gaussian components: distortions (n) = min(level, variance), rates (n) bits."""

    level: float
    distortions: np.ndarray
    rates: np.ndarray

    @property
    def bits(self) -> float:
        """Bits for all components together."""
        return float(self.rates.sum())


def reverse_water_filling(variances: np.ndarray, distortion: float) -> WaterFilling:
    """The fewest bits that describe independent Gaussians (n) with a TOTAL squared error ``distortion``.

    D_i = min(level, var_i) with sum D_i = distortion, rate_i = max(0, log2(var_i/level)/2): components below the
    water level get nothing. With ``variances`` the spectrum of a chunk (``dct_variances``) this bounds the bits per
    chunk. Limits: Gaussian, long blocks; real codes need ``SHAPE_LOSS`` bits more per active component.
    Source: ``SOURCES["rate_distortion"]``.

    Raises:
        InputError: no variance, a negative or non-finite one, or a distortion that is not positive.
    """
    spectrum = _variances(variances)
    total = float(spectrum.sum())
    if not (np.isfinite(distortion) and distortion > 0):
        raise InputError(f"distortion: expected a positive total squared error, got {distortion!r}")
    if distortion >= total:
        return WaterFilling(float(spectrum.max()), spectrum.copy(), np.zeros_like(spectrum))
    # With the j smallest components drowned the level is (distortion - their sum) / (n - j); the right j is the
    # first whose level does not reach the next component.
    ordered = np.sort(spectrum)
    drowned = np.concatenate([[0.0], np.cumsum(ordered)[:-1]])
    levels = (distortion - drowned) / np.arange(len(ordered), 0, -1)
    level = float(levels[int(np.argmax(levels <= ordered))])
    active = spectrum > level
    rates = np.zeros_like(spectrum)
    rates[active] = 0.5 * np.log2(spectrum[active] / level)
    return WaterFilling(level, np.minimum(level, spectrum), rates)


def dct_variances(covariance: np.ndarray) -> np.ndarray:
    """Variances (H) of the orthonormal DCT-II coefficients of a sequence with this covariance (H, H).

    The diagonal of C S C^T; their sum is the trace of S. Source: Ahmed, Natarajan, Rao 1974, IEEE Trans. Comp. 23:90.

    Raises:
        InputError: not a finite symmetric square matrix.
    """
    S = np.asarray(covariance, np.float64)
    if S.ndim != 2 or S.shape[0] != S.shape[1] or not S.size or not np.isfinite(S).all():
        raise InputError(f"covariance: expected a finite matrix (H, H), got shape {S.shape}")
    if not np.allclose(S, S.T, rtol=1e-9, atol=1e-12 * max(1.0, float(np.abs(S).max()))):
        raise InputError("covariance: expected a symmetric matrix. Pass E[x x^T], not a regression matrix.")
    C = dct(np.eye(len(S)), norm="ortho", axis=0)
    # Rounding must not turn a variance of zero into a negative one.
    return np.maximum(np.einsum("ij,jk,ik->i", C, S, C), 0.0)


def coding_gain(variances: np.ndarray) -> float:
    """Arithmetic over geometric mean of coefficient variances (n): how much smaller D is at the same bits.

    log2(gain)/2 bits per number are saved against coding the steps one by one. 1 for white noise, infinite where a
    component is constant. Limits: high rate (every component above the water level).
    Source: ``SOURCES["coding_gain"]``. Raises InputError for negative, non-finite or all-zero variances.
    """
    spectrum = _variances(variances)
    if not spectrum.any():
        raise InputError("variances: expected at least one above 0: a constant signal has no coding gain")
    if not spectrum.all():
        return float("inf")
    return float(spectrum.mean() / np.exp(np.log(spectrum).mean()))


def entropy(counts: np.ndarray) -> float:
    """-sum p log2 p in bits of the empirical distribution with these counts (any shape, not negative).

    Source: Shannon 1948. Limits: biased low by about (symbols - 1)/(2 n ln 2) bits (Miller 1955), so count
    many more tokens than there are symbols. Raises InputError when nothing was counted.
    """
    n = np.asarray(counts, np.float64).ravel()
    if not n.size or not np.isfinite(n).all() or (n < 0).any() or not n.sum():
        raise InputError(f"counts: expected counts >= 0 with at least one above 0, got {np.asarray(counts)!r:.80}")
    p = n[n > 0] / n.sum()
    return float(max(0.0, -(p * np.log2(p)).sum()))


def bits_per_chunk(lengths: np.ndarray, counts: np.ndarray) -> float:
    """Mean tokens per chunk (``lengths``, one per chunk) times ``entropy(counts)`` of the token ids, in bits.

    What an ideal coder pays that knows how often each token occurs and nothing of its neighbours or its place.
    Raises InputError for no chunk or a negative length, and as ``entropy``.
    """
    each = np.asarray(lengths, np.float64)
    if each.ndim != 1 or not each.size or not (each >= 0).all():
        raise InputError(f"lengths: expected tokens of at least one chunk, got {lengths!r:.80}")
    return float(each.mean()) * entropy(counts)


def _variances(variances: np.ndarray) -> np.ndarray:
    found = np.asarray(variances, np.float64)
    if found.ndim != 1 or not found.size or not np.isfinite(found).all() or (found < 0).any():
        raise InputError(f"variances: expected (n) finite numbers >= 0, n >= 1, got {variances!r:.80}")
    return found
