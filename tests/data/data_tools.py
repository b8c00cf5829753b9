"""Small datasets on disk and in memory for the tests of ``vola.data``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vola.data.episodes import Episode, MemoryDataset
from vola.data.lerobot_write import LeRobotWriter
from vola.types import ActionSpec, CameraSpec, RobotSpec, StateSpec

TEXTS = ("push the red disc", "go to the blue ring")
DATA, EPISODES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"


def spec(
    S: int = 3, A: int = 2, cameras: Sequence[tuple[str, int, int]] = (("top", 8, 8),), fps: float = 10.0
) -> RobotSpec:
    kinds = ("position",) * (A - 1) + ("gripper",) if A > 1 else ("position",)
    return RobotSpec(
        tuple(CameraSpec(*c) for c in cameras),
        StateSpec(tuple(f"s{i}" for i in range(S)), ("rad",) * S),
        ActionSpec(tuple(f"a{i}" for i in range(A)), ("m",) * A, kinds, fps),
    )


def memory(lengths: Sequence[int] = (3, 7, 4, 9, 5), robot: RobotSpec | None = None, ids: Sequence[int] | None = None):
    """action[t] = state[t] = 1000 * episode + t in every dimension; every pixel = 16 * episode + t (mod 256)."""
    robot = robot or spec()
    ids = list(ids) if ids is not None else list(range(len(lengths)))
    rows = [1000.0 * e + np.arange(n, dtype=np.float32)[:, None] for e, n in zip(ids, lengths, strict=True)]
    images = {}
    for c in robot.cameras:
        pixel = [((16 * e + np.arange(n)) % 256).astype(np.uint8) for e, n in zip(ids, lengths, strict=True)]
        images[c.name] = [np.broadcast_to(p[:, None, None, None], (len(p), 3, c.height, c.width)) for p in pixel]
    return MemoryDataset(
        robot,
        robot.action.rate,
        tuple(Episode(e, n, TEXTS[e % 2]) for e, n in zip(ids, lengths, strict=True)),
        {
            "state": [np.repeat(r, robot.state.size, 1).astype(np.float32) for r in rows],
            "action": [np.repeat(r, robot.action.size, 1).astype(np.float32) for r in rows],
        },
        images,
    )


def record(path: Path, data: MemoryDataset, **options: object) -> Path:
    """The dataset as a LeRobot v3.0 folder."""
    with LeRobotWriter(path, data.spec, data.fps, **options) as writer:
        for place, episode in enumerate(data.episodes):
            images = {k: v[place] for k, v in data.images.items()}
            writer.add_episode(images, data.columns["state"][place], data.columns["action"][place], episode.instruction)
    return path


def change(path: Path, edit: Callable[[dict[str, list]], None], types: dict[str, pa.DataType] | None = None) -> None:
    """Rewrite a parquet file: ``edit`` changes its columns (Python lists) in place."""
    table = pq.read_table(path)
    columns = table.to_pydict()
    edit(columns)
    fields = [table.schema.field(k) if k in table.column_names else pa.field(k, (types or {})[k]) for k in columns]
    schema = pa.schema([f if not types or f.name not in types else pa.field(f.name, types[f.name]) for f in fields])
    pq.write_table(pa.table(columns, schema=schema.with_metadata(table.schema.metadata)), path)


def edit_json(path: Path, edit: Callable[[dict], None]) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def write_v21(root: Path, lengths: Sequence[int] = (4, 6), tasks: bytes | None = None, fps: int = 10) -> Path:
    """A v2.1 set without cameras; action as in ``memory``."""
    one = {"dtype": "int64", "shape": [1], "names": None}
    features = {"observation.state": {"dtype": "float32", "shape": [2], "names": [["x", "y"]]}}
    features["action"] = {"dtype": "float32", "shape": [1], "names": {"motors": ["m"]}}
    features |= dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), one)
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    (root / "meta").mkdir(parents=True)
    info = {"codebase_version": "v2.1", "fps": fps, "features": features, "chunks_size": 1000}
    (root / "meta/info.json").write_text(json.dumps(info))
    text = tasks if tasks is not None else b'{"task_index": 0, "task": "pick"}\n'
    (root / "meta/tasks.jsonl").write_bytes(text)
    lines = [json.dumps({"episode_index": e, "tasks": ["pick"], "length": n}) for e, n in enumerate(lengths)]
    (root / "meta/episodes.jsonl").write_text("\n".join(lines))
    (root / "data/chunk-000").mkdir(parents=True)
    for e, n in enumerate(lengths):
        t = np.arange(n)
        columns = {
            "observation.state": pa.array([[1000.0 * e + i, 0.0] for i in t], pa.list_(pa.float32(), 2)),
            "action": pa.array(1000.0 * e + t, pa.float32()),
            "timestamp": pa.array(t / fps, pa.float32()),
            "frame_index": pa.array(t, pa.int64()),
            "episode_index": pa.array(np.full(n, e), pa.int64()),
            "index": pa.array(t, pa.int64()),
            "task_index": pa.array(np.zeros(n, np.int64)),
        }
        pq.write_table(pa.table(columns), root / f"data/chunk-000/episode_{e:06d}.parquet")
    return root
