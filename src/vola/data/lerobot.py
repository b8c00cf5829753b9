"""Reading LeRobot datasets, v3.0 and v2.1, images or video, without LeRobot."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from vola.data.episodes import Episode, check_frames, find_episode
from vola.data.lerobot_files import DataFile, locate
from vola.data.lerobot_finalise import recover
from vola.data.lerobot_meta import ACTION, STATE, EpisodeEntry, Meta, load_json, read_meta, robot_spec
from vola.data.png import decode_png
from vola.data.stats import CONSTANT_RANGE, Statistics
from vola.data.video import VideoPool, VideoReader
from vola.errors import ConfigError, DataError
from vola.types import RobotSpec


class LeRobotDataset:
    """A dataset on disk (see ``episodes.Dataset``); made by ``open_lerobot``. Numbers are in memory, pictures are not.

    The camera "top" is "observation.images.top" in the files; a key without that prefix is kept in full
    ("observation.image"). ``column`` knows "state", "action" and every numeric feature by its key.
    """

    def __init__(
        self,
        meta: Meta,
        spec: RobotSpec,
        entries: Sequence[EpisodeEntry],
        tolerance_s: float,
        instruction: str | None,
        notes: Sequence[str],
    ) -> None:
        self.root, self.version, self.fps, self.spec = meta.root, meta.version, meta.fps, spec
        self.notes: tuple[str, ...] = tuple(notes)
        self._meta, self._entries, self._tolerance = meta, tuple(entries), tolerance_s
        self._files: dict[Path, DataFile] = {}
        for entry in entries:
            if entry.data not in self._files:
                self._files[entry.data] = DataFile(entry.data, meta.features)
        self._starts = [locate(self._files[e.data], e, self.fps, tolerance_s) for e in entries]
        _check_coverage(meta, self._files)
        self._videos = VideoPool()
        self._checked: set[Path] = set()
        texts = [
            instruction or _instruction(self._files[e.data], s, meta, e)
            for e, s in zip(entries, self._starts, strict=True)
        ]
        self.episodes: tuple[Episode, ...] = tuple(
            Episode(e.index, e.length, t, _blind(meta, spec, e)) for e, t in zip(entries, texts, strict=True)
        )

    def column(self, name: str, episode_index: int) -> np.ndarray:
        """(L, dim) of one episode, or (L, *shape) for a feature with more axes.

        Raises:
            DataError: an unknown or non-numeric feature, or an unknown episode.
        """
        entry, start = self._find(episode_index)
        key = {"state": STATE, "action": ACTION}.get(name, name)
        if name == "state" and STATE not in self._meta.features:
            return np.zeros((entry.length, 0), np.float32)
        if key not in self._meta.features:
            raise DataError(f"{self.root}: expected a feature, one of {sorted(self._meta.features)}, got {name!r}")
        if self._meta.features[key].get("dtype") in ("image", "video"):
            raise DataError(f"{key}: expected a numeric feature, got a camera; use frames()")
        part = self._files[entry.data].column(key)[start : start + entry.length]
        return part.astype(np.float32, copy=False) if name in ("state", "action") else part

    def frames(self, camera: str, episode_index: int, frames: Sequence[int]) -> np.ndarray:
        """uint8 ``N C Y X``, only these frames are decoded.

        Raises:
            DataError: an unknown camera or episode, a frame outside the episode, a damaged picture or video.
        """
        size = next(((c.height, c.width) for c in self.spec.cameras if c.name == camera), None)
        if size is None:
            raise DataError(
                f"frames: expected one of the cameras {[c.name for c in self.spec.cameras]}, got {camera!r}"
            )
        place = find_episode(self.episodes, episode_index)
        check_frames(self.episodes[place], frames)
        if camera in self.episodes[place].blind:
            raise DataError(f"episode {episode_index}: camera {camera!r} has no pictures in it (its video is missing)")
        entry, start, key = self._entries[place], self._starts[place], self._meta.cameras[camera]
        if key in entry.videos:
            span = entry.videos[key]
            out = self._reader(key, span.path).frames([span.first + f for f in frames])
        else:
            data = self._files[entry.data].pictures(key, [start + f for f in frames])
            where = f"{entry.data}: {key}, episode {episode_index}, frame"
            images = [decode_png(d, f"{where} {f}") for d, f in zip(data, frames, strict=True)]
            shapes = {i.shape for i in images}
            if len(shapes) > 1:
                raise DataError(f"{where}s {list(frames)[:4]}: expected one image size, got {sorted(shapes)}")
            out = np.stack(images).transpose(0, 3, 1, 2) if images else np.empty((0, 3, *size), np.uint8)
        if out.shape[2:] != size:
            raise DataError(
                f"{key}, episode {episode_index}: info.json declares {size[0]}x{size[1]}, the pictures are "
                f"{out.shape[2]}x{out.shape[3]}. Correct the shape in info.json."
            )
        return out

    def stored(self, camera: str) -> str:
        """How the pictures of a camera lie on disk, e.g. "video, av1, yuv420p", in the words of info.json."""
        feature = self._meta.features[self._meta.cameras[camera]]
        info = feature.get("info") or feature.get("video_info") or {}
        known = [str(info[k]) for k in ("video.codec", "video.pix_fmt") if info.get(k)]
        return ", ".join(["video", *known]) if feature["dtype"] == "video" else "images in the tables"

    def fingerprint(self) -> str:
        """Content identity: spec, instructions, every number of state and action, names and sizes of media files."""
        digest = hashlib.sha256(repr((self.spec, self.fps, self.episodes)).encode())
        media: set[Path] = set()
        used = {self._meta.cameras[c.name] for c in self.spec.cameras}
        for entry in self._entries:
            for name in ("state", "action"):
                digest.update(np.ascontiguousarray(self.column(name, entry.index)).tobytes())
            videos = [v.path for k, v in entry.videos.items() if k in used and v.path.is_file()]
            media.update(videos or [entry.data])
        for path in sorted(media):
            digest.update(f"{path.relative_to(self.root)} {path.stat().st_size}".encode())
        return digest.hexdigest()[:16]

    def check(self) -> None:
        """Open every video, check every span, and decode the first and last frame of every episode.

        Raises:
            DataError: the first fault found.
        """
        for episode in self.episodes:
            for camera in {c.name for c in self.spec.cameras} - set(episode.blind):
                self.frames(camera, episode.index, sorted({0, episode.length - 1}))

    def compare_stored(self, statistics: Statistics) -> list[str]:
        """Where ``meta/stats.json`` is off from the exact statistics by more than 2 % of a dimension's range.

        LeRobot 0.6 averages the quantiles of the episodes, which are not those of the pooled rows. Nothing here uses
        the stored numbers; a policy trained elsewhere may. ``statistics``: of absolute actions and all episodes (those
        of a part cannot be compared and give no note).
        """
        path = self.root / "meta/stats.json"
        # Statistics of the episodes that have their video say nothing about stored ones of all episodes.
        if not path.is_file() or set(statistics.episodes) != {e.index for e in self._meta.episodes}:
            return []
        stored = load_json(path)
        notes: list[str] = []
        for key, name in ((STATE, "state"), (ACTION, "action")):
            exact = statistics[name]
            span = np.maximum(exact.max - exact.min, CONSTANT_RANGE)
            for field in ("mean", "std", "min", "max", "q01", "q99"):
                try:
                    value = np.asarray(stored.get(key, {}).get(field, []), np.float64).ravel()
                except (AttributeError, TypeError, ValueError):
                    return [*notes, f"meta/stats.json: {field} of {key} is no list of numbers; nothing here uses it"]
                off = np.abs(value - getattr(exact, field)) / span if value.shape == span.shape else np.zeros(1)
                if off.max(initial=0.0) > 0.02:
                    d = int(off.argmax())
                    notes.append(
                        f"meta/stats.json: {field} of {key} is off by up to {off[d]:.0%} of the range "
                        f"({exact.names[d]}: {value[d]:.4g} stored, {getattr(exact, field)[d]:.4g} exact)"
                    )
        return notes

    def _find(self, episode_index: int) -> tuple[EpisodeEntry, int]:
        place = find_episode(self.episodes, episode_index)
        return self._entries[place], self._starts[place]

    def _reader(self, key: str, path: Path) -> VideoReader:
        reader = self._videos.get(path)
        if path not in self._checked:
            self._check_spans(key, reader)
            self._checked.add(path)
        return reader

    def _check_spans(self, key: str, reader: VideoReader) -> None:
        """Every span of this file lies inside it, and its frames come at the dataset's rate."""
        spans = [(e, e.videos[key]) for e in self._entries if e.videos[key].path == reader.path]
        allowed = max(self._tolerance, 0.5 / self.fps)
        for entry, span in spans:
            last = span.first + entry.length - 1
            if span.first < 0 or last >= len(reader):
                raise DataError(
                    f"{reader.path}: episode {entry.index} needs the frames {span.first}..{last} of {key}, the "
                    f"video has {len(reader)}. It was cut short, or the episode table belongs to another file."
                )
            # Within half a frame the n-th picture and the picture at n / fps are the same one.
            for frame in (span.first, last):
                off = abs(reader.seconds(frame) - frame / self.fps)
                if off > allowed:
                    raise DataError(
                        f"{reader.path}: episode {entry.index}, frame {frame - span.first}: expected its picture at "
                        f"{frame / self.fps:.4f} s, the video shows it at {reader.seconds(frame):.4f} s. The video's "
                        f"rate is not {self.fps:g} fps; re-encode it, or pass tolerance_s above {off:.4f} to go by "
                        "frame numbers."
                    )


