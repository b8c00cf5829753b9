"""How small errors of a policy add up: exact recursions and the simulations that check them.

Two models, both deliberately small. A **chain** of T steps: the policy is on or off the expert's path, and every step
off it costs 1. A **linear plant** x' = a x + u + e: the deviation is a number, and cost is its size. They bracket what
happens: quadratic growth needs a policy that never recovers, and recovery or feedback makes growth linear or bounded.
Executing k steps per decision divides the cost by k only where the error per *decision* does not grow with k, which
is an assumption about the policy (measure eps(k) and use ``best_k``), not a consequence of chunking.

Here T is the horizon (steps of an episode), k the executed steps per decision, eps a probability per decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from vola.cite import Source
from vola.errors import ConfigError, InputError, expect_positive

BEHAVIOUR_CLONING = Source(
    "Ross and Bagnell, Efficient Reductions for Imitation Learning, 2010",
    "theorem 2.1: J(pi) <= J(expert) + T^2 eps",
    "eps: error probability on the expert's states; cost per step in [0, 1]; an upper bound, 2x the leading order "
    "of the chain without recovery",
)
DAGGER = Source(
    "Ross, Gordon and Bagnell, A Reduction of Imitation Learning and Structured Prediction to No-Regret Online "
    "Learning, 2011",
    "theorem 3.2: J(pi) <= J(expert) + u T eps + O(1)",
    "eps: error probability on the learner's own states; u: largest loss of cost-to-go from one error",
)


@dataclass(frozen=True)
class Chain:
    """T steps, a decision every k of them; a wrong decision leaves the expert's path.

    T: steps. eps: probability of an error. k: executed steps per decision.
    recovery: probability that a decision taken off the path leads back to it (0: never).
    per: "decision": each decision errs with eps, whatever k; "step": each planned step does, so that a decision errs
        with 1 - (1 - eps)^k (and counts as wrong from its first step).
    first: "costs": the step in which an error happens costs 1 like those after it; "free": it costs nothing. For
        small eps, k = 1 and no recovery that is T(T+1)/2 eps against T(T-1)/2 eps.

    Raises:
        ConfigError: probabilities outside [0, 1], or T or k below 1.
    """

    T: int
    eps: float
    k: int = 1
    recovery: float = 0.0
    per: Literal["decision", "step"] = "decision"
    first: Literal["costs", "free"] = "costs"

    def __post_init__(self) -> None:
        expect_positive("Chain", T=self.T, k=self.k)
        for name in ("eps", "recovery"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"Chain: expected {name} in [0, 1] (a probability), got {getattr(self, name)!r}")
        if self.per not in ("decision", "step") or self.first not in ("costs", "free"):
            raise ConfigError(
                f'Chain: expected per "decision" or "step", first "costs" or "free", got {self.per!r}, {self.first!r}'
            )

    @property
    def error(self) -> float:
        """Probability that one decision is wrong."""
        return self.eps if self.per == "decision" else -np.expm1(self.k * np.log1p(-self.eps)) if self.eps < 1 else 1.0

    @property
    def lengths(self) -> Float[np.ndarray, " n"]:
        """Steps of each of the n = ceil(T/k) decisions; the last one may be cut short by the end."""
        full, rest = divmod(self.T, self.k)
        return np.array([self.k] * full + [rest] * (rest > 0), float)


def off_path(chain: Chain) -> Float[np.ndarray, " n"]:
    """Probability of being off the path during each of the n decisions, exactly.

    The two-state chain p' = p (1 - recovery) + (1 - p) error from p = 0 before the first decision, in closed form:
    p_j = p_inf (1 - lambda^j), p_inf = error / (error + recovery), lambda = 1 - error - recovery, j = 1 .. n.
    Own derivation. Limits: recovery = 0 gives 1 - (1 - error)^j; n -> infinity gives p_inf < 1 under recovery.
    """
    j, both = np.arange(1, len(chain.lengths) + 1), chain.error + chain.recovery
    if both == 0:
        return np.zeros(len(j))
    # expm1 and log1p keep the digits of an eps far below 1e-8.
    gone = -np.expm1(j * np.log1p(-both)) if both < 1 else 1.0 - (1.0 - both) ** j
    return chain.error / both * gone


def expected_cost(chain: Chain) -> float:
    """Expected number of costly steps in T (steps), exactly: sum of lengths * off_path.

    With ``first="free"`` the expected number of errors is subtracted, one step each. Between 0 and T.
    """
    p = off_path(chain)
    cost = float((chain.lengths * p).sum())
    if chain.first == "free":
        before = np.concatenate([[0.0], p[:-1]])
        cost -= float(((1 - before) * chain.error).sum())
    return cost


def simulate_cost(chain: Chain, episodes: int, rng: np.random.Generator) -> Float[np.ndarray, " episodes"]:
    """Costs (steps) of ``episodes`` independent runs of the chain: the Monte Carlo twin of ``expected_cost``."""
    expect_positive("simulate_cost", episodes=episodes)
    off, cost = np.zeros(episodes, bool), np.zeros(episodes)
    for length in chain.lengths:
        draw = rng.random(episodes)
        wrong = ~off & (draw < chain.error)
        off = np.where(off, draw >= chain.recovery, wrong)
        cost += length * off - (wrong if chain.first == "free" else 0)
    return cost


def small_error_cost(chain: Chain) -> float:
    """Leading order of ``expected_cost`` in the error without recovery (steps).

    T(T+k)/(2k) error, minus T/k error with ``first="free"``; own derivation for T divisible by k (otherwise the exact
    sum of lengths * j is used). Holds while error * T/k << 1: see ``saturation``.

    Raises:
        ConfigError: a chain with recovery, whose cost is not quadratic.
    """
    if chain.recovery:
        raise ConfigError(f"small_error_cost: expected recovery = 0, got {chain.recovery}. Use expected_cost.")
    n = len(chain.lengths)
    cost = float((chain.lengths * np.arange(1, n + 1)).sum()) * chain.error
    return cost - (n * chain.error if chain.first == "free" else 0.0)


def saturation(chain: Chain) -> float:
    """``expected_cost / small_error_cost``: 1 in the quadratic regime, towards 0 when most episodes fail anyway.

    Without recovery and k = 1 about 1 - eps T/3; 0.97 at eps T = 0.1, 0.85 at 0.5. Raises ConfigError for eps = 0.
    """
    if chain.error == 0:
        raise ConfigError("saturation: expected eps > 0, got 0 (no cost to compare)")
    return expected_cost(chain) / small_error_cost(chain)


def dagger_cost(T: int, eps: float) -> float:
    """Expected cost (steps) of a policy that errs with eps on *every* state, its own mistakes' included: T eps.

    The chain with recovery 1 - eps. It is theorem 3.2 of ``DAGGER`` with u = 1 and equality.
    """
    return expected_cost(Chain(T, eps, recovery=1 - eps))


def behaviour_cloning_bound(T: int, eps: float) -> float:
    """T^2 eps (steps), ``BEHAVIOUR_CLONING``; T at most, since each of T steps costs at most 1."""
    return min(float(T), T * T * Chain(T, eps).eps)


def dagger_bound(T: int, eps: float, u: float = 1.0) -> float:
    """u T eps (steps), ``DAGGER`` without its O(1); T at most. u >= 0: cost-to-go lost by one error, T if nothing
    can be made good again (then the bound is that of behaviour cloning)."""
    if not u >= 0:
        raise ConfigError(f"dagger_bound: expected u >= 0, got {u!r}")
    return min(float(T), u * T * Chain(T, eps).eps)


@dataclass(frozen=True)
class Plant:
    """x' = a x + u + e from x = 0, in units of the state; every k steps u is planned anew from the true x.

    The plan is what feedback would do in the model without error: u_j = -gain (a - gain)^j x at step j of the chunk.
    a: 1 tracking without restoring force, > 1 unstable. gain: 0 is no feedback; |a - gain| < 1 stabilises.
    sigma: standard deviation of the error e per step.
    errors: "iid": drawn anew in every step (execution noise); "shared": once per chunk (a wrong plan).

    Raises:
        ConfigError: k below 1, sigma below 0, or a value that is not finite.
    """

    a: float = 1.0
    gain: float = 0.0
    sigma: float = 1.0
    k: int = 1
    errors: Literal["iid", "shared"] = "iid"

    def __post_init__(self) -> None:
        expect_positive("Plant", k=self.k)
        if not np.isfinite([self.a, self.gain, self.sigma]).all() or self.sigma < 0:
            raise ConfigError(f"Plant: expected finite a, gain and sigma >= 0, got {self.a}, {self.gain}, {self.sigma}")
        if self.errors not in ("iid", "shared"):
            raise ConfigError(f'Plant: expected errors "iid" or "shared", got {self.errors!r}')


def deviation(plant: Plant, T: int) -> Float[np.ndarray, " t"]:
    """Root mean square of x after 0 .. T steps (units of x), exactly.

    j steps into a chunk that began at x: x_j = (a - gain)^j x + sum_i a^(j-1-i) e_i, so
    V_j = (a - gain)^(2j) V + sigma^2 S_j with S_j = sum_i a^(2i) for iid and (sum_i a^i)^2 for shared errors,
    i = 0 .. j-1. Own derivation. Limits: no feedback, a = 1: sigma sqrt(t), iid whatever k, and sigma sqrt(k t) at the
    ends of chunks where errors are shared; feedback, k = 1: sigma / sqrt(1 - (a - gain)^2), bounded.
    """
    expect_positive("deviation", T=T)
    variance, start, out = 0.0, 0.0, [0.0]
    for t in range(T):
        j = t % plant.k
        if j == 0:
            start = variance
        powers = plant.a ** np.arange(j + 1)
        spread = (powers**2).sum() if plant.errors == "iid" else powers.sum() ** 2
        variance = float((plant.a - plant.gain) ** (2 * (j + 1)) * start + plant.sigma**2 * spread)
        out.append(variance)
    return np.sqrt(out)


def simulate_deviation(
    plant: Plant, T: int, episodes: int, rng: np.random.Generator
) -> Float[np.ndarray, "episodes t"]:
    """x after 0 .. T steps (units of x) of independent runs with normal errors: the twin of ``deviation``."""
    expect_positive("simulate_deviation", T=T, episodes=episodes)
    x = planned = error = np.zeros(episodes)
    out = [x]
    for t in range(T):
        if t % plant.k == 0:
            planned = x
        if t % plant.k == 0 or plant.errors == "iid":
            error = plant.sigma * rng.standard_normal(episodes)
        x = plant.a * x - plant.gain * planned + error
        planned = (plant.a - plant.gain) * planned
        out.append(x)
    return np.stack(out, axis=1)


@dataclass(frozen=True)
class Best:
    """``k`` with the smallest expected ``cost`` (steps), and ``costs`` of all k that were compared."""

    k: int
    cost: float
    costs: dict[int, float]


def best_k(eps_of_k: Mapping[int, float], T: int, recovery: float = 0.0) -> Best:
    """Which k costs least over T steps, predicted from the measured error probability per *decision* of each k.

    ``expected_cost`` of each (k, eps(k)). To leading order without recovery that is T(T+k)/(2k) eps(k): longer chunks
    pay as long as eps(k) grows slower than k T/(T+k). Constant eps chooses the largest k; eps(k) = 1-(1-eps)^k, errors
    per step, the smallest. Ties go to the smaller k.

    Args:
        recovery: probability per decision to come back to the path.

    Raises:
        InputError: nothing measured. ConfigError: a value that is no probability, or k or T below 1.
    """
    if not eps_of_k:
        raise InputError("best_k: expected at least one measured k, got none")
    costs = {k: expected_cost(Chain(T, eps, k, recovery)) for k, eps in sorted(eps_of_k.items())}
    k = min(costs, key=lambda k: (costs[k], k))
    return Best(k, costs[k], costs)


def exponent(x: Float[np.ndarray, " m"], y: Float[np.ndarray, " m"]) -> float:
    """Slope of log y over log x by least squares: the fitted exponent of a power law (no unit).

    Raises:
        InputError: fewer than two points, or values that are not finite and above 0.
    """
    a, b = np.asarray(x, float), np.asarray(y, float)
    if (
        a.shape != b.shape
        or a.ndim != 1
        or len(a) < 2
        or not (np.isfinite([a, b]).all() and (a > 0).all() and (b > 0).all())
    ):
        raise InputError(
            f"exponent: expected two equally long lists of at least 2 numbers > 0, got {a.shape}, {b.shape}"
        )
    return float(np.polyfit(np.log(a), np.log(b), 1)[0])
