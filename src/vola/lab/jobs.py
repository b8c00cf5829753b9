"""Training jobs and what is measured on them: the raw material of every experiment.

A ``Job`` is one policy: demonstrations, system, seed. A ``Case`` is one closed-loop question to it: executor, scenes,
settings of the head at sampling time. ``run_jobs`` trains and evaluates in two processes of one thread each and keeps
every answer on disk, so an interrupted experiment goes on where it stopped.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vola import checkpoint
from vola.data.lerobot import open_lerobot
from vola.ensemble import Ensemble
from vola.envs.experts import Sides
from vola.envs.tabletop import make_tabletop
from vola.errors import ConfigError, VolaError
from vola.executor import Receding
from vola.policy import Policy
from vola.realtime import RealTime
from vola.rollout.decision import decision_errors
from vola.rollout.latency import Latency
from vola.rollout.rollout import rollout
from vola.system import System
from vola.train.loop import Schedule, train
from vola.variants import with_head
from vola.workflow import EVALUATION_SEED, choose, collect, console, prepare

H, POSITIONS = 16, 512
PROCESSES = 2  # two processes with one thread each are faster than one with two


@dataclass(frozen=True)
class Demos:
    """Demonstrations of a built-in task; equal values are recorded once per experiment folder."""

    task: str
    episodes: int
    noise: float = 0.15
    sides: Sides = "both"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Folder name."""
        said = json.dumps(asdict(self), sort_keys=True)
        return f"{self.task.split('/')[-1].lower()}-{sha256(said.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Case:
    """One question to a trained policy.

    head: settings of the head for sampling, e.g. {"steps": 1}. scenes: settings of the task, e.g. {"noise": 0.3}.
    labels: what the answer's rows are called. decision: instead of driving alone, the policy makes one decision of
    ``execute.k`` steps per episode and "successes" are the episodes it did not lose (``rollout.decision``).
    """

    labels: Mapping[str, Any]
    execute: Receding | Ensemble | RealTime = Receding(4)
    episodes: int = 200
    head: Mapping[str, Any] = field(default_factory=dict)
    scenes: Mapping[str, Any] = field(default_factory=dict)
    latency: Latency | None = None
    task: str = ""
    decision: bool = False


@dataclass(frozen=True)
class Job:
    """One policy to train and its cases. ``name`` is its folder; ``changes`` override ``pi0.small`` with that head.

    ``stride``: training windows start at every n-th frame.
    """

    name: str
    demos: Demos
    head: str
    steps: int
    seed: int
    cases: tuple[Case, ...]
    labels: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    stride: int = 4
    size: str = "small"

    def fingerprint(self) -> str:
        """Changes when anything that decides the answer does, the settings behind the head's name included."""
        spec = make_tabletop(self.demos.task, **self.demos.settings).spec
        return sha256(f"{self!r} {job_system(self, spec).fingerprint()}".encode()).hexdigest()[:12]


def job_system(job: Job, robot: Any) -> System:
    """The system of a job for the robot of its demonstrations."""
    system = with_head(choose(robot, "pi0", job.size), job.head)
    own: dict[str, Any] = {"train.steps": job.steps, "train.seed": job.seed, "train.stride": job.stride}
    own |= {"H": H, "trunk.positions.length": POSITIONS}  # of the small systems; the tiny ones take them over
    return system.override(own | dict(job.changes))


def record_demos(demos: Demos, out: Path) -> Path:
    """The dataset of ``demos`` under ``out``, recorded unless it is there."""
    folder = out / "data" / demos.key
    if not folder.exists():
        draft = folder.with_name(f".{folder.name}")
        shutil.rmtree(draft, ignore_errors=True)  # of a recording that was broken off
        collect(demos.task, draft, demos.episodes, noise=demos.noise, sides=demos.sides, settings=dict(demos.settings))
        draft.rename(folder)
    return folder


