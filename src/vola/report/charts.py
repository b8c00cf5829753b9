"""The charts of a report: matplotlib figures as theme-following SVG, each drawn for a wide and for a narrow page.

No global figure state: figures are made and dropped here. Lines are named where they end instead of in a legend.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from vola.report.heldout import HeldOut
from vola.report.records import Log, Summary
from vola.report.theme import STAND_IN, themed
from vola.report.words import number
from vola.theory.statistics import wilson

WIDE, NARROW = 760, 350  # pixels; figures are made at 72 dpi so that one point is one pixel
FONT = 12.5
BINS = 50  # a loss curve of more points is shown as the median and the 10 to 90 % band of so many pieces
DASHES = {"hold": (0, (5, 2)), "mean": (0, (1.2, 1.8)), "linear": (0, (6, 2, 1.2, 2))}
MARKS = {"policy": "o", "baseline": "s", "expert": "D"}
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vola",
    "text.parse_math": False,
    "font.size": FONT,
    "axes.titlesize": FONT,
    "axes.unicode_minus": True,
    "text.color": STAND_IN["ink"],
    "axes.labelcolor": STAND_IN["soft"],
    "axes.edgecolor": STAND_IN["line"],
    "xtick.color": STAND_IN["line"],
    "ytick.color": STAND_IN["line"],
    "xtick.labelcolor": STAND_IN["soft"],
    "ytick.labelcolor": STAND_IN["soft"],
    "grid.color": STAND_IN["line"],
}


@dataclass(frozen=True)
class Chart:
    """One chart for two page widths, and what it shows in words (the text alternative)."""

    wide: str
    narrow: str
    description: str


@dataclass(frozen=True)
class Series:
    """A line: x and y of equal length, an optional band (low, high), and how it looks. ``end``: the name at its end."""

    label: str
    role: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    dash: str = ""
    mark: str = ""
    end: str = ""


def _chart(
    prefix: str, height: Callable[[bool], int], paint: Callable[[Figure, bool], None], description: str
) -> Chart:
    drawn = []
    for narrow in (False, True):
        with mpl.rc_context(_RC), warnings.catch_warnings():
            # Text stays text, so a character that matplotlib's own font lacks is drawn by the reader's browser.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure = Figure(figsize=((NARROW if narrow else WIDE) / 72, height(narrow) / 72), dpi=72)
            figure.patch.set_alpha(0)
            paint(figure, narrow)
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        drawn.append(themed(buffer.getvalue(), f"{prefix}-{'n' if narrow else 'w'}"))
    return Chart(drawn[0], drawn[1], description)


def learning_curve(summary: Summary, log: Log, baseline: Log | None) -> Chart | None:
    """Loss (logarithmic) over training steps and, below it, closed-loop success with Wilson intervals."""
    losses = _losses(summary, log, baseline)
    successes = _successes(summary, log, baseline)
    panels = [p for p in (losses, successes) if p]
    if not panels:
        return None

    def paint(figure: Figure, narrow: bool) -> None:
        rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        left = 46
        _margins(figure, left=left, right=_label_room(figure, sum(panels, [])), top=28, bottom=42, gap=0.42)
        for axes, series in zip(rows, panels, strict=True):
            if series is losses:
                _style(axes, "Loss, logarithmic" if _positive(series) else "Loss", left)
                _loss_axis(axes, series)
            else:
                _style(axes, "Success in closed loop, 95 % intervals", left)
                axes.set_ylim(-4, 104)
                axes.set_yticks([0, 50, 100], ["0 %", "50 %", "100 %"])
            _lines(axes, series)
        _steps_axis(rows[-1], "training step")
        rows[-1].xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=True))
        for axes, series in zip(rows, panels, strict=True):
            _end_labels(figure, axes, series)

    told = [f"{s.label}: from {number(float(s.y[0]))} to {number(float(s.y[-1]))}" for p in panels for s in p]
    described = "Learning curve over training steps. " + "; ".join(told) + "."
    return _chart("learning", lambda _: 60 + 175 * len(panels), paint, described)


def _losses(summary: Summary, log: Log, baseline: Log | None) -> list[Series]:
    listed = {p.role: p.name for p in reversed(summary.policies)}
    names = {"policy": listed.get("policy", summary.system), "baseline": listed.get("baseline", "baseline")}
    series = []
    for role, source in (("policy", log), ("baseline", baseline)):
        if source is not None and len(source.train):
            x, y, low, high = thinned(source.train, BINS)
            end = "" if len(source.val) else names[role]
            series.append(Series(f"{names[role]} training", role, x, y, low, high, end=end))
        if source is not None and len(source.val):
            x, y = source.val[:, 0], source.val[:, 1]
            series.append(Series(f"{names[role]} held out", role, x, y, mark=MARKS[role], end=names[role]))
    return series


def _positive(series: Sequence[Series]) -> bool:
    """A loss at or below zero (a log-density may be) has no place on a logarithmic axis."""
    return all((s.y > 0).all() for s in series)


def _loss_axis(axes: Axes, series: Sequence[Series]) -> None:
    if _positive(series):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))


def _successes(summary: Summary, log: Log, baseline: Log | None) -> list[Series]:
    series = []
    for source, role in ((log, "policy"), (baseline, "baseline")):
        for name in dict.fromkeys(e.policy for e in source.evaluations) if source else ():
            rows = sorted((e for e in source.evaluations if e.policy == name), key=lambda e: e.step) if source else []
            ends = [wilson(e.rate.successes, e.rate.n) for e in rows]
            x, y = np.array([e.step for e in rows], float), np.array([100 * e.rate.rate for e in rows])
            low, high = np.array([100 * i.low for i in ends]), np.array([100 * i.high for i in ends])
            known = summary.role_of(name, role)
            series.append(Series(name, known, x, y, low, high, mark=MARKS[known], end=name))
    return series


def thinned(points: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
    """(step, loss) ``N 2`` in at most ``most`` bins: mean step, median loss, and the 10 % and 90 % quantile per bin."""
    if len(points) <= most:
        return points[:, 0], points[:, 1], None, None
    bins = np.array_split(points, most)
    x = np.array([b[:, 0].mean() for b in bins])
    low, middle, high = np.stack([np.quantile(b[:, 1], [0.1, 0.5, 0.9]) for b in bins], axis=1)
    return x, middle, low, high


def heldout_steps(heldout: HeldOut, name: str, intervals: Mapping[str, np.ndarray], roles: Mapping[str, str]) -> Chart:
    """Held-out error over the steps of a chunk; ``intervals`` ("policy" and baselines): ``H 3`` mean, low, high;
    ``roles``: the colour role of each."""
    x = np.arange(1, heldout.H + 1, dtype=float)
    series = []
    for method, rows in intervals.items():
        role = roles[method]
        band = rows[:, 1:] if np.isfinite(rows).all() else np.full((heldout.H, 2), np.nan)
        label = name if method == "policy" else method
        dash = role if role in DASHES else ""
        series.append(Series(label, role, x, rows[:, 0], band[:, 0], band[:, 1], dash=dash, end=label))

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        _margins(figure, left=52, right=_label_room(figure, series), top=28, bottom=46)
        _style(axes, f"Mean absolute error, {heldout.unit}", 52)
        _lines(axes, series)
        axes.set_ylim(0, panel_top({m: rows[:, :1] for m, rows in intervals.items()}, 0))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        second = f"steps ahead (one step = {number(1000 / heldout.rate)} ms)"
        _steps_axis(axes, second)
        _end_labels(figure, axes, series)

    told = [
        f"{s.label} {number(float(s.y[0]))} at step 1, {number(float(s.y[-1]))} at step {heldout.H}" for s in series
    ]
    described = f"Held-out error by step of the chunk, in {heldout.unit}: {'; '.join(told)}."
    return _chart("steps", lambda _: 290, paint, described)


def heldout_dims(heldout: HeldOut, name: str, roles: Mapping[str, str]) -> Chart:
    """One small panel per action dimension: error over the steps; ``roles`` as above."""
    A = len(heldout.dims)
    x = np.arange(1, heldout.H + 1, dtype=float)
    tables = {"policy": heldout.policy.per_step_dim} | {k: b.per_step_dim for k, b in heldout.baselines.items()}

    def columns(narrow: bool) -> int:
        return min(A, 2 if narrow else 4)

    def height(narrow: bool) -> int:
        return 34 + 118 * -(-A // columns(narrow))

    same = len(set(heldout.units)) == 1  # then the page says the unit once
    titles = [d if same else f"{d} ({u})" for d, u in zip(heldout.dims, heldout.units, strict=True)]

    def paint(figure: Figure, narrow: bool) -> None:
        grid = figure.subplots(-(-A // columns(narrow)), columns(narrow), sharex=True, squeeze=False)
        _margins(figure, left=40, right=8, top=24, bottom=32, gap=0.55, between=0.34)
        for axes, a in zip(grid.flat, range(grid.size), strict=True):
            if a >= A:
                axes.set_visible(False)
                continue
            _style(axes, titles[a], 40, small=True)
            for method, table in tables.items():
                role = roles[method]
                style = DASHES.get(role, "-")
                axes.plot(x, table[:, a], color=STAND_IN[role], lw=1.8 if role == "policy" else 1.2, ls=style)
            axes.set_ylim(0, panel_top(tables, a))
            axes.yaxis.set_major_locator(MaxNLocator(2))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))

    best = [
        f"{dim}: {name} {number(float(tables['policy'][:, a].mean()))} {unit}"
        for a, (dim, unit) in enumerate(zip(heldout.dims, heldout.units, strict=True))
    ]
    return _chart(
        "dims", height, paint, "Held-out error by action dimension, mean over steps. " + "; ".join(best) + "."
    )


def panel_top(tables: Mapping[str, np.ndarray], a: int) -> float:
    """Upper end of a panel's axis: above the policy and all baselines but "linear", which may run off the scale."""
    highest = max(float(table[:, a].max()) for method, table in tables.items() if method != "linear")
    return 1.15 * highest if highest > 0 else 1.0


