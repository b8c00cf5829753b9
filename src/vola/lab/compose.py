"""Does language compose? (seed text 8.5.1, composition; 48 sentences, 12 of them never shown)

Claim: a policy told in words does combinations it never saw, because every word was seen; a policy told a task number
cannot, and needs more data even for what it saw. Grounding is measured apart from success: right object, right place.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vola.envs.tabletop import make_tabletop
from vola.envs.tasks import PLACES
from vola.executor import Receding
from vola.lab.findings import Finding, Plan, Pooled, Row, Table, Verdict, line_figure, pooled, shown, where
from vola.lab.jobs import Case, Demos, Job
from vola.workflow import EVALUATION_SEED

TASK = "vola/Compose-v0"
SIZES = (3000, 9000)
STEPS = {3000: 2500, 9000: 4000}
MORE = 1.5  # task numbers get this much more training, so that they fail for want of language, not of steps
CLAIM = "Words generalise to combinations never shown; task numbers do not"


def jobs(plan: Plan) -> tuple[Job, ...]:
    """Words and numbers, two amounts of demonstrations of the 36 seen combinations, per seed."""
    made = []
    for seed in range(plan.seeds):
        for told in ("words", "number"):
            for size in SIZES:
                demos = Demos(TASK, plan.demos(size), settings={"split": "seen", "told": told})
                steps = plan.steps(round(STEPS[size] * (MORE if told == "number" else 1)))
                cases = tuple(
                    Case({"split": split}, Receding(8), plan.episodes, scenes={"split": split})
                    for split in ("seen", "held_out")
                )
                labels = {"task": TASK, "told": told, "demonstrations": size, "demos": demos.key}
                name = f"compose-{told}-{size}-{seed}"
                made.append(Job(name, demos, "l2", steps, seed, cases, labels, stride=6, size=plan.size))
    return tuple(made)


def grounding(row: Row) -> tuple[np.ndarray, np.ndarray]:
    """Whether each episode ended nearest to the asked place of the right object, and at the right place of the object.

    Object: among the places asked for beside each of the four objects. Place: among the four places of the object.
    Chance is 1/4 for both.
    """
    table = make_tabletop(TASK, split=row["split"], told=row["told"])
    table.reset(np.arange(EVALUATION_SEED, EVALUATION_SEED + row["episodes"]))
    world, final = table.world, np.array(row["final"])
    asked = world.goal - world.objects[:, 0]
    beside = world.objects + asked[:, None]
    right_object = np.linalg.norm(final[:, None] - beside, axis=-1).argmin(axis=1) == 0
    steps = np.array(list(PLACES.values())) * np.linalg.norm(asked, axis=1)[:, None, None]
    places = world.objects[:, :1] + steps
    chosen = np.linalg.norm(final[:, None] - places, axis=-1).argmin(axis=1)
    right_place = np.linalg.norm(places[np.arange(len(final)), chosen] - world.goal, axis=-1) < 1e-6
    return right_object, right_place


def analyse(rows: Sequence[Row], plan: Plan, out: Path) -> Finding:
    """Success and grounding by encoding, amount of data and split."""
    body = []
    for told in ("words", "number"):
        for size in SIZES:
            for split in ("seen", "held_out"):
                labels = {"told": told, "demonstrations": size, "split": split}
                pairs = [grounding(row) for row in where(rows, **labels)]
                marks = [f"{np.mean([np.mean(p[i]) for p in pairs]):.0%}" for i in (0, 1)]
                minutes = np.mean([r["minutes"] for r in where(rows, **labels)])
                body.append((told, str(size), split, shown(pooled(rows, **labels)), *marks, f"{minutes:.1f}"))
    table = Table(
        "Success on vola/Compose-v0, k = 8",
        ("told", "demonstrations", "combinations", "success", "right object", "right place", "training minutes"),
        tuple(body),
    )
    lines: dict[str, dict[float, Pooled | None]] = {
        f"{told}, {split}": {n: pooled(rows, told=told, demonstrations=n, split=split) for n in SIZES}
        for told in ("words", "number")
        for split in ("seen", "held_out")
    }
    figures = {"data": line_figure(lines, "demonstrations", CLAIM)}
    verdict, sentence = _judge(rows)
    return Finding("compose", CLAIM, verdict, sentence, (table,), figures)


def _judge(rows: Sequence[Row]) -> tuple[Verdict, str]:
    def rate(told: str, size: int, split: str) -> float:
        found = pooled(rows, told=told, demonstrations=size, split=split)
        return found.rate if found else float("nan")

    small, large = SIZES
    gap = rate("words", large, "seen") - rate("words", large, "held_out")
    sentence = (
        f"With {large} demonstrations words reach {rate('words', large, 'seen'):.0%} on seen and "
        f"{rate('words', large, 'held_out'):.0%} on held-out combinations; numbers, with {MORE:g} times the steps, "
        f"{rate('number', large, 'seen'):.0%} and {rate('number', large, 'held_out'):.0%}. With {small}: words "
        f"{rate('words', small, 'seen'):.0%} and {rate('words', small, 'held_out'):.0%}, numbers "
        f"{rate('number', small, 'seen'):.0%} and {rate('number', small, 'held_out'):.0%}."
    )
    if rate("words", small, "seen") > rate("number", small, "seen") + 0.1:
        sentence += " Words also learn what they see from fewer demonstrations, because combinations share them."
    words, numbers = rate("words", large, "held_out"), rate("number", large, "held_out")
    if abs(gap) < 0.1 and words > 0.8 and numbers < 0.15:
        return "holds", sentence
    return ("holds in a regime" if words > numbers + 0.2 else "does not hold"), sentence
