"""A camera is called "top" here and "observation.images.top" in LeRobot files, and neither can become another."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from data_tools import DATA, EPISODES, edit_json, memory, record, spec
from hypothesis import given
from hypothesis import strategies as st

from vola.data.lerobot import open_lerobot
from vola.data.lerobot_meta import camera_key, camera_name
from vola.data.lerobot_write import LeRobotWriter
from vola.errors import ConfigError, DataError, InputError

KEYS = st.text("abo._i", max_size=8).map(lambda t: "observation." + t) | st.text("ab._", max_size=4).map(
    lambda t: "observation.images." + t
)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("observation.images.top", "top"),
        ("observation.images.wrist.left", "wrist.left"),
        ("observation.image", "observation.image"),
        ("observation.images", "observation.images"),
        ("observation.images.", "observation.images."),
        ("observation.images.observation.image", "observation.images.observation.image"),
    ],
)
def test_keys_and_names(key, name) -> None:
    assert camera_name(key) == name
    assert camera_key(name) == key


@given(KEYS)
def test_a_key_comes_back_from_its_name(key) -> None:
    assert camera_key(camera_name(key)) == key


@given(st.text("abo.", min_size=1, max_size=8).filter(lambda n: not n.startswith("observation.")))
def test_a_name_comes_back_from_its_key(name) -> None:
    assert camera_name(camera_key(name)) == name


@pytest.mark.parametrize("video", [False, True])
def test_files_carry_keys_and_datasets_carry_names(tmp_path, video) -> None:
    robot = spec(cameras=(("top", 8, 8), ("observation.image", 8, 8), ("wrist", 8, 8)))
    root = record(tmp_path / "set", memory((2, 3), robot), video=video)
    keys = ["observation.images.top", "observation.image", "observation.images.wrist"]
    features = json.loads((root / "meta/info.json").read_text())["features"]
    assert list(features)[:3] == keys
    assert set(keys) <= set(json.loads((root / "meta/stats.json").read_text()))
    if video:
        assert sorted(p.name for p in (root / "videos").iterdir()) == sorted(keys)
        assert {f"videos/{k}/from_timestamp" for k in keys} <= set(pq.read_schema(root / EPISODES).names)
    else:
        assert pq.read_schema(root / DATA).names[:3] == keys
    back = open_lerobot(root)
    assert back.spec == robot
    assert back.frames("wrist", 1, [0]).shape == (1, 3, 8, 8)
    assert open_lerobot(root, cameras=("wrist",)).spec.cameras == robot.cameras[2:]
    with pytest.raises(DataError, match=r"\['top', 'observation.image', 'wrist'\], got 'observation.images.top'"):
        back.frames("observation.images.top", 0, [0])


def test_a_key_without_the_prefix_is_the_name(tmp_path) -> None:
    """Cameras of other writers may be called anything."""
    root = record(tmp_path / "set", memory((2,)))
    table = pq.read_table(root / DATA)
    names = ["front" if n == "observation.images.top" else n for n in table.column_names]
    pq.write_table(table.rename_columns(names), root / DATA)
    edit_json(root / "meta/info.json", rename)
    assert open_lerobot(root).spec.cameras[0].name == "front"
    assert open_lerobot(root).frames("front", 0, [1])[0, 0, 0, 0] == 1


def rename(info: dict) -> None:
    info["features"]["front"] = info["features"].pop("observation.images.top")


def test_two_keys_of_one_name_are_refused(tmp_path) -> None:
    root = record(tmp_path / "set", memory((2,)))
    edit_json(root / "meta/info.json", lambda i: i["features"].update(top=i["features"]["observation.images.top"]))
    wanted = r"info\.json: .*different names, got \['observation\.images\.top', 'top'\].*'top' here.*Rename"
    with pytest.raises(DataError, match=wanted):
        open_lerobot(root)


@pytest.mark.parametrize("names", [("top", "observation.images.top"), ("a/b",), ("",)])
def test_names_that_make_no_key_are_refused(tmp_path, names) -> None:
    with pytest.raises(ConfigError, match="without '/' that give different LeRobot keys"):
        LeRobotWriter(tmp_path / "set", spec(cameras=[(n, 8, 8) for n in names]), 10)
    assert not (tmp_path / "set").exists()


def test_the_writer_wants_names_not_keys(tmp_path) -> None:
    with LeRobotWriter(tmp_path / "set", spec(), 10) as writer:
        picture = np.zeros((1, 8, 8, 3), np.uint8)
        with pytest.raises(InputError, match=r"\['top'\], got \['observation.images.top'\]"):
            writer.add_episode({"observation.images.top": picture}, np.zeros((1, 3)), np.zeros((1, 2)), "a b")
        writer.add_episode({"top": picture}, np.zeros((1, 3)), np.zeros((1, 2)), "a b")
