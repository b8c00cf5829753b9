"""A dataset at a glance, from its numbers alone: `vola data info`. Nothing is decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vola.data.episodes import Dataset
from vola.data.idle import idle_frames
from vola.data.lerobot import LeRobotDataset
from vola.data.stats import CONSTANT_RANGE, FeatureStats, compute_statistics
from vola.types import RobotSpec

# Shares of a dimension's large moves (see ``idle_frames``) below which it counts as still; the first one decides.
STILL = (0.01, 0.03, 0.1)
# Standard deviations beyond which a training value is an outlier: ``Normaliser.fit`` widens the scale there.
FAR = 20.0
_BARS = " ▁▂▃▄▅▆▇█"
_BINS = 16
_SHOWN = 8  # tasks and episodes listed by name


def describe(dataset: Dataset) -> RenderableType:
    """Everything worth knowing before training: sizes, ranges, cameras, tasks, idle frames, oddities.

    Raises:
        DataError: a state or action that is not finite (names episode, frame and dimension).
    """
    numbers = [e.index for e in dataset.episodes]
    statistics = compute_statistics(dataset, numbers)
    columns = {key: [dataset.column(key, i) for i in numbers] for key in ("state", "action")}
    state, action = dataset.spec.state, dataset.spec.action
    parts = [_head(dataset)]
    if state.size:
        parts.append(_dimensions("state", np.concatenate(columns["state"]), statistics["state"], unit=state.units))
    rows = np.concatenate(columns["action"])
    parts.append(_dimensions("action", rows, statistics["action"], kind=action.kinds, unit=action.units))
    parts += [_cameras(dataset), _tasks(dataset)]
    notes = [*dataset.notes, *_odd_numbers("state", statistics["state"]), *_odd_numbers("action", statistics["action"])]
    if isinstance(dataset, LeRobotDataset):
        notes += dataset.compare_stored(statistics)
    if set(action.kinds) == {"unknown"}:
        notes.append(_meaning(dataset.spec, columns["state"], columns["action"]))
    if notes:
        parts.append(Text("\n".join(f"note: {n}" for n in notes), style="yellow"))
    return Group(*(p for part in parts for p in (part, "")))


def _head(dataset: Dataset) -> RenderableType:
    title = Text("dataset", style="bold")
    if isinstance(dataset, LeRobotDataset):
        title = Text.assemble((str(dataset.root), "bold"), f"  LeRobot {dataset.version}")
    lengths = np.array([e.length for e in dataset.episodes])
    frames, low, high = int(lengths.sum()), int(lengths.min()), int(lengths.max())
    spread = f"{low:,} frames each" if low == high else f"{low:,} to {high:,} frames, median {np.median(lengths):,.0f}"
    grid = Table.grid(padding=(0, 2))
    grid.add_row("episodes", f"{len(lengths):,}  ({spread})")
    grid.add_row("frames", f"{frames:,} at {dataset.fps:g} fps = {_duration(frames / dataset.fps)}")
    grid.add_row("idle", _idle(dataset))
    return Group(title, grid)


def _idle(dataset: Dataset) -> str:
    numbers = [e.index for e in dataset.episodes]
    masks = [idle_frames(dataset, numbers, still) for still in STILL]
    overall = [float(np.concatenate(list(m.values())).mean()) for m in masks]
    others = ", ".join(f"{share:.1%} within {100 * t:g}%" for t, share in zip(STILL[1:], overall[1:], strict=True))
    text = f"{overall[0]:.1%} of the frames stay within {100 * STILL[0]:g}% of a large move ({others})"
    each = {n: float(masks[0][n].mean()) for n in numbers}
    worst = [n for n in sorted(numbers, key=lambda n: -each[n]) if each[n] > 0][:4]
    if worst:
        text += "\nmost in " + ", ".join(f"episode {n} {each[n]:.0%}" for n in worst)
    frozen = [n for n in numbers if each[n] == 1]
    if frozen:
        text += f"\n[yellow]never moving: {_some('episode', frozen)}. Look at them; leave them out of training.[/]"
    return text


def _dimensions(key: str, rows: np.ndarray, stats: FeatureStats, **labels: Sequence[str]) -> RenderableType:
    title = f"[bold]{key}[/], {len(stats.names)} dimension{'s' * (len(stats.names) > 1)}"
    varied = {k: v for k, v in labels.items() if len(set(v)) > 1}
    title += "".join(f", {k} {escape(v[0])}" for k, v in labels.items() if k not in varied)
    table = Table(title=title, title_justify="left", title_style="", box=None)
    for name in ("", *varied):
        table.add_column(name, overflow="fold")
    for name in ("min", "mean", "max", "std", "max |z|"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("min … max", no_wrap=True)
    constant, reach = _constant(stats), _reach(stats)
    for d, name in enumerate(stats.names):
        numbers = [f"{getattr(stats, f)[d]:.4g}" for f in ("min", "mean", "max", "std")]
        far = f"{reach[d]:.1f}" if reach[d] <= FAR else f"[yellow]{reach[d]:.1f}[/]"
        shape = "[yellow]constant[/]" if constant[d] else _bars(rows[:, d])
        table.add_row(escape(name), *(escape(v[d]) for v in varied.values()), *numbers, far, shape)
    return table


def _cameras(dataset: Dataset) -> RenderableType:
    table = Table(title="[bold]cameras[/]", title_justify="left", title_style="", box=None)
    for name in ("", "rows x columns", "stored as"):
        table.add_column(name)
    for camera in dataset.spec.cameras:
        stored = dataset.stored(camera.name) if isinstance(dataset, LeRobotDataset) else "arrays in memory"
        table.add_row(escape(camera.name), f"{camera.height}x{camera.width}", stored)
    return table if dataset.spec.cameras else Text("no cameras")


def _tasks(dataset: Dataset) -> Table:
    counts = Counter(e.instruction for e in dataset.episodes).most_common()
    table = Table(title=f"[bold]tasks[/], {len(counts)}", title_justify="left", title_style="", box=None)
    table.add_column("episodes", justify="right")
    table.add_column("instruction")
    for text, count in counts[:_SHOWN]:
        table.add_row(f"{count:,}", escape(text))
    rest = counts[_SHOWN:]
    if rest:
        table.add_row(f"{sum(n for _, n in rest):,}", f"{len(rest):,} more tasks", style="dim")
    return table


def _odd_numbers(key: str, stats: FeatureStats) -> list[str]:
    lines = []
    constant = np.flatnonzero(_constant(stats))
    if len(constant):
        named = _some("dimension", [stats.names[d] for d in constant])
        lines.append(f"{key}: constant {named}; a normaliser maps it to 0 and decodes to the constant")
    far = np.flatnonzero(_reach(stats) > FAR)
    if len(far):
        named = _some("dimension", [stats.names[d] for d in far])
        lines.append(f"{key}: {named} reaches over {FAR:g} standard deviations from its mean; look for outliers")
    return lines


def _meaning(spec: RobotSpec, states: Sequence[np.ndarray], actions: Sequence[np.ndarray]) -> str:
    """What actions of unknown kind look like: with absolute targets the action goes with the state, with offsets and
    velocities it goes with the change of the state that follows."""
    text = "the dataset does not say what its actions are (absolute targets, offsets, velocities)"
    pairs = [(a, spec.state.names.index(n)) for a, n in enumerate(spec.action.names) if n in spec.state.names]
    if not pairs or max(len(s) for s in states) < 2:
        return text + "; find out before mixing it with other data"
    command = np.concatenate([a[:-1] for a in actions]).astype(np.float64)
    place = np.concatenate([s[:-1] for s in states]).astype(np.float64)
    change = np.concatenate([np.diff(s, axis=0) for s in states]).astype(np.float64)
    r_place = np.median([_correlation(command[:, a], place[:, s]) for a, s in pairs])
    r_change = np.median([_correlation(command[:, a], change[:, s]) for a, s in pairs])
    text += f"; their correlation with the state is {r_place:.2f}, with its change {r_change:.2f} (medians)"
    if max(r_place, r_change) < 0.5:
        return text
    return text + (
        ": they look like absolute targets" if r_place > r_change else ": they look like offsets or velocities"
    )


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / size if size > 0 else 0.0


def _constant(stats: FeatureStats) -> np.ndarray:
    magnitude = np.maximum(1.0, np.maximum(np.abs(stats.min), np.abs(stats.max)))
    return np.asarray(stats.max - stats.min <= CONSTANT_RANGE * magnitude)


def _reach(stats: FeatureStats) -> np.ndarray:
    """Largest distance of a value from the mean, in standard deviations; 0 for a constant."""
    far = np.maximum(stats.max - stats.mean, stats.mean - stats.min)
    return np.where(_constant(stats), 0.0, far / np.where(stats.std > 0, stats.std, 1.0))


def _bars(values: np.ndarray) -> str:
    counts, _ = np.histogram(values.astype(np.float64), _BINS)
    # A bin with anything in it shows, however rare: outliers are what one looks for.
    levels = np.ceil(counts / counts.max() * (len(_BARS) - 1)).astype(int)
    return "".join(_BARS[level] for level in levels)


def _some(what: str, items: Sequence[object]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{what}{'s' * (len(items) > 1)} {', '.join(str(i) for i in items[:_SHOWN])}{more}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
