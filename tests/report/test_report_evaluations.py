"""Later evaluations and the action head on the page: recorded as they were run, read strictly, shown as rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from fake_run import write_json, write_run
from test_report_decoding import SEEDS, stub_rollouts
from test_report_page import read

from tools import dataset, fitted, policy, system, windows
from vola import checkpoint
from vola.checkpoint import Checkpoint
from vola.errors import DataError
from vola.executor import Receding
from vola.report.evaluations import MOST, append, digest, evaluations, read_evaluations
from vola.rollout.latency import Latency
from vola.summary import Prepared, evaluation_of, run_of, summarise
from vola.train.loop import Schedule, train


def loaded(folder: Path = Path("run/checkpoints/00004000"), name: str = "fast") -> Checkpoint:
    made = system(name, execute=Receding(1), head__tokens__on_malformed="repeat")
    return Checkpoint(folder, 4000, made, fitted(made), policy(made), {"fingerprint": "7c1e09bb42aa"})


@cache
def evaluated() -> str:
    scenes, settings = {"noise": 0.3, "kick_probability": 0.05}, {"head.pick": "argmax", "execute.k": 1}
    return json.dumps(evaluation_of(loaded(), stub_rollouts(), scenes, settings, Latency(2), ["vola", "eval", "run"]))


def record(**changes: object) -> dict:
    return json.loads(evaluated()) | changes


def test_a_record_says_what_was_run_and_comes_back(tmp_path: Path) -> None:
    made = record()
    assert made["checkpoint"] == {"step": 4000, "fingerprint": "7c1e09bb42aa"}
    assert made["scenes"] == {"noise": 0.3, "kick_probability": 0.05, "kick_size": 0.2}
    assert made["executor"] == {"part": "Receding", "k": 1}
    assert made["settings"] == {"head.pick": "argmax"}  # those of the executor stand there
    assert made["latency"] == {"ticks": 2, "probabilities": None}
    assert made["seeds"] == {"first": 0, "last": len(SEEDS) - 1}
    assert (made["successes"], made["episodes"], made["failures"]) == (6, 8, {"timeout": 2})
    assert (made["malformed_plans"], made["malformed_episodes"], made["starved_ticks"]) == (10, 5, 10)
    assert made["decoded"] == {"successes": 2, "episodes": 3}
    assert made["mean_length"] == np.mean([e.length for e in stub_rollouts().episodes])
    assert made["plan_ms"] > 0
    assert "T" in made["time"]
    append(tmp_path, made)
    append(tmp_path, made | {"successes": 3, "plan_ms": None})
    first, second = read_evaluations(tmp_path)
    assert (first.rate.successes, second.rate.successes) == (6, 3)
    assert first.executor == made["executor"]
    assert first.counts is not None
    assert first.counts.record().items() <= made.items()


def test_lines_of_evaluations_side_by_side_never_mix(tmp_path: Path) -> None:
    made = record()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: append(tmp_path, made | {"successes": i % 9}), range(40)))
    assert sorted(one.rate.successes for one in read_evaluations(tmp_path)) == sorted(i % 9 for i in range(40))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("env"), "evaluations.jsonl, line 1: expected the key 'env'"),
        (lambda r: r["checkpoint"].pop("step"), "line 1, checkpoint: expected the key 'step'"),
        (lambda r: r.update(episodes=2), "line 1: Rate: expected"),
        (lambda r: r.update(malformed_plans="3"), "expected a finite int under 'malformed_plans', got '3'"),
    ],
)
def test_damaged_records_are_refused(tmp_path: Path, change: Callable[[dict], object], message: str) -> None:
    made = record()
    change(made)
    append(tmp_path, made)
    with pytest.raises(DataError, match=message):
        read_evaluations(tmp_path)


def test_a_line_cut_off_names_its_number(tmp_path: Path) -> None:
    file = append(tmp_path, record())
    append(tmp_path, record())
    os.truncate(file, file.stat().st_size - 9)
    with pytest.raises(DataError, match="line 2: not a JSON object.*delete that line"):
        read_evaluations(tmp_path)


def test_only_a_checkpoint_inside_a_run_has_one(tmp_path: Path) -> None:
    assert run_of(loaded(tmp_path / "run" / "checkpoints" / "00000004")) == tmp_path.resolve() / "run"
    assert run_of(loaded(tmp_path / "copied" / "00000004")) is None


def test_the_page_shows_them_as_rows(tmp_path: Path) -> None:
    run = write_run(tmp_path, np.random.default_rng(0), episodes=8, side=8)
    assert "evaluations" not in read(run)[1].sections()
    plain = {"scenes": {"noise": 0.0, "kick_probability": 0.0, "kick_size": 0.2}, "latency": None, "settings": {}}
    append(run, record(**plain, time="2026-03-04T12:10:09+01:00", malformed_plans=0, starved_ticks=0))
    append(run, record(env="vola/Push-v0", checkpoint={"step": 12000, "fingerprint": "0ther"}, starts="x"))
    _, reader = read(run)
    assert reader.sections()[:4] == ["fans", "rollouts", "outcomes", "evaluations"]
    said = reader.text.replace("\u2009", " ")
    assert "Receding, k = 1step 4 000, 2026-03-04 12:10none75 % [40, 93] of 8" in said
    assert "noise 0.3, a shove of 0.2 m in 5 % of the steps, plans 2 ticks late" in said
    assert "step 12 000, on vola/Push-v0, head.pick = argmax, other weights (0ther)" in said
    assert (
        "10 plans in 5 episodes did not decode (on_malformed = repeat); the other episodes: 67 % [20, 94] of 3" in said
    )
    assert said.count("did not decode") == 1
    assert "10 ticks without a fresh action" in said
    assert "Not all of them were given the same start states" in reader.text


def test_many_evaluations_show_the_newest(tmp_path: Path) -> None:
    for i in range(MOST + 3):
        append(tmp_path, record(time=f"2026-03-{i + 1:02d}T12:00:00+00:00"))
    shown = evaluations(read_evaluations(tmp_path), "7c1e09bb42aa", "vola/Detour-v0")
    assert shown is not None
    assert (len(shown["rows"]), shown["earlier"], shown["same_starts"]) == (MOST, 3, True)
    assert shown["rows"][-1]["time"] == f"2026-03-{MOST + 3} 12:00"


def test_digest_is_of_the_set() -> None:
    assert digest(["a", "b"]) == digest(["b", "a"]) != digest(["ab"])


@pytest.mark.parametrize("name", ["bins", "flow"])
def test_head_cost_and_floor_reach_the_page_in_physical_units(tmp_path: Path, name: str) -> None:
    made = system(name, train__steps=1, train__batch=2)
    ready = Prepared(dataset(), made, fitted(made), windows(made), None)
    result = train(tmp_path, made, ready.fitted, ready.train, None, None, replace(Schedule(), progress="none"))
    content = summarise(tmp_path, ready, result, None, [], [], "data", ["vola"], 0.0)
    write_json(tmp_path / "summary.json", content)
    acting = checkpoint.load(tmp_path).policy
    cost, floor = acting.head.cost(), acting.head.floor(acting.action_normaliser)
    head = content["head"]
    assert (head["rule"], head["serial"]) == ({"bins": "Autoregressive", "flow": "Flow"}[name], cost.serial)
    assert [row["rms"] for row in head["floor"]] == (floor.rms.tolist() if name == "bins" else [])
    text = read(tmp_path)[1].text
    assert f"{cost.serial}, one after the other" in text
    if name == "bins":
        assert f"least error › dxrms {floor.rms[0]:.3g}, largest {floor.worst[0]:.3g} m" in text
    else:
        assert "no limit: the head is continuous" in text
    assert f"executorReceding, k = {made.execute.k}" in text
