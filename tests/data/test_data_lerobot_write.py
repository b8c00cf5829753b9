"""What is written is what is read back, and what LeRobot's format asks for."""

import io
import json
import multiprocessing as mp
import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_tools import DATA, EPISODES, TEXTS, memory, record, spec
from PIL import Image
from test_data_video import counter, read

from vola.data.lerobot import open_lerobot
from vola.data.lerobot_finalise import JOURNAL, count_pixels, histogram_stats
from vola.data.lerobot_write import LeRobotWriter
from vola.data.png import decode_png, encode_png
from vola.data.windows import Windows
from vola.errors import ConfigError, DataError, InputError
from vola.types import CameraSpec

TWO = (("top", 8, 8), ("observation.wrist", 6, 10))
VIDEO = spec(cameras=(("top", 32, 32),))


def numbered(lengths, fps: float = 10.0):
    """A memory dataset whose 32x32 frames show a counter that runs through all episodes."""
    robot = spec(cameras=(("top", 32, 32),), fps=fps)
    data = memory(lengths, robot)
    first = np.concatenate([[0], np.cumsum(lengths)])
    for i, n in enumerate(lengths):
        data.images["top"][i] = counter(n, int(first[i])).transpose(0, 3, 1, 2)
    return data


def test_pictures_in_tables_round_trip_exactly(tmp_path) -> None:
    data = memory((3, 7, 4), spec(cameras=TWO))
    rng = np.random.default_rng(0)
    for images in data.images.values():
        images[:] = [rng.integers(0, 256, i.shape, dtype=np.uint8) for i in images]
    back = open_lerobot(record(tmp_path / "set", data))
    assert back.spec == data.spec
    assert back.episodes == data.episodes
    assert (back.fps, back.notes, back.version) == (10.0, (), "v3.0")
    for e in data.episodes:
        for name in ("state", "action"):
            np.testing.assert_array_equal(back.column(name, e.index), data.column(name, e.index))
        for camera, *_ in TWO:
            got = back.frames(camera, e.index, [2, 0, 2])
            np.testing.assert_array_equal(got, data.frames(camera, e.index, [2, 0, 2]))
    back.check()


def test_D16_frames_read_can_be_written_again(tmp_path) -> None:
    first = open_lerobot(record(tmp_path / "a", memory((3, 2), spec(cameras=TWO))))
    with LeRobotWriter(tmp_path / "b", first.spec, first.fps) as writer:
        for e in first.episodes:
            images = {c.name: first.frames(c.name, e.index, range(e.length)) for c in first.spec.cameras}
            writer.add_episode(images, first.column("state", e.index), first.column("action", e.index), e.instruction)
    second = open_lerobot(tmp_path / "b")
    assert second.fingerprint() == first.fingerprint()
    np.testing.assert_array_equal(second.frames("top", 1, [1]), first.frames("top", 1, [1]))


@pytest.mark.parametrize("S", [0, 1, 2])
def test_D13_shapes_of_one_and_no_dimension(tmp_path, S) -> None:
    path = record(tmp_path / "set", memory((6,), spec(S=S, A=1, cameras=())))
    back = open_lerobot(path)
    assert back.column("state", 0).shape == (6, S)
    assert back.column("action", 0).shape == (6, 1)
    assert back.column("timestamp", 0).shape == (6, 1)
    assert pq.read_schema(path / DATA).field("action").type == pa.float32()
    batch = Windows(back, [0], T=1, H=3).batch([0, 1])
    assert batch.chunk.actions.shape == (2, 3, 1)
    assert batch.observation.state.shape == (2, 1, S)


@pytest.mark.parametrize(("fps", "n"), [(30, 40), (29.97, 300)])
def test_D06_many_episodes_in_one_video_keep_their_frames(tmp_path, fps, n) -> None:
    lengths = np.random.default_rng(1).integers(7, 18, n).tolist()
    data = numbered(lengths, fps)
    back = open_lerobot(record(tmp_path / "set", data, video=True))
    assert len(list((tmp_path / "set/videos").rglob("*.mp4"))) == 1
    first = np.concatenate([[0], np.cumsum(lengths)])
    for e in range(n):
        shown = read(back.frames("top", e, [0, lengths[e] - 1]))
        assert shown.tolist() == [first[e], first[e + 1] - 1]
    # Other writers sum the start times in floating point; the frames found must be the same.
    table = pq.read_table(tmp_path / "set" / EPISODES)
    key = "videos/observation.images.top/from_timestamp"
    drifting = np.concatenate([[0.0], np.cumsum(np.array(lengths) / fps)[:-1]]) + 1e-4
    place = table.column_names.index(key)
    pq.write_table(table.set_column(place, key, pa.array(drifting)), tmp_path / "set" / EPISODES)
    again = open_lerobot(tmp_path / "set")
    assert read(again.frames("top", n - 1, [0]))[0] == first[n - 1]


