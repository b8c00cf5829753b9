"""From records to what the page shows: one function per section, None where its records are absent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vola.errors import DataError
from vola.report import animation, charts, words
from vola.report.counts import count
from vola.report.evaluations import Recorded, read_evaluations
from vola.report.heldout import HeldOut, compare, error_mean, read_heldout, step_intervals
from vola.report.records import (
    Clip,
    Fan,
    Log,
    PolicyResult,
    Summary,
    read_log,
    read_rollouts,
    read_samples,
    read_summary,
)
from vola.report.theme import naive_role
from vola.rollout.rollout import EpisodeResult
from vola.theory.statistics import Interval, Mean, Rate, wilson

MOVIE_BYTES = 2_600_000  # of encoded clips; as text a third more
MOST_FANS = 4
MOST_ROWS = 24
MOST_FLAGGED = 200
CORNER = "(rows = who looks)"  # how the text of Layout.picture() begins
# The signs of that text: (style class, meaning).
SIGNS = {
    "#": ("all", "all of it"),
    "\\": ("causal", "up to its own place"),
    "~": ("steps", "up to its own time step"),
    "<": ("before", "before its own time step"),
    "I": ("self", "itself only"),
    ".": ("none", "nothing"),
}


@dataclass(frozen=True)
class Records:
    """All that a run folder holds; None and empty mean that a record is absent."""

    summary: Summary
    log: Log | None
    baseline_log: Log | None
    rollouts: tuple[EpisodeResult, ...]
    clips: tuple[Clip, ...]
    fans: tuple[Fan, ...]
    heldout: HeldOut | None
    evaluations: tuple[Recorded, ...] = ()


def read_records(run: Path) -> Records:
    """Read a run folder and refuse records that contradict each other.

    Raises:
        DataError: a record is damaged, or ``rollouts.parquet`` counts other successes than ``summary.json``.
    """
    summary, rollouts = read_summary(run), read_rollouts(run)
    policies = tuple(_counted(run, policy, rollouts) for policy in summary.policies)
    clips, fans = read_samples(run)
    logs = read_log(run / "log.jsonl"), read_log(run / "baseline" / "log.jsonl")
    summary = replace(summary, policies=policies)
    return Records(summary, *logs, rollouts, clips, fans, read_heldout(run), read_evaluations(run))


def _counted(run: Path, policy: PolicyResult, rollouts: Sequence[EpisodeResult]) -> PolicyResult:
    """A policy with the counts of its episodes; those that summary.json has must be the same."""
    own = [row for row in rollouts if row.policy == policy.name]
    if not own:
        return policy
    won = sum(row.success for row in own)
    if (won, len(own)) != (policy.rate.successes, policy.rate.n):
        raise DataError(
            f"{run / 'rollouts.parquet'}: counts {won} of {len(own)} successes for {policy.name!r}, but "
            f"summary.json says {policy.rate.successes} of {policy.rate.n}. The two come from different "
            "evaluations; train with --resume to evaluate again."
        )
    found = count(own, policy.counts.on_malformed if policy.counts else "")
    if policy.counts not in (None, found):
        raise DataError(
            f"{run / 'rollouts.parquet'}: counts {found.record()} for {policy.name!r}, but summary.json says "
            f"{policy.counts.record() if policy.counts else None}. The two come from different evaluations; train "
            "with --resume to evaluate again."
        )
    return replace(policy, counts=found)


def bars(summary: Summary) -> list[dict[str, Any]]:
    """Success rates with intervals, in percent of the bar's width."""
    rows = []
    for policy in sorted(summary.policies, key=lambda p: words.ORDER[p.role]):
        interval = wilson(policy.rate.successes, policy.rate.n, words.LEVEL)
        rows.append(
            {
                "role": policy.role,
                "name": policy.name,
                "called": words.called(policy),
                "k": policy.k,
                "percent": words.percent(policy.rate),
                "range": words.percent_range(interval),
                "successes": policy.rate.successes,
                "n": policy.rate.n,
                "low": round(100 * interval.low, 2),
                "high": round(100 * interval.high, 2),
                "at": round(100 * policy.rate.rate, 2),
            }
        )
    return rows


