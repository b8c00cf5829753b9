"""The records of a finished run: ``summary.json`` and ``rollouts.parquet`` (read by ``vola.report.records``), and one
line per later evaluation (``vola.report.evaluations``)."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
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
from vola.envs.tabletop import make_tabletop
from vola.fit import Fitted
from vola.heads.fast import Fast
from vola.model.layers import count_parameters
from vola.policy import Policy
from vola.report.counts import count
from vola.report.evaluations import digest
from vola.rollout.latency import Latency
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
        "head": _head(policy, system),
        "executor": _named(system.execute),
        "versions": checkpoint.versions() | _machine(),
        "layout": {"picture": layout.picture(), "explain": layout.explain()},
        "sources": [s.record() for s in bibliography(of=system)],
    }


def _scales(normaliser: Normaliser, kind: str) -> dict[str, str]:
    """Kind, constant dimensions, and per dimension what is subtracted and divided by."""
    constant = ", ".join(normaliser.names[d] for d in normaliser.constant) or "none"
    rows = zip(normaliser.names, normaliser.shift, normaliser.scale, strict=True)
    return {"kind": kind, "constant": constant} | {n: f"(x {-shift:+.4g}) / {scale:.4g}" for n, shift, scale in rows}


def _head(policy: Policy, system: System) -> dict[str, Any]:
    """Rule, network, passes per chunk and smallest reachable error; see ``vola.report.records.HeadRecord``."""
    cost, floor, spec = policy.head.cost(), policy.head.floor(policy.action_normaliser), policy.spec.action
    rows = zip(spec.names, spec.units, floor.rms.tolist(), floor.worst.tolist(), strict=True)
    return {
        "rule": type(system.head).__name__,
        "network": type(system.network).__name__,
        "serial": cost.serial,
        "parallel": cost.parallel,
        "floor": [dict(zip(("name", "unit", "rms", "worst"), r, strict=True)) for r in rows if floor.worst.any()],
    }


def _named(settings: Any) -> dict[str, Any]:
    return {"part": type(settings).__name__} | asdict(settings)


def result_of(rollouts: Rollouts, system: System) -> dict[str, Any]:
    """One policy's entry of summary.json: success with its interval, and what did not decode."""
    first = rollouts.episodes[0]
    k = system.execute.k if first.role != "expert" else None
    head = system.head
    fallback = head.tokens.on_malformed if isinstance(head, Fast) and first.role != "expert" else ""
    interval = wilson(rollouts.rate.successes, rollouts.rate.n)
    return {
        "name": first.policy,
        "role": first.role,
        "successes": rollouts.rate.successes,
        "episodes": rollouts.rate.n,
        "interval": [interval.low, interval.high],
        "k": k,
        **count(rollouts.episodes, fallback).record(),
    }


def evaluation_of(
    loaded: checkpoint.Checkpoint,
    rollouts: Rollouts,
    scenes: Mapping[str, Any],
    settings: Mapping[str, Any],
    latency: Latency | None,
    command: Sequence[str],
) -> dict[str, Any]:
    """One line of ``evaluations.jsonl`` (format: ``vola.report.evaluations``).

    Args:
        loaded: the checkpoint as evaluated.
        scenes: settings of the task. settings: what was changed in the trained system, as JSON values.
    """
    episodes, first = rollouts.episodes, rollouts.episodes[0]
    config = make_tabletop(first.task, **scenes).config
    own = ("noise", "kick_probability", "kick_size")
    times = [e.plan_ms for e in episodes if np.isfinite(e.plan_ms)]
    result = {k: v for k, v in result_of(rollouts, loaded.system).items() if k not in ("name", "role")}
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": list(command),
        "system": loaded.system.name,
        "checkpoint": {"step": loaded.step, "fingerprint": loaded.manifest["fingerprint"]},
        "env": first.task,
        "scenes": {name: getattr(config, name) for name in own},
        "settings": {k: v for k, v in settings.items() if k.split(".")[0] != "execute"},
        "executor": _named(loaded.system.execute),
        "latency": None if latency is None else asdict(latency),
        "seeds": {"first": first.seed, "last": episodes[-1].seed},
        "starts": digest([e.start_hash for e in episodes]),
        **result,
        "failures": dict(Counter(e.failure for e in episodes if not e.success)),
        "mean_length": float(np.mean([e.length for e in episodes])),
        "plan_ms": float(np.mean(times)) if times else None,
        "unknown_words": list(loaded.policy.unknown_words([e.instruction for e in episodes])),
    }


def run_of(loaded: checkpoint.Checkpoint) -> Path | None:
    """The run folder that a checkpoint lies in; None for a checkpoint that was copied out of its run."""
    folder = loaded.folder.resolve()
    return folder.parents[1] if folder.parent.name == "checkpoints" else None


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
