"""Every fault of a LeRobot dataset is an error that names file, episode, frame or key, and the cure."""

import json
import shutil

import numpy as np
import pytest
from data_tools import DATA, EPISODES, change, edit_json, memory, record, spec, write_v21
from test_data_video import counter, read

from vola.data.lerobot import open_lerobot
from vola.data.video import encode_video, join_videos
from vola.errors import ConfigError, DataError

VIDEO_FILE = "videos/observation.images.top/chunk-000/file-000.mp4"


def lengths_of(root, lengths) -> None:
    ends = np.cumsum([0, *lengths]).tolist()
    change(
        root / EPISODES,
        lambda c: c.update(length=list(lengths), dataset_from_index=ends[:-1], dataset_to_index=ends[1:]),
    )


@pytest.mark.parametrize(
    ("lengths", "match"),
    [
        ((50, 0, 50), "length >= 1 for every episode, episode 1 has 0"),
        ((50, 51, 49), r"frame 50 of episode 1 \(row 100\) belongs to episode 2"),
        ((50, 50, 90), r"episode 2 claims the rows 100\.\.190.*the file has 150 rows"),
        ((50, 50, 40), r"expected 140 rows.*got 150"),
    ],
)
def test_D05_wrong_lengths(tmp_path, lengths, match) -> None:
    root = record(tmp_path / "set", memory((50, 50, 50), spec(cameras=())))
    lengths_of(root, lengths)
    with pytest.raises(DataError, match=match):
        open_lerobot(root)


def cut(path, n: int = 20) -> None:
    path.write_bytes(path.read_bytes()[:-n])


def columns(name: str, edit):
    return lambda root: change(root / name, edit)


def info(edit):
    return lambda root: edit_json(root / "meta/info.json", edit)


