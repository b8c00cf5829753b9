"""Datasets of odd shapes go all the way, report included; what cannot go is refused before training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tools import dataset
from vola.data.episodes import split_episodes
from vola.data.lerobot import open_lerobot
from vola.data.lerobot_write import LeRobotWriter
from vola.errors import ConfigError, DataError
from vola.systems import pi0
from vola.train.loop import Schedule
from vola.types import ActionSpec, CameraSpec, RobotSpec, StateSpec
from vola.workflow import choose, prepare, train_run

QUIET = Schedule(progress="none")


def record(path: Path, cameras: tuple[str, ...], S: int, A: int, lengths: list[int], text: str = "go") -> Path:
    spec = RobotSpec(
        tuple(CameraSpec(c, 16, 16) for c in cameras),
        StateSpec(tuple(f"s{i}" for i in range(S)), ("m",) * S),
        ActionSpec(tuple(f"a{i}" for i in range(A)), ("m",) * A, ("delta",) * A, 10.0),
    )
    rng = np.random.default_rng(0)
    with LeRobotWriter(path, spec, 10.0) as writer:
        for n in lengths:
            images = {c: rng.integers(0, 255, (n, 16, 16, 3), dtype=np.uint8) for c in cameras}
            state, action = rng.standard_normal((n, S)), rng.standard_normal((n, A))
            writer.add_episode(images, state.astype(np.float32), action.astype(np.float32), text)
    return path


SHAPES = {
    "no camera": ((), 2, 2, [8] * 5, 0.25),
    "no state": (("top",), 0, 2, [8] * 5, 0.25),
    "one dimension": (("top",), 1, 1, [8] * 5, 0.25),
    "two cameras": (("top", "wrist"), 3, 2, [8] * 5, 0.25),
    "shorter than a chunk": (("top",), 2, 2, [2] * 4, 0.25),
    "one episode": (("top",), 2, 2, [9], 0.0),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_odd_datasets_go_all_the_way(shape: str, tmp_path: Path) -> None:
    cameras, S, A, lengths, val = SHAPES[shape]
    data = record(tmp_path / "data", cameras, S, A, lengths)
    run = train_run(str(data), tmp_path / "run", size="tiny", val=val, changes={"train.steps": 2}, schedule=QUIET)
    assert (run / "report.html").exists()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["cameras"] == list(cameras)
    assert (run / "heldout.json").exists() == (shape not in ("shorter than a chunk", "one episode"))


def test_a_system_for_another_robot_is_refused() -> None:
    data = dataset()
    other = pi0.tiny(replace(data.spec, cameras=data.spec.cameras[:1]))
    with pytest.raises(ConfigError, match="the system is for"):
        prepare(data, other, 0.25)


def test_choose_names_what_there_is() -> None:
    spec = dataset().spec
    with pytest.raises(ConfigError, match="expected one of"):
        choose(spec, "rt9")
    with pytest.raises(ConfigError, match="comes as"):
        choose(spec, "pi0", "full")
    with pytest.raises(ConfigError, match="no common name"):
        choose(spec, relative=True)
    assert choose(spec, size="tiny", changes={"H": 7}).H == 7


def test_a_path_that_is_no_dataset_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected"):
        train_run(str(tmp_path / "nothing"), tmp_path / "run", schedule=QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["observation.state", "action"])
def test_nan_in_a_held_out_episode_is_found_before_training(name: str, tmp_path: Path) -> None:
    data = record(tmp_path / "data", (), 2, 2, [6] * 4)
    held_out = split_episodes(open_lerobot(data), 0.25, 0)[1][0]
    (file,) = (data / "data").rglob("*.parquet")
    table = pq.read_table(file)
    rows = table[name].to_pylist()
    rows[6 * held_out + 4][1] = float("nan")
    column = pa.array(rows, table.schema.field(name).type)
    pq.write_table(table.set_column(table.schema.get_field_index(name), table.schema.field(name), column), file)
    with pytest.raises(DataError, match=f"nan in episode {held_out}, frame 4, dimension 1"):
        train_run(str(data), tmp_path / "run", size="tiny", val=0.25, schedule=QUIET)
    assert not (tmp_path / "run").exists()


def test_an_instruction_can_be_given_for_a_dataset(tmp_path: Path) -> None:
    data = open_lerobot(record(tmp_path / "data", (), 1, 1, [5, 5]), instruction="wipe the table")
    assert {e.instruction for e in data.episodes} == {"wipe the table"}
