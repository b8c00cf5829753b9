"""Intervals and paired comparisons against closed forms derived otherwise, published examples, and coverage."""

import math

import numpy as np
import pytest
from scipy.stats import binom, binomtest, norm

from vola.errors import InputError
from vola.theory.statistics import Rate, clopper_pearson, mean_interval_over_episodes, paired_difference, wilson


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (45, 50), (0, 10), (10, 10), (3, 7), (500, 1000)])
@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
def test_wilson_ends_solve_the_score_equation(successes: int, n: int, level: float) -> None:
    # The defining property: |p^ - p| = z sqrt(p (1 - p) / n) at both ends (or the end of [0, 1] itself).
    found, z, rate = wilson(successes, n, level), norm.ppf(0.5 + level / 2), successes / n
    for end in (found.low, found.high):
        assert abs(rate - end) == pytest.approx(z * math.sqrt(end * (1 - end) / n), abs=1e-9)
    reference = binomtest(successes, n).proportion_ci(level, method="wilson")
    assert (found.low, found.high) == pytest.approx((reference.low, reference.high), abs=1e-12)
    assert 0 <= found.low <= rate <= found.high <= 1
    assert rate in found


def test_wilson_known_values() -> None:
    z2 = norm.ppf(0.975) ** 2
    assert wilson(0, 10).high == pytest.approx(z2 / (10 + z2))  # p^ = 0: the quadratic has the root z^2/(n + z^2)
    assert wilson(10, 10).low == pytest.approx(10 / (10 + z2))
    found = wilson(45, 50)
    assert (found.low, found.high) == pytest.approx((0.7864, 0.9565), abs=5e-5)


@pytest.mark.parametrize(("successes", "n"), [(1, 4), (45, 50), (7, 9)])
def test_clopper_pearson_ends_have_the_tail_probabilities(successes: int, n: int) -> None:
    found = clopper_pearson(successes, n, 0.9)
    assert binom.sf(successes - 1, n, found.low) == pytest.approx(0.05)
    assert binom.cdf(successes, n, found.high) == pytest.approx(0.05)


def test_clopper_pearson_corner() -> None:
    found = clopper_pearson(0, 20)
    assert found.low == 0
    assert found.high == pytest.approx(1 - 0.025 ** (1 / 20))


def test_exact_coverage_of_both_rate_intervals() -> None:
    """Coverage summed over all outcomes, no simulation: the exact interval keeps 95 % everywhere, Wilson on average."""
    n, grid = 30, np.linspace(0.02, 0.98, 97)
    for interval, least, mean_range in ((clopper_pearson, 0.95, (0.95, 0.99)), (wilson, 0.85, (0.945, 0.96))):
        ends = [interval(s, n) for s in range(n + 1)]
        low, high = np.array([e.low for e in ends]), np.array([e.high for e in ends])
        covered = [binom.pmf(np.arange(n + 1), n, p)[(low <= p) & (p <= high)].sum() for p in grid]
        assert min(covered) >= least
        assert mean_range[0] <= np.mean(covered) <= mean_range[1]


def test_mean_of_few_episodes_is_students_t() -> None:
    found = mean_interval_over_episodes([1.0, np.array([1.0, 3.0, 2.0]), 3.0], 0.95, np.random.default_rng(0))
    assert found.value == pytest.approx(2)
    half = 4.302652730 / math.sqrt(3)  # t_{0.975, 2} from a table; s = 1
    assert (found.interval.low, found.interval.high) == pytest.approx((2 - half, 2 + half))
    assert (found.episodes, found.interval.method) == (3, "Student t over episodes")


def test_one_episode_says_nothing_about_spread() -> None:
    found = mean_interval_over_episodes([np.arange(4.0)], 0.95, np.random.default_rng(0))
    assert (found.value, found.interval.low, found.interval.high) == (1.5, -math.inf, math.inf)


def test_long_episodes_do_not_count_more() -> None:
    values = [np.zeros(1000), np.ones(1)]
    assert mean_interval_over_episodes(values, 0.95, np.random.default_rng(0)).value == 0.5


@pytest.mark.parametrize("episodes", [8, 40])
def test_interval_over_episodes_covers_although_frames_are_correlated(episodes: int) -> None:
    rng, trials = np.random.default_rng(1), 150
    by_episode = by_frame = 0
    for _ in range(trials):
        frames = rng.exponential(1.0, (episodes, 1)) - 1 + 0.3 * rng.standard_normal((episodes, 25))  # mean 0
        by_episode += 0.0 in mean_interval_over_episodes(list(frames), 0.95, rng).interval
        by_frame += abs(frames.mean()) < 1.96 * frames.std() / math.sqrt(frames.size)
    assert 0.87 <= by_episode / trials <= 0.99
    assert by_frame / trials < 0.6  # what treating frames as independent would have claimed to be 95 %


