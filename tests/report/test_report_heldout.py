"""Held-out error: averages by hand, units, and where the policy is said to be better."""

import json
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from fake_run import write_dataset_run, write_json

from vola.errors import DataError, InputError
from vola.report import words
from vola.report.heldout import STANDARD, compare, heldout_record, read_heldout, step_intervals
from vola.report.records import read_summary
from vola.types import ActionSpec

SPEC = ActionSpec(("x", "y"), ("m", "m"), ("delta", "delta"), 10.0)


def store(run: Path, record: dict) -> Path:
    (run / "heldout.json").write_text(json.dumps(record))
    return run


def test_windows_are_averaged_inside_episodes_and_episodes_count_the_same() -> None:
    # Episode 7: two windows, the second valid only at its first step. Episode 9: one window.
    error = np.array([[[1.0, 3.0], [5.0, 7.0]], [[3.0, 5.0], [99.0, 99.0]], [[10.0, 20.0], [30.0, 40.0]]])
    valid = np.array([[True, True], [True, False], [True, True]])
    record = heldout_record(SPEC, {"policy": error, "hold": 2 * error}, valid, np.array([7, 7, 9]), np.ones(2))
    assert record["policy"]["per_episode"] == [
        {"episode": 7, "mae": pytest.approx((1 + 3 + 5 + 7 + 3 + 5) / 6), "per_step": [3.0, 6.0]},
        {"episode": 9, "mae": 25.0, "per_step": [15.0, 35.0]},
    ]
    assert record["policy"]["per_step_dim"] == [[(2 + 10) / 2, (4 + 20) / 2], [(5 + 30) / 2, (7 + 40) / 2]]
    assert record["baselines"]["hold"]["per_step_dim"][0] == [12.0, 24.0]
    assert (record["unit"], record["H"], record["rate"]) == ("m", 2, 10.0)


def test_steps_no_window_of_an_episode_reaches_are_gaps(tmp_path: Path) -> None:
    valid = np.array([[True, True], [True, False]])
    record = heldout_record(SPEC, {"policy": np.ones((2, 2, 2))}, valid, np.array([0, 1]), np.ones(2))
    assert record["policy"]["per_episode"][1]["per_step"] == [1.0, None]
    found = read_heldout(store(tmp_path, record))
    assert found is not None
    assert np.isnan(found.policy.per_step[1, 1])
    rows = step_intervals(found.policy, np.random.default_rng(0))
    assert rows[:, 0].tolist() == [1, 1]
    assert np.isinf(rows[1, 1:]).all()  # one episode reaches step 2: no interval


def test_different_units_are_measured_in_standard_deviations() -> None:
    spec = ActionSpec(("x", "turn"), ("m", "rad"), ("delta", "delta"), 10.0)
    error = np.full((1, 1, 2), 2.0)
    record = heldout_record(spec, {"policy": error}, np.ones((1, 1), bool), np.zeros(1, int), np.array([4.0, 1.0]))
    assert record["policy"]["per_episode"][0]["mae"] == pytest.approx((0.5 + 2) / 2)
    assert record["policy"]["per_step_dim"] == [[2.0, 2.0]]  # a dimension by itself keeps its own unit
    assert record["unit"] == STANDARD
    with pytest.raises(InputError, match="constant dimension"):
        heldout_record(spec, {"policy": error}, np.ones((1, 1), bool), np.zeros(1, int), np.array([0.0, 1.0]))


def test_comparison_finds_the_steps_at_which_a_baseline_wins(tmp_path: Path) -> None:
    rng, episodes, H = np.random.default_rng(0), 10, 4
    shape = np.array([1.0, 1.0, 1.0, 1.0])
    hold = np.array([0.5, 1.0, 2.0, 3.0])  # better, alike, worse, worse than the policy
    jitter = 1 + 0.02 * rng.standard_normal((2, episodes, H))
    error = {
        name: np.repeat((s * j)[:, :, None], 2, axis=2)
        for name, s, j in zip(("policy", "hold"), (shape, hold), jitter, strict=True)
    }
    record = heldout_record(SPEC, error, np.ones((episodes, H), bool), np.arange(episodes), np.ones(2))
    found = read_heldout(store(tmp_path, record))
    assert found is not None
    (comparison,) = compare(found, rng)
    assert comparison.steps.tolist() == [1, 0, -1, -1]
    assert comparison.not_better() == (1, 2)
    assert comparison.difference.difference == pytest.approx(1 - hold.mean(), abs=0.02)
    assert words.weak_steps("pi0", H, [comparison]) == ["At steps 1–2 of 4 pi0 does not beat holding the last action."]
    assert words.heldout_sentence([comparison]) == "closer than holding the last action"


def test_low_error_without_success_is_named(tmp_path: Path) -> None:
    run = write_dataset_run(tmp_path, np.random.default_rng(0), episodes=6, H=4)
    record = json.loads((run / "heldout.json").read_text())
    record["baselines"] = {"L2": deepcopy(record["policy"]), "hold": record["baselines"]["hold"]}
    for episode in record["policy"]["per_episode"]:
        episode["mae"] *= 1.5
    summary = json.loads((run / "summary.json").read_text())
    for successes, said in ((1, True), (90, False)):
        rates = {"pi0": ("policy", 95), "L2": ("baseline", successes)}
        summary["policies"] = [
            {"name": name, "role": role, "successes": s, "episodes": 100} for name, (role, s) in rates.items()
        ]
        write_json(run / "summary.json", summary)
        found = read_heldout(store(run, record))
        assert found is not None
        sentence = words.closer_but_fails(read_summary(run), compare(found, np.random.default_rng(0)))
        assert ("the L2 baseline is closer than pi0" in sentence) == said


def test_refusals(tmp_path: Path) -> None:
    run = write_dataset_run(tmp_path, np.random.default_rng(0), episodes=3, H=4)
    good = json.loads((run / "heldout.json").read_text())
    for change, message in (
        (lambda r: r["baselines"]["hold"]["per_episode"].pop(), "'hold' on the policy's episodes"),
        (lambda r: r["policy"]["per_step_dim"].pop(), r"policy, per_step_dim: .*\(4, 4\), got shape \(3, 4\)"),
        (lambda r: r["units"].pop(), "one unit per dimension"),
        (lambda r: (r.pop("unit"), r["units"].__setitem__(0, "m")), "'unit' must say"),
        (lambda r: r["policy"]["per_episode"][0].update(mae="low"), r"per_episode\[0\]: expected a finite .*'mae'"),
    ):
        record = json.loads(json.dumps(good))
        change(record)
        with pytest.raises(DataError, match=message):
            read_heldout(store(run, record))
    valid = np.array([[True, False]])
    with pytest.raises(InputError, match="valid in some window"):
        heldout_record(SPEC, {"policy": np.ones((1, 2, 2))}, valid, np.zeros(1, int), np.ones(2))
