"""Experiments: a tiny one runs end to end and resumes; every analysis says what its rows say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from vola.cli import main
from vola.envs.experts import Expert
from vola.envs.tabletop import make_tabletop
from vola.errors import ConfigError
from vola.executor import Receding
from vola.lab import chunks, compose, heads, latency, modes, precision
from vola.lab.findings import Finding, Plan, Pooled, pooled, where, write_finding
from vola.lab.jobs import Case, Demos, Job, record_demos, run_job, run_jobs
from vola.lab.ledger import LABS
from vola.rollout.decision import decision_errors
from vola.types import Chunk, Observation
from vola.workflow import EVALUATION_SEED

PLAN = Plan(seeds=2, episodes=50)


def rows(module: Any, rate: Any, plan: Plan = PLAN) -> list[dict[str, Any]]:
    """What the jobs of an experiment would answer if ``rate(labels)`` were the success of every case."""
    made = []
    for job in module.jobs(plan):
        for case in job.cases:
            labels = dict(job.labels) | dict(case.labels)
            n = case.episodes
            made.append(
                labels
                | {"seed": job.seed, "minutes": 1.0, "loss": 0.0, "held_out": [0.0], "episodes": n}
                | {"successes": round(n * rate(labels)), "failures": {"timeout": n}, "malformed": 0, "starved": 0}
                | {"passes": 1, "plan_ms": 1.0, "length": 9.0, "scale": [1.0, 1.0], "floor": [0.0, 0.0]}
                | {"measure": [0.0] * n, "final": [[0.0, 0.0]] * n}
            )
    return made


def test_pooling_keeps_seeds_apart() -> None:
    some = [{"a": 1, "successes": 8, "episodes": 10}, {"a": 1, "successes": 6, "episodes": 10}, {"a": 2}]
    assert where(some, a=2) == [{"a": 2}]
    found = pooled(some[:2], a=1)
    assert found == Pooled(14, 20, (0.8, 0.6))
    low, high = found.interval
    assert low < 0.7 < high
    assert str(found).startswith("70.0% [48%, 85%], seeds 60%-80%")
    assert pooled(some, a=3) is None


@pytest.mark.parametrize("name", LABS)
def test_every_experiment_names_its_jobs_once_and_scales_them(name: str) -> None:
    jobs = LABS[name].jobs(PLAN)
    assert len({job.name for job in jobs}) == len(jobs)
    small = LABS[name].jobs(Plan(seeds=1, episodes=4, scale=0.001, size="tiny"))
    assert all(job.steps <= 10 and job.demos.episodes <= 10 for job in small)
    assert len({job.fingerprint() for job in small}) == len(small)


def test_modes_verdict_follows_the_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(modes, "_fans", lambda out: Figure())

    def rate(labels: Mapping[str, Any]) -> float:
        if labels["head"] == "l2":
            return 0.5 if labels["k"] == 1 else 0.0
        return 0.06 if labels["head"] == "flow, 1 steps" else 0.96

    found = modes.analyse(rows(modes, rate), PLAN, tmp_path)
    assert found.verdict == "holds in a regime"
    assert "L2 reaches 0% at k = 4 and 50% at k = 1" in found.sentence
    assert modes.analyse(rows(modes, lambda _: 0.5), PLAN, tmp_path).verdict == "does not hold"


def test_chunks_finds_the_best_k_and_predicts_it_from_decisions(tmp_path: Path) -> None:
    def rate(labels: Mapping[str, Any]) -> float:
        if labels["execute"] == "decision":
            return 0.99 if labels["k"] <= 8 else 0.5
        return {1: 0.6, 2: 0.7, 4: 0.98, 8: 0.8, 16: 0.5, 32: 0.2}[labels["k"]]

    found = chunks.analyse(rows(chunks, rate), PLAN, tmp_path)
    assert found.verdict == "holds"
    assert "detour 4 clean" in found.sentence
    assert "predicts k = 8 on detour" in found.sentence
    flat = chunks.analyse(rows(chunks, lambda labels: 1 / labels["k"]), PLAN, tmp_path)
    assert flat.verdict == "does not hold"


def test_precision_compares_with_the_prediction_made_from_the_flow_head(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    plan = Plan(seeds=2, episodes=400)
    made = rows(precision, lambda _: 1.0, plan)
    for row in made:
        K = int(row["head"].split()[0]) if "bins" in row["head"] else None
        error = 0.009 * rng.standard_normal(row["episodes"])
        if K:
            error = error + rng.uniform(-1, 1, row["episodes"]) / K
        row["measure"] = error.tolist()
    found = precision.analyse(made, plan, tmp_path)
    assert found.verdict == "holds"
    assert "within 7 points for K = 16, 32, 64, 256" in found.sentence
    for row in made:
        row["measure"] = [None] * row["episodes"]
    assert np.isnan(precision.rms(made))
    assert precision.within(made, 0.03).rate == 0


def test_compose_grounding_is_measured_on_the_scenes_themselves(tmp_path: Path) -> None:
    """A robot that ends at the goal grounds everything; one beside the wrong object grounds the place alone."""
    table = make_tabletop(compose.TASK, split="seen")
    table.reset(np.arange(EVALUATION_SEED, EVALUATION_SEED + 50))
    row = {"split": "seen", "told": "words", "episodes": 50, "final": table.world.goal.tolist()}
    right_object, right_place = compose.grounding(row)
    assert right_object.all()
    assert right_place.all()
    asked = table.world.goal - table.world.objects[:, 0]
    wrong = row | {"final": (table.world.objects[:, 1] + asked).tolist()}
    assert not compose.grounding(wrong)[0].any()
    made = rows(compose, lambda labels: 0.95 if labels["told"] == "words" or labels["split"] == "seen" else 0.02)
    assert compose.analyse(made, PLAN, tmp_path).verdict == "holds"


def test_latency_and_heads_say_what_they_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rate(labels: Mapping[str, Any]) -> float:
        return 0.98 - (0.1 * labels["delay"] if labels["execute"] == "replace the chunk" else 0)

    assert latency.analyse(rows(latency, rate), PLAN, tmp_path).verdict == "holds"
    assert latency.analyse(rows(latency, lambda _: 0.9), PLAN, tmp_path).verdict == "does not hold"
    monkeypatch.setattr(heads, "_timed", lambda out, head: (1, 2.0))
    plateau = rows(heads, lambda labels: 0.0 if labels["head"] == "l2" else 0.96)
    found = heads.analyse(plateau, PLAN, tmp_path)
    assert found.verdict == "holds"
    assert len(found.tables[0].rows) == 14


def tiny(name: str = "one", **changes: Any) -> Job:
    case = Case({"k": 2}, Receding(2), 3)
    job = Job(name, Demos("vola/Detour-v0", 8), "l2", 2, 0, (case,), {"head": "l2"}, size="tiny")
    return replace(job, **changes)


def test_a_job_is_answered_once_and_another_job_of_its_name_is_refused(tmp_path: Path) -> None:
    first = run_jobs([tiny()], tmp_path, 1)
    assert first[0]["episodes"] == 3
    assert len(first[0]["measure"]) == 3
    before = (tmp_path / "jobs" / "one" / "rows.json").stat().st_mtime_ns
    assert run_jobs([tiny()], tmp_path, 1) == first
    assert (tmp_path / "jobs" / "one" / "rows.json").stat().st_mtime_ns == before
    with pytest.raises(ConfigError, match="answers of another job"):
        run_job(tiny(seed=1), tmp_path)
    (tmp_path / "jobs" / "one" / "rows.json").unlink()  # broken off between training and answers
    with pytest.raises(ConfigError, match="training of another job"):
        run_job(tiny(steps=1), tmp_path)
    assert run_job(tiny(), tmp_path)[0]["successes"] == first[0]["successes"]
    draft = tmp_path / "data" / f".{tiny().demos.key}"
    (tmp_path / "data" / tiny().demos.key).rename(draft)  # broken off while recording
    record_demos(tiny().demos, tmp_path)
    assert not draft.exists()
    with pytest.raises(ConfigError, match="different names"):
        run_jobs([tiny(), tiny()], tmp_path, 1)


def test_settings_of_sampling_are_cases_of_one_training(tmp_path: Path) -> None:
    cases = (Case({"steps": 10}, Receding(2), 3), Case({"steps": 1}, Receding(2), 3, head={"steps": 1}))
    made = run_jobs([tiny("flow", head="flow", cases=cases)], tmp_path, 1)
    assert [row["passes"] for row in made] == [10, 1]


def test_one_decision_of_the_expert_loses_nothing_and_a_bad_one_does() -> None:
    table = make_tabletop("vola/Detour-v0")
    seeds = range(EVALUATION_SEED, EVALUATION_SEED + 40)

    class Upwards:
        observation_window, chunk_length = 1, 16

        def plan(self, observation: Observation, rngs: Any, guide: Any = None) -> Chunk:
            actions = np.zeros((observation.size, 16, 2), np.float32)
            actions[..., 1] = 0.12
            return Chunk(actions, np.ones((observation.size, 16), bool))

    lost = [decision_errors(table, seeds, Upwards(), k).rate for k in (1, 4, 16)]
    assert lost[0] < 0.1 < lost[1] <= lost[2]
    assert decision_errors(table, seeds, Upwards(), 4) == decision_errors(table, seeds, Upwards(), 4)
    with pytest.raises(ConfigError, match="1 <= k <= H"):
        decision_errors(table, seeds, Expert(table), 2)


def test_the_page_holds_command_tables_and_pictures(tmp_path: Path) -> None:
    finding = Finding("modes", "A claim", "holds", "It does.", (), {"k": Figure()})
    page = write_finding(finding, PLAN, [{"seed": 0, "minutes": 2.0}], "vola lab modes", tmp_path)
    text = page.read_text()
    assert "`vola lab modes`" in text
    assert "2 training seeds, 50 start states" in text
    assert (tmp_path / "modes-k.png").exists()
    assert json.loads((tmp_path / "modes.json").read_text())["plan"]["episodes"] == 50
    trial = write_finding(finding, replace(PLAN, scale=0.1), [{"seed": 0, "minutes": 2.0}], "x", tmp_path)
    assert "trial run" in trial.read_text()


def test_the_command_lists_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["lab"])
    listed = capsys.readouterr().out
    assert all(name in listed for name in LABS)
    arguments = [
        "--out",
        str(tmp_path),
        "--seeds",
        "1",
        "--episodes",
        "2",
        "--scale",
        "0.001",
        "--size",
        "tiny",
        "--processes",
        "1",
    ]
    main(["lab", "compose", *arguments])
    assert (tmp_path / "pages" / "compose.md").exists()
    assert "compose.md" in capsys.readouterr().out
