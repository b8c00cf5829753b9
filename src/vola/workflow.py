"""What the commands do, as functions: open data, train, evaluate, keep the records, write the report.

Everything here can be done from Python with the same arguments; ``cli.py`` only parses and prints.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vola.dagger import Dagger, read_rounds, train_with_dagger
from vola.data.episodes import Dataset, check_selection, split_episodes
from vola.data.lerobot import open_lerobot
from vola.data.lerobot_write import LeRobotWriter
from vola.data.stats import finite_column
from vola.data.transforms import RelativeActions, Transforms
from vola.data.windows import Windows
from vola.envs.experts import Expert, Sides
from vola.envs.tabletop import TASKS, make_tabletop
from vola.errors import ConfigError
from vola.executor import Receding
from vola.fit import fit
from vola.heads.pairing import tokenizer_config
from vola.policy import Policy
from vola.report.heldout import heldout_record
from vola.report.page import build_report
from vola.rollout.collect import demonstrate
from vola.rollout.heldout import BEFORE, action_moments, held_out_errors
from vola.rollout.latency import Latency
from vola.rollout.rollout import Rollouts, rollout
from vola.rollout.samples import fan, save_samples
from vola.summary import Prepared, summarise, write_rollouts
from vola.system import System
from vola.systems import pi0, regression
from vola.train.loop import Evaluate, Result, Schedule, refuse_existing, train
from vola.types import RobotSpec
from vola.variants import with_head

# Demonstrations use seeds from 0 on; start states that are evaluated lie far away and are never demonstrated.
EVALUATION_SEED = 1_000_000
DEMONSTRATION_NOISE = 0.15
FEW = 5  # held-out episodes below which an interval over them is hardly one
SYSTEMS: Mapping[str, ModuleType] = {"pi0": pi0, "regression": regression}

console = Console(stderr=True)


def find_system(name: str, size: str = "small") -> Any:
    """The function (robot) -> System of a system file.

    Raises:
        ConfigError: no such system or size.
    """
    if name not in SYSTEMS:
        raise ConfigError(f"system: expected one of {sorted(SYSTEMS)}, got {name!r}")
    sizes = [s for s in ("tiny", "small", "full") if hasattr(SYSTEMS[name], s)]
    if size not in sizes:
        raise ConfigError(f"size: {name} comes as {sizes}, got {size!r}")
    return getattr(SYSTEMS[name], size)


def collect(
    env_id: str,
    out: Path,
    episodes: int,
    *,
    first_seed: int = 0,
    noise: float = DEMONSTRATION_NOISE,
    sides: Sides = "both",
    video: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> int:
    """Record expert demonstrations of a built-in task as a LeRobot v3.0 dataset; returns the episodes written.

    Raises:
        ConfigError: unknown task or setting, or a folder that is not empty.
    """
    table = make_tabletop(env_id, noise=noise, **(settings or {}))
    with LeRobotWriter(out, table.spec, table.spec.action.rate, video=video, robot_type="vola-tabletop") as writer:
        with _progress("recording", episodes) as advance:
            for d in demonstrate(table.config, episodes, first_seed, sides):
                writer.add_episode(d.images, d.state, d.action, d.instruction)
                advance(1)
        return writer.episodes


def choose(
    robot: RobotSpec,
    name: str = "pi0",
    size: str = "small",
    *,
    head: str | None = None,
    relative: bool = False,
    changes: Mapping[str, Any] | None = None,
) -> System:
    """The system of that name for a robot.

    Args:
        head: another action head on its backbone, by name (``vola.variants``).
        relative: learn actions as offsets from the current state on every dimension that both share by name.
        changes: settings to override, e.g. {"H": 32}.

    Raises:
        ConfigError: unknown system or setting, or settings that do not fit together.
    """
    system: System = find_system(name, size)(robot)
    if head is not None:
        system = with_head(system, head)
    if relative:
        system = replace(system, transforms=Transforms((RelativeActions.by_name(robot),)))
    return system.override(changes or {})


def prepare(dataset: Dataset, system: System, val: float = 0.1) -> Prepared:
    """Split by episode (share ``val`` held out, stratified by instruction), fit on the training part, decode images.

    Raises:
        ConfigError: a system for another robot, or a split that is not possible.
        DataError: NaN or infinity in any episode. InputError: an instruction without a word.
    """
    if system.robot != dataset.spec:
        raise ConfigError(
            f"prepare: the system is for {system.robot}, the dataset is of {dataset.spec}. Make it with "
            "small(dataset.spec)."
        )
    first, second = split_episodes(dataset, val, system.train.seed)
    tokens = tokenizer_config(system.head)
    fitted = fit(dataset, first, system.H, system.transforms, tokens, system.normalise_actions)
    for episode in check_selection(dataset, second) if second else ():
        finite_column(dataset, episode, "state", dataset.spec.state.names)
        finite_column(dataset, episode, "action", dataset.spec.action.names)
        fitted.tokenizer.encode([episode.instruction])

    def windows(episodes: Sequence[int], stride: int) -> Windows:
        made = Windows(dataset, episodes, system.T, system.H, system.image_size, stride=stride)
        with Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console) as bar:
            made.prefetch(bar)
        return made

    data, held_out = windows(first, system.train.stride), windows(second, 1) if second else None
    return Prepared(dataset, system, fitted, data, held_out, _notes(dataset, data, held_out))


def _notes(dataset: Dataset, data: Windows, held_out: Windows | None) -> tuple[str, ...]:
    """What the dataset's reader noticed, and what of it concerns this split."""
    notes = list(dataset.notes)
    for camera in (c.name for c in dataset.spec.cameras):
        parts = [("training", data)] + ([("held-out", held_out)] if held_out else [])
        seen = [(name, sum(camera not in e.blind for e in w.episodes), len(w.episodes)) for name, w in parts]
        if any(count < total for _, count, total in seen):
            said = " and ".join(f"{count} of {total} {name} episodes" for name, count, total in seen)
            notes.append(f"{said} have pictures of {camera}; in the others the policy acts blind")
    if held_out is not None and len(held_out.episodes) < FEW:
        notes.append(f"only {len(held_out.episodes)} held-out episodes: intervals over episodes say little")
    return tuple(notes)


