"""How many steps of a chunk should be executed? (seed texts 8.5.5 chunking, 8.5.7 executors; compounding error)

Claim: k trades compounding and dithering (few steps) against lost feedback (many), so success has a best k inside.
Three tasks tell when: Detour has two ways and punishes indecision, Push is unstable and punishes blindness, Gust has
two ways and kicks. The chain of ``theory.compounding`` is fed with the error per decision measured on the same policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from vola.ensemble import Ensemble
from vola.executor import Receding
from vola.lab.findings import Finding, Plan, Pooled, Row, Table, Verdict, line_figure, pooled, shown
from vola.lab.jobs import Case, Demos, Job
from vola.theory.compounding import best_k
from vola.theory.filters import Heaviest, ensemble_response

H = 32
KS = (1, 2, 4, 8, 16, 32)
OWN = (1, 4, 8, 16)  # models trained for their own chunk length
STEPS = 3000
DISTURBED: Mapping[str, Mapping[str, Any]] = {
    "clean": {"noise": 0.0, "kick_probability": 0.0},
    "noise 0.3": {"noise": 0.3, "kick_probability": 0.0},
    "noise 0.6": {"noise": 0.6, "kick_probability": 0.0},
    "kicks": {"noise": 0.0, "kick_probability": 0.05},
    "many kicks": {"noise": 0.0, "kick_probability": 0.2, "kick_size": 0.12},
}
TASKS: Mapping[str, tuple[str, str, float, Mapping[str, Any]]] = {
    # name: (id, head, noise of the demonstrations, their settings)
    "detour": ("vola/Detour-v0", "flow", 0.15, {}),
    "push": ("vola/Push-v0", "l2", 0.3, {"kick_probability": 0.03}),
    "gust": ("vola/Gust-v0", "flow", 0.15, {}),
}
LENGTH = {"detour": 14, "push": 20, "gust": 20}  # steps of the expert, the T of the chain
ENSEMBLES: Mapping[str, Ensemble | Receding] = {
    "k = 1, no ensemble": Receding(1),
    "ensemble, oldest heaviest (m = 0.01)": Ensemble(0.01, "oldest"),
    "ensemble, newest heaviest (m = 0.01)": Ensemble(0.01, "newest"),
    "ensemble, newest heaviest (m = 0.5)": Ensemble(0.5, "newest"),
}
FILTERS: tuple[tuple[float, Heaviest], ...] = ((0.01, "oldest"), (0.5, "oldest"), (0.5, "newest"))
CLAIM = "Success has a best number of executed steps inside 1 < k < H"


def jobs(plan: Plan) -> tuple[Job, ...]:
    """One model with H = 32 per task, and on Detour models trained for their own chunk length, per seed."""
    made = []
    steps, size = plan.steps(STEPS), plan.size
    for seed in range(plan.seeds):
        for name, (task, head, noise, settings) in TASKS.items():
            demos = Demos(task, plan.demos(3000), noise=noise, settings=settings)
            labels = {"model": name, "H": H, "demos": demos.key, "head": head}
            made.append(
                Job(f"chunks-{name}-{seed}", demos, head, steps, seed, _cases(plan), labels, {"H": H}, size=size)
            )
        detour = Demos("vola/Detour-v0", plan.demos(3000))
        for k in OWN:
            own = tuple(
                Case({"disturbance": d, "k": k, "execute": "k"}, Receding(k), plan.episodes, scenes=DISTURBED[d])
                for d in ("clean", "noise 0.3")
            )
            labels = {"model": "own", "H": k, "demos": detour.key, "head": "flow"}
            changes: dict[str, Any] = {"H": k, "execute": Receding(k)}
            made.append(Job(f"chunks-own{k}-{seed}", detour, "flow", steps, seed, own, labels, changes, size=size))
    return tuple(made)


def _cases(plan: Plan) -> tuple[Case, ...]:
    cases = [
        Case({"disturbance": d, "k": k, "execute": "k"}, Receding(k), plan.episodes, scenes=settings)
        for d, settings in DISTURBED.items()
        for k in KS
    ]
    clean = DISTURBED["clean"]
    for k in KS:
        labels = {"disturbance": "clean", "k": k, "execute": "decision"}
        cases.append(Case(labels, Receding(k), 2 * plan.episodes, scenes=clean, decision=True))
    cases += [
        Case({"disturbance": d, "k": 1, "execute": name}, execute, plan.episodes, scenes=DISTURBED[d])
        for name, execute in ENSEMBLES.items()
        for d in ("clean", "noise 0.3")
        if not isinstance(execute, Receding)
    ]
    return tuple(cases)


def analyse(rows: Sequence[Row], plan: Plan, out: Path) -> Finding:
    """Success against k per task and disturbance; prediction from eps(k); prediction against control horizon."""
    tables = [_by_k(rows, name) for name in TASKS]
    chain, predicted = _chain(rows)
    tables += [chain, _horizons(rows), _ensembles(rows)]
    figures = {
        name: line_figure(
            {d: {k: pooled(rows, model=name, disturbance=d, k=k, execute="k") for k in KS} for d in DISTURBED},
            "executed steps k", f"{task}, one model with H = {H}",
        )
        for name, (task, *_) in TASKS.items()
    }  # fmt: skip
    figures["filter"] = _filter()
    best = {name: {d: _best(rows, name, d) for d in DISTURBED} for name in TASKS}
    verdict, sentence = _judge(best, predicted)
    return Finding("chunks", CLAIM, verdict, sentence, tuple(tables), figures)


def _curve(rows: Sequence[Row], name: str, disturbance: str) -> dict[int, Pooled]:
    found = {k: pooled(rows, model=name, disturbance=disturbance, k=k, execute="k") for k in KS}
    return {k: v for k, v in found.items() if v is not None}


def _best(rows: Sequence[Row], name: str, disturbance: str) -> tuple[int, ...]:
    """Every k whose interval reaches the highest rate: what the measurement cannot tell apart from the best."""
    curve = _curve(rows, name, disturbance)
    top = max(v.rate for v in curve.values())
    return tuple(k for k, v in curve.items() if v.interval[1] >= top)


def _by_k(rows: Sequence[Row], name: str) -> Table:
    body = []
    for d in DISTURBED:
        cells = [shown(pooled(rows, model=name, disturbance=d, k=k, execute="k")) for k in KS]
        body.append((d, *cells, ", ".join(map(str, _best(rows, name, d)))))
    caption = f"{TASKS[name][0]}: success by executed steps k, one model with H = {H} (head: {TASKS[name][1]})"
    return Table(caption, ("disturbance", *(f"k = {k}" for k in KS), "best (within noise)"), tuple(body))


def _chain(rows: Sequence[Row]) -> tuple[Table, dict[str, int]]:
    """The error per decision measured on the policy, the cost it predicts, and what was measured."""
    body, predicted = [], {}
    for name in TASKS:
        kept = {k: pooled(rows, model=name, k=k, execute="decision") for k in KS}
        eps = {k: 1 - v.rate for k, v in kept.items() if v is not None}
        T = LENGTH[name]
        found = best_k({k: e for k, e in eps.items() if k <= T}, T)
        predicted[name] = found.k
        for k in eps:
            alone = (1 - eps[k]) ** (T / min(k, T))
            measured = pooled(rows, model=name, disturbance="clean", k=k, execute="k")
            cost = f"{found.costs[k]:.2f}" if k in found.costs else ""
            best = "best predicted" if k == found.k else ""
            body.append((name, str(k), f"{eps[k]:.3f}", cost, f"{alone:.0%}", shown(measured), best))
    header = ("task", "k", "eps(k) per decision", "cost of the chain", "(1 - eps)^(T/k)", "measured", "")
    return Table("Errors per decision and what they predict (no disturbance)", header, tuple(body)), predicted


def _horizons(rows: Sequence[Row]) -> Table:
    """Prediction horizon H against control horizon k (model predictive control's two horizons), on Detour."""
    body = []
    for k in OWN:
        for d in ("clean", "noise 0.3"):
            own = pooled(rows, model="own", H=k, disturbance=d, execute="k")
            long = pooled(rows, model="detour", disturbance=d, k=k, execute="k")
            body.append((str(k), d, shown(own), shown(long)))
    header = ("k", "disturbance", "trained with H = k", f"trained with H = {H}, executes k")
    return Table(
        "vola/Detour-v0: models trained for their own k against one that predicts farther", header, tuple(body)
    )


def _ensembles(rows: Sequence[Row]) -> Table:
    body = []
    for task in TASKS:
        for name, execute in ENSEMBLES.items():
            kind = "k" if isinstance(execute, Receding) else name
            cells = [shown(pooled(rows, model=task, k=1, execute=kind, disturbance=d)) for d in ("clean", "noise 0.3")]
            body.append((task, name, *cells))
    return Table("Ensembling every tick, H = 32", ("task", "executor", "clean", "noise 0.3"), tuple(body))


def _filter() -> Figure:
    """What ensembling does to what single plans add: the gain of its filter at 10 Hz control."""
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    axes = figure.subplots()
    frequency = np.linspace(0, 0.5, 400)
    for m, heaviest in FILTERS:
        gain = np.abs(ensemble_response(m, 16, frequency, heaviest))
        axes.plot(10 * frequency, gain, label=f"m = {m}, {heaviest} heaviest")
    axes.set_xlabel("frequency of what a single plan adds, Hz at a control rate of 10 Hz")
    axes.set_ylabel("gain")
    axes.set_title("Ensembling 16 overlapping plans as a filter", fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return figure


def _judge(best: Mapping[str, Mapping[str, tuple[int, ...]]], predicted: Mapping[str, int]) -> tuple[Verdict, str]:
    def said(name: str, disturbance: str) -> str:
        return "/".join(map(str, best[name][disturbance]))

    inside = {name: all(1 < k < H for k in best[name]["clean"]) for name in TASKS}
    sentence = (
        "Best k (those within noise of the top): "
        + "; ".join(
            f"{name} {said(name, 'clean')} clean, {said(name, 'noise 0.3')} with noise 0.3 V, "
            f"{said(name, 'many kicks')} with many kicks"
            for name in TASKS
        )
        + ". The chain fed with the measured error per decision predicts "
        + ", ".join(f"k = {predicted[name]} on {name}" for name in TASKS)
        + ": it counts decisions and knows nothing of dithering, which is an error made by two decisions together."
    )
    if all(inside.values()):
        return "holds", sentence
    return ("holds in a regime" if any(inside.values()) else "does not hold"), sentence
