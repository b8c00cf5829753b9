"""The ``meta`` folder of a LeRobot dataset, v3.0 and v2.1, read into one table of episodes.

Format: ``huggingface/lerobot`` at the versions named; every location (data file, video file, span) comes from here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from vola.errors import DataError
from vola.types import ActionSpec, CameraSpec, RobotSpec, StateSpec

VERSIONS = ("v3.0", "v2.1")
STATE, ACTION = "observation.state", "action"
CAMERA_PREFIX = "observation.images."
AUTOMATIC = ("timestamp", "frame_index", "episode_index", "index", "task_index")
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
OLD_DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
OLD_VIDEO_PATH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"


@dataclass(frozen=True)
class VideoSpan:
    """Where an episode lies in a video: its file and the number of its first frame in that file."""

    path: Path
    first: int


@dataclass(frozen=True)
class EpisodeEntry:
    """One row of the episode table. ``start`` is the global row number of its first frame, None where a data file
    holds one episode alone (v2.1)."""

    index: int
    length: int
    data: Path
    start: int | None
    videos: Mapping[str, VideoSpan]


@dataclass(frozen=True)
class Meta:
    """What ``meta`` says: version, rates, features by key, task texts by number, episodes, remarks."""

    root: Path
    version: str
    fps: float
    features: Mapping[str, Mapping[str, Any]]
    tasks: Mapping[int, str]
    episodes: tuple[EpisodeEntry, ...]
    notes: tuple[str, ...]

    @property
    def cameras(self) -> dict[str, str]:
        """Feature key of every colour camera by its name, in the order of info.json."""
        return {camera_name(k): k for k, f in self.features.items() if _is_camera(f)}


def camera_name(key: str) -> str:
    """What a camera is called here: its feature key without "observation.images." ("top"); any other key in full."""
    short = key.removeprefix(CAMERA_PREFIX)
    # "observation.images.observation.x" keeps its prefix: without it the writer would take it for a full key.
    return short if short and not short.startswith("observation.") else key


def camera_key(name: str) -> str:
    """The feature key of a camera in LeRobot files, the inverse of ``camera_name`` ("top" -> "observation.images.top");
    a name that starts with "observation." is a full key already."""
    return name if name.startswith("observation.") else CAMERA_PREFIX + name


def read_meta(root: Path) -> Meta:
    """Read and cross-check ``meta``.

    Raises:
        DataError: naming the file and what is wrong with it.
    """
    info = _read_info(root)
    version = info.get("codebase_version")
    if version not in VERSIONS:
        raise DataError(
            f"{root / 'meta/info.json'}: expected codebase_version to be one of {VERSIONS}, got {version!r}. "
            "Convert the dataset with LeRobot's own converter first."
        )
    fps = info.get("fps")
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not fps > 0:
        raise DataError(f"{root / 'meta/info.json'}: expected fps > 0, got {fps!r}")
    features = info.get("features")
    if not isinstance(features, dict) or ACTION not in features:
        raise DataError(
            f"{root / 'meta/info.json'}: expected features with the key {ACTION!r}, got "
            f"{sorted(features) if isinstance(features, dict) else features!r}"
        )
    notes = [f"{k} is a depth map and is not read" for k, f in features.items() if _is_picture(f) and _is_depth(f)]
    _check_cameras(root, [k for k, f in features.items() if _is_camera(f)])
    cameras = [k for k, f in features.items() if f.get("dtype") == "video" and _is_camera(f)]
    if version == "v3.0":
        path = root / "meta/tasks.parquet"
        tasks = _read_tasks_parquet(path) if path.is_file() else {}
        episodes = _read_episodes_v3(root, info, float(fps), cameras)
    else:
        path = root / "meta/tasks.jsonl"
        tasks = _read_tasks_jsonl(path) if path.is_file() else {}
        episodes = _read_episodes_v21(root, info, cameras)
    _check_lengths(root, episodes)
    for name, found in (("total_episodes", len(episodes)), ("total_frames", sum(e.length for e in episodes))):
        if name in info and info[name] != found:
            notes.append(f"info.json says {name} = {info[name]}, the episode table holds {found}")
    return Meta(root, version, float(fps), features, tasks, tuple(episodes), tuple(notes))


def robot_spec(meta: Meta, cameras: tuple[str, ...]) -> tuple[RobotSpec, list[str]]:
    """The spec of the chosen cameras (names), state and action, and remarks about names that had to be made up.

    Units and kinds are those our own writer stores beside ``names``, else "unknown".
    """
    notes: list[str] = []
    state = meta.features.get(STATE)
    names, units, _ = _vector(STATE, state, notes) if state is not None else ((), (), ())
    action_names, action_units, kinds = _vector(ACTION, meta.features[ACTION], notes)
    keys = meta.cameras
    specs = tuple(CameraSpec(c, *_image_size(keys[c], meta.features[keys[c]])) for c in cameras)
    return RobotSpec(specs, StateSpec(names, units), ActionSpec(action_names, action_units, kinds, meta.fps)), notes


def read_parquet(path: Path, columns: list[str] | None = None) -> pa.Table:
    """A table; raises DataError naming the file if it is missing, cut short or lacks a column."""
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            missing = sorted(set(columns or ()) - set(file.schema_arrow.names))
            if missing:
                raise DataError(f"{path}: expected the columns {missing}, got {file.schema_arrow.names}")
            return file.read(columns=columns, use_threads=False)
    except FileNotFoundError:
        raise DataError(f"{path}: expected this file, found none. Fetch the dataset again, completely.") from None
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: expected a complete parquet file, but it cannot be read ({error}). "
            "The file was probably cut short; copy it again."
        ) from error


def _read_info(root: Path) -> dict[str, Any]:
    path = root / "meta/info.json"
    if not path.is_file():
        raise DataError(
            f"{root}: expected a LeRobot dataset folder (one that holds meta/info.json), found "
            f"{'no such folder' if not root.is_dir() else 'no meta/info.json'}. "
            "Name the folder on this machine; nothing is downloaded."
        )
    info = load_json(path)
    features = info.get("features")
    for key, feature in features.items() if isinstance(features, Mapping) else [("features", features)]:
        said: Mapping[str, Any] = feature if isinstance(feature, Mapping) else {}
        shape = said.get("shape")
        whole = isinstance(shape, list) and all(isinstance(n, int | float) and n == int(n) for n in shape)
        if not whole or not isinstance(said.get("info") or {}, Mapping):
            raise DataError(f"{path}: expected a feature {key!r} with a list of sizes as shape, got {feature!r:.120}")
    return info


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object; raises DataError naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: expected JSON, got text that does not parse ({error})") from error
    if not isinstance(data, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def _read_tasks_parquet(path: Path) -> dict[int, str]:
    table = read_parquet(path)
    # The text is the pandas index: named "task" by LeRobot, "__index_level_0__" by a plain to_parquet.
    texts = [f.name for f in table.schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
    if "task_index" not in table.column_names or not texts:
        raise DataError(f"{path}: expected task_index and a text column, got {table.column_names}")
    column = "task" if "task" in texts else texts[0]
    return dict(zip(table["task_index"].to_pylist(), table[column].to_pylist(), strict=True))


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"{path}: expected this file, found none. Fetch the dataset again, completely.")
    lines = []
    # Not splitlines(): it would also cut at characters such as U+2028 that may stand inside a task text.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(f"{path}: expected one JSON object per line, line {number} is not ({error})") from error
    return lines


def _read_tasks_jsonl(path: Path) -> dict[int, str]:
    try:
        return {int(line["task_index"]): str(line["task"]) for line in _read_jsonl(path)}
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: expected lines with task_index and task, got one without ({error})") from error


def _read_episodes_v3(root: Path, info: Mapping[str, Any], fps: float, cameras: list[str]) -> list[EpisodeEntry]:
    files = sorted((root / "meta/episodes").glob("*/*.parquet"))
    if not files:
        raise DataError(f"{root / 'meta/episodes'}: expected chunk-*/file-*.parquet, found none")
    columns = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    columns += ["dataset_from_index", "dataset_to_index"]
    columns += [f"videos/{k}/{c}" for k in cameras for c in ("chunk_index", "file_index", "from_timestamp")]
    data_path, video_path = info.get("data_path") or DATA_PATH, info.get("video_path") or VIDEO_PATH
    out = []
    for file in files:
        for row in read_parquet(file, columns).to_pylist():
            index, length = row["episode_index"], row["length"]
            start, end = row["dataset_from_index"], row["dataset_to_index"]
            if any(not isinstance(v, int | float) or v != v for v in row.values()) or length != int(length):
                raise DataError(f"{file}: expected a number in every column of episode {index}, got {row}")
            length = int(length)
            if length > 0 and end - start != length:
                raise DataError(
                    f"{file}: episode {index} has length {length}, but its rows {start}..{end} are {end - start}. "
                    "The episode table is damaged; rebuild it from the data files."
                )
            videos = {}
            for k in cameras:
                place = {n: row[f"videos/{k}/{n}"] for n in ("chunk_index", "file_index")}
                # An integer frame number: start times summed in floating point are off by much less than a frame.
                first = round(row[f"videos/{k}/from_timestamp"] * fps)
                videos[k] = VideoSpan(_inside(root, video_path, video_key=k, **place), first)
            chunk = {n: row[f"data/{n}"] for n in ("chunk_index", "file_index")}
            out.append(EpisodeEntry(index, length, _inside(root, data_path, **chunk), start, videos))
    return out


def _read_episodes_v21(root: Path, info: Mapping[str, Any], cameras: list[str]) -> list[EpisodeEntry]:
    path = root / "meta/episodes.jsonl"
    data_path, video_path = info.get("data_path") or OLD_DATA_PATH, info.get("video_path") or OLD_VIDEO_PATH
    size = int(info.get("chunks_size") or 1000)
    out = []
    for line in _read_jsonl(path):
        try:
            index, length = int(line["episode_index"]), int(line["length"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: expected episode_index and length in every line, got {line!r:.200}") from error
        place = {"episode_chunk": index // size, "episode_index": index}
        videos = {k: VideoSpan(_inside(root, video_path, video_key=k, **place), 0) for k in cameras}
        out.append(EpisodeEntry(index, length, _inside(root, data_path, **place), None, videos))
    return out


def _inside(root: Path, template: str, **place: Any) -> Path:
    """The file that a path template of info.json stands for; it cannot lead out of the dataset."""
    try:
        path = template.format(**place)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f"{root / 'meta/info.json'}: expected a path built from {sorted(place)}, got {template!r} ({error!r})"
        ) from error
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise DataError(f"{root / 'meta/info.json'}: expected a path inside the dataset, got {template!r}")
    return root / path


def _check_cameras(root: Path, keys: list[str]) -> None:
    for key in keys:
        twins = [k for k in keys if camera_name(k) == camera_name(key)]
        if len(twins) > 1:
            raise DataError(
                f"{root / 'meta/info.json'}: expected cameras of different names, got {twins}, which would both be "
                f"called {camera_name(key)!r} here. Rename one of them in the dataset."
            )


def _check_lengths(root: Path, episodes: list[EpisodeEntry]) -> None:
    if not episodes:
        raise DataError(f"{root / 'meta'}: expected at least one episode, the episode table is empty")
    seen: set[int] = set()
    for e in episodes:
        if e.length < 1:
            raise DataError(
                f"{root / 'meta'}: expected a length >= 1 for every episode, episode {e.index} has {e.length}. "
                "All later boundaries would shift; rebuild the episode table from the data files."
            )
        if e.index in seen:
            raise DataError(f"{root / 'meta'}: expected every episode once, episode {e.index} is listed twice")
        seen.add(e.index)


def _is_picture(feature: Mapping[str, Any]) -> bool:
    return feature.get("dtype") in ("image", "video")


def _is_depth(feature: Mapping[str, Any]) -> bool:
    info = feature.get("info") or feature.get("video_info") or {}
    return bool(info.get("is_depth_map") or info.get("video.is_depth_map"))


def _is_camera(feature: Mapping[str, Any]) -> bool:
    return _is_picture(feature) and not _is_depth(feature)


def _image_size(key: str, feature: Mapping[str, Any]) -> tuple[int, int]:
    """(rows, columns); the order of the axes comes from ``names`` where there are any, else from where 1 or 3 is."""
    shape, names = list(feature.get("shape") or ()), flat_names(feature.get("names"))
    if len(shape) == 3 and all(isinstance(s, int) and s > 0 for s in shape):
        if names is not None and {"height", "width"} <= set(names) and len(names) == 3:
            return shape[names.index("height")], shape[names.index("width")]
        if shape[2] in (1, 3):
            return shape[0], shape[1]
        if shape[0] in (1, 3):
            return shape[1], shape[2]
    raise DataError(f"info.json: expected the shape (height, width, 3) for the camera {key}, got {shape}")


def flat_names(names: Any) -> list[str] | None:
    """Names as they occur in the wild: a list, a list in a list, a dict of lists or of positions, or null."""
    if isinstance(names, dict):
        parts = list(names.values())
        if all(isinstance(p, int) for p in parts):
            return sorted(names, key=lambda n: names[n])
        names = [n for part in parts for n in (part if isinstance(part, list) else [part])]
    if isinstance(names, list):
        return [str(n) for part in names for n in (part if isinstance(part, list) else [part])]
    return None


def _vector(
    key: str, feature: Mapping[str, Any], notes: list[str]
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    shape = list(feature.get("shape") or ())
    if len(shape) != 1 or not isinstance(shape[0], int) or shape[0] < 1:
        raise DataError(f"info.json: expected one axis in the shape of {key}, got {shape}")
    size = shape[0]
    names = flat_names(feature.get("names"))
    if names is None or len(names) != size or len(set(names)) != size:
        if names is not None:
            notes.append(f"{key} has {size} dimensions, but its names {names} do not fit; they are numbered instead")
        names = [f"{key.rsplit('.', 1)[-1]}_{i}" for i in range(size)]
    extra = {}
    for field in ("units", "kinds"):
        stored = feature.get(field)
        fits = isinstance(stored, list) and len(stored) == size and all(isinstance(s, str) for s in stored)
        extra[field] = tuple(stored) if fits and stored is not None else ("unknown",) * size
    return tuple(names), extra["units"], extra["kinds"]
