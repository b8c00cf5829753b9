"""Microseconds per environment step of every executor: popping an action, and taking in a new chunk first.

OMP_NUM_THREADS=1 python benchmarks/executor.py
"""

import time

import numpy as np

from vola.ensemble import Ensemble
from vola.executor import Executor, Receding
from vola.realtime import RealTime
from vola.types import Chunk


def seconds(act, rounds: int) -> float:
    """Seconds of one call, the median over ``rounds``."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def measure(execute: Executor, B: int, H: int, A: int) -> tuple[float, float, float]:
    """Microseconds per environment step of a pop, of a step with a new chunk per row, and of a guide."""
    rng = np.random.default_rng(0)
    chunk = Chunk(rng.standard_normal((B, H, A)).astype(np.float32), np.ones((B, H), bool))
    _, state = execute.step(execute.start(B, H, A), chunk)
    for _ in range(3):
        _, state = execute.step(state, chunk)
    rows = np.ones(B, bool)
    calls = (lambda: execute.step(state), lambda: execute.step(state, chunk), lambda: execute.guide(state, rows))
    pop, take, guide = (1e6 * seconds(call, 400) / B for call in calls)
    return pop, take, guide


def main(H: int = 50, A: int = 14) -> None:
    """Print one row per executor and batch."""
    print(f"H={H}, A={A}; microseconds per environment step (median of 400)")
    print(f"{'executor':24s} {'B':>4s} {'pop':>8s} {'new chunk':>10s} {'guide':>8s}")
    for execute in (Receding(None), Receding(16), Ensemble(), Ensemble(heaviest="newest"), RealTime(25, 5)):
        for B in (1, 100):
            pop, take, guide = measure(execute, B, H, A)
            name = f"{type(execute).__name__}({getattr(execute, 'heaviest', execute.k)})"
            print(f"{name:24s} {B:4d} {pop:8.2f} {take:10.2f} {guide:8.2f}")


if __name__ == "__main__":
    main()