def leaves_panel(tables: Mapping[str, np.ndarray]) -> bool:
    """Whether linear extrapolation leaves the panel of some column of ``tables`` (per method ``H A``)."""
    linear = tables.get("linear")
    return linear is not None and any(linear[:, a].max() > panel_top(tables, a) for a in range(linear.shape[1]))


def _margins(
    figure: Figure, left: int, right: int, top: int, bottom: int, gap: float = 0.2, between: float = 0.2
) -> None:
    """Margins in pixels; ``gap`` and ``between`` are the spaces of rows and columns as a share of a panel."""
    width, height = figure.get_size_inches() * 72
    figure.subplots_adjust(
        left=left / width, right=1 - right / width, top=1 - top / height, bottom=bottom / height,
        hspace=gap, wspace=between,
    )  # fmt: skip


def fitted(title: str, room: float, size: float) -> tuple[str, float]:
    """A title for ``room`` pixels: smaller down to 9.5, then with its middle left out (both ends tell joints apart)."""
    per_letter = 0.66  # width of a bold letter as a share of the font size, on the wide side
    smaller = min(size, max(9.5, room / (per_letter * len(title))))
    letters = max(3, int(room / (per_letter * smaller)))
    if len(title) > letters:
        title = f"{title[: letters // 2]}\u2026{title[len(title) - (letters - 1 - letters // 2) :]}"
    return title, smaller


