"""Writing LeRobot datasets, v3.0, with pictures in the tables or in videos, without LeRobot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import pyarrow as pa

from vola.data.lerobot_finalise import JOURNAL, automatic_features, count_pixels, finalise, lock
from vola.data.lerobot_meta import ACTION, DATA_PATH, STATE, VIDEO_PATH, camera_key
from vola.data.png import encode_png
from vola.data.video import ENCODERS, encode_video, find_encoder
from vola.errors import ConfigError, DataError, InputError
from vola.types import RobotSpec


class LeRobotWriter:
    """Records episodes into a new LeRobot v3.0 dataset; use as a context manager, or call ``close``.

    Every episode is durable when ``add_episode`` returns: if the process dies, ``open_lerobot`` completes the
    dataset with the finished episodes. An exception inside ``with`` does the same at once.

    video: pictures as mp4 (codec "h264", "hevc", "av1" or an encoder's name) instead of lossless PNG.
    The camera "top" becomes the feature "observation.images.top"; a name that starts with "observation." is a key as
    it is. ``open_lerobot`` turns keys back into these names.
    Units of state and action and kinds of actions are stored beside their names, where LeRobot ignores them.

    Raises:
        ConfigError: the folder exists and is not empty, fps differs from ``spec.action.rate``, an unknown codec, two
            cameras with one key.
    """

    def __init__(
        self,
        path: str | Path,
        spec: RobotSpec,
        fps: float,
        *,
        video: bool = False,
        robot_type: str | None = None,
        codec: str = "h264",
        data_files_size_in_mb: int = 100,
        video_files_size_in_mb: int = 200,
    ) -> None:
        if not 0 < fps < np.inf or abs(spec.action.rate - fps) > 1e-9 * fps:
            raise ConfigError(f"fps: expected the rate of the actions, {spec.action.rate} Hz and > 0, got {fps}")
        self.path, self.spec, self.fps = Path(path), spec, int(fps) if fps == int(fps) else float(fps)
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ConfigError(
                f"{self.path}: expected a new or empty folder, this one has content. Nothing is overwritten."
            )
        self._keys = _camera_keys(spec)
        self._encoder = None
        if video and spec.cameras:
            self._encoder = [find_encoder(codec, c.height, c.width) for c in spec.cameras][0]
        self._features = _features(spec, self._keys, self.fps, self._encoder)
        folder = self.path / JOURNAL
        folder.mkdir(parents=True)
        self._lock: IO[bytes] | None = lock(folder)
        info = {
            "codebase_version": "v3.0",
            "robot_type": robot_type,
            "fps": self.fps,
            "chunks_size": 1000,
            "data_files_size_in_mb": data_files_size_in_mb,
            "video_files_size_in_mb": video_files_size_in_mb,
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self._encoder else None,
            "features": self._features,
        }
        header = {"info": info, "pictures": list(self._keys.values())}
        (folder / "info.json").write_text(json.dumps(header))
        self._folder = folder
        self._schema = _schema(self._features)
        self._sink: Any = open(folder / "data.arrows", "wb")  # noqa: SIM115 - closed in close()
        self._stream = pa.ipc.new_stream(self._sink, self._schema)
        self._journal: Any = open(folder / "episodes.jsonl", "w", encoding="utf-8")  # noqa: SIM115
        self._tasks: dict[str, int] = {}
        self._torn = False
        self.episodes = 0
        self.frames = 0

    def add_episode(
        self, images: Mapping[str, np.ndarray], state: np.ndarray, action: np.ndarray, instruction: str
    ) -> int:
        """Append one episode of L frames; returns its number.

        images: per camera uint8 ``L Y X 3`` (or ``L 3 Y X``, as ``Dataset.frames`` gives). state: ``L S``,
        action: ``L A``, in the units of the spec; ``action[t]`` is what was commanded while seeing frame t.

        Raises:
            InputError: wrong camera, shape, dtype, length, a number that is not finite, or an empty instruction;
                nothing of the episode is kept then. ConfigError: the writer is closed.
        """
        if self._lock is None:
            raise ConfigError(f"{self.path}: expected an open writer, this one is closed")
        if self._torn:
            raise ConfigError(
                f"{self.path}: writing episode {self.episodes} was broken off, nothing can follow it. "
                f"Close the writer; the {self.episodes} episodes before it are kept."
            )
        if not isinstance(instruction, str) or not instruction.strip():
            raise InputError(f"instruction: expected one sentence, got {instruction!r}")
        numbers = {"action": (action, self.spec.action.names), "state": (state, self.spec.state.names)}
        length = len(action) if np.ndim(action) else 0
        arrays = {k: _vectors(k, v, length, names) for k, (v, names) in numbers.items()}
        if set(images) != {c.name for c in self.spec.cameras}:
            wanted = [c.name for c in self.spec.cameras]
            raise InputError(f"images: expected the cameras {wanted}, got {sorted(images)}")
        pictures = {
            self._keys[c.name]: _pictures(c.name, images[c.name], length, c.height, c.width) for c in self.spec.cameras
        }
        index, self._torn = self.episodes, True
        if self._encoder is not None:
            for key, frames in pictures.items():
                path = self._folder / f"videos/{key}/episode-{index:06d}.mp4"
                path.parent.mkdir(parents=True, exist_ok=True)
                encode_video(path, frames, self.fps, self._encoder)
        task = self._tasks.setdefault(instruction, len(self._tasks))
        self._stream.write_batch(self._batch(pictures, arrays, task))
        self._sink.flush()
        histograms = {k: count_pixels(v).tolist() for k, v in pictures.items()}
        line = {"episode_index": index, "length": length, "task": instruction, "histograms": histograms}
        self._journal.write(json.dumps(line) + "\n")
        self._journal.flush()
        self._torn = False
        self.episodes, self.frames = index + 1, self.frames + length
        return index

    def close(self) -> None:
        """Bring the dataset into its final form; a second call does nothing.

        Raises:
            DataError: no episode was added; the folder is left as it was found.
        """
        if self._lock is None:
            return
        if not self._torn:
            self._stream.close()
        self._sink.close()
        self._journal.close()
        held, self._lock = self._lock, None
        with held:
            if self.episodes:
                finalise(self.path)
                return
            shutil.rmtree(self._folder)
        raise DataError(f"{self.path}: expected at least one episode to be added before closing, got none")

    def __enter__(self) -> LeRobotWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except DataError:
            # Without an episode there is nothing to keep, and the exception under way says why.
            if error is None or self.episodes:
                raise

    def _batch(self, pictures: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray], task: int) -> pa.RecordBatch:
        L = len(arrays["action"])
        frame = np.arange(L)
        automatic = {
            "timestamp": (frame / self.fps).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.full(L, self.episodes),
            "index": self.frames + frame,
            "task_index": np.full(L, task),
        }
        columns: list[pa.Array] = []
        for field in self._schema:
            if field.name in pictures:
                data = pa.array([encode_png(p) for p in pictures[field.name]], pa.binary())
                names = pa.array([f"frame-{t:06d}.png" for t in range(L)], pa.string())
                columns.append(pa.StructArray.from_arrays([data, names], fields=list(field.type)))
            elif field.name in automatic:
                columns.append(pa.array(automatic[field.name], field.type))
            else:
                values = arrays["action" if field.name == ACTION else "state"]
                flat = pa.array(np.ascontiguousarray(values).ravel(), pa.float32())
                wide = values.shape[1] > 1
                columns.append(pa.FixedSizeListArray.from_arrays(flat, values.shape[1]) if wide else flat)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _vectors(name: str, values: np.ndarray, length: int, names: tuple[str, ...]) -> np.ndarray:
    got = np.asarray(values)
    if got.shape != (length, len(names)) or length == 0 or got.dtype == object:
        raise InputError(
            f"{name}: expected ({length or 'L >= 1'}, {len(names)}) numbers for {names}, got {got.dtype} of shape "
            f"{got.shape}. A single dimension still needs its axis: values[:, None]."
        )
    out = got.astype(np.float32)
    bad = np.argwhere(~np.isfinite(out))
    if len(bad):
        t, d = (int(i) for i in bad[0])
        raise InputError(f"{name}: expected finite numbers, got {got[t, d]} in frame {t}, dimension {d} ({names[d]})")
    return out


def _pictures(name: str, images: np.ndarray, length: int, height: int, width: int) -> np.ndarray:
    got = np.asarray(images)
    if got.dtype != np.uint8:
        raise InputError(
            f"images[{name!r}]: expected uint8 in 0..255, got {got.dtype}. Floats in [0, 1] become "
            "(x * 255).round().astype('uint8')."
        )
    if got.shape == (length, height, width, 3):
        return got
    if got.shape == (length, 3, height, width):
        return got.transpose(0, 2, 3, 1)
    raise InputError(
        f"images[{name!r}]: expected ({length}, {height}, {width}, 3) or ({length}, 3, {height}, {width}), "
        f"got {got.shape}"
    )


def _camera_keys(spec: RobotSpec) -> dict[str, str]:
    """Feature key by camera name; a key is also the name of a folder."""
    keys = [camera_key(c.name) for c in spec.cameras]
    bad = [c.name for c, k in zip(spec.cameras, keys, strict=True) if keys.count(k) > 1 or not c.name or "/" in k]
    if bad:
        raise ConfigError(
            f"cameras: expected names without '/' that give different LeRobot keys, got {bad} for {sorted(set(keys))}. "
            "Rename a camera in the spec."
        )
    return dict(zip((c.name for c in spec.cameras), keys, strict=True))


def _features(spec: RobotSpec, keys: Mapping[str, str], fps: float, encoder: str | None) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for c in spec.cameras:
        entry: dict[str, Any] = {"dtype": "video" if encoder else "image", "shape": [c.height, c.width, 3]}
        entry["names"] = ["height", "width", "channels"]
        if encoder:
            codec = {"libx264": "h264", "libx265": "hevc"}.get(encoder, "av1")
            options = ENCODERS[encoder]
            video = {
                "height": c.height,
                "width": c.width,
                "codec": codec,
                "pix_fmt": "yuv420p",
                "fps": fps,
                "channels": 3,
            }
            video |= {"g": 2, "crf": int(options["crf"]), "preset": options.get("preset"), "fast_decode": 0}
            video |= {"video_backend": "pyav", "extra_options": {}}
            info = {f"video.{k}": v for k, v in video.items()}
            entry["info"] = {**info, "has_audio": False, "is_depth_map": False}
        out[keys[c.name]] = entry
    if spec.state.size:
        state = {"names": list(spec.state.names), "units": list(spec.state.units)}
        out[STATE] = {"dtype": "float32", "shape": [spec.state.size], **state}
    action = {"names": list(spec.action.names), "units": list(spec.action.units), "kinds": list(spec.action.kinds)}
    out[ACTION] = {"dtype": "float32", "shape": [spec.action.size], **action}
    return {**out, **automatic_features()}


def _schema(features: Mapping[str, Mapping[str, Any]]) -> pa.Schema:
    """Arrow types of section "data parquet" of the format, and the column description LeRobot's loader looks for."""
    fields: list[pa.Field] = []
    described: dict[str, dict[str, Any]] = {}
    for key, feature in features.items():
        dtype, shape = feature["dtype"], feature["shape"]
        if dtype == "video":
            continue
        if dtype == "image":
            fields.append(pa.field(key, pa.struct([("bytes", pa.binary()), ("path", pa.string())])))
            described[key] = {"_type": "Image"}
            continue
        kind = pa.float32() if dtype == "float32" else pa.int64()
        value: dict[str, Any] = {"dtype": dtype, "_type": "Value"}
        if shape[0] > 1:
            fields.append(pa.field(key, pa.list_(kind, shape[0])))
            described[key] = {"feature": value, "length": shape[0], "_type": "List"}
        else:
            fields.append(pa.field(key, kind))
            described[key] = value
    return pa.schema(fields, metadata={"huggingface": json.dumps({"info": {"features": described}})})
