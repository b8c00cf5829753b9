"""Temporal ensembling as a filter: how the average over overlapping plans treats motion and noise of each frequency.

At every tick the executed action is a weighted mean of the n predictions that n successive plans made for it. What
a plan adds by itself (sampling noise, a jump to another mode) therefore passes a finite impulse response filter whose
taps are the ensembling weights. What all plans agree on passes unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Complex128, Float, Float64

from vola.errors import InputError, expect_positive

Heaviest = Literal["oldest", "newest"]


def ensemble_weights(m: float, n: int, heaviest: Heaviest = "oldest") -> Float64[np.ndarray, " n"]:
    """Normalised weights of n overlapping predictions, entry 0 = the oldest query.

    w_i = exp(-m * rank_i) / sum; rank 0 is the oldest query in ACT's convention ("oldest"), the newest in the
    reversed one that many texts describe ("newest").
    Source: Zhao et al., ACT, 2023, section IV-A, and its code (m = 0.01).

    Raises:
        InputError: m negative or not finite, or another ``heaviest``. ConfigError: n < 1.
    """
    expect_positive("ensemble_weights", n=n)
    if not (np.isfinite(m) and m >= 0):
        raise InputError(f"ensemble_weights: expected a finite m >= 0, got {m!r}")
    if heaviest not in ("oldest", "newest"):
        raise InputError(f"ensemble_weights: expected heaviest 'oldest' or 'newest', got {heaviest!r}")
    w = np.exp(-m * np.arange(n))
    w /= w.sum()
    return w if heaviest == "oldest" else w[::-1].copy()


def ensemble_response(
    m: float, n: int, frequencies: Float[np.ndarray, " F"] | Sequence[float], heaviest: Heaviest = "oldest"
) -> Complex128[np.ndarray, " F"]:
    """Frequency response of ensembling n plans, one per tick, to what a plan adds by itself.

    H(f) = sum over lags j = 0 .. n-1 of w(j) exp(-2 pi i f j), where w(j) is the weight of the plan made j ticks
    ago. ``frequencies`` in cycles per control tick (0.5 = Nyquist; multiply by the control rate for Hz).
    |H| is the gain, H(0) = 1. White noise of the plans keeps the share sum of w(j)^2 of its power, which is the mean
    of |H|^2 over all frequencies (Parseval).

    Raises:
        InputError: a frequency is not finite, or what ``ensemble_weights`` refuses.
    """
    f = np.asarray(frequencies, np.float64)
    if f.ndim != 1 or not np.isfinite(f).all():
        raise InputError(f"frequencies: expected a row of finite numbers, got {frequencies!r:.80}")
    by_lag = ensemble_weights(m, n, heaviest)[::-1]
    return np.exp(-2j * np.pi * f[:, None] * np.arange(n)) @ by_lag