def test_D08_an_episode_ends_where_the_next_begins(tmp_path) -> None:
    data = memory((10, 8), VIDEO)
    data.images["top"][0] = np.broadcast_to(np.array([220, 20, 20], np.uint8)[None, :, None, None], (10, 3, 32, 32))
    data.images["top"][1] = np.broadcast_to(np.array([20, 20, 220], np.uint8)[None, :, None, None], (8, 3, 32, 32))
    back = open_lerobot(record(tmp_path / "set", data, video=True))
    red, blue = back.frames("top", 0, range(10)), back.frames("top", 1, range(8))
    assert (red[:, 0] > 180).all()
    assert (red[:, 2] < 60).all()
    assert (blue[:, 2] > 180).all()
    with pytest.raises(DataError, match=r"episode 0: expected frames in 0\.\.9, got 10"):
        back.frames("top", 0, [10])


def test_files_are_closed_at_their_size(tmp_path) -> None:
    data = numbered((5, 4, 3))
    rng = np.random.default_rng(0)
    noise = [rng.integers(0, 256, (n, 3, 512, 512), dtype=np.uint8) for n in (2, 2, 2)]
    big = memory((2, 2, 2), spec(cameras=(("top", 512, 512),)))
    big.images["top"][:] = noise
    back = open_lerobot(record(tmp_path / "images", big, data_files_size_in_mb=1))
    assert sorted(p.name for p in (tmp_path / "images/data").rglob("*")) == [
        "chunk-000", "file-000.parquet", "file-001.parquet", "file-002.parquet",
    ]  # fmt: skip
    np.testing.assert_array_equal(back.frames("top", 2, [1]), noise[2][1:])
    assert back.column("index", 2).ravel().tolist() == [4, 5]
    back = open_lerobot(record(tmp_path / "video", data, video=True, video_files_size_in_mb=0))
    assert len(list((tmp_path / "video").rglob("*.mp4"))) == 3
    assert read(back.frames("top", 2, [0, 2])).tolist() == [9, 11]


def test_tables_have_the_columns_and_types_of_the_format(tmp_path, shared) -> None:
    """Column for column what LeRobot's own writer made of the same features."""
    theirs = shared / "data/lerobot_written/synth_video"
    source = open_lerobot(theirs)
    frames = {"observation.image": source.frames("observation.image", 0, range(20))}
    with LeRobotWriter(tmp_path / "set", source.spec, 10, video=True) as writer:
        for _ in range(2):
            writer.add_episode(frames, source.column("state", 0)[:20], source.column("action", 0)[:20], TEXTS[0])
    for name in (DATA, EPISODES, "meta/tasks.parquet"):
        ours, other = pq.read_schema(tmp_path / "set" / name), pq.read_schema(theirs / name)
        assert set(ours.names) == set(other.names)
        for field in other:
            assert ours.field(field.name).type == field.type, field.name
    assert pq.ParquetFile(tmp_path / "set" / DATA).num_row_groups == 2
    described = [
        json.loads(pq.read_schema(p / DATA).metadata[b"huggingface"])["info"] for p in (tmp_path / "set", theirs)
    ]
    assert described[0] == described[1]
    index = [
        json.loads(pq.read_schema(p / "meta/tasks.parquet").metadata[b"pandas"]) for p in (tmp_path / "set", theirs)
    ]
    for key in ("index_columns", "columns", "column_indexes"):
        assert index[0][key] == index[1][key]
    info, other = (json.loads((p / "meta/info.json").read_text()) for p in (tmp_path / "set", theirs))
    assert set(other) <= set(info)
    for key, feature in other["features"].items():
        assert set(feature) <= set(info["features"][key])
        assert feature["shape"] == info["features"][key]["shape"]
    assert info["splits"] == {"train": "0:2"}
    stats, other = (json.loads((p / "meta/stats.json").read_text()) for p in (tmp_path / "set", theirs))
    assert {k: {f: np.shape(v) for f, v in s.items()} for k, s in stats.items()} == {
        k: {f: np.shape(v) for f, v in s.items()} for k, s in other.items()
    }


