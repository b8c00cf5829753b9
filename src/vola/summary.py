"""The records of a finished run: ``summary.json`` and ``rollouts.parquet`` (read by ``vola.report.records``)."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from vola import checkpoint
from vola.cite import bibliography
from vola.data.episodes import Dataset
from vola.data.stats import Normaliser
from vola.data.windows import Windows
from vola.fit import Fitted
from vola.model.layers import count_parameters
from vola.policy import Policy
from vola.rollout.rollout import Rollouts
from vola.system import System
from vola.theory.statistics import wilson
from vola.train.loop import Result
from vola.train.throughput import peak_flops, step_flops
from vola.types import Observation, select


@dataclass(frozen=True)
class Prepared:
    """A dataset split by episode, with the system for its robot, what was fitted, and the two sets of windows."""

    dataset: Dataset
    system: System
    fitted: Fitted
    train: Windows
    val: Windows | None
    notes: tuple[str, ...] = ()


def summarise(
    out: Path,
    ready: Prepared,
    result: Result,
    env: str | None,
    rollouts: Sequence[Rollouts],
    seeds: Sequence[int],
    data: str,
    command: Sequence[str],
    begun: float,
) -> dict[str, Any]:
    """The content of summary.json; ``begun`` is the ``time.perf_counter`` at which the run started."""
    policy, system, dataset = result.policy, ready.system, ready.dataset
    batch = ready.train.batch(np.arange(min(system.train.batch, len(ready.train))))
    flops = step_flops(policy, batch) * result.samples_per_second / batch.size
    layout = policy.backbone.layout(words=int(policy.prepare(batch.observation).words.shape[1]))
    state, action = policy.state_normaliser, policy.action_normaliser
    latest = checkpoint.load(out)
    return {
        "name": out.name,
        "system": system.name,
        "fingerprint": latest.manifest["fingerprint"],
        "env": env,
        "policies": [result_of(r, system) for r in rollouts],
        "minutes": (time.perf_counter() - begun) / 60,
        "samples_per_second": result.samples_per_second,
        "flops_share": flops / peak_flops(),
        "plan_ms": _latency(policy, batch.observation),
        "command": list(command),
        "cameras": [c.name for c in system.robot.cameras],
        "instructions": list(ready.fitted.instructions),
        "seeds": {
            "training": system.train.seed,
            "start states": f"{seeds[0]} ... {seeds[-1]}" if rollouts else "none",
        },
        "dataset": {
            "path": data,
            "fingerprint": dataset.fingerprint(),
            "episodes": len(dataset.episodes),
            "frames": sum(e.length for e in dataset.episodes),
            "notes": list(ready.notes),
            "train_episodes": len(ready.train.episodes),
            "val_episodes": len(ready.val.episodes) if ready.val else 0,
        },
        "normaliser": {
            "state": _scales(state, system.normalise_state),
            "action": _scales(action, system.normalise_actions),
            "actions are": "relative to the state" if system.transforms.steps else "absolute",
        },
        "parameters": {
            "total": count_parameters(policy),
            "backbone": count_parameters(policy.backbone),
            "head": count_parameters(policy.head),
        },
        "versions": checkpoint.versions() | _machine(),
        "layout": {"picture": layout.picture(), "explain": layout.explain()},
        "sources": [s.record() for s in bibliography(of=system)],
    }


def _scales(normaliser: Normaliser, kind: str) -> dict[str, str]:
    """Kind, constant dimensions, and per dimension what is subtracted and divided by."""
    constant = ", ".join(normaliser.names[d] for d in normaliser.constant) or "none"
    rows = zip(normaliser.names, normaliser.shift, normaliser.scale, strict=True)
    return {"kind": kind, "constant": constant} | {n: f"(x {-shift:+.4g}) / {scale:.4g}" for n, shift, scale in rows}


def result_of(rollouts: Rollouts, system: System) -> dict[str, Any]:
    first = rollouts.episodes[0]
    k = system.execute.k if first.role != "expert" else None
    interval = wilson(rollouts.rate.successes, rollouts.rate.n)
    return {
        "name": first.policy,
        "role": first.role,
        "successes": rollouts.rate.successes,
        "episodes": rollouts.rate.n,
        "interval": [interval.low, interval.high],
        "k": k,
    }


def _latency(policy: Policy, observation: Observation, repeats: int = 20) -> dict[str, float]:
    """Milliseconds of one plan for one observation."""
    one, rngs = select(observation, np.array([0])), [np.random.default_rng(0)]
    policy.plan(one, rngs)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        policy.plan(one, rngs)
        times.append(1e3 * (time.perf_counter() - start))
    return {"median": float(np.median(times)), "p95": float(np.quantile(times, 0.95))}


def _machine() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores",
    }


def write_rollouts(out: Path, rollouts: Sequence[Rollouts]) -> None:
    """One row per episode of all rollouts to ``rollouts.parquet``."""
    rows = [asdict(e) for r in rollouts for e in r.episodes]
    pq.write_table(pa.Table.from_pylist(rows), out / "rollouts.parquet")
