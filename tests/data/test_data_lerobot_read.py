"""Sets made by others read back exactly, in every form they come in; rows keep their own frames whatever the clock.

Of D15 the way back to v2.1 does not apply: only v3.0 is written. Of D14 batches of instructions are in test_policy.
"""

import io
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_tools import DATA, EPISODES, change, edit_json, memory, record, spec, write_v21
from PIL import Image
from test_data_video import counter, read

from vola.data import lerobot_files
from vola.data.lerobot import open_lerobot
from vola.data.lerobot_meta import flat_names
from vola.data.stats import compute_statistics
from vola.data.video import encode_video
from vola.data.windows import Windows
from vola.errors import DataError

VIDEO_FILE = "videos/observation.images.top/chunk-000/file-000.mp4"


# --- sets of others ---


def test_the_set_written_by_lerobot_reads_exactly(shared) -> None:
    root = shared / "data/lerobot_written/synth_image"
    data = open_lerobot(root)
    rows = pq.read_table(root / DATA).to_pydict()
    assert (data.version, data.fps, len(data.episodes)) == ("v3.0", 10.0, 20)
    assert [e.instruction for e in data.episodes[:3]] == ["reach the corner", "follow the dot", "reach the corner"]
    assert data.spec.action.names == ("x", "y")
    assert data.spec.action.units == ("unknown", "unknown")
    for e in (0, 7, 19):
        part = slice(100 * e, 100 * e + 100)
        np.testing.assert_array_equal(data.column("action", e), np.float32(rows["action"][part]))
        np.testing.assert_array_equal(data.column("state", e), np.float32(rows["observation.state"][part]))
        np.testing.assert_array_equal(data.column("frame_index", e)[:, 0], np.arange(100))
        pictures = [np.asarray(Image.open(io.BytesIO(p["bytes"]))) for p in rows["observation.image"][part]]
        got = data.frames("observation.image", e, [99, 0, 50])
        np.testing.assert_array_equal(got.transpose(0, 2, 3, 1), np.stack([pictures[t] for t in (99, 0, 50)]))


def test_stored_quantiles_that_are_not_those_of_the_rows_are_named(shared, tmp_path) -> None:
    data = open_lerobot(shared / "data/lerobot_written/synth_image")
    notes = data.compare_stored(compute_statistics(data, [e.index for e in data.episodes]))
    assert [n.split(":")[1].split(" is off")[0] for n in notes] == [
        " q01 of observation.state", " q99 of observation.state", " q01 of action", " q99 of action",
    ]  # fmt: skip
    assert "(x: 62.49 stored, 89.99 exact)" in notes[3]
    ours = open_lerobot(record(tmp_path / "set", memory((3, 9, 4))))
    assert ours.compare_stored(compute_statistics(ours, [0, 1, 2])) == []
    edit_json(tmp_path / "set/meta/stats.json", lambda s: s["action"].update(mean=[0.0, 0.0]))
    assert "mean of action" in ours.compare_stored(compute_statistics(ours, [0, 1, 2]))[0]
    assert ours.compare_stored(compute_statistics(ours, [0, 1])) == []


def test_video_frames_are_those_of_the_rows(shared) -> None:
    """The same demonstrations in AV1: close to the PNG of the same row, and closer than to any neighbour's."""
    image, video = (open_lerobot(shared / "data/lerobot_written" / n) for n in ("synth_image", "synth_video"))
    for e in (0, 3, 19):
        a = image.frames("observation.image", e, range(100)).astype(np.int16)
        b = video.frames("observation.image", e, range(100)).astype(np.int16)
        np.testing.assert_array_equal(image.column("action", e), video.column("action", e))
        assert np.abs(a - b).mean() < 4
        for other in (-1, 1):
            # where the PNG of two neighbouring rows differ much, the video shows this row's, not the neighbour's
            # Key frames only: at this rate the frames between them copy most of the one before, decoded by anyone.
            for t in range(2, 99, 2):
                moved = np.abs(a[t] - a[t + other]) > 60
                if moved.sum() > 30:
                    assert np.abs(a[t] - b[t])[moved].mean() < np.abs(a[t + other] - b[t])[moved].mean()


def test_the_minimal_handwritten_set_is_accepted(shared) -> None:
    root = shared / "data/lerobot_written/handwritten_v3"
    data = open_lerobot(root)
    rows = pq.read_table(root / DATA).to_pydict()
    assert data.spec.state.names == ("state_0", "state_1")
    assert [e.length for e in data.episodes] == [20, 20, 20]
    np.testing.assert_array_equal(data.column("action", 2), np.float32(rows["action"][40:]))
    data.check()
    batch = Windows(data, [2, 0], T=2, H=8, resize=(24, 24)).batch([0, 19, 20])
    assert batch.observation.images["observation.image"].shape == (3, 2, 3, 24, 24)
    assert batch.chunk.valid.sum(1).tolist() == [8, 1, 8]


