"""From a recording in progress to a LeRobot v3.0 dataset.

While episodes are recorded they lie in ``<dataset>/.recording``, each one durable once its line is in the journal:

    info.json        what will become meta/info.json, and the encoder
    data.arrows      Arrow stream, one batch per episode (readable up to the last complete batch)
    videos/          one mp4 per camera and episode
    episodes.jsonl   one line per episode, written last: length, task, picture histograms

``finalise`` turns this into data/, videos/, meta/ and writes meta/info.json last; until then the folder is still a
recording, so it may be killed at any point and run again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vola.data.lerobot_meta import AUTOMATIC
from vola.data.stats import FIELDS, QUANTILES, describe_rows
from vola.data.video import join_videos
from vola.errors import DataError

try:
    import fcntl
except ImportError:  # Windows has no flock: there two writers in one folder go unnoticed
    fcntl = None  # type: ignore[assignment]

JOURNAL = ".recording"
_CHUNK = 1000  # files per chunk folder


def lock(folder: Path) -> IO[bytes]:
    """Hold the recording in ``folder``; the lock goes away with the process. Raises DataError if another holds it."""
    handle = open(folder / "lock", "ab")  # noqa: SIM115 - held open on purpose
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.close()
            raise DataError(
                f"{folder.parent}: expected a finished dataset, but a running process is still recording into it. "
                "Close that writer first."
            ) from None
    return handle


def recover(root: Path) -> list[str]:
    """Complete a recording whose writer was killed; returns what to tell the user (nothing if there is none).

    Raises:
        DataError: no episode was complete, the writer is still running, or the folder cannot be written.
    """
    folder = root / JOURNAL
    if not folder.is_dir() or (root / "meta/info.json").is_file():
        return []
    try:
        with lock(folder):
            done = finalise(root)
    except OSError as error:
        raise DataError(
            f"{root}: this recording was interrupted and cannot be completed here ({error}). "
            "Copy the folder to a writable place and open it there."
        ) from error
    return [f"the recording was interrupted; its {done} complete episodes are kept, what came after them is dropped"]


def finalise(root: Path) -> int:
    """Write the final layout from the journal, then remove the journal. Returns the number of episodes.

    Raises:
        DataError: no complete episode.
    """
    folder = root / JOURNAL
    header = json.loads((folder / "info.json").read_text())
    info, pictures = header["info"], header["pictures"]
    lines = _complete_lines(folder / "episodes.jsonl")
    for name in ("data", "videos", "meta"):
        shutil.rmtree(root / name, ignore_errors=True)
    tasks: dict[str, int] = {}
    rows, numbers = _write_data(root, folder / "data.arrows", lines, info)
    if not rows:
        raise DataError(f"{root}: expected at least one complete episode in the recording, got none. Record again.")
    lines = lines[: len(rows)]
    for row, line in zip(rows, lines, strict=True):
        tasks.setdefault(line["task"], len(tasks))
        row.update(episode_index=line["episode_index"], tasks=[line["task"]], length=line["length"])
    if info["video_path"] is not None:
        for key in pictures:
            _write_videos(root, folder, key, rows, info)
    features = {k: f for k, f in info["features"].items() if k not in pictures}
    frames = [sampled_frames(line["length"]) for line in lines]
    _write_episodes(root, rows, _stats(features, numbers, [line["histograms"] for line in lines], frames), pictures)
    pooled = [np.concatenate([n[i] for n in numbers]) for i in range(len(features))]
    histograms = {k: np.sum([line["histograms"][k] for line in lines], axis=0) for k in pictures}
    stats = _stats(features, [pooled], [histograms], [sum(frames)])[0]
    (root / "meta/stats.json").write_text(json.dumps(stats, indent=4))
    _write_tasks(root / "meta/tasks.parquet", list(tasks))
    total = sum(line["length"] for line in lines)
    info.update(total_episodes=len(rows), total_frames=total, total_tasks=len(tasks))
    info["splits"] = {"train": f"0:{len(rows)}"}
    partial = root / "meta/info.json.tmp"
    partial.write_text(json.dumps(info, indent=4, ensure_ascii=False))
    os.replace(partial, root / "meta/info.json")
    shutil.rmtree(folder)
    return len(rows)


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    # The text behind the last newline is the line that was being written when the process died.
    return [json.loads(line) for line in lines[:-1]]


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    if not path.is_file() or path.stat().st_size == 0:
        return
    with pa.memory_map(str(path)) as source:
        try:
            with pa.ipc.open_stream(source) as reader:
                while True:
                    yield reader.read_next_batch()
        except (StopIteration, pa.ArrowInvalid, OSError):
            return  # the end, or a batch cut off by a kill


def _write_data(
    root: Path, journal: Path, lines: Sequence[Mapping[str, Any]], info: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[list[np.ndarray]]]:
    """The data files, one row group per episode; returns the episodes' places and numeric columns ``(L, dim)``."""
    limit = info["data_files_size_in_mb"] << 20
    numeric = [k for k, f in info["features"].items() if f["dtype"] not in ("image", "video")]
    places: list[dict[str, Any]] = []
    numbers: list[list[np.ndarray]] = []
    index, start, writer, handle = -1, 0, None, None
    try:
        for line, batch in zip(lines, _batches(journal), strict=False):
            if writer is None or handle is None or handle.tell() > limit:
                if writer is not None and handle is not None:
                    writer.close()
                    handle.close()
                index += 1
                path = root / info["data_path"].format(chunk_index=index // _CHUNK, file_index=index % _CHUNK)
                path.parent.mkdir(parents=True, exist_ok=True)
                handle = open(path, "wb")  # noqa: SIM115 - closed below
                # A dictionary of picture bytes would hold each picture once and then be thrown away.
                writer = pq.ParquetWriter(handle, batch.schema, compression="snappy", use_dictionary=numeric)
            writer.write_table(pa.Table.from_batches([batch]))
            end = start + line["length"]
            place = {"data/chunk_index": index // _CHUNK, "data/file_index": index % _CHUNK}
            places.append({**place, "dataset_from_index": start, "dataset_to_index": end})
            numbers.append([_rows(batch.column(k)) for k in numeric])
            start = end
    finally:
        if writer is not None and handle is not None:
            writer.close()
            handle.close()
    return places, numbers


def _rows(column: pa.Array) -> np.ndarray:
    flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
    return flat.to_numpy(zero_copy_only=False).reshape(len(column), -1)


def _write_videos(root: Path, folder: Path, key: str, rows: list[dict[str, Any]], info: Mapping[str, Any]) -> None:
    limit, fps = info["video_files_size_in_mb"] << 20, info["fps"]
    groups: list[list[tuple[Path, int]]] = []
    size = limit + 1
    for row in rows:
        part = folder / f"videos/{key}/episode-{row['episode_index']:06d}.mp4"
        if size + part.stat().st_size > limit:
            groups.append([])
            size = 0
        before = sum(length for _, length in groups[-1])
        index = len(groups) - 1
        # Start times are exact frame counts divided once, never sums of times.
        span = {"from_timestamp": before / fps, "to_timestamp": (before + row["length"]) / fps}
        place = {"chunk_index": index // _CHUNK, "file_index": index % _CHUNK, **span}
        row.update({f"videos/{key}/{k}": v for k, v in place.items()})
        groups[-1].append((part, row["length"]))
        size += part.stat().st_size
    for index, parts in enumerate(groups):
        place = {"chunk_index": index // _CHUNK, "file_index": index % _CHUNK}
        path = root / info["video_path"].format(video_key=key, **place)
        path.parent.mkdir(parents=True, exist_ok=True)
        join_videos(path, parts, fps)


def _stats(
    features: Mapping[str, Any],
    numbers: Sequence[Sequence[np.ndarray]],
    histograms: Sequence[Mapping[str, Any]],
    frames: Sequence[int],
) -> list[dict[str, dict[str, Any]]]:
    """Per entry of ``numbers``: feature -> the ten statistics LeRobot stores, exact."""
    widths = [f["shape"][0] for f in features.values()]
    ends = np.cumsum([0, *widths])
    out = []
    for columns, counts, sampled in zip(numbers, histograms, frames, strict=True):
        # One call for all columns side by side: 3,000 short episodes take a second, not ten.
        stats = describe_rows(np.concatenate(columns, axis=1).astype(np.float64), [""] * int(ends[-1]))
        entry: dict[str, dict[str, Any]] = {}
        for camera, histogram in counts.items():
            entry[camera] = histogram_stats(np.asarray(histogram), sampled)
        for place, key in enumerate(features):
            part = slice(ends[place], ends[place + 1])
            entry[key] = {f: getattr(stats, f)[part].tolist() for f in FIELDS} | {"count": [stats.count]}
        out.append(entry)
    return out


def sampled_frames(length: int) -> int:
    """How many of an episode's frames LeRobot takes picture statistics from: all up to 100, then L^0.75."""
    return min(length, max(100, min(10_000, int(length**0.75))))


def count_pixels(images: np.ndarray) -> np.ndarray:
    """How often each value occurs: int64 ``(3, 256)`` of uint8 ``L Y X 3``.

    Evenly spaced frames, ``sampled_frames`` of them, and every n-th pixel where a side is 300 or more, as LeRobot
    does. Counting cannot overflow, as squaring uint8 would.
    """
    L, Y, X, _ = images.shape
    step = max(Y, X) // 150 if max(Y, X) >= 300 else 1
    some = images[np.round(np.linspace(0, L - 1, sampled_frames(L))).astype(int), ::step, ::step]
    return np.stack([np.bincount(some[..., c].ravel(), minlength=256) for c in range(3)])


def histogram_stats(histogram: np.ndarray, frames: int) -> dict[str, Any]:
    """Exact statistics on the [0, 1] scale of pixels counted by value: ``(3, 256)`` -> lists shaped (3, 1, 1).

    ``count`` is the number of frames that were counted, as in LeRobot's files.
    """
    values = np.arange(256) / 255.0
    total = np.cumsum(histogram, axis=1)
    n = int(total[0, -1])
    mean = histogram @ values / n
    std = np.sqrt(np.maximum(histogram @ values**2 / n - mean**2, 0.0))
    # Linear interpolation between order statistics, as numpy.quantile does: the i-th smallest pixel is the first
    # value whose running count exceeds i. min and max are the quantiles 0 and 1.
    position = np.array([0.0, 1.0, *QUANTILES.values()]) * (n - 1)
    low = np.floor(position).astype(np.int64)
    pair = np.minimum(np.stack([low, low + 1], axis=1), n - 1)
    a, b = np.moveaxis(values[(total[:, None, None] <= pair[None, ..., None]).sum(-1)], 2, 0)
    result = {
        "mean": mean,
        "std": std,
        **dict(zip(("min", "max", *QUANTILES), (a + (b - a) * (position - low)).T, strict=True)),
    }
    nested: dict[str, Any] = {k: v[:, None, None].tolist() for k, v in result.items()}
    nested["count"] = [frames]
    return nested


def _write_episodes(
    root: Path, rows: list[dict[str, Any]], stats: list[dict[str, dict[str, Any]]], pictures: Sequence[str]
) -> None:
    columns: dict[str, pa.Array] = {}
    order = ["episode_index", "tasks", "length"]
    order += [k for k in rows[0] if k not in order]
    for key in order:
        columns[key] = pa.array([row[key] for row in rows])
    number = pa.list_(pa.float64())
    for feature in stats[0]:
        kind = pa.list_(pa.list_(number)) if feature in pictures else number
        for field in ("min", "max", "mean", "std", "count", *QUANTILES):
            values = [s[feature][field] for s in stats]
            columns[f"stats/{feature}/{field}"] = pa.array(values, pa.list_(pa.int64()) if field == "count" else kind)
    zeros = pa.array(np.zeros(len(rows), np.int64))
    columns["meta/episodes/chunk_index"] = columns["meta/episodes/file_index"] = zeros
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, compression="snappy")


def _write_tasks(path: Path, tasks: list[str]) -> None:
    """With pandas' index metadata: without it LeRobot takes every task for the integer 0."""

    def column(name: str, kind: str, numpy_type: str) -> dict[str, Any]:
        return {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy_type, "metadata": None}

    names = {"name": None, "field_name": None, "pandas_type": "unicode", "numpy_type": "object"}
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [{**names, "metadata": {"encoding": "UTF-8"}}],
        "columns": [column("task_index", "int64", "int64"), column("task", "unicode", "object")],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.2.0",
    }
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), path)


def automatic_features() -> dict[str, dict[str, Any]]:
    """The five features every LeRobot dataset has."""
    kinds = {"timestamp": "float32"}
    return {k: {"dtype": kinds.get(k, "int64"), "shape": [1], "names": None} for k in AUTOMATIC}
