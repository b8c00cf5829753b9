"""What action tokenizers would cost on a dataset: error in physical units, tokens, bits. `vola data tokens`.

Everything is fitted on the training episodes and measured on the held-out ones, on the chunks that a policy would
be trained on: statistics by quantiles, padded steps left out of every error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from vola.data.episodes import Dataset, Episode, check_selection, split_episodes
from vola.data.stats import Normaliser, compute_statistics, finite_column
from vola.data.transforms import Transforms
from vola.errors import ConfigError
from vola.theory.quantisation import bits_per_chunk
from vola.tokenizers.actions import ActionTokenizer, Tokens
from vola.tokenizers.bins import QuantileBins, UniformBins
from vola.tokenizers.fast import FastConfig, Pieces
from vola.types import Observation, RobotSpec

KINDS = (
    *("midpoint:16", "midpoint:64", "midpoint:256", "truncated:256"),
    *("edges:256", "quantile:16", "quantile:64", "quantile:256"),
    *("fast:5", "fast:10", "fast:30", "fast-wide:10"),
)
MOST_CHUNKS = 2000  # of each part; more hardly move the figures and cost minutes with FAST
_GROUP = 4  # tokenizers side by side in a table: what 80 columns hold
PROBES = 64  # chunks in which one token is changed
_LEGEND = """tokens: mean and most per chunk. bits: tokens x entropy of the ids;
log2: tokens x log2 of the vocabulary. error: rms in % of half the range;
floor: the same without clipping. clipped: % of the numbers.
off by 1: error, likewise, when one token of a chunk moves to the next id
(median chunk); broken: how often that leaves no chunk at all."""
_CONFIGS: dict[str, Callable[[float], Any]] = {
    "midpoint": lambda n: UniformBins(_whole(n), "midpoint"),
    "truncated": lambda n: UniformBins(_whole(n), "truncated"),
    "edges": lambda n: UniformBins(_whole(n), "edges"),
    "quantile": lambda n: QuantileBins(_whole(n)),
    "fast": lambda n: _fast(n, "byte_level", 0.0),
    "fast-wide": lambda n: _fast(n, "whole", 3.0),
}


@dataclass(frozen=True)
class Row:
    """One tokenizer on the held-out chunks, or why it could not be fitted (``refused``; numbers are then NaN).

    rms, worst: per dimension (A), physical units, valid steps only. share: rms of all numbers in normalised units,
    where 2 is the range from the 1 % to the 99 % quantile; floor: what it can be without clipping.
    clipped: share of the numbers (bins) or coefficients (FAST) outside what can be written.
    one_token: rms change of a chunk (normalised, median over chunks) when one of its tokens moves to a neighbouring id.
    broken: the share of such sequences that are no chunk any more (repaired for ``one_token``).
    """

    kind: str
    vocabulary: int
    tokens_mean: float
    tokens_max: int
    bits: float
    rms: np.ndarray
    worst: np.ndarray
    share: float
    floor: float
    clipped: float
    one_token: float
    broken: float
    refused: str = ""


@dataclass(frozen=True)
class TokenReport:
    """All rows, and what they were measured on: (chunks, episodes) of the fit and of the measurement."""

    robot: RobotSpec
    H: int
    transform: str
    fitted: tuple[int, int]
    measured: tuple[int, int]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class _Chunks:
    """Normalised chunks ``B H A`` and which steps are inside the episode."""

    values: np.ndarray
    valid: np.ndarray


def measure(
    dataset: Dataset,
    H: int = 16,
    kinds: Sequence[str] = KINDS,
    transforms: Transforms | None = None,
    val: float = 0.2,
    seed: int = 0,
    progress: Progress | None = None,
) -> TokenReport:
    """Fit every tokenizer on the training episodes of a split and measure it on the others.

    kinds: "midpoint:K", "truncated:K", "edges:K", "quantile:K", "fast:SCALE" or "fast-wide:SCALE" (merges across
    all characters and an alphabet three times wider at both ends).

    Raises:
        ConfigError: an unknown kind, H below 1, or too few episodes to hold one out. DataError: values not finite.
    """
    configs = {kind: _config(kind) for kind in kinds}
    transforms = transforms or Transforms()
    first, second = split_episodes(dataset, val, seed)
    if not second:
        raise ConfigError(f"val: expected a share above 0 of episodes to measure on, got {val}")
    normaliser = Normaliser.fit("quantile", compute_statistics(dataset, first, H, transforms)["action"])
    fitted = _chunks(dataset, check_selection(dataset, first), H, transforms, normaliser)
    held = _chunks(dataset, check_selection(dataset, second), H, transforms, normaliser)
    rows = []
    task = progress.add_task("fitting", total=len(configs)) if progress else None
    for kind, config in configs.items():
        rows.append(_row(kind, config, fitted, held, normaliser, seed))
        if progress is not None and task is not None:
            progress.advance(task)
    sizes = (len(fitted.values), len(first)), (len(held.values), len(second))
    return TokenReport(dataset.spec, H, "relative" if transforms.steps else "absolute", *sizes, tuple(rows))


def describe_tokens(report: TokenReport) -> RenderableType:
    """The report as tables: one line per tokenizer, then errors per dimension in physical units."""
    good = [r for r in report.rows if not r.refused]
    parts: list[RenderableType] = [_head(report), Group(_overall(report.rows), Text(_LEGEND, style="dim"))]
    if good:
        parts += [_per_dimension(report.robot, good[i : i + _GROUP]) for i in range(0, len(good), _GROUP)]
    notes = [f"{r.kind}: not fitted. {r.refused}" for r in report.rows if r.refused]
    clipped = max((r.clipped for r in good if "fast" not in r.kind), default=0.0)
    if clipped > 0.001:
        notes.append(
            f"up to {clipped:.1%} of the held-out numbers lie outside the range of the bins; there the worst error is "
            "the distance to its end. Uniform bins span the 1 % to 99 % quantiles, as published."
        )
    saturated = [r for r in good if "fast" in r.kind and r.clipped > 0 and r.share > 1.5 * r.floor]
    for row in saturated:
        notes.append(
            f"{row.kind}: {row.share / row.floor:.1f} times the error of rounding, because {row.clipped:.3%} of the "
            "held-out coefficients are larger than any in training and saturate. fast-wide leaves room for them "
            '(FastConfig: margin, reach, pieces="whole").'
        )
    if notes:
        parts.append(Text("\n".join(f"note: {n}" for n in notes), style="yellow"))
    return Group(*(p for part in parts for p in (part, "")))


def _config(kind: str) -> Any:
    name, _, number = kind.partition(":")
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if name not in _CONFIGS or not np.isfinite(value):
        raise ConfigError(f"kinds: expected NAME:NUMBER with NAME in {', '.join(_CONFIGS)}, got {kind!r}")
    return _CONFIGS[name](value)


def _whole(number: float) -> int:
    if number != int(number):
        raise ConfigError(f"kinds: expected a whole number of bins, got {number}")
    return int(number)


def _fast(scale: float, pieces: Pieces, margin: float) -> FastConfig:
    """As published, or with room for motions larger than those of the training set."""
    # Every different coefficient needs a token; finer rounding and a margin mean more of them.
    vocabulary = 1024 * (2 if scale > 10 else 1) * (2 if margin else 1)
    reach = 20.0 if margin else 4.0
    return FastConfig(scale, vocabulary, reach=reach, margin=margin, pieces=pieces, on_malformed="repair")


def _chunks(
    dataset: Dataset, episodes: Sequence[Episode], H: int, transforms: Transforms, normaliser: Normaliser
) -> _Chunks:
    """At most MOST_CHUNKS evenly spread chunks; each starts at a frame and ends, at the latest, with its episode."""
    stride = max(1, -(-sum(e.length for e in episodes) // MOST_CHUNKS))
    values, valid, passed = [], [], 0
    for episode in episodes:
        state = finite_column(dataset, episode, "state", dataset.spec.state.names)
        action = finite_column(dataset, episode, "action", dataset.spec.action.names)
        starts = np.arange(-passed % stride, episode.length, stride)
        passed += episode.length
        rows = starts[:, None] + np.arange(H)
        seen = np.ones((len(starts), 1), bool)
        observation = Observation({}, {}, state[starts][:, None], seen, ("",) * len(starts))
        encoded = transforms.encode(observation, action[np.minimum(rows, episode.length - 1)])
        values.append(normaliser.encode(encoded))
        valid.append(rows < episode.length)
    return _Chunks(np.concatenate(values), np.concatenate(valid))


def _row(kind: str, config: Any, fitted: _Chunks, held: _Chunks, normaliser: Normaliser, seed: int) -> Row:
    A = held.values.shape[2]
    try:
        tokenizer: ActionTokenizer = config.fit(fitted.values, fitted.valid)
    except ConfigError as refusal:
        none = np.full(A, np.nan)
        return Row(kind, 0, np.nan, 0, np.nan, none, none, np.nan, np.nan, np.nan, np.nan, np.nan, str(refusal))
    # Complete chunks for every step: bins skip padded ones, FAST repeats the last action, as in training.
    full = held.values.astype(np.float64)
    tokens = tokenizer.encode(full)
    decoded = tokenizer.decode(tokens, *full.shape[1:])
    assert not decoded.malformed.any()
    error = (decoded.chunks - full)[held.valid]
    physical = error * normaliser.scale
    # A constant dimension decodes to its constant whatever is written: it has no part in the share.
    moving = normaliser.scale > 0
    lengths = tokens.valid.sum(1)
    counts = np.bincount(tokens.ids[tokens.valid], minlength=tokenizer.vocabulary)
    clipped, total = tokenizer.count_clipped(full, held.valid)
    change, broken = _one_token(tokenizer, full, np.random.default_rng(seed))
    return Row(
        kind,
        tokenizer.vocabulary,
        float(lengths.mean()),
        int(lengths.max()),
        bits_per_chunk(lengths, counts),
        np.sqrt((physical**2).mean(0)),
        np.abs(physical).max(0),
        float(np.sqrt((error[:, moving] ** 2).mean())) if moving.any() else 0.0,
        float(np.sqrt((tokenizer.floor()[0][moving] ** 2).mean())) if moving.any() else 0.0,
        float(clipped.sum() / (total * A)),
        change,
        broken,
    )


def _one_token(tokenizer: ActionTokenizer, chunks: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    """What a model's off-by-one costs: one random token of a chunk (never the end token) moves to the next id."""
    chosen = chunks[np.unique(np.linspace(0, len(chunks) - 1, PROBES).round().astype(int))]
    tokens = tokenizer.encode(chosen)
    lengths = tokens.valid.sum(1) - (tokenizer.end is not None)
    ids = tokens.ids.copy()
    last = tokenizer.vocabulary - 1 - (tokenizer.end is not None)
    for b, length in enumerate(lengths):
        place = int(rng.integers(length))
        step = int(rng.choice((-1, 1)))
        ids[b, place] += step if 0 <= ids[b, place] + step <= last else -step
    H, A = chosen.shape[1:]
    before = tokenizer.decode(tokens, H, A).chunks
    after = tokenizer.decode(Tokens(ids, tokens.valid), H, A)
    changes = np.sqrt(((after.chunks - before) ** 2).mean(axis=(1, 2)))
    return float(np.median(changes)), float(after.malformed.mean())