def test_the_real_robot_set_with_missing_videos(shared) -> None:
    root = shared / "data/g1_bottle"
    data = open_lerobot(root)
    assert [e.index for e in data.episodes] == [10, 20, 24, 28, 29, 30, 31, 59, 63, 82, 88, 99]
    (note,) = data.notes
    assert "88 of 100 episodes" in note
    assert "episode_000000.mp4" in note
    assert "12 remain" in note
    assert data.spec.action.size == data.spec.state.size == 26
    assert data.spec.action.names[3] == "kLeftElbow"
    assert data.spec.cameras[0].name == "cam_high"
    assert data.frames("cam_high", 99, [264, 0]).shape == (2, 3, 480, 640)
    with pytest.raises(DataError, match=r"episode_000000\.mp4: expected this video of episode 0"):
        open_lerobot(root, missing_video="refuse")
    numbers = open_lerobot(root, cameras=())
    assert sum(e.length for e in numbers.episodes) == 35_965
    assert numbers.notes == ()
    np.testing.assert_array_equal(numbers.column("action", 99), data.column("action", 99))
    with pytest.raises(DataError, match="expected frames in"):
        data.frames("cam_high", 99, [265])


# --- odd but allowed ---


def test_v21_names_of_every_form(tmp_path) -> None:
    data = open_lerobot(write_v21(tmp_path / "set"))
    assert (data.version, data.spec.state.names, data.spec.action.names) == ("v2.1", ("x", "y"), ("m",))
    assert data.column("action", 1).ravel().tolist() == [1000, 1001, 1002, 1003, 1004, 1005]
    assert flat_names([["a", "b"]]) == flat_names(["a", "b"]) == flat_names({"motors": ["a", "b"]}) == ["a", "b"]
    assert flat_names({"b": 1, "a": 0}) == ["a", "b"]
    assert flat_names(None) is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"task_index": 0, "task": "pick"}', "pick"),
        (b'{"task_index": 0, "task": "pick"}\n\n', "pick"),
        (b'\r\n{"task_index": 0, "task": "pick"}\r\n', "pick"),
        (b'\xef\xbb\xbf{"task_index": 0, "task": "pick"}\n', "pick"),
        ('{"task_index": 0, "task": "пик ☕ 拿起\u2028ok"}\n'.encode(), "пик ☕ 拿起\u2028ok"),
    ],
)
def test_D15_task_files_of_every_form(tmp_path, content, text) -> None:
    old = open_lerobot(write_v21(tmp_path / "old", tasks=content))
    assert {e.instruction for e in old.episodes} == {text}
    # and the text survives into v3.0
    data = memory((4,), spec(cameras=()))
    with_text = type(data)(
        data.spec, 10.0, tuple(type(e)(e.index, e.length, text) for e in data.episodes), data.columns, {}
    )
    assert open_lerobot(record(tmp_path / "new", with_text)).episodes[0].instruction == text


def test_tasks_without_pandas_metadata_and_with_an_unnamed_index(tmp_path) -> None:
    root = record(tmp_path / "set", memory((2, 2)))
    path = root / "meta/tasks.parquet"
    table = pq.read_table(path).replace_schema_metadata(None)
    pq.write_table(table, path)
    assert open_lerobot(root).episodes[1].instruction == "go to the blue ring"
    pq.write_table(table.rename_columns(["task_index", "__index_level_0__"]), path)
    assert open_lerobot(root).episodes[1].instruction == "go to the blue ring"


def test_what_may_be_missing(tmp_path) -> None:
    root = record(tmp_path / "set", memory((3, 4)))
    (root / "meta/stats.json").unlink()
    edit_json(root / "meta/info.json", lambda i: [i.pop(k) for k in (
        "robot_type", "splits", "chunks_size", "data_path", "video_path", "data_files_size_in_mb", "total_frames",
    )])  # fmt: skip
    table = pq.read_table(root / EPISODES)
    pq.write_table(table.select([c for c in table.column_names if not c.startswith("stats/")]), root / EPISODES)
    data = open_lerobot(root)
    assert data.notes == ()
    np.testing.assert_array_equal(data.column("action", 1), memory((3, 4)).column("action", 1))


def test_other_numeric_features_are_columns(tmp_path) -> None:
    root = record(tmp_path / "set", memory((3, 2), spec(cameras=())))
    force = [[[1.0 * i, 2.0], [3.0, 4.0]] for i in range(5)]
    types = {"reward": pa.float64(), "force": pa.list_(pa.list_(pa.float32())), "note": pa.string()}
    change(root / DATA, lambda c: c.update(reward=[0.5] * 5, force=force, note=["a"] * 5), types)
    new = {"reward": ("float64", [1]), "force": ("float32", [2, 2]), "note": ("string", [1])}
    edit_json(
        root / "meta/info.json",
        lambda i: i["features"].update({k: {"dtype": d, "shape": s, "names": None} for k, (d, s) in new.items()}),
    )
    data = open_lerobot(root)
    assert data.column("reward", 1).shape == (2, 1)
    assert data.column("reward", 1).dtype == np.float64
    np.testing.assert_array_equal(data.column("force", 1), force[3:])
    with pytest.raises(DataError, match="expected numbers in note"):
        data.column("note", 0)
    with pytest.raises(DataError, match="'speed'"):
        data.column("speed", 0)


