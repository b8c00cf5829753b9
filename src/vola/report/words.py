"""Numbers and findings as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vola.report.counts import Counts
from vola.report.heldout import Comparison, HeldOut, compare, error_mean
from vola.report.records import ROLES, PolicyResult, Summary
from vola.rollout.rollout import EpisodeResult
from vola.theory.statistics import Interval, Paired, Rate, paired_difference, wilson

NBSP = "\u00a0"
NAIVE = {"hold": "holding the last action", "mean": "the mean action", "linear": "linear extrapolation"}
# What stands in for a sequence that did not decode (``FastConfig.on_malformed``).
FALLBACKS = {
    "repeat": "the last action was repeated instead, or normalised zeros executed where there was none yet",
    "repair": "missing numbers were taken as zero and surplus ones dropped",
}
LEVEL = 0.95
ORDER = {role: i for i, role in enumerate(ROLES)}


def percent(rate: Rate) -> str:
    """ "97 %"; one decimal where whole percents would turn a near miss into 0 or 100, or where n >= 200 earns it."""
    exact = 100 * rate.successes / rate.n  # in this order: 100 * 115 / 200 is 57.5, 100 * (115 / 200) is below it
    whole = f"{exact:.0f}"
    if exact not in (0, 100) and (rate.n >= 200 or whole in ("0", "100")):
        whole = f"{exact:.1f}"
        if whole in ("0.0", "100.0"):
            whole = "< 0.1" if exact < 50 else "> 99.9"
    return f"{whole}{NBSP}%"


def percent_range(interval: Interval) -> str:
    """ "[93, 99]" in percent, rounded outwards so that the printed interval is never narrower than the computed one."""
    return f"[{math.floor(100 * interval.low + 1e-9)}, {math.ceil(100 * interval.high - 1e-9)}]"


def number(value: float, digits: int = 3) -> str:
    """Three significant digits with a thin space per thousand: 1 360 000, 42.1, 0.00431."""
    if not math.isfinite(value):
        return "\u2013"
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    if abs(rounded) >= 1000 or float(value).is_integer():
        return f"{(value if float(value).is_integer() else rounded):,.0f}".replace(",", "\u2009")
    return f"{rounded:.{max(places, 0)}f}" if abs(rounded) >= 1e-4 else f"{value:.{digits - 1}e}"


def number_range(interval: Interval) -> str:
    ends = (number(interval.low), number(interval.high))
    return "" if math.isinf(interval.low) else f"[{ends[0]}, {ends[1]}]".replace("-", "\u2212")


def signed(value: float) -> str:
    """With its sign: +0.12, \u22120.12."""
    sign = "+" if value > 0 else "\u2212" if value < 0 else ""
    return sign + number(abs(value))


def joined(parts: Sequence[str], word: str = "and") -> str:
    """ "a, b and c"."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {word} {parts[-1]}"