def closed_loop(
    policy: Policy,
    env_id: str,
    system: System,
    *,
    episodes: int,
    film: Sequence[int] = (),
    settings: Mapping[str, Any] | None = None,
    latency: Latency | None = None,
) -> Rollouts:
    """Evaluate on the fixed held-out start states EVALUATION_SEED, EVALUATION_SEED + 1, ...; ``settings`` of the task
    such as ``{"noise": 0.3}``; ``latency``: how many ticks a plan takes while the task goes on."""
    check_robot(system, env_id)
    seeds = range(EVALUATION_SEED, EVALUATION_SEED + episodes)
    table = make_tabletop(env_id, **(settings or {}))
    return rollout(
        table, seeds, policy, system.execute, name=system.name, role="policy", task=env_id, film=film, latency=latency
    )


def expert_loop(env_id: str, *, episodes: int, film: Sequence[int] = ()) -> Rollouts:
    """The expert on the same start states: the ceiling."""
    table = make_tabletop(env_id)
    seeds = range(EVALUATION_SEED, EVALUATION_SEED + episodes)
    return rollout(
        table, seeds, Expert(table), Receding(1), name="expert", role="expert", task=env_id, whole=True, film=film
    )


def train_run(
    data: str,
    out: Path,
    *,
    system: str = "pi0",
    size: str = "small",
    val: float = 0.1,
    env: str | None = None,
    episodes: int = 3000,
    eval_episodes: int = 200,
    head: str | None = None,
    relative: bool = False,
    instruction: str | None = None,
    missing_video: Literal["skip", "blind", "refuse"] = "skip",
    changes: Mapping[str, Any] | None = None,
    dagger: int = 0,
    dagger_episodes: int = 300,
    schedule: Schedule | None = None,
    resume: bool = False,
    report: bool = True,
    command: Sequence[str] = (),
) -> Path:
    """Train on a dataset (or on fresh demonstrations of a built-in task), evaluate, write all records of the run.

    Args:
        data: a LeRobot dataset folder, or the id of a built-in task, whose ``episodes`` demonstrations are recorded
            in ``out/data``. env: evaluate in this task in closed loop (default: the task that ``data`` names).
        dagger: rounds in which the expert labels ``dagger_episodes`` episodes that the policy drives in ``env``.

    Returns the run folder. Raises ConfigError for what ``choose`` and ``prepare`` refuse, and for DAgger without task.
    """
    if dagger and env is None and data not in TASKS:
        raise ConfigError("dagger: expected a task in which the policy drives, got none; name it with --env")
    begun = time.perf_counter()
    refuse_existing(out, resume)
    if data in TASKS:
        env, folder = env or data, out / "data"
        if not folder.exists():
            collect(data, folder, episodes)
        data = str(folder)
    dataset = open_lerobot(data, instruction=instruction, missing_video=missing_video)
    made = choose(dataset.spec, system, size, head=head, relative=relative, changes=changes)
    if env is not None:
        check_robot(made, env)
    ready = prepare(dataset, made, val)
    for note in ready.notes:
        console.print(f"[yellow]note:[/] {note}")
    schedule, evaluate = schedule or Schedule(), _evaluator(env, made)
    if dagger and env is not None:
        rounds = Dagger(env, dagger, dagger_episodes)
        result = train_with_dagger(out, ready, rounds, evaluate, schedule, resume)
        ready = replace(ready, notes=(*ready.notes, *read_rounds(out)))
    else:
        result = train(out, made, ready.fitted, ready.train, ready.val, evaluate, schedule, resume)
    _conclude(out, ready, result, env, eval_episodes, data, command, begun)
    if report:
        build_report(out)
    return out