def decoding(records: Records) -> dict[str, Any] | None:
    """Per policy what did not decode and success without it, and the episodes with such plans; None where all went
    well."""
    told, flagged = [], []
    for policy in sorted(records.summary.policies, key=lambda p: words.ORDER[p.role]):
        sentences = words.decode_sentences(policy.name, policy.rate, policy.counts) if policy.counts else []
        told += [(policy.role, sentences)] if sentences else []
        rows = [row for row in records.rollouts if row.policy == policy.name and row.malformed]
        flagged += [(policy.role, policy.name, row.seed, row.malformed, row.failure or "success") for row in rows]
    if not told:
        return None
    return {"told": told, "flagged": flagged[:MOST_FLAGGED], "more": max(0, len(flagged) - MOST_FLAGGED)}


def learning(records: Records) -> dict[str, Any] | None:
    if records.log is None:
        return None
    chart = charts.learning_curve(records.summary, records.log, records.baseline_log)
    if chart is None:
        return None
    logs = [log for log in (records.log, records.baseline_log) if log is not None]
    table = [
        (e.policy, words.number(e.step, 9), words.percent(e.rate), _range(e.rate), f"{e.rate.successes} of {e.rate.n}")
        for log in logs
        for e in log.evaluations
    ]
    return {
        "chart": chart,
        "table": table,
        "two_losses": records.baseline_log is not None,
        "held_out": len(records.log.val) > 0,
    }


def outcomes(records: Records) -> dict[str, Any] | None:
    """Success by task or instruction, and how the failures failed."""
    if not records.rollouts:
        return None
    policies = rolled_out(records)
    by_task = len({row.task for row in records.rollouts}) > 1
    counts: dict[str, dict[str, list[bool]]] = {}
    for row in records.rollouts:
        key = row.task if by_task else row.instruction
        counts.setdefault(key, {}).setdefault(row.policy, []).append(row.success)
    table = []
    for key in sorted(counts)[:MOST_ROWS]:
        rates = {name: Rate(sum(own), len(own)) for name, own in counts[key].items()}
        sizes = {rate.n for rate in rates.values()}
        same = words.number(sizes.pop(), 9) if len(sizes) == 1 and len(rates) == len(policies) else ""
        table.append((key, same, [_cell(rates.get(name)) for name in policies]))
    macro = []
    for name in policies if by_task else ():
        own = [float(np.mean(c[name])) for c in counts.values() if name in c]
        macro.append(f"{100 * np.mean(own):.0f}{words.NBSP}%")
    failures = []
    for name in policies:
        kinds = Counter(r.failure or "not named" for r in records.rollouts if r.policy == name and not r.success)
        if kinds:
            failures.append((name, _role(records, name), [(kind, count) for kind, count in kinds.most_common(6)]))
    return {
        "head": "task" if by_task else "instruction",
        "policies": [(name, _role(records, name)) for name in policies],
        "table": table if len(counts) > 1 else [],
        "more": max(0, len(counts) - MOST_ROWS),
        "macro": macro,
        "failures": failures,
    }


def _cell(rate: Rate | None) -> tuple[str, str, str]:
    return ("\u2013", "", "") if rate is None else (words.percent(rate), _range(rate), str(rate.n))


def _range(rate: Rate) -> str:
    return words.percent_range(wilson(rate.successes, rate.n, words.LEVEL))


def rolled_out(records: Records) -> list[str]:
    """Names of the policies that were rolled out: first the policy, then baselines, then experts."""
    names = dict.fromkeys(row.policy for row in records.rollouts)
    return sorted(names, key=lambda name: words.ORDER[_role(records, name)])


def _role(records: Records, policy: str) -> str:
    listed = next((row.role for row in records.rollouts if row.policy == policy), "policy")
    return records.summary.role_of(policy, listed)


