"""What a user should know about a dataset before training on it, for ``vola data info``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vola.data.episodes import Dataset
from vola.data.idle import idle_frames
from vola.data.lerobot import LeRobotDataset
from vola.data.lerobot_meta import ACTION, STATE
from vola.data.stats import FeatureStats, Normaliser, compute_statistics
from vola.errors import DataError

_IDLE = 0.5  # an episode that stands still for more than this share is named
_WIDE = 30.0  # a spread this many times the median one suggests another unit
_OFF = 0.02  # stored and exact statistics may differ by this share of the range


def describe(dataset: Dataset, episodes: Sequence[int] | None = None) -> RenderableType:
    """Episodes, rates, dimensions with units, ranges and oddities, cameras, tasks, idle share, notes.

    Reads every number of state and action of ``episodes`` (default all), and no picture.
    """
    chosen = [e.index for e in dataset.episodes] if episodes is None else list(episodes)
    # Without these, describing a dataset would fail exactly where its faults should be shown.
    notes = list(dataset.notes)
    parts: list[RenderableType] = [_overview(dataset, chosen), _tasks(dataset, chosen)]
    try:
        statistics = compute_statistics(dataset, chosen)
    except DataError as error:
        notes.append(f"no statistics: {error}")
    else:
        action, state = dataset.spec.action, dataset.spec.state
        parts.append(_dimensions("action", statistics["action"], action.units, action.kinds))
        if state.size:
            parts.append(_dimensions("state", statistics["state"], state.units, None))
        notes += _idle_notes(dataset, chosen)
        if isinstance(dataset, LeRobotDataset) and len(chosen) == len(dataset.episodes):
            notes += compare_stored(dataset.root, {ACTION: statistics["action"], STATE: statistics["state"]})
    parts += [Text(f"! {note}", style="yellow") for note in notes]
    return Group(*parts)


def _overview(dataset: Dataset, chosen: list[int]) -> RenderableType:
    lengths = np.array([e.length for e in dataset.episodes if e.index in set(chosen)])
    table = Table.grid(padding=(0, 2))
    if isinstance(dataset, LeRobotDataset):
        table.add_row("dataset", Text(f"{dataset.root} (LeRobot {dataset.version})"))
    table.add_row("episodes", f"{len(lengths)}")
    table.add_row("frames", f"{lengths.sum()}  ({lengths.min()} to {lengths.max()}, median {np.median(lengths):g})")
    table.add_row("rate", f"{dataset.fps:g} Hz, {lengths.sum() / dataset.fps / 60:.1f} minutes")
    cameras = [f"{c.name} {c.height}x{c.width}" for c in dataset.spec.cameras]
    table.add_row("cameras", Text(", ".join(cameras) or "none"))
    idle = idle_frames(dataset, chosen)
    table.add_row("idle frames", f"{np.concatenate(list(idle.values())).mean():.0%} (no dimension of the action moves)")
    return table


def _tasks(dataset: Dataset, chosen: list[int]) -> RenderableType:
    table = Table(
        "instruction", "episodes", "frames", title="tasks", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    counts: dict[str, list[int]] = {}
    for episode in dataset.episodes:
        if episode.index in set(chosen):
            counts.setdefault(episode.instruction, []).append(episode.length)
    ranked = sorted(counts.items(), key=lambda item: -len(item[1]))
    for text, lengths in ranked[:20]:
        table.add_row(Text(text), str(len(lengths)), str(sum(lengths)))
    if len(ranked) > 20:
        table.add_row(f"... {len(ranked) - 20} more", "", "")
    return table


def _dimensions(
    title: str, stats: FeatureStats, units: tuple[str, ...], kinds: tuple[str, ...] | None
) -> RenderableType:
    remarks = dimension_remarks(stats)
    texts = {"name": stats.names, "unit": units, **({"kind": kinds} if kinds else {}), "remark": tuple(remarks)}
    # A column that says nothing takes room from the numbers: say it once instead.
    silent = [k for k, v in texts.items() if set(v) == {"unknown"}]
    shown = {k: v for k, v in texts.items() if k not in silent and any(v)}
    head = f"{title}: {len(stats.names)} dimensions" + "".join(f", {k} unknown" for k in silent)
    table = Table(title=head, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    numbers = ("min", "q01", "q50", "q99", "max", "std")
    table.add_column("dim", justify="right")
    for name in [k for k in shown if k != "remark"]:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column("median" if name == "q50" else name, justify="right", no_wrap=True)
    if "remark" in shown:
        table.add_column("remark", style="yellow")
    for d in range(len(stats.names)):
        left = [Text(v[d]) for k, v in shown.items() if k != "remark"]
        values = [f"{getattr(stats, f)[d]:.4g}" for f in numbers]
        table.add_row(str(d), *left, *values, *([Text(remarks[d])] if "remark" in shown else []))
    return table


def dimension_remarks(stats: FeatureStats) -> list[str]:
    """Per dimension what would trouble a normaliser: constant, rare outliers, a spread unlike the others'."""
    quantile = Normaliser.fit("quantile", stats, limit=np.inf)
    largest = np.full(len(stats.names), np.inf)
    regular = (stats.q99 > stats.q01) | np.isin(range(len(stats.names)), quantile.constant)
    largest[regular] = quantile.largest()[regular]
    moving = [d for d in range(len(stats.names)) if d not in quantile.constant]
    typical = float(np.median(stats.std[moving])) if moving else 0.0
    out = []
    for d in range(len(stats.names)):
        said = []
        if d in quantile.constant:
            said.append("constant")
        elif largest[d] > 5.0:
            said.append(f"rare outliers, {largest[d]:.3g} times the q01..q99 range")
        if d in moving and stats.std[d] > _WIDE * typical:
            said.append(f"{stats.std[d] / typical:.0f} times the spread of the others: another unit?")
        out.append("; ".join(said))
    return out


def _idle_notes(dataset: Dataset, chosen: list[int]) -> list[str]:
    shares = {index: float(mask.mean()) for index, mask in idle_frames(dataset, chosen).items()}
    notes = []
    still = [index for index, share in shares.items() if share == 1.0]
    if still:
        notes.append(f"{len(still)} episodes never move: {_some(still)}")
    slow = [index for index, share in shares.items() if _IDLE < share < 1.0]
    if slow:
        notes.append(f"{len(slow)} episodes are idle for more than {_IDLE:.0%} of their frames: {_some(slow)}")
    return notes


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + ", ..." * (len(numbers) > 10)


def compare_stored(root: Path, exact: dict[str, FeatureStats]) -> list[str]:
    """Where ``meta/stats.json`` differs from the exact statistics by more than 2 % of a dimension's range."""
    path = root / "meta/stats.json"
    if not path.is_file():
        return []
    stored = json.loads(path.read_text(encoding="utf-8-sig"))
    notes = []
    for key, stats in exact.items():
        span = np.maximum(stats.max - stats.min, 1e-12)
        for field in ("mean", "std", "min", "max", "q01", "q99"):
            value = np.asarray(stored.get(key, {}).get(field, []), np.float64).ravel()
            if value.shape != span.shape:
                continue
            off = np.abs(value - getattr(stats, field)) / span
            if off.max() > _OFF:
                d = int(off.argmax())
                notes.append(
                    f"stored {field} of {key} is off by up to {off[d]:.0%} of the range ({stats.names[d]}: "
                    f"{value[d]:.4g} stored, {getattr(stats, field)[d]:.4g} exact); vola uses the exact one"
                )
    return notes