def _conclude(
    out: Path,
    ready: Prepared,
    result: Result,
    env: str | None,
    eval_episodes: int,
    data: str,
    command: Sequence[str],
    begun: float,
) -> None:
    """The records of a run that reached its last step; raises KeyboardInterrupt for one that was stopped."""
    if result.interrupted and result.step < ready.system.train.steps:
        console.print(f"stopped at step {result.step}, everything is saved; go on with the same command and --resume")
        raise KeyboardInterrupt
    try:
        elapsed = result.seconds - result.seconds_now
        finish(out, ready, result, env, eval_episodes, data, command, begun - elapsed)
    except KeyboardInterrupt:
        console.print("the weights are saved; the same command with --resume does the evaluation that is missing")
        raise


def check_robot(system: System, env_id: str) -> None:
    """Raises ConfigError when a task's robot has other cameras, state or actions than the system's."""
    spec = make_tabletop(env_id).spec
    for what, own, other in (
        ("cameras", [c.name for c in system.robot.cameras], [c.name for c in spec.cameras]),
        ("state", system.robot.state.names, spec.state.names),
        ("actions", system.robot.action.names, spec.action.names),
    ):
        if own != other:
            raise ConfigError(
                f"--env {env_id}: expected a task whose {what} are {own}, it has {other}. Name the task that the data "
                "are of, or leave --env out."
            )


def _evaluator(env: str | None, system: System, episodes: int = 50) -> Evaluate | None:
    if env is None:
        return None

    def evaluate(policy: Policy, step: int) -> list[dict[str, Any]]:
        rate = closed_loop(policy, env, system, episodes=episodes).rate
        return [{"policy": system.name, "successes": rate.successes, "episodes": rate.n}]

    return evaluate


def finish(
    out: Path,
    ready: Prepared,
    result: Result,
    env: str | None,
    eval_episodes: int,
    data: str,
    command: Sequence[str],
    begun: float,
) -> None:
    """Evaluate a finished run and write summary.json, rollouts.parquet, samples.safetensors and heldout.json."""
    policy, system = result.policy, ready.system
    for stale in ("rollouts.parquet", "samples.safetensors", "heldout.json"):
        (out / stale).unlink(missing_ok=True)  # of an earlier evaluation of this run
    rollouts: list[Rollouts] = []
    if env is not None:
        film = range(min(3, eval_episodes))
        rollouts = [
            closed_loop(policy, env, system, episodes=eval_episodes, film=film),
            expert_loop(env, episodes=eval_episodes, film=film),
        ]
        write_rollouts(out, rollouts)
        fans = [{system.name: fan(policy, make_tabletop(env), EVALUATION_SEED + i)} for i in range(3)]
        save_samples(out / "samples.safetensors", rollouts, fans)
    if ready.val is not None and not (ready.val.frame >= BEFORE).any():
        console.print(f"[yellow]note:[/] no held-out episode is longer than {BEFORE} frames: no held-out error")
    elif ready.val is not None:
        mean, scale = action_moments(ready.train)
        errors = held_out_errors(policy, ready.val, mean)
        record = heldout_record(system.robot.action, errors.error, errors.valid, errors.episode, scale)
        (out / "heldout.json").write_text(json.dumps(record))
    seeds = range(EVALUATION_SEED, EVALUATION_SEED + eval_episodes)
    summary = summarise(out, ready, result, env, rollouts, seeds, data, command, begun)
    (out / "summary.json").write_text(json.dumps(summary, indent=2))


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    columns = TextColumn(f"[bold]{what}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda n: bar.advance(task, n)