def clips(records: Records) -> dict[str, Any] | None:
    """Films, one row of cards per policy."""
    if not records.clips:
        return None
    made, left_out = animation.movies(records.clips, MOVIE_BYTES)
    rows: dict[str, list[dict[str, Any]]] = {}
    for clip, movie in zip(records.clips, made, strict=False):
        outcome = "reaches the goal" if clip.success else f"fails: {clip.failure or 'not named'}"
        rows.setdefault(clip.policy, []).append(
            {
                "movie": movie,
                "policy": clip.policy,
                "role": _role(records, clip.policy),
                "instruction": clip.instruction,
                "success": clip.success,
                "outcome": "success" if clip.success else (clip.failure or "failure"),
                "frames": len(clip.frames),
                "alt": f"{clip.policy}, told \u201c{clip.instruction}\u201d, {outcome} after {len(clip.frames)} frames",
            }
        )
    columns = min(4, max((len(row) for row in rows.values()), default=1))
    trail = any(movie.trail for movie in made)
    return {"rows": list(rows.values()), "columns": columns, "left_out": left_out, "trail": trail}


def fans(records: Records) -> dict[str, Any] | None:
    """Groups of pictures of one observation, one per policy, with all sampled chunks over it. ``across``: whether
    a wide page sets the groups beside each other (policies below each other) or the other way round."""
    groups: dict[str, list[Fan]] = {}
    for fan in records.fans:
        groups.setdefault(fan.group, []).append(fan)
    shown = []
    for members in list(groups.values())[:MOST_FANS]:
        members.sort(key=lambda f: words.ORDER[_role(records, f.policy)])
        pictures = []
        for fan in members:
            n, H, spread = len(fan.paths), fan.paths.shape[1] - 1, animation.spread(fan)
            apart = f"up to {100 * spread:.0f}{words.NBSP}% of the width apart" if spread >= 0.005 else "all the same"
            pictures.append(
                {
                    "policy": fan.policy,
                    "role": _role(records, fan.policy),
                    "image": animation.still(fan.image),
                    "width": fan.image.shape[1],
                    "height": fan.image.shape[0],
                    "paths": animation.paths(fan),
                    "ends": [(round(float(x), 1), round(float(y), 1)) for x, y in fan.paths[:, -1]],
                    "strength": round(min(0.9, max(0.16, 6 / n)), 3),
                    "n": n,
                    "H": H,
                    "spread": apart,
                    "alt": f"{n} chunks of {H} steps sampled from {fan.policy} for one picture, told "
                    f"\u201c{fan.instruction}\u201d; {apart}",
                }
            )
        shown.append({"instruction": members[0].instruction, "pictures": pictures})
    policies = max((len(group["pictures"]) for group in shown), default=0)
    return {"groups": shown, "across": len(shown) > policies} if shown else None


def heldout(records: Records, rng: np.random.Generator) -> dict[str, Any] | None:
    """Held-out error: table against the baselines, error over the steps, error per dimension."""
    found = records.heldout
    if found is None:
        return None
    name = next((p.name for p in records.summary.policies if p.role == "policy"), records.summary.system)
    comparisons = compare(found, rng)
    roles = {"policy": "policy"}
    for i, c in enumerate(comparisons):
        roles[c.baseline] = records.summary.role_of(c.baseline, naive_role(c.baseline, i))
    own = error_mean(found.policy.mae, rng)
    rows = [("policy", name, "", words.number(own.value), words.number_range(own.interval), "", "", "")]
    for c in comparisons:
        gap = c.difference
        rows.append(
            (
                roles[c.baseline],
                c.baseline,
                found.explain[c.baseline],
                words.number(c.error.value),
                words.number_range(c.error.interval),
                words.signed(gap.difference),
                words.number_range(gap.interval),
                verdict(gap.interval),
            )
        )
    methods = {"policy": found.policy, **found.baselines}
    intervals = {key: step_intervals(errors, rng) for key, errors in methods.items()}
    return {
        "name": name,
        "unit": found.unit,
        "same_unit": found.units[0] if len(set(found.units)) == 1 else "",
        "H": found.H,
        "episodes": own.episodes,
        "mae": words.number(own.value),
        "range": words.number_range(own.interval),
        "method": own.interval.method,
        "verdict": words.heldout_sentence(comparisons),
        "weak": words.weak_steps(name, found.H, comparisons),
        "closer_but": words.closer_but_fails(records.summary, comparisons),
        "rows": rows,
        "bars": _error_bars(rows, [own, *(c.error for c in comparisons)]),
        "steps": charts.heldout_steps(found, name, intervals, roles),
        "dims": charts.heldout_dims(found, name, roles),
        "off_scale": charts.leaves_panel({key: errors.per_step_dim for key, errors in methods.items()}),
        "leaves": charts.leaves_panel({key: rows[:, :1] for key, rows in intervals.items()}),
        "table": _dimension_table(found),
        "columns": [(r[0], r[1]) for r in rows],
    }


