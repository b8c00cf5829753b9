"""How fast the built-in tabletop is: environment steps per second on one core, with and without pictures.

OMP_NUM_THREADS=1 python benchmarks/tabletop.py
"""

import time

import numpy as np

from vola.envs.gym_env import TabletopVectorEnv
from vola.envs.tabletop import TASKS, make_tabletop


def rate(n: int, step, rounds: int = 60) -> float:
    """Environment steps per second of the fastest of three trials."""
    best = np.inf
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(rounds):
            step()
        best = min(best, time.perf_counter() - start)
    return n * rounds / best


def main(n: int = 64) -> None:
    """Print one row per task; the time limit is out of reach and the robot holds against the wind, so that every scene
    moves in every step."""
    print(f"{n} scenes   steps/s, no picture   + 48x48   + 256x256   Gymnasium vector env 48x48")
    for env_id in TASKS:
        table = make_tabletop(env_id, time_limit=10_000, kick_probability=0.0)
        env = TabletopVectorEnv(env_id, n, time_limit=10_000, kick_probability=0.0)
        table.reset(np.arange(n))
        env.reset(seed=0)
        still = np.tile([0.0, -getattr(table.config.task, "wind", 0.0)], (n, 1))
        bare = rate(n, lambda table=table, still=still: table.step(still), 300)
        small = rate(n, lambda table=table, still=still: (table.step(still), table.render(48)))
        large = rate(n, lambda table=table, still=still: (table.step(still), table.render(256)), 3)
        vector = rate(n, lambda env=env, still=still: env.step(still))
        print(f"{env_id:16s} {bare:15,.0f} {small:9,.0f} {large:11,.0f} {vector:20,.0f}")


if __name__ == "__main__":
    main()
