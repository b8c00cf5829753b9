"""Compounding error: exact equals simulated, exponents and limits, and the measured figures of earlier prototypes."""

from dataclasses import replace

import numpy as np
import pytest

from vola.errors import ConfigError, InputError
from vola.theory.compounding import (
    Chain,
    Plant,
    behaviour_cloning_bound,
    best_k,
    dagger_bound,
    dagger_cost,
    deviation,
    expected_cost,
    exponent,
    off_path,
    saturation,
    simulate_cost,
    simulate_deviation,
    small_error_cost,
)

CHAINS = [
    Chain(20, 0.05),
    Chain(20, 0.05, first="free"),
    Chain(30, 0.05, recovery=0.3),
    Chain(30, 0.05, recovery=0.3, first="free"),
    Chain(22, 0.1, k=4),  # the last chunk is cut short
    Chain(22, 0.02, k=4, per="step", recovery=0.2),
    Chain(9, 0.6, recovery=0.9),  # 1 - eps - recovery is negative
    Chain(5, 1.0),
    Chain(5, 0.0),
]


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_chain_exact_equals_simulation(chain):
    cost = simulate_cost(chain, 40_000, np.random.default_rng(0))
    assert (cost >= 0).all()
    assert (cost <= chain.T).all()
    error = cost.std() / np.sqrt(len(cost))
    assert abs(cost.mean() - expected_cost(chain)) <= 4 * error + 1e-12


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_closed_form_equals_the_recursion(chain):
    p, found = 0.0, []
    for _ in chain.lengths:
        p = p * (1 - chain.recovery) + (1 - p) * chain.error
        found.append(p)
    np.testing.assert_allclose(off_path(chain), found, rtol=1e-12, atol=1e-15)


def test_the_first_wrong_step_decides_between_the_two_conventions():
    T, eps = 30, 1e-9
    assert expected_cost(Chain(T, eps)) == pytest.approx(T * (T + 1) / 2 * eps, rel=1e-6)
    assert expected_cost(Chain(T, eps, first="free")) == pytest.approx(T * (T - 1) / 2 * eps, rel=1e-6)
    for chain in CHAINS[:2]:
        assert small_error_cost(replace(chain, eps=1e-9)) == pytest.approx(
            expected_cost(replace(chain, eps=1e-9)), rel=1e-6
        )
    for k in (1, 2, 4, 8, 16):
        assert small_error_cost(Chain(64, 1e-3, k)) == pytest.approx(64 * (64 + k) / (2 * k) * 1e-3)


def test_quadratic_without_recovery_linear_with_it():
    """Figures of calibration.md section 7 (Monte Carlo of 200 000 runs): ratios within 0.02, exponents within 0.03."""
    T = np.array([8, 16, 32, 64, 128])
    for eps, ratio, slope in ((1e-4, 0.99, 1.94), (1e-3, 0.96, 1.94), (1e-2, 0.68, 1.83)):
        costs = np.array([expected_cost(Chain(int(t), eps)) for t in T])
        assert costs[-1] / (128 * 129 / 2 * eps) == pytest.approx(ratio, abs=0.02)
        assert exponent(T, costs) == pytest.approx(slope, abs=0.03)
    far = T[T >= 32]
    for recovery, slope in ((0.1, 1.17), (0.5, 1.03)):
        assert exponent(
            far, np.array([expected_cost(Chain(int(t), 1e-3, recovery=recovery)) for t in far])
        ) == pytest.approx(slope, abs=0.03)
    long = np.array([1e4, 1e5], int)
    assert exponent(long, np.array([expected_cost(Chain(int(t), 1e-3, recovery=0.5)) for t in long])) == pytest.approx(
        1.0, abs=1e-3
    )
    assert off_path(Chain(10_000, 1e-3, recovery=0.5))[-1] == pytest.approx(1e-3 / 0.501)


def test_chunks_help_only_when_the_error_per_decision_does_not_grow():
    """Exponents in k of calibration.md section 7, within 0.03: -0.90, -0.84 per decision, +0.11, +0.09 per step."""
    k = np.array([1, 2, 4, 8, 16, 32])
    for eps, decision, step in ((1e-3, -0.90, 0.11), (1e-2, -0.84, 0.09)):
        costs = {
            per: np.array([expected_cost(Chain(64, eps, int(j), per=per)) for j in k]) for per in ("decision", "step")
        }
        assert exponent(k, costs["decision"]) == pytest.approx(decision, abs=0.03)
        assert exponent(k, costs["step"]) == pytest.approx(step, abs=0.03)
        assert (np.diff(costs["step"]) > 0).all()
    found = expected_cost(Chain(64, 1e-3, 4)) / small_error_cost(Chain(64, 1e-3, 4))
    assert found == pytest.approx(1, abs=0.07)


def test_saturation():
    assert saturation(Chain(100, 1e-3)) == pytest.approx(0.97, abs=0.005)
    assert saturation(Chain(100, 5e-3)) == pytest.approx(0.85, abs=0.01)
    assert saturation(Chain(1000, 1e-9)) == pytest.approx(1, abs=1e-5)
    values = [saturation(Chain(100, e)) for e in (1e-4, 1e-3, 1e-2, 1e-1, 1.0)]
    assert (np.diff(values) < 0).all()
    assert values[-1] == pytest.approx(2 / 101)


