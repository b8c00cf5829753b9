"""One training loop. Everything random in step n is a function of (seed, n), so an interrupted run that resumes ends
with the same bits as one that was never interrupted."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vola import checkpoint
from vola.checkpoint import TrainingState
from vola.data.windows import Windows, batch_indices
from vola.errors import CheckpointError, ConfigError, NonFiniteError
from vola.fit import Fitted
from vola.policy import Policy
from vola.system import System, describe
from vola.train.optim import (
    Average,
    gradient_norm,
    learning_rate,
    make_optimiser,
    optimiser_tensors,
    restore_optimiser,
    set_rate,
)
from vola.types import Batch

Evaluate = Callable[[Policy, int], list[dict[str, Any]]]


@dataclass(frozen=True)
class Schedule:
    """How often (in steps) to log, to measure held-out loss, to evaluate in closed loop and to save; 0 is only at the
    end. ``keep`` is how many checkpoints stay on disk. ``progress``: a bar for a terminal, a line at every validation
    for a log file, or none; to standard error. ``until`` ends this part of the run early, at that step; 0: at its
    last."""

    log: int = 20
    validate: int = 250
    evaluate: int = 0
    save: int = 500
    keep: int = 2
    progress: Literal["bar", "lines", "none"] = "bar"
    until: int = 0


@dataclass(frozen=True)
class Result:
    """What a finished (or interrupted) run hands back; ``policy`` holds the weights that act.

    ``samples_per_second`` and ``seconds`` are of the whole run, earlier parts of a resumed one included;
    ``seconds_now`` of this part alone.
    """

    policy: Policy
    step: int
    interrupted: bool
    samples_per_second: float
    seconds: float
    seconds_now: float


def train(
    run: Path,
    system: System,
    fitted: Fitted,
    data: Windows,
    held_out: Windows | None = None,
    evaluate: Evaluate | None = None,
    schedule: Schedule | None = None,
    resume: bool = False,
) -> Result:
    """Train ``system`` on ``data`` and keep log and checkpoints in the folder ``run``.

    Args:
        held_out: windows of episodes that training never sees; their loss is logged as "val".
        evaluate: called with the acting policy and the step; the records it returns are logged (closed-loop success).
        resume: go on from the newest checkpoint of ``run`` (from the start if there is none).

    Raises:
        CheckpointError: ``run`` already holds another run, or resuming with another system or dataset.
        NonFiniteError: a loss or gradient stopped being a number; names the batch. The last checkpoint is intact.
    """
    config, schedule = system.train, schedule or Schedule()
    if len(data) == 0:
        raise ConfigError("train: expected at least one training window, got none")
    policy = system.build(fitted)
    optimiser = make_optimiser(policy, config)
    average = Average(policy, config.ema)
    start = _begin(run, system, fitted, policy, optimiser, average, resume)
    meter = _Meter(start * config.batch * config.accumulate, _logged_seconds(run))
    rng = torch.Generator(policy.device)
    policy.train()
    with _interruptible() as interrupted, _bar(system.name, start, config.steps, schedule) as advance:
        step, stop = start, min(config.steps, schedule.until or config.steps)
        for step in range(start + 1, stop + 1):
            record = _step(policy, optimiser, average, system, data, step - 1, rng)
            meter.add(config.batch * config.accumulate)
            last = step == stop or interrupted()
            if last or step % schedule.log == 0:
                record |= {"samples_per_second": meter.rate(), "seconds": meter.seconds()}
                _log(run, {"kind": "train", "step": step} | record)
            advance(step, record["loss"], meter.rate())
            if last or _due(step, schedule.save):  # before anything that may fail
                _save(run, system, fitted, policy, optimiser, average, step, schedule.keep)
            if held_out is not None and len(held_out) and (step == stop or _due(step, schedule.validate)):
                with acting(policy, average, config.ema):
                    _log(run, {"kind": "val", "step": step} | held_out_loss(policy, held_out))
            if evaluate is not None and (step == config.steps or _due(step, schedule.evaluate)):
                with acting(policy, average, config.ema):
                    for line in evaluate(policy, step):
                        _log(run, {"kind": "eval", "step": step} | line)
            if interrupted():  # perhaps only since the save above
                _save(run, system, fitted, policy, optimiser, average, step, schedule.keep)
                break
        stopped = interrupted()
    checkpoint.load_weights(policy, _acting_weights(policy, average, config.ema), "average")
    policy.eval()
    return Result(policy, step, stopped, meter.rate(), meter.seconds(), meter.seconds() - meter.earlier)


def _step(
    policy: Policy,
    optimiser: torch.optim.Optimizer,
    average: Average,
    system: System,
    data: Windows,
    step: int,
    rng: torch.Generator,
) -> dict[str, float]:
    """Optimiser step ``step`` (from 0): forward and backward on every accumulated batch, clip, update."""
    config = system.train
    total = 0.0
    optimiser.zero_grad(set_to_none=True)
    for part in range(config.accumulate):
        position = step * config.accumulate + part
        batch = data.batch(batch_indices(len(data), config.batch, config.seed, position))
        rng.manual_seed(_mix(config.seed, position))
        with torch.autocast(policy.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            loss = policy.loss(batch, rng).mean()
        if not torch.isfinite(loss):
            raise _non_finite("loss", loss.item(), step + 1, batch)
        (loss / config.accumulate).backward()
        total += loss.item() / config.accumulate
    norm = gradient_norm(policy.parameters(), config.clip)
    if not np.isfinite(norm):
        raise _non_finite("gradient norm", norm, step + 1, batch)
    rate = learning_rate(step, config)
    set_rate(optimiser, rate)
    optimiser.step()
    if config.ema:
        average.update(policy, step)
    return {"loss": total, "lr": rate, "grad_norm": norm}


@torch.no_grad()
def held_out_loss(policy: Policy, windows: Windows, most: int = 512, batch: int = 128) -> dict[str, Any]:
    """Mean loss over at most ``most`` evenly spaced windows: in total, by part, and, where the main part is per number,
    per step of the chunk and per action dimension.

    Noise and flow times are the same at every call, so curves over training steps compare like with like.
    """
    chosen = np.unique(np.linspace(0, len(windows) - 1, min(most, len(windows))).round().astype(int))
    H, A = policy.H, policy.spec.action.size
    total, count = torch.zeros(H, A, dtype=torch.float64), torch.zeros(H, A, dtype=torch.float64)
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    weights: dict[str, float] = {}
    rng = torch.Generator(policy.device)
    for n, rows in enumerate(np.array_split(chosen, -(-len(chosen) // batch))):
        rng.manual_seed(_mix(-1, n))
        loss = policy.loss(windows.batch(rows), rng)
        for name, part in loss.parts.items():
            valid = part.valid.expand_as(part.values)
            sums[name] = sums.get(name, 0.0) + float(torch.where(valid, part.values, 0).sum())
            counts[name] = counts.get(name, 0.0) + float(valid.sum())
            weights[name] = part.weight
        if loss.main.values.shape[1:] == (H, A):
            valid = loss.main.valid.expand_as(loss.main.values)
            total += torch.where(valid, loss.main.values, 0).sum(0).cpu()
            count += valid.sum(0).cpu()
    means = {name: sums[name] / max(counts[name], 1.0) for name in sums}
    record: dict[str, Any] = {"loss": sum(weights[name] * mean for name, mean in means.items()), "parts": means}
    if count.any():
        record["loss_per_step"] = (total.sum(1) / count.sum(1).clamp(min=1)).tolist()
        record["loss_per_dimension"] = (total.sum(0) / count.sum(0).clamp(min=1)).tolist()
    return record | {"windows": len(chosen)}


@contextmanager
def acting(policy: Policy, average: Average, ema: float) -> Iterator[None]:
    """Put the acting weights in and the mode on eval; both are restored, also after an error."""
    mode = policy.training
    live = {k: v.clone() for k, v in policy.state_dict().items()}
    policy.load_state_dict(_acting_weights(policy, average, ema))
    policy.eval()
    try:
        yield
    finally:
        policy.load_state_dict(live)
        policy.train(mode)


def _acting_weights(policy: Policy, average: Average, ema: float) -> dict[str, torch.Tensor]:
    return average.weights if ema else dict(policy.state_dict())


def refuse_existing(run: Path, resume: bool) -> None:
    """Raises CheckpointError when ``run`` already holds a run that is not to be resumed."""
    if not resume and (checkpoint.complete(run) or (run / "log.jsonl").exists()):
        raise CheckpointError(
            f"{run} already holds a run. Continue it with --resume, or choose another folder with --out."
        )


def _begin(
    run: Path,
    system: System,
    fitted: Fitted,
    policy: Policy,
    optimiser: torch.optim.Optimizer,
    average: Average,
    resume: bool,
) -> int:
    """Make the run folder or restore from it; returns the finished steps."""
    found = checkpoint.complete(run)
    refuse_existing(run, resume)
    if not resume:
        run.mkdir(parents=True, exist_ok=True)
        (run / "system.json").write_text(system.to_json())
        return 0
    if not found:
        run.mkdir(parents=True, exist_ok=True)
        (run / "system.json").write_text(system.to_json())
        _cut_log(run, 0)
        return 0
    saved = checkpoint.load(found[-1])
    if saved.fitted.dataset != fitted.dataset:
        raise CheckpointError(
            f"resume: the run was trained on dataset {saved.fitted.dataset}, this one is {fitted.dataset}. "
            "Use the same dataset and split, or start a new run with --out."
        )
    if replace(saved.system, train=replace(saved.system.train, steps=system.train.steps)) != system:
        before, now = describe(saved.system).splitlines(), describe(system).splitlines()
        changed = "; ".join(line.strip() for line in now if line not in before and " steps = " not in line)
        raise CheckpointError(
            f"resume: the run was started with other settings than: {changed or 'these'}. Only train.steps may change; "
            "start a new run with --out."
        )
    state = checkpoint.load_training(found[-1])
    if state.step > system.train.steps:
        raise CheckpointError(
            f"resume: {state.step} steps are done, expected train.steps >= that, got {system.train.steps}"
        )
    checkpoint.load_weights(policy, state.weights, str(found[-1]))
    restore_optimiser(policy, optimiser, state.optimiser)
    average.load(saved.policy.state_dict())
    _cut_log(run, state.step)
    return state.step


def _save(
    run: Path,
    system: System,
    fitted: Fitted,
    policy: Policy,
    optimiser: torch.optim.Optimizer,
    average: Average,
    step: int,
    keep: int,
) -> None:
    state = TrainingState(step, policy.state_dict(), optimiser_tensors(policy, optimiser))
    checkpoint.save(run, system, fitted, _acting_weights(policy, average, system.train.ema), state)
    checkpoint.forget(run, keep)


def _cut_log(run: Path, step: int) -> None:
    """Drop log lines past ``step`` (and a half-written last line): those steps are going to be done again."""
    log = run / "log.jsonl"
    if not log.exists():
        return
    kept = []
    for number, line in enumerate(log.read_text().splitlines(keepends=True), 1):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{log}: line {number} is not a training record ({error}). Delete it; the checkpoints are intact."
            ) from error
    draft = run / ".log.jsonl"
    draft.write_text("".join(kept))
    draft.replace(log)


def _log(run: Path, record: dict[str, Any]) -> None:
    with (run / "log.jsonl").open("a") as f:
        f.write(json.dumps(record) + "\n")


def _logged_seconds(run: Path) -> float:
    """Seconds that the earlier parts of a resumed run took, as its log says."""
    log = run / "log.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return max((float(r["seconds"]) for r in rows if "seconds" in r), default=0.0)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _mix(seed: int, position: int) -> int:
    """A 63-bit seed for each (seed, position); neighbouring positions give unrelated streams."""
    return int(np.random.SeedSequence([seed % 2**32, position]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _non_finite(what: str, value: float, step: int, batch: Batch) -> NonFiniteError:
    names = [f"{e}:{f}" for e, f in zip(batch.episode[:8], batch.frame[:8], strict=True)]
    state, actions = batch.observation.state, batch.chunk.actions
    return NonFiniteError(
        f"{what} became {value} at step {step}; the last checkpoint is intact. Batch of episode:frame "
        f"{', '.join(names)}{', ...' if batch.size > 8 else ''}; state in [{state.min():.4g}, {state.max():.4g}], "
        f"actions in [{actions.min():.4g}, {actions.max():.4g}]. "
        "Look for outliers with `vola data info`, or lower train.lr."
    )


class _Meter:
    """Samples per second over the whole run, evaluation and saving included; a resumed run goes on counting."""

    def __init__(self, samples: int, earlier: float) -> None:
        self.begun, self.samples, self.earlier = time.perf_counter(), samples, earlier

    def add(self, samples: int) -> None:
        self.samples += samples

    def seconds(self) -> float:
        return self.earlier + time.perf_counter() - self.begun

    def rate(self) -> float:
        return self.samples / max(self.seconds(), 1e-9)


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks the loop to stop after the current step and save; a second Ctrl-C stops at once."""
    asked = False

    def ask(_number: int, _frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("\nstopping after this step; everything is saved (Ctrl-C again stops at once)", file=sys.stderr)

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread: whoever owns it decides about Ctrl-C
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _bar(name: str, start: int, steps: int, schedule: Schedule) -> Iterator[Callable[[int, float, float], None]]:
    columns = (
        TextColumn(f"[bold]{name}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:.0f} samples/s"),
        TimeRemainingColumn(),
    )
    if schedule.progress == "lines":
        every = schedule.validate or max(1, steps // 10)

        def line(step: int, loss: float, rate: float) -> None:
            if step % every == 0 or step == steps:
                text = f"{name}: step {step} of {steps}, loss {loss:.4f}, {rate:.0f} samples/s"
                print(text, file=sys.stderr, flush=True)

        yield line
        return
    with Progress(*columns, console=Console(stderr=True), disable=schedule.progress == "none") as bar:
        task = bar.add_task(name, total=steps, completed=start, loss=float("nan"), rate=0.0)
        yield lambda step, loss, rate: bar.update(task, completed=step, loss=loss, rate=rate)
