"""Explicit integration of dx / dtau = v(x, tau) with a fixed number of equal steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from jaxtyping import Float
from torch import Tensor

Velocity: TypeAlias = Callable[[Tensor, float], Tensor]
Solver: TypeAlias = Literal["euler", "midpoint", "heun", "rk4"]

# Where in the step each stage looks, as a fraction of it, and the stage's share of the step. In each of these methods
# a stage starts from the one before it alone. Source: Hairer, Norsett, Wanner 1993, tables 1.1 and 1.2.
STAGES: dict[Solver, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "euler": ((0,), (1,)),
    "midpoint": ((0, 1 / 2), (0, 1)),
    "heun": ((0, 1), (1 / 2, 1 / 2)),
    "rk4": ((0, 1 / 2, 1 / 2, 1), (1 / 6, 1 / 3, 1 / 3, 1 / 6)),
}


def evaluations(solver: Solver) -> int:
    """Evaluations of the velocity per step: euler 1, midpoint and heun 2, rk4 4 (their orders are the same numbers)."""
    return len(STAGES[solver][0])


def integrate(
    velocity: Velocity, x: Float[Tensor, " B *shape"], start: float, stop: float, steps: int, solver: Solver
) -> Float[Tensor, " B *shape"]:
    """x at time ``stop`` from x at ``start``, in ``steps`` equal steps; backwards where stop < start."""
    nodes, shares = STAGES[solver]
    dt = (stop - start) / steps
    for i in range(steps):
        stage, moved = x, x
        for j, (node, share) in enumerate(zip(nodes, shares, strict=True)):
            v = velocity(stage, start + (i + node) * dt)
            if share:
                moved = moved + share * dt * v
            if j + 1 < len(nodes):
                stage = x + nodes[j + 1] * dt * v
        x = moved
    return x