def ranges(steps: Sequence[int]) -> str:
    """ "1\u20133, 7" from [1, 2, 3, 7]."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(str(a) if a == b else f"{a}\u2013{b}" for a, b in runs)


def called(policy: PolicyResult) -> str:
    """How a sentence calls a policy: "pi0", "the L2 baseline", "the expert"."""
    if policy.role == "baseline":
        return f"the {policy.name} baseline"
    if policy.role == "expert":
        return "the expert" if policy.name == "expert" else f"the expert {policy.name}"
    return policy.name


def decode_sentences(name: str, rate: Rate, counts: Counts) -> list[str]:
    """What did not decode, what was done instead, and success without these episodes; nothing where all is well."""
    said = []
    if counts.malformed_plans:
        plans = f"{counts.malformed_plans} {_plural('plan', counts.malformed_plans)} of {name}"
        where = f"in {counts.malformed_episodes} of {rate.n} {_plural('episode', rate.n)}"
        fallback = FALLBACKS.get(counts.on_malformed, "")
        rule = f": {fallback} (head.tokens.on_malformed={counts.on_malformed})" if fallback else ""
        said.append(f"{plans} did not decode, {where}{rule}.")
        said.append(_without(name, rate, counts.decoded))
    if counts.starved_ticks:
        ticks = f"{number(counts.starved_ticks, 9)} {_plural('tick', counts.starved_ticks)}"
        said.append(f"On {ticks} in all {name} had no fresh action and the last one was repeated.")
    return said


def _without(name: str, rate: Rate, decoded: Rate | None) -> str:
    if decoded is None:
        return f"No episode of {name} was without such a plan, so there is no success rate without them."
    return (
        f"Success without these episodes: {percent(decoded)} {_interval(decoded)}, {decoded.successes} of {decoded.n}; "
        f"with them {percent(rate)}, {rate.successes} of {rate.n}."
    )


def decode_notes(counts: Counts) -> list[str]:
    """The same as notes in a table."""
    notes = []
    if counts.malformed_plans:
        plans = f"{counts.malformed_plans} {_plural('plan', counts.malformed_plans)}"
        episodes = f"{counts.malformed_episodes} {_plural('episode', counts.malformed_episodes)}"
        rule = f" (on_malformed = {counts.on_malformed})" if counts.on_malformed else ""
        rate = counts.decoded
        others = f"{percent(rate)} {_interval(rate)} of {rate.n}" if rate else "none"
        notes.append(f"{plans} in {episodes} did not decode{rule}; the other episodes: {others}")
    if counts.starved_ticks:
        notes.append(
            f"{number(counts.starved_ticks, 9)} {_plural('tick', counts.starved_ticks)} without a fresh action"
        )
    return notes


def _interval(rate: Rate) -> str:
    return percent_range(wilson(rate.successes, rate.n, LEVEL)).replace(" ", NBSP)


def _plural(word: str, n: int) -> str:
    return word if n == 1 else f"{word}s"


def executor(record: Mapping[str, Any]) -> str:
    """How chunks become actions, from {"part": class name, its settings}: "Receding, k = 4"."""
    settings = [
        "the whole chunk" if key == "k" and value is None else f"{key} = {text(value)}"
        for key, value in record.items()
        if key != "part"
    ]
    return ", ".join([str(record.get("part", "")), *settings])


def conditions(record: Mapping[str, Any]) -> str:
    """What an evaluation was made under: executor, changed settings, late plans, disturbance of the scenes."""
    parts = [executor(record["executor"])]
    parts += [f"{name} = {text(value)}" for name, value in record["settings"].items() if name.startswith("head")]
    if record["latency"]:
        parts.append(f"plans {text(record['latency']['ticks'])} ticks late")
    kicks = record["scenes"].get("kick_probability")
    shown = {k: v for k, v in record["scenes"].items() if v and (k != "kick_size" or kicks)}
    parts += [f"{name} = {text(value)}" for name, value in shown.items()]
    return ", ".join(parts)


def shared_starts(rollouts: Sequence[EpisodeResult], first: str, second: str) -> list[tuple[bool, bool]]:
    """Success of two policies on the start states (hash and instruction) that both were given, in a fixed order."""
    table: dict[str, dict[tuple[str, str, int], bool]] = {first: {}, second: {}}
    for row in rollouts:
        if row.policy in table:
            table[row.policy][row.start_hash, row.instruction, row.seed] = row.success
    common = sorted(table[first].keys() & table[second].keys())
    return [(table[first][key], table[second][key]) for key in common]


def paired_sentence(summary: Summary, rollouts: Sequence[EpisodeResult]) -> str:
    """Policy against first baseline on the start states they share, or "" where there are none."""
    roles = {role: next((p for p in summary.policies if p.role == role), None) for role in ("policy", "baseline")}
    policy, baseline = roles["policy"], roles["baseline"]
    if policy is None or baseline is None:
        return ""
    pairs = shared_starts(rollouts, policy.name, baseline.name)
    if not pairs:
        return ""
    found = paired_difference([a for a, _ in pairs], [b for _, b in pairs], LEVEL)
    return (
        f"On the {found.episodes} start states both were given, {policy.name} succeeds on {found.a_higher} where "
        f"{called(baseline)} fails, and the other way round on {found.b_higher}: a difference of {_points(found)} "
        f"({found.interval.method.split(',')[0]} interval for pairs; McNemar's exact test {_p_value(found.p_value)})."
    )


def _points(found: Paired) -> str:
    return f"{100 * found.difference:+.0f}{NBSP}points {percent_range(found.interval).replace(' ', NBSP)}".replace(
        "-", "\u2212"
    )


def _p_value(p: float) -> str:
    return f"p{NBSP}<{NBSP}0.0001" if p < 1e-4 else f"p{NBSP}={NBSP}{number(p, 2)}"


def naive(name: str) -> str:
    """How a sentence calls a held-out baseline."""
    return NAIVE.get(name, name)


def heldout_sentence(comparisons: Sequence[Comparison]) -> str:
    """Which baselines the policy beats over the whole chunk and which it does not: "closer than a and b, but ..."."""
    won = [naive(c.baseline) for c in comparisons if c.difference.interval.high < 0]
    lost = [naive(c.baseline) for c in comparisons if c.difference.interval.low > 0]
    undecided = [naive(c.baseline) for c in comparisons if 0 in c.difference.interval]
    parts = [f"closer than {joined(won)}"] if won else []
    parts += [f"farther off than {joined(lost)}"] if lost else []
    parts += [f"not distinguishable from {joined(undecided, 'or')}"] if undecided else []
    return joined(parts, "but") if parts else ""


def weak_steps(name: str, H: int, comparisons: Sequence[Comparison]) -> list[str]:
    """Plain sentences about the steps at which the policy is not shown to beat a baseline."""
    others: dict[tuple[int, ...], list[str]] = {}
    for comparison in comparisons:
        others.setdefault(comparison.not_better(), []).append(naive(comparison.baseline))
    sentences = []
    for steps, names in others.items():
        if len(steps) == H:
            sentences.append(f"At no step is {name} shown to beat {joined(names, 'or')}.")
        elif steps:
            where = f"step{'s' * (len(steps) > 1)} {ranges(steps)}"
            sentences.append(f"At {where} of {H} {name} does not beat {joined(names, 'or')}.")
    return sentences


def closer_but_fails(summary: Summary, comparisons: Sequence[Comparison]) -> str:
    """Where a policy of this run is closer to the held-out demonstrations and yet succeeds less often; "" otherwise."""
    own = next((p for p in summary.policies if p.role == "policy"), None)
    for other in summary.policies:
        found = next((c.difference for c in comparisons if c.baseline == other.name), None)
        if own is None or found is None or found.interval.low <= 0:
            continue
        if wilson(other.rate.successes, other.rate.n, LEVEL).high < wilson(own.rate.successes, own.rate.n, LEVEL).low:
            return (
                f"On held-out actions {called(other)} is closer than {own.name}, and yet it succeeds less often "
                f"({percent(other.rate)} against {percent(own.rate)}). A single best guess keeps this error low, also "
                "where the demonstrations went several ways and the guess lies between them."
            )
    return ""


def heldout_lines(name: str, found: HeldOut, rng: np.random.Generator) -> list[str]:
    """The held-out comparison for a terminal: mean absolute error over the whole chunk, interval over episodes."""
    comparisons = compare(found, rng)
    own = error_mean(found.policy.mae, rng)
    rows = [(name, own, "")] + [
        (naive(c.baseline), c.error, f"{signed(c.difference.difference)} {number_range(c.difference.interval)}")
        for c in comparisons
    ]
    lines = [f"held-out error over {found.H} steps, {found.unit}, {len(found.policy.mae)} episodes, 95 % intervals"]
    for label, mean, difference in rows:
        beside = f"   {name} minus it: {difference}" if difference else ""
        lines.append(f"  {label:<26}{number(mean.value):>8}  {number_range(mean.interval):<18}{beside}")
    return lines + [f"  {sentence}" for sentence in weak_steps(name, found.H, comparisons)]


def flat(record: Mapping[str, Any], grouped: bool = False, prefix: str = "") -> list[tuple[str, str]]:
    """A nested JSON object as (path, text) rows; ``grouped`` sets thin spaces into large whole numbers."""
    rows: list[tuple[str, str]] = []
    for key, value in record.items():
        if isinstance(value, Mapping) and value:
            rows += flat(value, grouped, f"{prefix}{key} \u203a ")
        else:
            rows.append((f"{prefix}{key}", text(value, grouped)))
    return rows


def text(value: Any, grouped: bool = False) -> str:
    """A JSON value as people read it."""
    if value is None or value == [] or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u2009") if grouped else str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(text(item, grouped) for item in value)
    return str(value)
