"""Error on held-out demonstrations: the record ``heldout.json``, how to make it, and where a policy is really better.

The record: {"dims": [A names], "units": [A], "unit": unit of "mae" and "per_step", "rate": Hz, "H": H,
"policy": method, "baselines": {name: method}} with method = {"per_step_dim": [[H x A]], "per_episode":
[{"episode": i, "mae": x, "per_step": [H numbers, null where no window of the episode reaches that far]}]}.

* per_step_dim[h][a]: mean absolute error of step h, dimension a, in that dimension's own unit;
* per_step[h], mae: mean over the dimensions, in ``unit`` (the common unit, or training standard deviations when the
  dimensions' units differ), over all windows of one held-out episode.

Windows are averaged inside their episode first and every episode counts the same. The baselines are as a rule "hold",
"mean" and "linear"; a policy that was trained beside this one may stand there too, under its name in ``summary.json``.
"explain" ({name: sentence}, optional) says what each does where it is not as in ``EXPLAIN``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vola.errors import DataError, InputError, expect_shape
from vola.report.fields import Fields, read_json
from vola.theory.statistics import Mean, Paired, mean_interval_over_episodes, paired_difference
from vola.types import ActionSpec

LEVEL = 0.95
STANDARD = "training standard deviations"
NAMELESS = {"unknown": "data units"}
EXPLAIN = {
    "hold": "keeps the last known action",
    "mean": "always says the mean training action",
    "linear": "goes on as the last two actions did",
}


@dataclass(frozen=True)
class Errors:
    """One method's absolute error: ``per_step_dim`` ``H A``; of each held-out episode its number (``episodes`` ``E``),
    ``mae`` ``E`` and ``per_step`` ``E H`` (NaN where no window of the episode reaches that far)."""

    per_step_dim: np.ndarray
    episodes: np.ndarray
    mae: np.ndarray
    per_step: np.ndarray


@dataclass(frozen=True)
class HeldOut:
    """``heldout.json``; all methods are measured on the same episodes. ``explain`` says what each baseline does; units
    that the dataset does not name ("unknown") are called "data units"."""

    dims: tuple[str, ...]
    units: tuple[str, ...]
    unit: str
    rate: float
    H: int
    policy: Errors
    baselines: Mapping[str, Errors]
    explain: Mapping[str, str]


@dataclass(frozen=True)
class Comparison:
    """Policy against one baseline: overall, and per step h the sign of the difference as far as the data show it:
    -1 the policy is better, 0 undecided (interval holds 0), +1 worse. Steps are compared one by one, each at 95 %."""

    baseline: str
    error: Mean
    difference: Paired
    steps: np.ndarray

    def not_better(self) -> tuple[int, ...]:
        """Steps, counted from 1, at which the policy is not shown to be better."""
        return tuple(int(h) + 1 for h in np.nonzero(self.steps >= 0)[0])


def heldout_record(
    spec: ActionSpec,
    error: Mapping[str, np.ndarray],
    valid: np.ndarray,
    episode: np.ndarray,
    scale: np.ndarray,
) -> dict[str, Any]:
    """The content of ``heldout.json`` from absolute errors of N windows.

    error: {"policy": N H A, and one entry per baseline}, physical units. valid: bool ``N H``. episode: int ``N``, the
    held-out episode of each window. scale: ``A``, the training standard deviations; used only when units differ.

    Raises:
        InputError: no "policy", wrong shapes, a scale that is not above 0, or no valid step at all.
    """
    if "policy" not in error:
        raise InputError(f"error: expected the key 'policy', got {sorted(error)}")
    sizes = expect_shape("error['policy']", error["policy"], "N H A", A=spec.size)
    expect_shape("valid", valid, "N H", **{k: sizes[k] for k in "NH"})
    expect_shape("episode", episode, "N", N=sizes["N"])
    expect_shape("scale", scale, "A", A=spec.size)
    same = len(set(spec.units)) == 1
    if not same and not (np.asarray(scale) > 0).all():
        raise InputError("scale: expected positive standard deviations; give a constant dimension the scale 1")
    weights = np.ones(spec.size) if same else 1 / np.asarray(scale, np.float64)
    methods = {}
    for name, values in error.items():
        expect_shape(f"error[{name!r}]", values, "N H A", **sizes)
        methods[name] = _method(np.asarray(values, np.float64), np.asarray(valid, bool), episode, weights)
    policy = methods.pop("policy")
    return {
        "dims": list(spec.names),
        "units": list(spec.units),
        "unit": spec.units[0] if same else STANDARD,
        "rate": spec.rate,
        "H": sizes["H"],
        "policy": policy,
        "baselines": methods,
    }


def _method(error: np.ndarray, valid: np.ndarray, episode: np.ndarray, weights: np.ndarray) -> dict[str, Any]:
    rows, tables = [], []
    for number in np.unique(episode):
        own = episode == number
        count = valid[own].sum(axis=0)
        if not count.any():
            continue
        total = np.where(valid[own][..., None], error[own], 0.0).sum(axis=0)
        table = np.full(total.shape, np.nan)
        np.divide(total, count[:, None], out=table, where=count[:, None] > 0)
        tables.append(table)
        per_step = (table * weights).mean(axis=1)
        mae = float((total * weights).sum() / (count.sum() * len(weights)))
        steps = [float(x) if np.isfinite(x) else None for x in per_step]
        rows.append({"episode": int(number), "mae": mae, "per_step": steps})
    if not rows:
        raise InputError("valid: expected at least one valid step, got none")
    reached = np.isfinite(np.stack(tables)).sum(axis=0)
    if not reached.all():
        raise InputError("valid: expected every step of the chunk to be valid in some window; take a shorter chunk")
    return {"per_step_dim": (np.nansum(np.stack(tables), axis=0) / reached).tolist(), "per_episode": rows}


def read_heldout(run: Path) -> HeldOut | None:
    """``heldout.json``, or None where there is none."""
    file = run / "heldout.json"
    if not file.is_file():
        return None
    top = Fields(str(file), read_json(file))
    dims, H = top.texts("dims"), int(top.take("H", int))
    units = tuple(NAMELESS.get(u, u) for u in top.texts("units"))
    if not dims or len(dims) != len(units):
        raise DataError(f"{file}: expected one unit per dimension, got {len(dims)} dims and {len(units)} units")
    unit = top.text("unit", units[0] if len(set(units)) == 1 else "")
    unit = NAMELESS.get(unit, unit)
    if not unit:
        raise DataError(f"{file}: the dimensions have different units, so 'unit' must say what their mean is in")
    policy = _read_errors(Fields(f"{file}, policy", top.take("policy", dict)), H, len(dims))
    baselines = {}
    for name in top.mapping("baselines"):
        method = _read_errors(Fields(f"{file}, baselines[{name!r}]", top.value["baselines"][name]), H, len(dims))
        if not np.array_equal(method.episodes, policy.episodes):
            raise DataError(f"{file}: expected {name!r} on the policy's episodes, in the same order, got others")
        baselines[name] = method
    told = Fields(f"{file}, explain", top.mapping("explain"))
    explain = {name: told.text(name, EXPLAIN.get(name, "")) for name in baselines}
    return HeldOut(dims, units, unit, top.number("rate"), H, policy, baselines, explain)


def _read_errors(item: Fields, H: int, A: int) -> Errors:
    per_step_dim = _numbers(f"{item.where}, per_step_dim", item.take("per_step_dim", list), (H, A))
    rows = [Fields(f"{item.where}, per_episode[{i}]", r) for i, r in enumerate(item.take("per_episode", list))]
    if not rows:
        raise DataError(f"{item.where}: expected at least one held-out episode, got none")
    steps = np.stack([_numbers(f"{r.where}, per_step", r.take("per_step", list), (H,), gaps=True) for r in rows])
    numbers = np.array([r.take("episode", int) for r in rows])
    return Errors(per_step_dim, numbers, np.array([r.number("mae") for r in rows]), steps)


def _numbers(where: str, value: list[Any], shape: tuple[int, ...], gaps: bool = False) -> np.ndarray:
    try:
        found = np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: expected numbers of shape {shape} ({error})") from error
    if found.shape != shape or not (gaps or np.isfinite(found).all()):
        raise DataError(f"{where}: expected finite numbers of shape {shape}, got shape {found.shape}")
    return found


def error_mean(values: np.ndarray, rng: np.random.Generator) -> Mean:
    """Mean over episodes with its interval, cut at 0: an absolute error is not negative."""
    mean = mean_interval_over_episodes(list(values), LEVEL, rng)
    low = mean.interval.low if np.isinf(mean.interval.low) else max(0.0, mean.interval.low)
    return replace(mean, interval=replace(mean.interval, low=low))


def step_intervals(errors: Errors, rng: np.random.Generator) -> np.ndarray:
    """``H 3``: mean over episodes, low and high (95 %) of each step; NaN where no episode reaches it."""
    rows = np.full((errors.per_step.shape[1], 3), np.nan)
    for h, column in enumerate(errors.per_step.T):
        values = column[np.isfinite(column)]
        if values.size:
            mean = error_mean(values, rng)
            rows[h] = mean.value, mean.interval.low, mean.interval.high
    return rows


def compare(heldout: HeldOut, rng: np.random.Generator) -> tuple[Comparison, ...]:
    """The policy against each baseline, paired by held-out episode."""
    return tuple(_compare(name, heldout.policy, other, rng) for name, other in heldout.baselines.items())


def _compare(name: str, policy: Errors, other: Errors, rng: np.random.Generator) -> Comparison:
    steps = np.zeros(policy.per_step.shape[1], int)
    for h, difference in enumerate((policy.per_step - other.per_step).T):
        values = difference[np.isfinite(difference)]
        if values.size:
            interval = mean_interval_over_episodes(list(values), LEVEL, rng).interval
            steps[h] = int(interval.low > 0) - int(interval.high < 0)
    error = error_mean(other.mae, rng)
    return Comparison(name, error, paired_difference(policy.mae, other.mae, LEVEL, rng), steps)