def test_stored_statistics_are_exact_and_renumbered(tmp_path) -> None:
    """N06: index, episode and task statistics are those of the rows; quantiles are those of the pooled rows."""
    data = memory((3, 9, 4))
    path = record(tmp_path / "set", data)
    stats = json.loads((path / "meta/stats.json").read_text())
    rows = pq.read_table(path / DATA).to_pydict()
    for key in ("index", "episode_index", "task_index", "frame_index", "timestamp"):
        pooled = np.array(rows[key], np.float64)
        assert stats[key]["max"] == [pooled.max()]
        assert stats[key]["count"] == [16]
        np.testing.assert_allclose(stats[key]["q10"], np.quantile(pooled, 0.1))
        np.testing.assert_allclose(stats[key]["std"], pooled.std())
    assert stats["index"]["max"] == [15]
    pooled = np.concatenate(data.columns["action"]).astype(np.float64)
    for field, value in {
        "q01": np.quantile(pooled, 0.01, 0),
        "mean": pooled.mean(0),
        "q99": np.quantile(pooled, 0.99, 0),
    }.items():
        np.testing.assert_allclose(stats["action"][field], value)
    pixels = np.concatenate(data.images["top"]).transpose(1, 0, 2, 3).reshape(3, -1) / 255
    for field, value in {"mean": pixels.mean(1), "std": pixels.std(1), "q90": np.quantile(pixels, 0.9, axis=1)}.items():
        np.testing.assert_allclose(np.ravel(stats["observation.images.top"][field]), value, atol=1e-12)
    assert stats["observation.images.top"]["count"] == [16]
    one = pq.read_table(path / EPISODES).to_pylist()[1]
    np.testing.assert_allclose(one["stats/action/q50"], np.median(data.columns["action"][1], 0))
    np.testing.assert_allclose(np.ravel(one["stats/observation.images.top/max"]), (16 + 8) / 255)
    assert (one["dataset_from_index"], one["dataset_to_index"]) == (3, 12)


def test_N06_tasks_of_merged_sets_are_told_apart_by_their_text(tmp_path) -> None:
    texts = {"same": ("pick", "pick"), "other": ("pick", "place")}
    for name, instructions in texts.items():
        data = memory((2, 2), spec(cameras=()))
        with LeRobotWriter(tmp_path / name, data.spec, 10) as writer:
            for i, text in enumerate(instructions):
                writer.add_episode({}, data.columns["state"][i], data.columns["action"][i], text)
        rows = pq.read_table(tmp_path / name / DATA)["task_index"].to_pylist()
        assert set(rows) == set(range(len(set(instructions))))
        assert [e.instruction for e in open_lerobot(tmp_path / name).episodes] == list(instructions)


def test_N07_pixel_statistics_do_not_overflow() -> None:
    images = np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)
    stats = histogram_stats(count_pixels(images), 10)
    np.testing.assert_allclose(np.ravel(stats["mean"]), 0.5, atol=0.01)
    np.testing.assert_allclose(np.ravel(stats["std"]), 0.289, atol=0.01)
    values = images.transpose(3, 0, 1, 2).reshape(3, -1) / 255
    for q in ("q01", "q10", "q50", "q90", "q99"):
        np.testing.assert_allclose(np.ravel(stats[q]), np.quantile(values, int(q[1:]) / 100, axis=1), atol=1e-12)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (48, 48), (31, 64)])
