"""How sure a measured number is: intervals for success rates and episode means, and paired comparisons.

The independent unit is everywhere the **episode** (one start state, one rollout, one demonstration). Frames of one
episode resemble each other, so an interval over frames would be far too narrow. No interval here contains the
spread between training seeds: that takes several trainings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.stats import binomtest, norm, t

from vola.errors import InputError

FEW_EPISODES = 30  # below this the percentile bootstrap is too narrow and Student's t is used
RESAMPLES = 10_000
EXACT_FLIPS = 12  # up to 2**12 sign patterns are enumerated, more are drawn


@dataclass(frozen=True)
class Interval:
    """A confidence interval [low, high] at ``level`` (0.95 = 95 %); ``method`` names the construction.

    Infinite ends mean that the data say nothing (one episode has no spread).
    """

    low: float
    high: float
    level: float
    method: str

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Rate:
    """``successes`` out of ``n`` episodes."""

    successes: int
    n: int

    def __post_init__(self) -> None:
        whole = all(isinstance(v, int | np.integer) and not isinstance(v, bool) for v in (self.successes, self.n))
        if not whole or not 0 <= self.successes <= self.n or self.n < 1:
            raise InputError(
                f"Rate: expected whole numbers with 0 <= successes <= n and n >= 1, got {self.successes} of {self.n}"
            )

    @property
    def rate(self) -> float:
        return self.successes / self.n


@dataclass(frozen=True)
class Mean:
    """The mean over ``episodes`` episodes (each counts the same) and its interval."""

    value: float
    interval: Interval
    episodes: int


@dataclass(frozen=True)
class Paired:
    """mean(a - b) over ``episodes`` shared episodes; in ``a_higher`` of them a was above b, in ``b_higher`` below.

    p_value: probability of a difference at least this large when a and b are exchangeable; ``test`` names the test.
    """

    difference: float
    interval: Interval
    p_value: float
    a_higher: int
    b_higher: int
    episodes: int
    test: str


def wilson(successes: int, n: int, level: float = 0.95) -> Interval:
    """Score interval for a success rate: all p that a two-sided z-test at 1 - level does not reject.

    (p^ + z^2/2n +- z sqrt(p^ (1 - p^)/n + z^2/4n^2)) / (1 + z^2/n),  p^ = successes/n, z = Phi^-1((1 + level)/2).
    Never leaves [0, 1] and has a sensible width at 0 and n successes, where p^ +- z se has none.

    Source: Wilson 1927, J. Amer. Stat. Assoc. 22:209; recommended by Brown, Cai, DasGupta 2001, Stat. Sci. 16:101.
    """
    p, z = Rate(successes, n).rate, _z(level)
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # At the corners the formula is exactly 0 or 1; rounding must not push it past the estimate.
    low = 0.0 if successes == 0 else float(centre - half)
    high = 1.0 if successes == n else float(centre + half)
    return Interval(low, high, level, "Wilson")


def clopper_pearson(successes: int, n: int, level: float = 0.95) -> Interval:
    """Exact interval for a success rate: covers at least ``level`` for every p and n, hence wider than ``wilson``.

    low solves P(X >= successes | p) = (1 - level)/2, high solves P(X <= successes | p) = (1 - level)/2; these are
    the beta quantiles B(a/2; s, n-s+1) and B(1-a/2; s+1, n-s). Source: Clopper, Pearson 1934, Biometrika 26:404.
    """
    rate = Rate(successes, n)
    _z(level)
    found = binomtest(int(rate.successes), int(rate.n)).proportion_ci(level, method="exact")
    return Interval(float(found.low), float(found.high), level, "Clopper-Pearson")


def mean_interval_over_episodes(
    values_per_episode: Sequence[float | np.ndarray], level: float, rng: np.random.Generator
) -> Mean:
    """Mean of the episode means, and its interval.

    Each entry is one episode: a number, or its values over frames, which are averaged first, so a long episode does
    not count more than a short one (the estimand is "the mean on a random episode", not "on a random frame").

    * fewer than 30 episodes: Student's t, m +- t_{n-1} s / sqrt(n) (Student 1908, Biometrika 6:1); one episode has no
      spread and gets [-inf, inf];
    * otherwise: the percentile bootstrap over episodes with 10 000 resamples (Efron 1979, Ann. Stat. 7:1; whole
      episodes as clusters: Davison, Hinkley 1997, Bootstrap Methods, section 3.8).

    Raises:
        InputError: no episode, an empty episode, or a value that is not finite.
    """
    means = _episode_means("values_per_episode", values_per_episode)
    return Mean(float(means.mean()), _interval_of_mean(means, level, rng), len(means))


def paired_difference(
    a: Sequence[float] | np.ndarray,
    b: Sequence[float] | np.ndarray,
    level: float = 0.95,
    rng: np.random.Generator | None = None,
) -> Paired:
    """mean(a - b) where a[i] and b[i] come from the same episode (the same start state, the same demonstration).

    Pairing removes the spread between easy and hard episodes, so it sees smaller differences than two intervals.

    * bool arrays (success or not): Newcombe's square-and-add interval with continuity-corrected correlation (method 10
      in Newcombe 1998, Stat. Med. 17:2635) and McNemar's exact test, a binomial test on the episodes where the two
      differ (McNemar 1947, Psychometrika 12:153);
    * numbers: the interval of ``mean_interval_over_episodes`` on a - b, and the sign-flip permutation test (Fisher
      1935, The Design of Experiments, section 21): all 2^n flips for n <= 12, otherwise 10 000 drawn ones,
      p = (hits + 1) / (draws + 1) (Phipson, Smyth 2010, SAGMB 9:39). Needs ``rng``.

    Raises:
        InputError: different lengths, no episode, values not finite, one array bool and the other not, rng missing.
    """
    left, right = np.asarray(a), np.asarray(b)
    if left.shape != right.shape or left.ndim != 1 or not left.size:
        raise InputError(
            f"paired_difference: expected two lists of equal length, entry i of both from episode i, got shapes "
            f"{left.shape} and {right.shape}"
        )
    if (left.dtype == bool) != (right.dtype == bool):
        raise InputError(f"paired_difference: expected both bool or both numbers, got {left.dtype} and {right.dtype}")
    if left.dtype == bool:
        return _paired_outcomes(left, right, level)
    if rng is None:
        raise InputError("paired_difference: expected a numpy Generator as rng for numbers, got None")
    return _paired_numbers(left, right, level, rng)


def _paired_outcomes(a: np.ndarray, b: np.ndarray, level: float) -> Paired:
    n = len(a)
    both, only_a, only_b, none = (int(x.sum()) for x in (a & b, a & ~b, ~a & b, ~a & ~b))
    difference = (only_a - only_b) / n
    first, second = (wilson(both + only_a, n, level), wilson(both + only_b, n, level))
    p_a, p_b = (both + only_a) / n, (both + only_b) / n
    margins = (both + only_a) * (only_b + none) * (both + only_b) * (only_a + none)
    excess = both * none - only_a * only_b
    corrected = max(excess - n / 2, 0.0) if excess > 0 else excess
    phi = corrected / np.sqrt(margins) if margins else 0.0

    def reach(one: float, other: float) -> float:
        return float(np.sqrt(max(one * one - 2 * phi * one * other + other * other, 0.0)))

    low = difference - reach(p_a - first.low, second.high - p_b)
    high = difference + reach(first.high - p_a, p_b - second.low)
    p_value = float(binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0
    interval = Interval(max(low, -1.0), min(high, 1.0), level, "Newcombe, paired")
    return Paired(difference, interval, p_value, only_a, only_b, n, "McNemar, exact")


def _paired_numbers(a: np.ndarray, b: np.ndarray, level: float, rng: np.random.Generator) -> Paired:
    differences = _episode_means("a", a) - _episode_means("b", b)
    n = len(differences)
    if n <= EXACT_FLIPS:
        flips = np.array(list(product((1.0, -1.0), repeat=n)))
        extra, test = 0, "sign flips, exact"
    else:
        flips = rng.choice((1.0, -1.0), (RESAMPLES, n))
        extra, test = 1, "sign flips, drawn"
    # The tolerance keeps the observed pattern itself among "at least as large" despite rounding.
    observed = abs(differences.mean()) * (1 - 1e-12)
    hits = int((np.abs(flips @ differences) / n >= observed).sum())
    p_value = (hits + extra) / (len(flips) + extra)
    higher, lower = int((differences > 0).sum()), int((differences < 0).sum())
    interval = _interval_of_mean(differences, level, rng)
    return Paired(float(differences.mean()), interval, p_value, higher, lower, n, test)


def _interval_of_mean(means: np.ndarray, level: float, rng: np.random.Generator) -> Interval:
    _z(level)
    n = len(means)
    if n == 1:
        return Interval(-np.inf, np.inf, level, "none (1 episode)")
    if n < FEW_EPISODES:
        half = t.ppf((1 + level) / 2, n - 1) * means.std(ddof=1) / np.sqrt(n)
        return Interval(float(means.mean() - half), float(means.mean() + half), level, "Student t over episodes")
    low, high = np.quantile(_resampled_means(means, rng), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level, "bootstrap over episodes")


def _resampled_means(means: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """RESAMPLES means of n episodes drawn with replacement, in pieces of about 8 MB."""
    n = len(means)
    piece = max(1, 1_000_000 // n)
    parts = [
        means[rng.integers(0, n, (min(piece, RESAMPLES - start), n))].mean(axis=1)
        for start in range(0, RESAMPLES, piece)
    ]
    return np.concatenate(parts)


def _episode_means(name: str, values: Sequence[float | np.ndarray] | np.ndarray) -> np.ndarray:
    if len(values) == 0:
        raise InputError(f"{name}: expected at least one episode, got none")
    means = np.empty(len(values))
    for i, value in enumerate(values):
        frames = np.asarray(value, dtype=np.float64)
        if frames.size == 0 or not np.isfinite(frames).all():
            raise InputError(f"{name}[{i}]: expected at least one finite number, got {frames!r:.80}")
        means[i] = frames.mean()
    return means


def _z(level: float) -> float:
    if not 0 < level < 1:
        raise InputError(f"level: expected a number between 0 and 1 such as 0.95, got {level!r}")
    return float(norm.ppf((1 + level) / 2))