def run_job(job: Job, out: Path) -> list[dict[str, Any]]:
    """Train (or resume) a job, answer its cases, write ``rows.json``; answers that are there are kept.

    Raises:
        ConfigError: the folder holds the answers or the weights of another job of that name.
    """
    folder = out / "jobs" / job.name
    kept, identity = folder / "rows.json", folder / "job.txt"
    if kept.exists():
        saved = json.loads(kept.read_text())
        if saved["fingerprint"] != job.fingerprint():
            raise ConfigError(f"{kept}: holds the answers of another job. Remove {folder}, or choose another --out.")
        return list(saved["rows"])
    if folder.exists() and (not identity.exists() or identity.read_text() != job.fingerprint()):
        raise ConfigError(f"{folder}: holds the training of another job. Remove it, or choose another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    identity.write_text(job.fingerprint())
    torch.set_num_threads(1)
    trained = _train(job, out, folder)
    rows = []
    for case in job.cases:
        rows.append(dict(job.labels) | dict(case.labels) | trained | _answer(job, case, folder))
    draft = kept.with_suffix(".draft")
    draft.write_text(json.dumps({"fingerprint": job.fingerprint(), "rows": rows}))
    draft.replace(kept)
    return rows


def _train(job: Job, out: Path, folder: Path) -> dict[str, Any]:
    """Train unless a finished checkpoint is there. ``minutes`` are those of one thread's CPU time, decoding included:
    other processes on the machine do not change them."""
    found, clock = checkpoint.complete(folder), folder / "cpu_seconds.json"
    before = float(json.loads(clock.read_text())) if clock.exists() else 0.0
    if not found or checkpoint.load(found[-1]).step < job.steps:
        begun = time.process_time()
        dataset = open_lerobot(out / "data" / job.demos.key)
        ready = prepare(dataset, job_system(job, dataset.spec), 0.05)
        schedule = Schedule(progress="none", validate=max(1, job.steps // 8), keep=1)
        result = train(folder, ready.system, ready.fitted, ready.train, ready.val, None, schedule, resume=True)
        before += time.process_time() - begun
        clock.write_text(json.dumps(before))
        if result.interrupted and result.step < job.steps:
            raise KeyboardInterrupt
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "train"][-1]
    held_out = [line["loss"] for line in lines if line["kind"] == "val"]
    return {"seed": job.seed, "minutes": before / 60, "loss": last["loss"], "held_out": held_out}


def policy_with(loaded: checkpoint.Checkpoint, head: Mapping[str, Any]) -> Policy:
    """The checkpoint's policy with other sampling settings of its head; weights are the same."""
    return checkpoint.with_changes(loaded, {f"head.{k}": v for k, v in head.items()}).policy if head else loaded.policy


def _answer(job: Job, case: Case, folder: Path) -> dict[str, Any]:
    """Success of one case on the fixed held-out start states, and what went wrong."""
    policy = policy_with(checkpoint.load(folder), case.head)
    task = case.task or job.demos.task
    table = make_tabletop(task, **{**job.demos.settings, **case.scenes})
    seeds = range(EVALUATION_SEED, EVALUATION_SEED + case.episodes)
    begun = time.perf_counter()
    if case.decision:
        lost = decision_errors(table, seeds, policy, case.execute.k or policy.H)
        return {"successes": lost.n - lost.successes, "episodes": lost.n, "seconds": time.perf_counter() - begun}
    done = rollout(table, seeds, policy, case.execute, name=job.name, role="policy", task=task, latency=case.latency)
    failures = [e.failure for e in done.episodes if e.failure]
    return {
        "successes": done.rate.successes,
        "episodes": done.rate.n,
        "length": float(np.mean([e.length for e in done.episodes])),
        "failures": {kind: failures.count(kind) for kind in sorted(set(failures))},
        "malformed": sum(e.malformed for e in done.episodes),
        "starved": sum(e.starved for e in done.episodes),
        "plan_ms": float(np.nanmean([e.plan_ms for e in done.episodes])),
        "passes": policy.head.cost().serial,
        "seconds": time.perf_counter() - begun,
        "measure": [None if np.isnan(x) else round(float(x), 5) for x in table.measure],
        "final": np.round(table.world.robot, 4).tolist(),
        "floor": policy.head.floor(policy.action_normaliser).rms.tolist(),
        "scale": policy.action_normaliser.scale.tolist(),
    }


def run_jobs(jobs: Sequence[Job], out: Path, processes: int = PROCESSES) -> list[dict[str, Any]]:
    """All rows of all jobs, in the order of the jobs. ``processes`` 1 runs them in this process.

    Raises:
        KeyboardInterrupt: stopped by Ctrl-C; finished jobs and checkpoints are kept, the same call goes on.
    """
    names = [job.name for job in jobs]
    if len(set(names)) != len(names):
        raise ConfigError(f"jobs: expected different names, got {sorted(n for n in names if names.count(n) > 1)}")
    for demos in {job.demos.key: job.demos for job in jobs}.values():
        record_demos(demos, out)
    open_ = [job for job in jobs if not (out / "jobs" / job.name / "rows.json").exists()]
    for job in jobs:
        if job not in open_:
            run_job(job, out)  # answers of another plan are refused before anything is trained
    if processes > 1:
        _work(open_, out, processes)
    return [row for job in jobs for row in run_job(job, out)]


def _work(jobs: Sequence[Job], out: Path, processes: int) -> None:
    """Run jobs side by side in fresh processes of one thread each."""
    columns = TextColumn("[bold]jobs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")  # children read them when torch is imported
    try:
        context = multiprocessing.get_context("spawn")
        with (
            Progress(*columns, TextColumn("{task.fields[last]}"), console=console, disable=not jobs) as bar,
            ProcessPoolExecutor(max(1, min(processes, len(jobs))), context, initializer=_quiet) as pool,
        ):
            shown = bar.add_task("jobs", total=len(jobs), last="")
            waiting: dict[Future[list[dict[str, Any]]], Job] = {pool.submit(run_job, job, out): job for job in jobs}
            try:
                while waiting:
                    for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                        job = waiting.pop(future)
                        future.result()
                        bar.update(shown, advance=1, last=job.name)
            except (KeyboardInterrupt, VolaError):
                pool.shutdown(wait=False, cancel_futures=True)  # those that run save; no other one starts
                raise
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _quiet() -> None:
    """In a child: one thread, and no traceback of an idle worker on Ctrl-C."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console.quiet = True