def test_png_is_lossless_and_standard(shape) -> None:
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    data = encode_png(image)
    np.testing.assert_array_equal(decode_png(data, "here"), image)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), image)
    other = io.BytesIO()
    Image.fromarray(image).save(other, "PNG")
    np.testing.assert_array_equal(decode_png(other.getvalue(), "here"), image)
    for cut in (data[: len(data) // 2], b"text", data[:30]):
        with pytest.raises(DataError, match="here: expected a readable image"):
            decode_png(cut, "here")


# --- interrupted recordings ---


def killed(path: Path, video: bool) -> None:
    """Three episodes, then dies in the middle of the fourth."""
    data = numbered((5, 4, 3, 6))
    writer = LeRobotWriter(path, data.spec, 10, video=video)
    for i in range(3):
        writer.add_episode(
            {"top": data.images["top"][i]}, data.columns["state"][i], data.columns["action"][i], TEXTS[0]
        )
    with open(path / JOURNAL / "data.arrows", "ab") as journal:
        journal.write(b"\xff\xff\xff\xff\x10\x02\x00\x00half a batch")
    with open(path / JOURNAL / "episodes.jsonl", "a") as journal:
        journal.write('{"episode_index": 3, "leng')
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("video", [False, True])
def test_D11_a_killed_writer_leaves_the_finished_episodes(tmp_path, video) -> None:
    path = tmp_path / "set"
    child = mp.get_context("fork").Process(target=killed, args=(path, video))
    child.start()
    child.join(timeout=60)
    assert child.exitcode == -signal.SIGKILL
    back = open_lerobot(path)
    assert [e.length for e in back.episodes] == [5, 4, 3]
    assert "interrupted; its 3 complete episodes are kept" in back.notes[0]
    assert read(back.frames("top", 2, [0, 2])).tolist() == [9, 11]
    assert open_lerobot(path).notes == ()
    assert not (path / JOURNAL).exists()


def test_D11_a_kill_while_finishing_is_repaired_too(tmp_path, monkeypatch) -> None:
    import vola.data.lerobot_finalise as finalise

    data = memory((3, 4))
    writer = LeRobotWriter(tmp_path / "set", data.spec, 10)
    for i in range(2):
        writer.add_episode(
            {"top": data.images["top"][i]}, data.columns["state"][i], data.columns["action"][i], TEXTS[0]
        )
    with monkeypatch.context() as patch:
        patch.setattr(finalise, "_write_tasks", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            writer.close()
    assert (tmp_path / "set" / DATA).exists()
    assert len(open_lerobot(tmp_path / "set").episodes) == 2


def test_D11_an_exception_while_recording_keeps_what_was_finished(tmp_path) -> None:
    data = memory((3, 4))
    with pytest.raises(RuntimeError, match="robot"), LeRobotWriter(tmp_path / "set", data.spec, 10) as writer:  # noqa: PT012
        writer.add_episode({"top": data.images["top"][0]}, data.columns["state"][0], data.columns["action"][0], "a b")
        raise RuntimeError("robot fell over")
    assert len(open_lerobot(tmp_path / "set").episodes) == 1


def test_D11_nothing_finished_or_still_recording_is_said(tmp_path) -> None:
    data = memory((3,))
    writer = LeRobotWriter(tmp_path / "set", data.spec, 10)
    with pytest.raises(DataError, match="still recording"):
        open_lerobot(tmp_path / "set")
    with pytest.raises(DataError, match="at least one episode"):
        writer.close()
    with pytest.raises(ConfigError, match="closed"):
        writer.add_episode({}, np.zeros((1, 3)), np.zeros((1, 2)), "a")


# --- what the writer refuses ---


def good() -> dict:
    data = memory((3,), spec(cameras=TWO))
    images = {k: np.array(v[0]) for k, v in data.images.items()}
    return {
        "images": images,
        "state": data.columns["state"][0],
        "action": data.columns["action"][0],
        "instruction": "a b",
    }


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda a: a.update(action=a["action"][:, 0]), r"action: expected \(3, 2\).*\(3,\)"),
        (lambda a: a.update(action=a["action"][:0]), r"action: expected \(L >= 1, 2\)"),
        (lambda a: a.update(state=np.zeros((3, 7))), r"state: expected \(3, 3\).*\(3, 7\)"),
        (lambda a: a.update(state=np.array([[1, 2, 3], [1, 2, None], [1, 2, 3]], dtype=object)), "state.*object"),
        (lambda a: a.update(action=np.array([[0, 0], [0, np.nan], [0, 0]])), r"nan in frame 1, dimension 1 \(a1\)"),
        (lambda a: a["images"].pop("top"), "images: expected the cameras"),
        (lambda a: a["images"].update(top=a["images"]["top"] / 255.0), "top.*uint8.*float64"),
        (lambda a: a["images"].update(top=a["images"]["top"][:2]), r"top.*\(3, 8, 8, 3\)"),
        (lambda a: a["images"].update(top=a["images"]["top"][..., :6]), r"top.*\(3, 8, 8, 3\)"),
        (lambda a: a.update(instruction=" "), "instruction: expected one sentence"),
        (lambda a: a.update(instruction=["a"]), "instruction: expected one sentence"),
    ],
)  # fmt: skip
def test_N14_wrong_episodes_are_refused_and_leave_no_trace(tmp_path, edit, match) -> None:
    arguments = good()
    edit(arguments)
    with LeRobotWriter(tmp_path / "set", spec(cameras=TWO), 10) as writer:
        writer.add_episode(**good())
        with pytest.raises(InputError, match=match):
            writer.add_episode(**arguments)
        writer.add_episode(**good())
    assert [e.length for e in open_lerobot(tmp_path / "set").episodes] == [3, 3]


def test_wrong_settings_are_refused(tmp_path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="Nothing is overwritten"):
        LeRobotWriter(tmp_path / "full", spec(), 10)
    with pytest.raises(ConfigError, match=r"expected the rate of the actions, 10\.0 Hz"):
        LeRobotWriter(tmp_path / "a", spec(), 30)
    with pytest.raises(ConfigError, match="even image sides"):
        LeRobotWriter(tmp_path / "a", spec(cameras=(("top", 7, 8),)), 10, video=True)
    twins = spec(cameras=(("top", 8, 8), ("observation.images.top", 8, 8)))
    with pytest.raises(ConfigError, match="different LeRobot keys"):
        LeRobotWriter(tmp_path / "a", twins, 10)
    assert not (tmp_path / "a").exists()


def test_units_and_kinds_travel_with_the_names(tmp_path) -> None:
    robot = spec()
    back = open_lerobot(record(tmp_path / "set", memory((2,), robot)))
    assert back.spec.action.kinds == ("position", "gripper")
    assert back.spec.state.units == ("rad", "rad", "rad")
    assert back.spec.cameras == (CameraSpec("top", 8, 8),)