def test_bootstrap_agrees_with_the_normal_limit_and_repeats() -> None:
    values = list(np.random.default_rng(2).standard_normal(400))
    one, two = (mean_interval_over_episodes(values, 0.95, np.random.default_rng(3)) for _ in range(2))
    assert one == two
    half = 1.96 * np.std(values) / 20
    assert (one.interval.low, one.interval.high) == pytest.approx((one.value - half, one.value + half), abs=0.01)


def outcomes(both: int, only_a: int, only_b: int, none: int) -> tuple[np.ndarray, np.ndarray]:
    counts = (both, only_a, only_b, none)
    return np.repeat([True, True, False, False], counts), np.repeat([True, False, True, False], counts)


@pytest.mark.parametrize(
    ("table", "low", "high", "p_value"),
    [
        # Airway hyper-responsiveness (Bentur 2009) as worked out in Fagerland, Lydersen, Laake 2017, chapter 8.
        ((1, 1, 7, 12), -0.507, -0.026, 18 / 256),
        # Altman, Machin, Bryant, Gardner 2000, Statistics with Confidence, table 6.2.
        ((14, 5, 0, 22), 0.011, 0.226, 2 / 32),
    ],
)
def test_paired_outcomes_published_examples(table: tuple, low: float, high: float, p_value: float) -> None:
    found = paired_difference(*outcomes(*table))
    assert (found.interval.low, found.interval.high) == pytest.approx((low, high), abs=6e-4)
    assert found.p_value == pytest.approx(p_value)
    assert (found.a_higher, found.b_higher) == table[1:3]


def test_equal_outcomes_are_no_difference() -> None:
    found = paired_difference(*outcomes(30, 0, 0, 20))
    assert (found.difference, found.p_value) == (0, 1)
    assert found.interval.low == pytest.approx(-found.interval.high)
    assert found.interval.low < -0.03  # never of zero width


def test_paired_interval_mirrors_and_stays_in_range() -> None:
    for table in ((0, 20, 0, 0), (3, 9, 2, 6), (5, 0, 0, 0)):
        one, other = paired_difference(*outcomes(*table)), paired_difference(*outcomes(*table)[::-1])
        assert (one.interval.low, one.interval.high) == pytest.approx((-other.interval.high, -other.interval.low))
        assert -1 <= one.interval.low <= one.difference <= one.interval.high <= 1


def test_coverage_of_paired_outcomes() -> None:
    rng, trials, truth = np.random.default_rng(4), 400, 0.2
    hits = 0
    for _ in range(trials):
        easy = rng.random(50)  # the same start states for both: correlated outcomes
        hits += truth in paired_difference(easy < 0.7, easy < 0.5).interval
    assert hits / trials >= 0.93


def test_paired_numbers_see_what_two_intervals_miss() -> None:
    rng = np.random.default_rng(5)
    hard = rng.exponential(1.0, 24)
    a, b = hard + 0.02 * rng.standard_normal(24), hard + 0.05
    found = paired_difference(a, b, rng=rng)
    assert found.interval.high < 0
    assert found.p_value < 0.01
    alone = [mean_interval_over_episodes(list(x), 0.95, rng).interval for x in (a, b)]
    assert alone[0].high > alone[1].low  # the two separate intervals overlap widely


def test_sign_flip_test_is_exact_for_few_episodes() -> None:
    # All differences positive: of 2^5 sign patterns only the two one-sided ones are as extreme.
    found = paired_difference(np.arange(1.0, 6.0), np.zeros(5), rng=np.random.default_rng(0))
    assert found.p_value == pytest.approx(2 / 32)
    assert found.test == "sign flips, exact"


@pytest.mark.parametrize(
    "call",
    [
        lambda: Rate(3, 2),
        lambda: Rate(0, 0),
        lambda: Rate(True, 1),
        lambda: wilson(1, 2, 95),
        lambda: mean_interval_over_episodes([], 0.95, np.random.default_rng(0)),
        lambda: mean_interval_over_episodes([1.0, math.nan], 0.95, np.random.default_rng(0)),
        lambda: paired_difference([1.0, 2.0], [1.0]),
        lambda: paired_difference([1.0, 2.0], [1.0, 2.0]),  # numbers need a generator
        lambda: paired_difference(np.array([True, False]), np.array([1.0, 0.0])),
    ],
)
def test_refusals(call) -> None:  # noqa: ANN001
    with pytest.raises(InputError, match="expected"):
        call()
