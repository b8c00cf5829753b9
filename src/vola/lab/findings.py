"""Rows -> what a person reads: pooled rates with intervals, tables, figures, and a sentence with the verdict.

Rates pool all training seeds. Their Wilson interval is over episodes alone; the spread over training seeds is given
beside it (lowest and highest seed), because it is a different uncertainty and the start states are shared.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure

import vola
from vola.errors import ConfigError, expect_positive
from vola.theory.statistics import wilson

Verdict = Literal["holds", "holds in a regime", "does not hold", "inconclusive"]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """How large an experiment is run. ``scale`` multiplies training steps and demonstrations."""

    seeds: int = 3
    episodes: int = 200
    scale: float = 1.0
    size: str = "small"

    def __post_init__(self) -> None:
        expect_positive("lab", seeds=self.seeds, episodes=self.episodes)
        if not 0 < self.scale < math.inf:
            raise ConfigError(f"lab: expected a scale > 0, got {self.scale}")

    def steps(self, full: int) -> int:
        return max(2, round(full * self.scale))

    def demos(self, full: int) -> int:
        """An even number, so that scenes can be shown in pairs."""
        return max(8, 2 * round(full * self.scale / 2))


@dataclass(frozen=True)
class Pooled:
    """Successes over all seeds: rate, Wilson interval over episodes, and the rate of each seed."""

    successes: int
    n: int
    seeds: tuple[float, ...]

    @property
    def rate(self) -> float:
        return self.successes / self.n

    @property
    def interval(self) -> tuple[float, float]:
        found = wilson(self.successes, self.n)
        return found.low, found.high

    def __str__(self) -> str:
        low, high = self.interval
        spread = f", seeds {min(self.seeds):.0%}-{max(self.seeds):.0%}" if len(self.seeds) > 1 else ""
        return f"{self.rate:.1%} [{low:.0%}, {high:.0%}]{spread}"


@dataclass(frozen=True)
class Table:
    """A table: header and rows of text."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, *self.rows)]
        lines.insert(1, "|" + "---|" * len(self.header))
        return f"**{self.caption}**\n\n" + "\n".join(lines)


@dataclass(frozen=True)
class Finding:
    """The result of one experiment. ``sentence`` says whether the claim holds, in which regime, and where not."""

    name: str
    claim: str
    verdict: Verdict
    sentence: str
    tables: tuple[Table, ...]
    figures: Mapping[str, Figure] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def where(rows: Sequence[Row], **labels: Any) -> list[Row]:
    """The rows whose labels all match."""
    return [row for row in rows if all(row.get(k) == v for k, v in labels.items())]


def pooled(rows: Sequence[Row], **labels: Any) -> Pooled | None:
    """Successes of the matching rows over all seeds; None where there are none."""
    found = where(rows, **labels)
    if not found:
        return None
    rates = tuple(row["successes"] / row["episodes"] for row in found)
    return Pooled(sum(row["successes"] for row in found), sum(row["episodes"] for row in found), rates)


def shown(value: Pooled | None) -> str:
    """For a table cell."""
    return "" if value is None else str(value)


def write_finding(finding: Finding, plan: Plan, rows: Sequence[Row], command: str, folder: Path) -> Path:
    """Write ``<name>.md``, ``<name>.json`` (rows, plan, versions) and one PNG per figure; returns the page.

    The command is part of the page: every number in it comes from there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for key, figure in finding.figures.items():
        name = f"{finding.name}-{key}.png"
        figure.savefig(folder / name, dpi=110, facecolor="white", metadata={"Software": None})
        pictures.append(f"![{key}]({name})")
    minutes = sum({(r.get("head"), r.get("demos"), r.get("H"), r["seed"]): r["minutes"] for r in rows}.values())
    scaled = "" if plan.scale == 1 else f" SCALED by {plan.scale:g}: figures of a trial run, not results."
    parts = [
        f"# {finding.claim}",
        f"**{finding.verdict.capitalize()}.** {finding.sentence}",
        f"Command: `{command}` ({plan.seeds} training seeds, {plan.episodes} start states each, {minutes:.0f} CPU "
        f"minutes of training).{scaled} Rates: pooled over seeds, [95 % Wilson over episodes], range of the seeds.",
        *pictures,
        *(table.markdown() for table in finding.tables),
        *finding.notes,
    ]
    page = folder / f"{finding.name}.md"
    page.write_text("\n\n".join(parts) + "\n")
    versions = {"vola": vola.__version__, "torch": torch.__version__, "python": platform.python_version()}
    record = {"plan": asdict(plan), "command": command, "versions": versions, "verdict": finding.verdict}
    kept = {"name": finding.name, "claim": finding.claim, "sentence": finding.sentence, **record, "rows": list(rows)}
    (folder / f"{finding.name}.json").write_text(json.dumps(kept, indent=1))
    return page


def line_figure(
    series: Mapping[str, Mapping[float, Pooled | None]], x: str, title: str, log: bool = True, y: str = "success"
) -> Figure:
    """Success with Wilson bars against a number, one line per name."""
    figure = Figure(figsize=(7.2, 3.9), layout="constrained")
    axes = figure.subplots()
    styles = ("o-", "s-", "^-", "D-", "v-", "P-", "X-", "*-", "h-", "<-")
    for style, (name, points) in zip(styles * 3, series.items(), strict=False):
        known = {k: v for k, v in points.items() if v is not None}
        if not known:
            continue
        rate = [v.rate for v in known.values()]
        low = [max(0.0, v.rate - v.interval[0]) for v in known.values()]
        high = [max(0.0, v.interval[1] - v.rate) for v in known.values()]
        axes.errorbar(
            list(known), rate, yerr=[low, high], fmt=style, capsize=2, markersize=4, linewidth=1.2, label=name
        )
    if log:
        ticks = sorted({k for points in series.values() for k, v in points.items() if v is not None})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()
    axes.set_ylim(-0.03, 1.03)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