def _error_bars(rows: Sequence[tuple[str, ...]], means: Sequence[Mean]) -> list[dict[str, Any]]:
    """Errors with intervals, in percent of a bar as wide as the largest of them (an interval may be cut off)."""
    scale = 100 / max(1e-300, *(1.08 * mean.value for mean in means))
    made = []
    for (role, name, explain, value, span, *_), mean in zip(rows, means, strict=True):
        known = np.isfinite(mean.interval.low)
        ends = (mean.interval.low, mean.interval.high) if known else (mean.value, mean.value)
        low, high = (round(float(np.clip(scale * end, 0, 100)), 2) for end in ends)
        bar = {"role": role, "name": name, "explain": explain, "value": value, "range": span}
        made.append(bar | {"low": low, "high": high, "at": round(scale * mean.value, 2)})
    return made


def verdict(interval: Interval) -> str:
    """What the interval of (policy - baseline) says about the policy's error."""
    return "better" if interval.high < 0 else "worse" if interval.low > 0 else "undecided"


def _dimension_table(found: HeldOut) -> list[tuple[str, str, list[tuple[str, bool]]]]:
    """Per dimension: name, unit, and each method's error averaged over the steps, the smallest marked."""
    tables = [found.policy.per_step_dim, *(b.per_step_dim for b in found.baselines.values())]
    means = np.stack([t.mean(axis=0) for t in tables], axis=1)
    return [
        (dim, unit, [(words.number(float(v)), bool(v == row.min())) for v in row])
        for dim, unit, row in zip(found.dims, found.units, means, strict=True)
    ]


def layout(summary: Summary) -> dict[str, Any] | None:
    """Who looks at whom: the text picture of ``Layout.picture()`` as a grid of drawn cells (kind "grid": names, rows of
    (name, tokens, shapes), legend), any other text as it is (kind "text")."""
    lines = [line for line in summary.layout_picture.splitlines() if line.strip()]
    if not lines:
        return None
    names = lines[0].removeprefix(CORNER).split()
    rows = [_layout_row(line) for line in lines[1 : 1 + len(names)]]
    if not lines[0].startswith(CORNER) or [row[0] for row in rows if len(row[2]) == len(names)] != names:
        return {"kind": "text", "text": summary.layout_picture}
    used = {sign for _, _, signs in rows for sign in signs}
    shapes = [(name, tokens, [SIGNS[s] for s in signs]) for name, tokens, signs in rows]
    return {"kind": "grid", "names": names, "rows": shapes, "legend": [SIGNS[s] for s in SIGNS if s in used]}


def _layout_row(line: str) -> tuple[str, str, list[str]]:
    name, _, rest = line.partition(" ")
    tokens, *signs = rest.split() or [""]
    return name, tokens.removeprefix("x"), [s for s in signs if s in SIGNS]


def speed(records: Records) -> dict[str, Any] | None:
    """Tiles (value, unit, what) and the plan latency of every policy as the rollouts measured it."""
    summary, tiles = records.summary, []
    if summary.minutes is not None:
        tiles.append((words.number(summary.minutes), "min", "the whole run"))
    if summary.samples_per_second is not None:
        tiles.append((words.number(summary.samples_per_second), "samples/s", "training throughput"))
    if summary.flops_share is not None:
        tiles.append((words.number(100 * summary.flops_share, 2), "%", "of the measured peak FLOP/s"))
    if summary.plan_ms:
        (first, ms), *others = summary.plan_ms.items()
        more = "".join(f"; {label} {words.number(value)}" for label, value in others)
        tiles.append((words.number(ms), "ms", f"one plan, {first}{more}"))
    latency = []
    for name in rolled_out(records):
        own = np.array([row.plan_ms for row in records.rollouts if row.policy == name])
        own = own[np.isfinite(own)]
        if own.size:
            half, most = (words.number(float(v)) for v in np.quantile(own, [0.5, 0.9]))
            latency.append((name, _role(records, name), half, most, own.size))
    return {"tiles": tiles, "latency": latency} if tiles or latency else None