def open_lerobot(
    path: str | Path,
    *,
    cameras: Sequence[str] | None = None,
    missing_video: Literal["skip", "blind", "refuse"] = "skip",
    tolerance_s: float = 1e-4,
    instruction: str | None = None,
) -> LeRobotDataset:
    """Open a LeRobot dataset folder (v3.0 or v2.1) and check its tables.

    A recording of ours that was killed is first completed with the episodes it had finished (see ``recover``).

    cameras: names to use ("top"), default all colour cameras; ``()`` reads numbers only, also of episodes whose video
    is missing. missing_video: "skip" leaves such episodes out, "blind" keeps their numbers and marks the camera's
    pictures as missing (``Episode.blind``), both with a sentence in ``notes``; "refuse" raises. tolerance_s: how far
    a row's time may be from frame / fps. instruction: replaces the dataset's own task texts.

    Raises:
        DataError: any fault in the files, naming file, episode, frame or key.
        ConfigError: unknown camera or option.
    """
    if missing_video not in ("skip", "blind", "refuse"):
        raise ConfigError(f"missing_video: expected 'skip', 'blind' or 'refuse', got {missing_video!r}")
    if instruction is not None and (not isinstance(instruction, str) or not instruction.strip()):
        raise ConfigError(f"instruction: expected one sentence, got {instruction!r}")
    recovered = recover(Path(path))
    meta = read_meta(Path(path))
    chosen = tuple(meta.cameras) if cameras is None else tuple(cameras)
    if isinstance(cameras, str) or set(chosen) - set(meta.cameras) or len(set(chosen)) < len(chosen):
        raise ConfigError(f"cameras: expected some of {tuple(meta.cameras)}, each once, got {cameras!r}")
    spec, notes = robot_spec(meta, chosen)
    notes = [*recovered, *meta.notes, *notes]
    entries = list(meta.episodes)
    if chosen:
        entries, remark = _with_video(meta, chosen, missing_video)
        notes += remark
    return LeRobotDataset(meta, spec, entries, tolerance_s, instruction, notes)


