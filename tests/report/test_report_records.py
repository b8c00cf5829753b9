"""Damaged or contradictory records are refused with the file and the key; good ones come back as written."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_run import write_dataset_run, write_run
from safetensors.numpy import load_file, save_file

from vola.errors import DataError
from vola.report.heldout import read_heldout
from vola.report.records import read_log, read_rollouts, read_samples, read_summary
from vola.report.sections import read_records


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path, np.random.default_rng(0), episodes=12, side=16)


def edit(file: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_a_good_run_comes_back(run: Path) -> None:
    records = read_records(run)
    assert [p.name for p in records.summary.policies] == ["pi0", "L2", "expert"]
    assert records.summary.policies[0].k == 4
    assert records.log is not None
    assert records.baseline_log is not None
    assert records.log.train.shape == (300, 2)
    assert records.log.val[:, 0].tolist() == list(range(300, 3001, 300))
    assert [(e.step, e.rate.successes) for e in records.log.evaluations][:2] == [(600, 16), (1200, 110)]
    assert len(records.rollouts) == 36
    assert np.isnan(records.rollouts[-1].plan_ms)  # the expert's latency was null
    assert records.clips[0].frames.shape == (14, 16, 16, 3)
    assert {(f.group, f.policy, f.paths.shape) for f in records.fans if f.group == "0"} == {
        ("0", "pi0", (64, 17, 2)),
        ("0", "L2", (16, 17, 2)),
    }


def test_samples_come_in_numeric_order(run: Path) -> None:
    file = run / "samples.safetensors"
    tensors = {f"rollout/{i}/frames": np.full((1, 4, 4, 3), i, np.uint8) for i in (10, 9, 1)}
    notes = {k.rpartition("/")[0]: {"policy": "p", "instruction": "i", "success": True} for k in tensors}
    save_file(tensors, file, {"info": json.dumps(notes)})
    assert [int(c.frames[0, 0, 0, 0]) for c in read_samples(run)[0]] == [1, 9, 10]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("name"), "summary.json: expected the key 'name'"),
        (lambda s: s.update(minutes="2"), "finite int or float under 'minutes', got '2'"),
        (lambda s: s.update(minutes=float("nan")), "under 'minutes', got nan"),
        (lambda s: s["policies"][1].update(role="hero"), r"policies\[1\]: expected a role out of policy"),
        (lambda s: s["policies"][1].update(successes=13), r"policies\[1\]: Rate: expected .* got 13 of 12"),
        (lambda s: s["policies"][1].update(successes=True), "expected a finite int under 'successes', got True"),
        (lambda s: s["policies"][1].update(name="pi0"), "expected different policy names"),
        (lambda s: s["sources"][0].update(url="javascript:alert(1)"), r"sources\[0\]: .*https://"),
        (lambda s: s["dataset"].pop("frames"), "dataset: expected the key 'frames'"),
        (lambda s: s.update(command="vola demo"), "expected a finite list under 'command'"),
    ],
)
def test_bad_summary(run: Path, change: Callable[[dict], object], message: str) -> None:
    edit(run / "summary.json", change)
    with pytest.raises(DataError, match=message):
        read_summary(run)


def test_missing_summary_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="summary.json: no such file.*vola train"):
        read_records(tmp_path)


@pytest.mark.parametrize("name", ["summary.json", "rollouts.parquet", "samples.safetensors"])
def test_cut_off_files_name_themselves(run: Path, name: str) -> None:
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=f"{name}: not readable.*stopped while writing"):
        read_records(run)


def test_cut_off_heldout_names_itself(tmp_path: Path) -> None:
    run = write_dataset_run(tmp_path, np.random.default_rng(0), episodes=3, H=4)
    (run / "heldout.json").write_bytes((run / "heldout.json").read_bytes()[:200])
    with pytest.raises(DataError, match="heldout.json: not readable"):
        read_heldout(run)


def test_log_cut_in_a_line_and_diverged_loss(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"kind": "train", "step": 1, "loss": 1.0}\n{"kind": "train", "st')
    with pytest.raises(DataError, match="log.jsonl, line 2: not a JSON object.*delete that line"):
        read_log(file)
    file.write_text('{"kind": "train", "step": 1, "loss": NaN}\n')
    with pytest.raises(DataError, match="log.jsonl, line 1: expected a finite .*'loss', got nan"):
        read_log(file)
    assert read_log(tmp_path / "absent.jsonl") is None


def test_unknown_kinds_and_keys_in_the_log_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"kind": "note", "text": "hello"}\n\n{"kind": "val", "step": 5, "loss": 0.5, "more": [1]}\n')
    log = read_log(file)
    assert log is not None
    assert (len(log.train), log.val.tolist(), log.evaluations) == (0, [[5.0, 0.5]], ())


def test_rollouts_lacking_a_column_or_of_another_type(run: Path) -> None:
    file = run / "rollouts.parquet"
    table = pq.read_table(file)
    pq.write_table(table.drop_columns(["start_hash"]), file)
    with pytest.raises(DataError, match=r"missing: \['start_hash'\]"):
        read_rollouts(run)
    place = table.column_names.index("success")
    pq.write_table(table.set_column(place, "success", pa.array(["yes"] * len(table))), file)
    with pytest.raises(DataError, match="row 0: expected a bool as success, got 'yes'"):
        read_rollouts(run)


def test_two_counts_of_one_evaluation_must_agree(run: Path) -> None:
    edit(run / "summary.json", lambda s: s["policies"][1].update(successes=1))
    with pytest.raises(DataError, match=r"counts 0 of 12 successes for 'L2', but summary.json says 1 of 12"):
        read_records(run)


def test_samples_of_a_wrong_kind(run: Path) -> None:
    file = run / "samples.safetensors"
    tensors = load_file(file)
    notes = {k.rpartition("/")[0]: {"policy": "p", "instruction": "i", "success": True} for k in tensors}
    save_file(tensors | {"rollout/0/frames": np.zeros((2, 4, 4, 3), np.float32)}, file, {"info": json.dumps(notes)})
    with pytest.raises(DataError, match=r"uint8 \(L, Y, X, 3\) under 'rollout/0/frames', got float32"):
        read_samples(run)
    save_file(tensors, file, {"info": "{}"})
    with pytest.raises(DataError, match="header: expected the key 'fan/0/L2'"):
        read_samples(run)
    save_file(tensors, file)
    with pytest.raises(DataError, match="header key 'info'"):
        read_samples(run)
