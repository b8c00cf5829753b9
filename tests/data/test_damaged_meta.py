"""Tables of a dataset with values of the wrong kind: one sentence that names the file."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from vola.data.lerobot import open_lerobot
from vola.data.lerobot_write import LeRobotWriter
from vola.data.summary import describe
from vola.errors import DataError
from vola.types import ActionSpec, CameraSpec, RobotSpec, StateSpec

SPEC = RobotSpec((CameraSpec("top", 8, 8),), StateSpec(("x",), ("m",)), ActionSpec(("dx",), ("m",), ("delta",), 10.0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path, rng = tmp_path / "set", np.random.default_rng(0)
    with LeRobotWriter(path, SPEC, 10.0) as writer:
        for _ in range(2):
            numbers = rng.standard_normal((5, 1)).astype(np.float32)
            writer.add_episode({"top": rng.integers(0, 255, (5, 8, 8, 3), dtype=np.uint8)}, numbers, numbers, "go")
    return path


FEATURES = {
    "a text": "x", "nothing": None, "a number": 3, "shape a number": {"dtype": "float32", "shape": 1},
    "shape of texts": {"dtype": "float32", "shape": ["a"]}, "half a size": {"dtype": "float32", "shape": [1.5]},
    "info a text": {"dtype": "image", "shape": [8, 8, 3], "info": "x"},
}  # fmt: skip


@pytest.mark.parametrize("case", FEATURES)
def test_features_of_the_wrong_kind(case: str, folder: Path) -> None:
    file = folder / "meta/info.json"
    info = json.loads(file.read_text())
    info["features"]["action"] = FEATURES[case]
    file.write_text(json.dumps(info))
    with pytest.raises(DataError, match=r"info.json: expected a feature 'action' with a list of sizes as shape, got"):
        open_lerobot(folder)


@pytest.mark.parametrize("value", ["five", 4.5])
def test_episode_lengths_of_the_wrong_kind(value: object, folder: Path) -> None:
    (file,) = (folder / "meta/episodes").rglob("*.parquet")
    table = pq.read_table(file)
    place = table.schema.get_field_index("length")
    pq.write_table(table.set_column(place, "length", pa.array([value, value])), file)
    with pytest.raises(DataError, match="expected a number in every column of episode 0"):
        open_lerobot(folder)


@pytest.mark.parametrize("stored", [{"action": 5}, {"action": {"mean": "x"}}, {"action": {"mean": [[1], [2, 3]]}}])
def test_stored_statistics_of_the_wrong_kind_are_a_note(stored: object, folder: Path) -> None:
    (folder / "meta/stats.json").write_text(json.dumps(stored))
    console = Console(width=100, record=True, quiet=True)
    console.print(describe(open_lerobot(folder)))
    with console.capture() as captured:
        console.quiet = False
        console.print(describe(open_lerobot(folder)))
    assert "no list of numbers" in " ".join(captured.get().split())