FAULTS = {
    "truncated data": (lambda r: cut(r / DATA), r"file-000\.parquet: expected a complete parquet file"),
    "truncated episodes": (lambda r: cut(r / EPISODES), r"episodes/chunk-000/file-000\.parquet: expected a complete"),
    "no data file": (lambda r: (r / DATA).unlink(), r"data/chunk-000/file-000\.parquet: expected this file"),
    "no episodes": (lambda r: shutil.rmtree(r / "meta/episodes"), r"meta/episodes: expected chunk-\*/file-\*\.parquet"),
    "no info": (lambda r: (r / "meta/info.json").unlink(), "one that holds meta/info.json"),
    "broken info": (lambda r: (r / "meta/info.json").write_text("{"), r"info\.json: expected JSON"),
    "info is a list": (lambda r: (r / "meta/info.json").write_text("[]"), r"info\.json: expected a JSON object"),
    "version": (info(lambda i: i.update(codebase_version="v1.6")), r"one of \('v3\.0', 'v2\.1'\), got 'v1\.6'"),
    "fps": (info(lambda i: i.update(fps=0)), "fps > 0, got 0"),
    "no action": (info(lambda i: i["features"].pop("action")), "the key 'action'"),
    "action shape": (info(lambda i: i["features"]["action"].update(shape=[3])), r"expected action to hold \(3,\)"),
    "2-d action": (info(lambda i: i["features"]["action"].update(shape=[1, 2])), "one axis in the shape of action"),
    "image shape": (
        info(lambda i: i["features"]["observation.images.top"].update(shape=[9, 8, 3])), "declares 9x8.*are 8x8",
    ),
    "no camera shape": (
        info(lambda i: i["features"]["observation.images.top"].update(shape=[8])),
        r"\(height, width, 3\) for the camera",
    ),
    "path out of the set": (
        info(lambda i: i.update(data_path="../{chunk_index}{file_index}.parquet")), "inside the dataset",
    ),
    "no tasks": (lambda r: (r / "meta/tasks.parquet").unlink(), r"text of task 0 \(episode 0\).*instruction="),
    "task without text": (
        columns("meta/tasks.parquet", lambda c: c.update(task=["", "b"])), r"text of task 0 \(episode 0\), got ''",
    ),
    "two tasks in one episode": (
        columns(DATA, lambda c: c["task_index"].__setitem__(2, 1)), "episode 0 changes its task at frame 2",
    ),
    "null in action": (columns(DATA, lambda c: c["action"].__setitem__(2, None)), "action"),
    "frame missing": (
        columns(DATA, lambda c: c["frame_index"].__setitem__(4, 9)), "frame_index 1 in row 4 of episode 1",
    ),
    "nan time": (columns(DATA, lambda c: c["timestamp"].__setitem__(1, float("nan"))), "episode=0, frame=1"),
    "row of another episode": (
        columns(DATA, lambda c: c["episode_index"].__setitem__(1, 7)), "frame 1 of episode 0.*belongs to episode 7",
    ),
    "episode twice": (columns(EPISODES, lambda c: c.update(episode_index=[0, 0])), "episode 0 is listed twice"),
    "no length": (columns(EPISODES, lambda c: c.pop("length")), r"expected the columns \['length'\]"),
    "rows and length differ": (
        columns(EPISODES, lambda c: c.update(dataset_to_index=[3, 99])), "episode 1 has length 4, but its rows 3..99",
    ),
    "picture": (
        columns(DATA, lambda c: c["observation.images.top"].__setitem__(4, {"bytes": b"no", "path": ""})),
        "observation.images.top, episode 1, frame 1: expected a readable image",
    ),
    "picture outside": (
        columns(DATA, lambda c: c["observation.images.top"].__setitem__(4, {"bytes": None, "path": "a.png"})),
        "row 4 of observation.images.top holds no picture bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(tmp_path, fault) -> None:
    """Every one is a DataError at opening or, for what only decoding can show, at check()."""
    root = record(tmp_path / "set", memory((3, 4)))
    open_lerobot(root).check()
    damage, match = FAULTS[fault]
    damage(root)
    with pytest.raises(DataError, match=match):
        open_lerobot(root).frames("top", 0, range(3)), open_lerobot(root).frames("top", 1, range(4))


def test_no_such_folder(tmp_path) -> None:
    with pytest.raises(DataError, match="found no such folder.*nothing is downloaded"):
        open_lerobot(tmp_path / "lerobot/pusht")


def video_set(tmp_path):
    data = memory((4, 3), spec(cameras=(("top", 32, 32),)))
    data.images["top"][:] = [counter(4).transpose(0, 3, 1, 2), counter(3, 4).transpose(0, 3, 1, 2)]
    return record(tmp_path / "set", data, video=True, video_files_size_in_mb=0)


def test_missing_and_short_videos(tmp_path) -> None:
    root = video_set(tmp_path)
    second = root / VIDEO_FILE.replace("file-000", "file-001")
    encode_video(tmp_path / "two.mp4", counter(2, 4), 10, "libx264")
    shutil.copy(tmp_path / "two.mp4", second)
    with pytest.raises(DataError, match=r"file-001\.mp4: episode 1 needs the frames 0\.\.2.*has 2"):
        open_lerobot(root).check()
    second.unlink()
    data = open_lerobot(root)
    assert [e.index for e in data.episodes] == [0]
    assert "1 of 2 episodes lack a video (first: episode 1" in data.notes[0]
    with pytest.raises(DataError, match=r"file-001\.mp4.*missing_video='skip'"):
        open_lerobot(root, missing_video="refuse")
    (root / VIDEO_FILE).unlink()
    with pytest.raises(DataError, match=r"file-000\.mp4.*2 of 2 episodes"):
        open_lerobot(root)
    assert len(open_lerobot(root, cameras=()).episodes) == 2


def test_a_span_that_starts_too_late_in_the_file(tmp_path) -> None:
    root = video_set(tmp_path)
    key = "videos/observation.images.top/from_timestamp"
    change(root / EPISODES, lambda c: c[key].__setitem__(0, 0.2))
    with pytest.raises(DataError, match=r"episode 0 needs the frames 2\.\.5"):
        open_lerobot(root).check()


def test_v21_faults(tmp_path) -> None:
    root = write_v21(tmp_path / "a", lengths=(4, 6))
    text = (root / "meta/episodes.jsonl").read_text()
    (root / "meta/episodes.jsonl").write_text(text.replace('"length": 6', '"length": 5'))
    with pytest.raises(DataError, match=r"episode_000001\.parquet: episode 1 claims the rows 0\.\.5.*6 rows"):
        open_lerobot(root)
    (root / "meta/episodes.jsonl").write_text(text + "\n{broken")
    with pytest.raises(DataError, match=r"episodes\.jsonl.*line 3"):
        open_lerobot(root)
    (root / "meta/episodes.jsonl").write_text(json.dumps({"episode_index": 0}))
    with pytest.raises(DataError, match=r"episodes\.jsonl: expected episode_index and length"):
        open_lerobot(root)
    (root / "meta/episodes.jsonl").unlink()
    with pytest.raises(DataError, match=r"episodes\.jsonl: expected this file"):
        open_lerobot(root)


def test_counts_that_disagree_are_noted(tmp_path) -> None:
    root = record(tmp_path / "set", memory((3, 4)))
    edit_json(root / "meta/info.json", lambda i: i.update(total_frames=99))
    assert "total_frames = 99, the episode table holds 7" in open_lerobot(root).notes[0]


def test_wrong_options_are_refused(tmp_path) -> None:
    root = record(tmp_path / "set", memory((3,)))
    for options, match in (
        ({"cameras": ("wrist",)}, "some of .*'top'.*'wrist'"),
        ({"cameras": "top"}, "some of"),
        ({"missing_video": "ignore"}, "missing_video: expected 'skip'.*'ignore'"),
        ({"instruction": " "}, "one sentence"),
        ({"instruction": ["a"]}, "one sentence"),
    ):
        with pytest.raises(ConfigError, match=match):
            open_lerobot(root, **options)


def test_joined_videos_of_another_writer(tmp_path) -> None:
    """B-frames, one long key frame distance, both episodes in one file: the rows still get their own frames."""
    root = video_set(tmp_path)
    for i, (n, first) in enumerate(((4, 0), (3, 4))):
        encode_video(tmp_path / f"{i}.mp4", counter(n, first), 10, "libx264")
    join_videos(root / VIDEO_FILE, [(tmp_path / "0.mp4", 4), (tmp_path / "1.mp4", 3)], 10)
    place = "videos/observation.images.top/"
    change(root / EPISODES, lambda c: c.update({f"{place}file_index": [0, 0], f"{place}from_timestamp": [0.0, 0.4]}))
    data = open_lerobot(root)
    assert read(data.frames("top", 1, [2, 0])).tolist() == [6, 4]
    assert read(data.frames("top", 0, [3])).tolist() == [3]
