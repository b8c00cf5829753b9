"""Episodes whose video is missing: left out, refused, or used without their pictures."""

from pathlib import Path

import numpy as np
import pytest

from vola.data.episodes import split_episodes
from vola.data.lerobot import open_lerobot
from vola.data.lerobot_write import LeRobotWriter
from vola.data.transforms import Transforms
from vola.data.windows import Windows
from vola.errors import ConfigError, DataError
from vola.fit import fit
from vola.types import ActionSpec, CameraSpec, RobotSpec, StateSpec

SPEC = RobotSpec(
    (CameraSpec("top", 16, 16), CameraSpec("wrist", 16, 16)),
    StateSpec(("x",), ("m",)),
    ActionSpec(("dx",), ("m",), ("delta",), 10.0),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three episodes of five frames, one video file per episode and camera; the wrist video of episode 1 is gone."""
    path, rng = tmp_path / "set", np.random.default_rng(0)
    with LeRobotWriter(path, SPEC, 10.0, video=True, video_files_size_in_mb=0) as writer:
        for i in range(3):
            pictures = {c.name: rng.integers(100, 255, (5, 16, 16, 3), dtype=np.uint8) for c in SPEC.cameras}
            numbers = np.full((5, 1), i, np.float32)
            writer.add_episode(pictures, numbers, numbers, "go")
    videos = sorted((path / "videos").rglob("*wrist*/**/*.mp4"))
    assert len(videos) == 3
    videos[1].unlink()
    return path


def test_blind_episodes_keep_their_numbers_and_mark_their_pictures(folder: Path) -> None:
    data = open_lerobot(folder, missing_video="blind")
    assert [e.blind for e in data.episodes] == [(), ("wrist",), ()]
    assert "pictures count as missing" in data.notes[0]
    w = Windows(data, [0, 1, 2], T=2, H=2, resize=(8, 8))
    w.prefetch()
    assert w.cached == (25, 25)
    batch = w.batch([2, 7, 12])
    np.testing.assert_array_equal(batch.episode, [0, 1, 2])
    np.testing.assert_array_equal(batch.observation.images_valid["wrist"], [[True] * 2, [False] * 2, [True] * 2])
    assert batch.observation.images_valid["top"].all()
    wrist = batch.observation.images["wrist"]
    assert wrist[0].min() > 0
    assert wrist[1].max() == 0
    np.testing.assert_array_equal(batch.observation.state[:, -1, 0], [0, 1, 2])
    cold = Windows(data, [0, 1, 2], T=2, H=2, resize=(8, 8), cache_bytes=0).batch([2, 7, 12])
    np.testing.assert_array_equal(cold.observation.images["wrist"], wrist)


def test_the_other_ways(folder: Path) -> None:
    assert [e.index for e in open_lerobot(folder).episodes] == [0, 2]
    with pytest.raises(DataError, match="wrist.*expected this video of episode 1"):
        open_lerobot(folder, missing_video="refuse")
    with pytest.raises(ConfigError, match="'skip', 'blind' or 'refuse'"):
        open_lerobot(folder, missing_video="guess")
    data = open_lerobot(folder, missing_video="blind")
    with pytest.raises(DataError, match="episode 1: camera 'wrist' has no pictures"):
        data.frames("wrist", 1, [0])
    assert data.fingerprint() != open_lerobot(folder).fingerprint()


def test_a_camera_without_any_picture_is_refused(folder: Path) -> None:
    data = open_lerobot(folder, missing_video="blind")
    with pytest.raises(DataError, match="'wrist': expected pictures in at least one training episode"):
        fit(data, [1], 2, Transforms())
    assert set(fit(data, [0, 1], 2, Transforms()).pixels) == {"top", "wrist"}
    assert split_episodes(data, 0.34, 0)[1]
