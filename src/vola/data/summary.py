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
from vola.data.lerobot import LeRobotDataset
from vola.data.stats import CONSTANT_RANGE, FeatureStats, compute_statistics
from vola.errors import InputError
from vola.types import RobotSpec

# Shares of a dimension's range per frame below which it counts as still; the first is the default. openpi filters
# DROID at 1e-3, OpenVLA filters LIBERO at 1e-4.
STILL = (0.001, 0.003, 0.01)
# Standard deviations beyond which a training value is an outlier: ``Normaliser.fit`` widens the scale there.
FAR = 20.0
_BARS = " ▁▂▃▄▅▆▇█"
_BINS = 16
_SHOWN = 8  # tasks and episodes listed by name


def idle_frames(
    actions: Sequence[np.ndarray], kinds: Sequence[str], tolerance: float = STILL[0]
) -> tuple[np.ndarray, ...]:
    """Per episode a bool array (L,): True where no dimension moves the robot.

    actions: one ``(L, A)`` array per episode, in physical units. kinds: one per dimension, see ``ActionSpec``.
    A "delta" or "velocity" moves the robot when it is not zero; any other dimension when it differs from the frame
    before (the first frame is judged by the step to the second). "Zero" and "differs" leave room for noise:
    ``tolerance`` times what the dimension spans between its 1 % and 99 % quantile over all episodes. A frame in which
    only a gripper changes is therefore not idle. ``~idle`` is the filter; an episode that never moves is all True.

    Raises:
        InputError: no episode, an array that is not ``(L >= 1, A)``, or a negative tolerance.
    """
    shapes = [np.shape(a) for a in actions]
    if not shapes or any(len(s) != 2 or s[0] < 1 or s[1] != len(kinds) for s in shapes) or not tolerance >= 0:
        raise InputError(
            f"idle_frames: expected episodes (L >= 1, {len(kinds)}) and tolerance >= 0, got {shapes[:4]}, {tolerance}"
        )
    rate = np.array([k in ("delta", "velocity") for k in kinds])
    pool = np.concatenate(actions).astype(np.float64)
    pool[:, rate] = np.abs(pool[:, rate])
    low, q01, q99, high = np.quantile(pool, (0.0, 0.01, 0.99, 1.0), axis=0)
    low, q01 = np.where(rate, 0.0, low), np.where(rate, 0.0, q01)
    # A gripper that is closed in less than 1 % of all frames spans nothing between those quantiles.
    span = np.where(q99 > q01, q99 - q01, high - low)
    rounding = CONSTANT_RANGE * np.maximum(np.abs(low), np.abs(high))
    still = np.maximum(tolerance * span, rounding)
    return tuple((_motion(a.astype(np.float64), rate) <= still).all(1) for a in actions)


def _motion(action: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """(L, A) how far each dimension moves the robot in each frame."""
    change = np.diff(action, axis=0)
    first = change[:1] if len(change) else np.full((1, action.shape[1]), np.inf)
    return np.abs(np.where(rate, action, np.concatenate([first, change])))


def idle_fraction(
    actions: Sequence[np.ndarray], kinds: Sequence[str], tolerance: float = STILL[0]
) -> tuple[float, np.ndarray]:
    """Share of idle frames over all frames, and per episode (float64, one per episode); see ``idle_frames``."""
    idle = idle_frames(actions, kinds, tolerance)
    return float(np.concatenate(idle).mean()), np.array([i.mean() for i in idle])


def describe(dataset: Dataset) -> RenderableType:
    """Everything worth knowing before training: sizes, ranges, cameras, tasks, idle frames, oddities.

    Raises:
        DataError: a state or action that is not finite (names episode, frame and dimension).
    """
    numbers = [e.index for e in dataset.episodes]
    statistics = compute_statistics(dataset, numbers)
    columns = {key: [dataset.column(key, i) for i in numbers] for key in ("state", "action")}
    state, action = dataset.spec.state, dataset.spec.action
    parts = [_head(dataset, columns["action"])]
    if state.size:
        parts.append(_dimensions("state", np.concatenate(columns["state"]), statistics["state"], unit=state.units))
    rows = np.concatenate(columns["action"])
    parts.append(_dimensions("action", rows, statistics["action"], kind=action.kinds, unit=action.units))
    parts += [_cameras(dataset), _tasks(dataset)]
    notes = [*dataset.notes, *_odd_numbers("state", statistics["state"]), *_odd_numbers("action", statistics["action"])]
    if set(action.kinds) == {"unknown"}:
        notes.append(_meaning(dataset.spec, columns["state"], columns["action"]))
    if notes:
        parts.append(Text("\n".join(f"note: {n}" for n in notes), style="yellow"))
    return Group(*(p for part in parts for p in (part, "")))


def _head(dataset: Dataset, actions: Sequence[np.ndarray]) -> RenderableType:
    title = Text("dataset", style="bold")
    if isinstance(dataset, LeRobotDataset):
        title = Text.assemble((str(dataset.root), "bold"), f"  LeRobot {dataset.version}")
    lengths = np.array([e.length for e in dataset.episodes])
    frames, low, high = int(lengths.sum()), int(lengths.min()), int(lengths.max())
    spread = f"{low:,} frames each" if low == high else f"{low:,} to {high:,} frames, median {np.median(lengths):,.0f}"
    grid = Table.grid(padding=(0, 2))
    grid.add_row("episodes", f"{len(lengths):,}  ({spread})")
    grid.add_row("frames", f"{frames:,} at {dataset.fps:g} fps = {_duration(frames / dataset.fps)}")
    grid.add_row("idle", _idle([e.index for e in dataset.episodes], actions, dataset.spec.action.kinds))
    return Group(title, grid)


def _idle(numbers: Sequence[int], actions: Sequence[np.ndarray], kinds: Sequence[str]) -> str:
    shares = [idle_fraction(actions, kinds, t) for t in STILL]
    overall, each = shares[0]
    others = ", ".join(f"{share:.1%} within {100 * t:g}%" for t, (share, _) in zip(STILL[1:], shares[1:], strict=True))
    text = f"{overall:.1%} of the frames stay within {100 * STILL[0]:g}% of the range ({others})"
    worst = [int(p) for p in np.argsort(-each, kind="stable") if each[p] > 0][:4]
    if worst:
        text += "\nmost in " + ", ".join(f"episode {numbers[p]} {each[p]:.0%}" for p in worst)
    frozen = [n for n, share in zip(numbers, each, strict=True) if share == 1]
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
    counts, _ = np.histogram(values, _BINS)
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