def _head(report: TokenReport) -> RenderableType:
    (chunks, episodes), (held_chunks, held_episodes) = report.fitted, report.measured
    seconds = report.H / report.robot.action.rate
    return Text.from_markup(
        f"[bold]action tokenizers[/], H={report.H} ({seconds:.2g} s), {report.robot.action.size} dimensions, "
        f"{report.transform} actions scaled by their 1 % and 99 % quantiles\n"
        f"fitted on {chunks:,} chunks of {episodes} episodes, measured on {held_chunks:,} chunks of {held_episodes} "
        "others"
    )


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=None, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _overall(rows: Sequence[Row]) -> RenderableType:
    names = ("tokens", "most", "bits", "log2", "error", "floor", "clipped", "off by 1", "broken")
    table = _table("[bold]held-out chunks[/]", names)
    for row in rows:
        if row.refused:
            table.add_row(row.kind, *["-"] * len(names))
            continue
        shares = (f"{100 * v:.2f}" for v in (row.share, row.floor, row.clipped, row.one_token))
        uniform = row.tokens_mean * np.log2(row.vocabulary)
        counts = f"{row.tokens_mean:.1f}", str(row.tokens_max), f"{row.bits:,.0f}", f"{uniform:,.0f}"
        table.add_row(row.kind, *counts, *shares, f"{row.broken:.0%}")
    return table


def _per_dimension(robot: RobotSpec, rows: Sequence[Row]) -> RenderableType:
    units = robot.action.units
    same = len(set(units)) == 1
    unit = f"unit {escape(units[0])}" if same else "in the unit of each dimension"
    table = _table(f"[bold]rms and largest error[/] of a held-out action, {unit}", [r.kind for r in rows])
    for d, name in enumerate(robot.action.names):
        label = escape(name if same else f"{name} [{units[d]}]")
        table.add_row(label, *(_pair(r.rms[d], r.worst[d]) for r in rows))
    if same and units[0] != "unknown" and len(robot.action.names) > 1:
        table.add_row("all", *(_pair(np.sqrt((r.rms**2).mean()), r.worst.max()) for r in rows), style="bold")
    return table


def _pair(rms: float, worst: float) -> str:
    return f"{rms:.2g} {worst:.2g}"