def test_dagger_is_linear_and_the_bounds_hold():
    for T in (1, 10, 100, 1000):
        for eps in (0.0, 1e-4, 1e-2, 0.5, 1.0):
            assert dagger_cost(T, eps) == pytest.approx(T * eps)
            assert dagger_cost(T, eps) <= dagger_bound(T, eps) * (1 + 1e-12)
            for first in ("costs", "free"):
                assert (
                    expected_cost(Chain(T, eps, first=first)) <= behaviour_cloning_bound(T, eps) * (1 + 1e-12) + 1e-12
                )
    assert dagger_bound(50, 1e-3, u=50) == behaviour_cloning_bound(50, 1e-3)
    assert behaviour_cloning_bound(100, 0.5) == 100
    # twice the leading order at k = 1: calibration.md section 7, 4.10 against 2.03 (T = 64, eps = 1e-3), within 3 %
    assert behaviour_cloning_bound(64, 1e-3) == pytest.approx(4.10, rel=0.03)
    assert expected_cost(Chain(64, 1e-3)) == pytest.approx(2.03, rel=0.03)


PLANTS = [
    Plant(sigma=0.02),
    Plant(gain=0.2, sigma=0.02, k=8),
    Plant(gain=0.2, sigma=0.02, k=5, errors="shared"),
    Plant(a=1.3, gain=0.8, sigma=0.02, k=4),
    Plant(a=1.1, sigma=0.02, k=3, errors="shared"),
    Plant(a=0.0, gain=0.0, sigma=1.0, k=2),
]


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_plant_exact_equals_simulation(plant):
    x = simulate_deviation(plant, 18, 40_000, np.random.default_rng(1))
    np.testing.assert_allclose(np.sqrt((x**2).mean(0)), deviation(plant, 18), rtol=0.02, atol=1e-12)


def test_plant_figures_of_calibration():
    """calibration.md section 7 (sigma 0.02, 64 steps, own reading of its set-up), within 4 %."""

    def end(**settings):
        return deviation(Plant(sigma=0.02, **settings), 64)[-1]

    for k in (1, 4, 32):
        assert end(k=k) == pytest.approx(0.16)  # iid without feedback: k changes nothing
    assert end(k=1, errors="shared") == pytest.approx(0.16, rel=0.04)
    assert end(k=32, errors="shared") == pytest.approx(0.91, rel=0.04)
    assert end(gain=0.2) == pytest.approx(0.033, rel=0.04)
    assert end(gain=0.2, k=32) == pytest.approx(0.113, rel=0.04)
    assert end(gain=0.2, k=32, errors="shared") == pytest.approx(0.644, rel=0.04)
    for k, rms in ((1, 0.023), (4, 0.064), (8, 0.195), (16, 1.60)):
        assert end(a=1.3, gain=0.8, k=k) == pytest.approx(rms, rel=0.04)


def test_plant_exponents_and_limits():
    t = np.array([16, 32, 64, 128])
    assert exponent(t, deviation(Plant(), 128)[t]) == pytest.approx(0.5)
    assert exponent(t, deviation(Plant(gain=0.2), 128)[t]) == pytest.approx(0.01, abs=0.01)
    assert deviation(Plant(gain=0.2), 500)[-1] == pytest.approx(1 / np.sqrt(1 - 0.8**2))
    shared = [deviation(Plant(k=k, errors="shared"), 64)[-1] for k in (1, 2, 4, 8)]
    np.testing.assert_allclose(shared, 8 * np.sqrt([1, 2, 4, 8]))
    one, same = Plant(a=1.2, gain=0.5), Plant(a=1.2, gain=0.5, errors="shared")
    np.testing.assert_array_equal(deviation(one, 20), deviation(same, 20))  # k = 1: nothing to share


def test_best_k_follows_the_measured_error():
    ks = (1, 2, 4, 8, 16)
    assert best_k(dict.fromkeys(ks, 1e-3), 64).k == 16
    assert best_k({k: 1 - (1 - 1e-3) ** k for k in ks}, 64).k == 1
    # dithering at small k, blindness at large k: an interior optimum
    found = best_k({k: 1e-3 * (0.5 + 8 / k + 0.05 * k**2) for k in ks}, 64)
    assert found.k == 8
    assert found.cost == min(found.costs.values())
    assert list(found.costs) == list(ks)
    # leading order: doubling k pays as long as the error grows by less than the factor of k T / (T + k)
    factor = (2 * 64 / 66) / (64 / 65)
    assert best_k({1: 1e-6, 2: 0.99 * factor * 1e-6}, 64).k == 2
    assert best_k({1: 1e-6, 2: 1.01 * factor * 1e-6}, 64).k == 1
    assert best_k({4: 0.0, 2: 0.0}, 64).k == 2


def test_misuse_is_refused():
    for wrong in (
        {"eps": 1.1},
        {"eps": np.nan},
        {"recovery": -0.1},
        {"k": 0},
        {"T": 0},
        {"per": "chunk"},
        {"first": ""},
    ):
        with pytest.raises(ConfigError, match="Chain"):
            Chain(**({"T": 5, "eps": 0.1} | wrong))
    for wrong in ({"k": 0}, {"sigma": -1.0}, {"a": np.inf}, {"errors": "same"}):
        with pytest.raises(ConfigError, match="Plant"):
            Plant(**wrong)
    with pytest.raises(ConfigError, match="recovery"):
        small_error_cost(Chain(5, 0.1, recovery=0.5))
    with pytest.raises(ConfigError, match="eps > 0"):
        saturation(Chain(5, 0.0))
    with pytest.raises(ConfigError, match="u >= 0"):
        dagger_bound(5, 0.1, u=-1)
    with pytest.raises(InputError, match="best_k"):
        best_k({}, 5)
    for x, y in (([1, 2], [1, 0]), ([1], [1]), ([1, 2], [1, 2, 3])):
        with pytest.raises(InputError, match="exponent"):
            exponent(np.array(x), np.array(y))