def test_a_camera_with_channels_first_and_a_depth_map(tmp_path) -> None:
    root = record(tmp_path / "set", memory((3,)))

    def edit(info: dict) -> None:
        camera = info["features"]["observation.images.top"]
        camera.update(shape=[3, 8, 8], names=["channels", "height", "width"])
        depth = {"dtype": "video", "shape": [8, 8, 1], "names": None, "info": {"is_depth_map": True}}
        info["features"]["observation.images.depth"] = depth

    edit_json(root / "meta/info.json", edit)
    data = open_lerobot(root)
    assert [(c.name, c.height, c.width) for c in data.spec.cameras] == [("top", 8, 8)]
    assert "depth map" in data.notes[0]
    assert data.frames("top", 0, [1]).shape == (1, 3, 8, 8)


def test_pictures_in_many_blocks(tmp_path, monkeypatch) -> None:
    """Blocks of one row group each, and all but one of them dropped again: the pictures stay those of their rows."""
    data = memory((3, 5, 2, 4))
    root = record(tmp_path / "set", data)
    for size, kept in ((1, 1), (1, 4), (1500, 2)):
        monkeypatch.setattr(lerobot_files, "_BLOCK_BYTES", size)
        monkeypatch.setattr(lerobot_files, "_KEPT_BLOCKS", kept)
        back = open_lerobot(root)
        for e in (3, 1, 0, 2, 1):
            every = range(data.episodes[e].length)
            np.testing.assert_array_equal(back.frames("top", e, every), data.frames("top", e, every))


def test_instruction_can_be_given_and_cameras_chosen(tmp_path) -> None:
    root = record(tmp_path / "set", memory((3, 2), spec(cameras=(("top", 8, 8), ("wrist", 8, 8)))))
    data = open_lerobot(root, instruction="close the lid", cameras=("wrist",))
    assert {e.instruction for e in data.episodes} == {"close the lid"}
    assert [c.name for c in data.spec.cameras] == ["wrist"]
    with pytest.raises(DataError, match="'top'"):
        data.frames("top", 0, [0])


def test_a_dataset_can_be_pickled_for_workers(tmp_path) -> None:
    data = memory((4, 3), spec(cameras=(("top", 32, 32),)))
    data.images["top"][:] = [counter(4).transpose(0, 3, 1, 2), counter(3, 4).transpose(0, 3, 1, 2)]
    for video in (False, True):
        back = open_lerobot(record(tmp_path / str(video), data, video=video))
        back.frames("top", 0, [0])
        assert read(pickle.loads(pickle.dumps(back)).frames("top", 1, [2])).tolist() == [6]


# --- times ---


def late(root, frame: int, by: float) -> None:
    change(root / DATA, lambda c: c["timestamp"].__setitem__(frame, c["timestamp"][frame] + by))


def test_D01_one_late_frame(tmp_path) -> None:
    root = record(tmp_path / "set", memory((20,), spec(fps=30.0)))
    late(root, 7, 0.4 / 30)
    with pytest.raises(DataError, match=r"episode=0, frame=7.*0\.233333.*tolerance_s") as error:
        open_lerobot(root)
    assert "0.013333" in str(error.value)
    data = open_lerobot(root, tolerance_s=0.5 / 30)
    np.testing.assert_array_equal(data.column("action", 0), memory((20,)).column("action", 0))
    assert data.frames("top", 0, [7])[0, 0, 0, 0] == 7


def test_D19_clock_times_that_drift(tmp_path) -> None:
    data = memory((60,), spec(cameras=(("top", 32, 32),), fps=30.0))
    data.images["top"][0] = counter(60).transpose(0, 3, 1, 2)
    root = record(tmp_path / "set", data, video=True)
    change(root / DATA, lambda c: c.update(timestamp=[1.02 * t / 30 for t in range(60)]))
    with pytest.raises(DataError, match="episode=0, frame=1"):
        open_lerobot(root)
    back = open_lerobot(root, tolerance_s=0.05)
    assert read(back.frames("top", 0, [59])).tolist() == [59]
    late(root, 59, 1.0)
    with pytest.raises(DataError, match=r"episode=0, frame=59.*got 3\.00"):
        open_lerobot(root, tolerance_s=0.05)


def test_float32_times_of_long_episodes_are_not_late(tmp_path) -> None:
    """After an hour at 30 fps float32 seconds are exact to 2.4e-4 s only."""
    n = 110_000
    data = memory((n,), spec(S=1, A=1, cameras=(), fps=30.0))
    assert open_lerobot(record(tmp_path / "set", data)).episodes[0].length == n


def test_a_video_of_another_rate_is_refused(tmp_path) -> None:
    data = memory((30,), spec(cameras=(("top", 32, 32),)))
    root = record(tmp_path / "set", data, video=True)
    encode_video(root / VIDEO_FILE, counter(30), 25, "libx264")
    with pytest.raises(DataError, match=r"file-000\.mp4: episode 0, frame 29.*2\.9000 s.*not 10 fps"):
        open_lerobot(root).frames("top", 0, [3])
    assert read(open_lerobot(root, tolerance_s=2.0).frames("top", 0, [3])).tolist() == [3]
