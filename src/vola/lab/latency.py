"""A plan takes time and the robot does not wait: what does asynchronous execution cost? (seed text 8.5.7; RTC)

Claim: replacing the chunk in execution by a late plan jumps between modes, and real-time chunking, which makes the new
plan continue the old one, does not. Detour; a plan asked for at tick t arrives at t + d; the first plan is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vola.executor import Receding
from vola.lab.findings import Finding, Plan, Row, Table, Verdict, line_figure, pooled, shown
from vola.lab.jobs import Case, Demos, Job
from vola.realtime import Method, RealTime
from vola.rollout.latency import Latency

TASK = "vola/Detour-v0"
DELAYS = (0, 1, 2, 4, 6)
K = 4
STEPS = 3000
PREFIX = 6  # longest prefix that the trained form has seen
GUIDED: tuple[Method, ...] = ("vjp", "identity")
EXECUTORS = ("replace the chunk", "real-time, vjp", "real-time, identity", "real-time, trained prefix")
CLAIM = "Late plans hurt where they replace the chunk in execution, not where they continue it"


def jobs(plan: Plan) -> tuple[Job, ...]:
    """A flow policy, and one trained to continue a given prefix, per seed."""
    demos, made = Demos(TASK, plan.demos(3000)), []
    for seed in range(plan.seeds):
        plain = [
            Case({"execute": EXECUTORS[0], "delay": d}, Receding(K), plan.episodes, latency=_late(d)) for d in DELAYS
        ]
        for method in GUIDED:
            for d in DELAYS:
                label = {"execute": f"real-time, {method}", "delay": d}
                plain.append(Case(label, RealTime(K, d, method=method), plan.episodes, latency=_late(d)))
        trained = [
            Case(
                {"execute": EXECUTORS[3], "delay": d},
                RealTime(K, d, method="prefix"),
                plan.episodes,
                latency=_late(d),
            )
            for d in DELAYS
        ]
        labels = {"task": TASK, "demos": demos.key, "head": "flow"}
        steps, size = plan.steps(STEPS), plan.size
        made.append(Job(f"latency-flow-{seed}", demos, "flow", steps, seed, tuple(plain), labels, size=size))
        labels, changes = labels | {"head": "flow, prefix"}, {"head.prefix": PREFIX}
        name = f"latency-prefix-{seed}"
        made.append(Job(name, demos, "flow", steps, seed, tuple(trained), labels, changes, size=size))
    return tuple(made)


def _late(ticks: int) -> Latency | None:
    return Latency(ticks) if ticks else None


def analyse(rows: Sequence[Row], plan: Plan, out: Path) -> Finding:
    """Success by delay and executor."""
    table = Table(
        f"Success on {TASK} by delay in ticks of 0.1 s (a new plan is asked for every {K} ticks of H = 16)",
        ("executor", *(f"{d} ticks" for d in DELAYS)),
        tuple((e, *(shown(pooled(rows, execute=e, delay=d)) for d in DELAYS)) for e in EXECUTORS),
    )
    lines = {e: {float(d): pooled(rows, execute=e, delay=d) for d in DELAYS} for e in EXECUTORS}
    figures = {"delay": line_figure(lines, "delay of a plan, ticks", CLAIM, log=False)}

    def rate(execute: str, delay: int) -> float:
        found = pooled(rows, execute=execute, delay=delay)
        return found.rate if found else float("nan")

    last = DELAYS[-1]
    drop = {e: rate(e, 0) - rate(e, last) for e in EXECUTORS}
    sentence = (
        f"From no delay to {last} ticks: "
        + "; ".join(f"{e} {rate(e, 0):.0%} -> {rate(e, last):.0%}" for e in EXECUTORS)
        + ". An episode of the expert has 14 ticks."
    )
    hurt, best = drop[EXECUTORS[0]], min(drop[e] for e in EXECUTORS[1:])
    verdict: Verdict = "does not hold"
    if hurt > 0.05:
        verdict = "holds" if best < hurt / 2 else "holds in a regime"
    return Finding("latency", CLAIM, verdict, sentence, (table,), figures)