def _style(axes: Axes, title: str, left: int, small: bool = False) -> None:
    """Title flush with the tick labels, ``left`` pixels before the axis; only horizontal rules."""
    width = axes.get_window_extent().width  # at 72 dpi, so in pixels
    title, size = fitted(title, width + left - 6, FONT - 1) if small else (title, FONT)
    axes.set_title(title, loc="left", x=-left / width, fontsize=size, pad=6 if small else 9, weight="bold")
    axes.patch.set_alpha(0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", lw=0.8)
    axes.tick_params(length=0, pad=6, labelsize=FONT - 2 if small else FONT - 0.5)
    axes.tick_params(axis="x", length=3)
    axes.set_axisbelow(True)


def _steps_axis(axes: Axes, label: str) -> None:
    axes.set_xlabel(label, fontsize=FONT - 0.5, loc="left", labelpad=4)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: number(v, 6)))


def _lines(axes: Axes, series: Sequence[Series]) -> None:
    for s in series:
        colour = STAND_IN[s.role]
        style = DASHES[s.dash] if s.dash else "-"
        if s.mark and s.low is not None and s.high is not None:
            axes.vlines(s.x, s.low, s.high, color=colour, lw=1.4)
        elif s.low is not None and s.high is not None and np.isfinite(s.low).all():
            axes.fill_between(s.x, s.low, s.high, color=colour, alpha=0.16, lw=0)
        axes.plot(
            s.x, s.y, color=colour, lw=1.8 if s.mark else 1.5, ls=style, marker=s.mark or None, markersize=5.5,
            markeredgewidth=0, solid_capstyle="round", solid_joinstyle="round",
        )  # fmt: skip


def _label_room(figure: Figure, series: Sequence[Series]) -> int:
    """Pixels that the longest name at a line's end needs, at most 45 % of the figure."""
    texts = [figure.text(0, 0, s.end, fontsize=FONT, weight="bold") for s in series]
    widest = max(t.get_window_extent().width for t in texts)
    for t in texts:
        t.remove()
    return int(min(14 + widest, 0.45 * figure.get_size_inches()[0] * 72))


def _end_labels(figure: Figure, axes: Axes, series: Sequence[Series]) -> None:
    """The names of the lines at their right ends, pushed apart where two would touch."""
    series = [s for s in series if s.end]
    axes.get_xlim(), axes.get_ylim()  # settles the limits, so that data can be placed in pixels
    right = axes.transAxes.transform((1, 0))[0]
    tops = [axes.transData.transform((s.x[-1], s.y[-1]))[1] for s in series]
    order = sorted(range(len(series)), key=lambda i: tops[i])
    placed: list[float] = []
    for i in order:
        placed.append(max(tops[i], placed[-1] + FONT + 2) if placed else tops[i])
    ceiling = axes.transAxes.transform((0, 1))[1]
    for j in reversed(range(len(placed))):
        placed[j] = min(placed[j], ceiling)
        ceiling = placed[j] - FONT - 2
    for i, y in zip(order, placed, strict=True):
        s = series[i]
        x, y = figure.transFigure.inverted().transform((right + 8, y))
        figure.text(x, y, s.end, color=STAND_IN[s.role], va="center", fontsize=FONT, weight="bold")