def _check_coverage(meta: Meta, files: dict[Path, DataFile]) -> None:
    claimed: Counter[Path] = Counter()
    for entry in meta.episodes:
        claimed[entry.data] += entry.length
    for path, file in files.items():
        if claimed[path] != file.rows:
            raise DataError(
                f"{path}: expected {claimed[path]} rows (the sum of its episodes' lengths), got {file.rows}. "
                "The episode table does not fit this file; fetch both again."
            )


def _blind(meta: Meta, spec: RobotSpec, entry: EpisodeEntry) -> tuple[str, ...]:
    """Cameras whose video of this episode is not on the disk."""
    videos = {c.name: entry.videos.get(meta.cameras[c.name]) for c in spec.cameras}
    return tuple(name for name, span in videos.items() if span is not None and not span.path.is_file())


def _with_video(
    meta: Meta, cameras: tuple[str, ...], missing_video: Literal["skip", "blind", "refuse"]
) -> tuple[list[EpisodeEntry], list[str]]:
    there: dict[Path, bool] = {}
    keys = [meta.cameras[c] for c in cameras]
    kept, missing = [], []
    for entry in meta.episodes:
        paths = [entry.videos[k].path for k in keys if k in entry.videos]
        absent = [p for p in paths if not there.setdefault(p, p.is_file())]
        if absent:
            missing.append((entry, absent[0]))
        else:
            kept.append(entry)
    if not missing:
        return kept, []
    first, path = missing[0]
    count = f"{len(missing)} of {len(meta.episodes)} episodes lack a video (first: episode {first.index}, {path}"
    if missing_video == "blind":
        return list(meta.episodes), [f"{count}); their numbers are used, their pictures count as missing"]
    if missing_video == "refuse" or not kept:
        raise DataError(
            f"{path}: expected this video of episode {first.index}, found none; {count}). Fetch the videos"
            + (
                "."
                if not kept
                else ", or leave these episodes out with missing_video='skip', or 'blind' to use their numbers."
            )
        )
    return kept, [f"{count}) and are left out; {len(kept)} remain"]


def _instruction(file: DataFile, start: int, meta: Meta, entry: EpisodeEntry) -> str:
    numbers = file.column("task_index")[start : start + entry.length, 0]
    if (numbers != numbers[0]).any():
        frame = int(np.argmax(numbers != numbers[0]))
        raise DataError(
            f"{entry.data}: episode {entry.index} changes its task at frame {frame}; expected one instruction per "
            "episode. Split the episode there, or give one with instruction=."
        )
    text = meta.tasks.get(int(numbers[0]))
    if text is None or not str(text).strip():
        raise DataError(
            f"{meta.root / 'meta'}: expected the text of task {numbers[0]} (episode {entry.index}), got {text!r}. "
            "Give the instruction with instruction=."
        )
    return str(text)
