"""Episodes in memory, and recordings that end badly in ways a file cannot show. Splits are in test_data_windows."""

from dataclasses import replace

import numpy as np
import pytest
from data_tools import memory, spec

from vola.data.episodes import Episode, check_frames, check_selection, find_episode, split_episodes
from vola.data.lerobot import open_lerobot
from vola.data.lerobot_finalise import JOURNAL
from vola.data.lerobot_write import LeRobotWriter
from vola.errors import ConfigError, DataError, InputError


def test_episodes_are_found_by_number() -> None:
    episodes = tuple(Episode(i, 3, "go") for i in (10, 1, 7))
    assert [find_episode(episodes, i) for i in (10, 1, 7)] == [0, 1, 2]
    with pytest.raises(DataError, match=r"episode 0: expected one of the 3 episodes \[10, 1, 7\]"):
        find_episode(episodes, 0)
    check_frames(episodes[0], [0, 2])
    for frame in (-1, 3):
        with pytest.raises(DataError, match=rf"episode 10: expected frames in 0\.\.2, got {frame}"):
            check_frames(episodes[0], [1, frame])


def test_selections_keep_their_order() -> None:
    data = memory(ids=(3, 1, 8, 0, 5))
    assert [e.index for e in check_selection(data, np.array([8, 3]))] == [8, 3]
    with pytest.raises(DataError, match="episode 2"):
        check_selection(data, [3, 2])


def test_a_split_does_not_depend_on_the_order_of_the_episodes() -> None:
    forward, backward = memory((2,) * 9), memory((2,) * 9, ids=range(8, -1, -1))
    assert split_episodes(forward, 0.3, seed=1) == split_episodes(backward, 0.3, seed=1)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda d: {"episodes": (d.episodes[0], replace(d.episodes[1], index=0))}, r"number once, got \[0, 0\]"),
        (lambda d: {"columns": {"state": d.columns["state"]}}, "expected a column 'action'"),
        (lambda d: {"columns": {**d.columns, "reward": [np.zeros((3, 1))]}}, "reward: expected 2 arrays"),
        (lambda d: {"images": {"top": [i / 255.0 for i in d.images["top"]]}}, "top: episode 0: expected uint8.*float"),
        (lambda d: {"images": {"top": [i[..., :6] for i in d.images["top"]]}}, r"uint8 images 3 8 8.*\(3, 8, 6\)"),
        (lambda d: {"images": {"top": [i.transpose(0, 2, 3, 1) for i in d.images["top"]]}}, r"got uint8 \(8, 8, 3\)"),
    ],
)  # fmt: skip
def test_arrays_that_are_no_dataset_are_refused(edit, match) -> None:
    data = memory((3, 4))
    with pytest.raises(DataError, match=match):
        replace(data, **edit(data))


def arguments(L: int = 3) -> dict:
    data = memory((L,), spec())
    columns = {k: v[0] for k, v in data.columns.items()}
    return {"images": {"top": data.images["top"][0]}, **columns, "instruction": "push the red disc"}


def test_nothing_follows_an_episode_that_was_broken_off(tmp_path, monkeypatch) -> None:
    """Ctrl-C between the rows and the journal line: a further episode would be given the rows of this one."""
    writer = LeRobotWriter(tmp_path / "set", spec(), 10)
    writer.add_episode(**arguments())

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("vola.data.lerobot_write.count_pixels", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.add_episode(**arguments(5))
    with pytest.raises(ConfigError, match="writing episode 1 was broken off.*the 1 episodes before it are kept"):
        writer.add_episode(**arguments(4))
    writer.close()
    assert [e.length for e in open_lerobot(tmp_path / "set").episodes] == [3]


def test_a_recording_without_episodes_leaves_nothing(tmp_path) -> None:
    with pytest.raises(RuntimeError, match="no robot"), LeRobotWriter(tmp_path / "set", spec(), 10):
        raise RuntimeError("no robot")
    assert not (tmp_path / "set" / JOURNAL).exists()
    with pytest.raises(DataError, match="at least one episode"), LeRobotWriter(tmp_path / "set", spec(), 10):
        pass
    with LeRobotWriter(tmp_path / "set", spec(), 10) as writer:
        writer.add_episode(**arguments())
    assert len(open_lerobot(tmp_path / "set").episodes) == 1


@pytest.mark.parametrize("fps", [0.0, -10.0, np.nan, np.inf])
def test_rates_that_are_none_are_refused(tmp_path, fps) -> None:
    robot = replace(spec(), action=replace(spec().action, rate=fps))
    with pytest.raises(ConfigError, match="fps: expected the rate of the actions"):
        LeRobotWriter(tmp_path / "set", robot, fps)


def test_D14_an_instruction_is_one_sentence(tmp_path) -> None:
    """Never a list of characters: a string stays one, anything else is refused at the door."""
    with LeRobotWriter(tmp_path / "set", spec(), 10) as writer:
        for bad in (None, "", ["p", "i"], b"pick"):
            with pytest.raises(InputError, match="instruction: expected one sentence"):
                writer.add_episode(**{**arguments(), "instruction": bad})
        writer.add_episode(**{**arguments(), "instruction": "pick"})
    assert open_lerobot(tmp_path / "set").episodes[0].instruction == "pick"
