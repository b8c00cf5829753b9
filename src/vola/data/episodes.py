"""What a dataset is to the rest of the library: episodes, numeric columns, camera frames; and the split by episode."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vola.errors import ConfigError, DataError, InputError
from vola.types import RobotSpec


@dataclass(frozen=True)
class Episode:
    """One demonstration: its number in the dataset, its length L in frames, what was asked for, and the cameras whose
    pictures are missing from it (``blind``; numbers are whole)."""

    index: int
    length: int
    instruction: str
    blind: tuple[str, ...] = ()


class Dataset(Protocol):
    """Demonstrations at rest. An episode is always named by ``Episode.index``, never by its place in a list.

    ``column`` gives numbers as ``(L, dim)``; "state" and "action" are float32 in the units of ``spec``, any other
    numeric feature keeps its own name and dtype. ``frames`` decodes only the frames asked for, in the order asked.
    ``notes`` says in sentences what a user has to know (episodes left out, odd metadata).
    """

    @property
    def spec(self) -> RobotSpec: ...

    @property
    def fps(self) -> float: ...

    @property
    def episodes(self) -> tuple[Episode, ...]: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def column(self, name: str, episode_index: int) -> np.ndarray: ...

    def frames(self, camera: str, episode_index: int, frames: Sequence[int]) -> np.ndarray: ...

    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class MemoryDataset:
    """A dataset held in arrays: fresh demonstrations from an environment, and tests.

    columns: per name ("state", "action", ...) one array ``(L, dim)`` per episode, in the order of ``episodes``.
    images: per camera one uint8 array ``L C Y X`` per episode.

    Raises:
        DataError: an array whose length or width is not that of its episode or of the spec, images that are not
            uint8 of their camera's size, two episodes of one number.
    """

    spec: RobotSpec
    fps: float
    episodes: tuple[Episode, ...]
    columns: Mapping[str, Sequence[np.ndarray]]
    images: Mapping[str, Sequence[np.ndarray]]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes = {"state": self.spec.state.size, "action": self.spec.action.size}
        for name in sizes:
            if name not in self.columns:
                raise DataError(f"MemoryDataset: expected a column {name!r}, got {sorted(self.columns)}")
        if {c.name for c in self.spec.cameras} != set(self.images):
            wanted = sorted(c.name for c in self.spec.cameras)
            raise DataError(f"MemoryDataset: expected images of the cameras {wanted}, got {sorted(self.images)}")
        numbers = [e.index for e in self.episodes]
        if len(set(numbers)) != len(numbers):
            raise DataError(f"MemoryDataset: expected every episode number once, got {numbers}")
        for name, parts in (*self.columns.items(), *self.images.items()):
            if len(parts) != len(self.episodes):
                raise DataError(f"{name}: expected {len(self.episodes)} arrays, one per episode, got {len(parts)}")
            for episode, part in zip(self.episodes, parts, strict=True):
                width = sizes.get(name)
                if len(part) != episode.length or (width is not None and part.shape[1:] != (width,)):
                    raise DataError(
                        f"{name}: episode {episode.index} has {episode.length} frames, expected an array "
                        f"({episode.length}, {'...' if width is None else width}), got {part.shape}"
                    )
        for camera in self.spec.cameras:
            for episode, part in zip(self.episodes, self.images[camera.name], strict=True):
                if part.shape[1:] != (3, camera.height, camera.width) or part.dtype != np.uint8:
                    raise DataError(
                        f"{camera.name}: episode {episode.index}: expected uint8 images 3 {camera.height} "
                        f"{camera.width}, got {part.dtype} {part.shape[1:]}"
                    )

    def column(self, name: str, episode_index: int) -> np.ndarray:
        """Numbers ``(L, dim)`` of one episode; raises DataError on an unknown name or episode."""
        if name not in self.columns:
            raise DataError(f"column: expected one of {sorted(self.columns)}, got {name!r}")
        part = np.asarray(self.columns[name][find_episode(self.episodes, episode_index)])
        return part.astype(np.float32, copy=False) if name in ("state", "action") else part

    def frames(self, camera: str, episode_index: int, frames: Sequence[int]) -> np.ndarray:
        """uint8 ``N C Y X``; raises DataError on an unknown camera or episode or a frame outside the episode."""
        if camera not in self.images:
            raise DataError(f"frames: expected one of the cameras {sorted(self.images)}, got {camera!r}")
        place = find_episode(self.episodes, episode_index)
        check_frames(self.episodes[place], frames)
        return np.asarray(self.images[camera][place])[np.asarray(frames, np.int64)]

    def fingerprint(self) -> str:
        """Content identity: equal data, instructions and spec give equal strings."""
        digest = hashlib.sha256(repr((self.spec, self.fps, self.episodes)).encode())
        for name, parts in sorted((*self.columns.items(), *self.images.items())):
            digest.update(name.encode())
            for part in parts:
                digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()[:16]


def find_episode(episodes: Sequence[Episode], index: int) -> int:
    """The place of episode number ``index`` in ``episodes``; raises DataError naming what there is."""
    # Most datasets are numbered 0..n-1: look there first, search otherwise.
    if 0 <= index < len(episodes) and episodes[index].index == index:
        return index
    for place, episode in enumerate(episodes):
        if episode.index == index:
            return place
    known = [e.index for e in episodes]
    raise DataError(f"episode {index}: expected one of the {len(known)} episodes {known[:8]}{'...' * (len(known) > 8)}")


def check_frames(episode: Episode, frames: Sequence[int]) -> None:
    """Raises DataError naming the first frame that is outside the episode (its end is exclusive)."""
    for frame in frames:
        if not 0 <= frame < episode.length:
            raise DataError(
                f"episode {episode.index}: expected frames in 0..{episode.length - 1}, got {frame}. "
                "An episode ends before its length; nothing is clamped here."
            )


def split_episodes(dataset: Dataset, val_fraction: float, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Episode numbers for training and validation: disjoint, complete, stratified by instruction, pure in ``seed``.

    ``round(val_fraction * n)`` episodes, at least one, are held out. Every instruction gets its proportional share;
    left-over places go first to instructions that would have none. An instruction keeps at least one training
    episode as long as that is possible. ``val_fraction = 0`` holds out nothing. Both lists are ascending.

    Raises:
        ConfigError: a fraction outside [0, 1), or fewer than two episodes to split.
    """
    episodes = dataset.episodes
    n = len(episodes)
    if not 0.0 <= val_fraction < 1.0:
        raise ConfigError(f"val_fraction: expected a number in [0, 1), got {val_fraction}")
    if val_fraction == 0.0:
        return tuple(sorted(e.index for e in episodes)), ()
    if n < 2:
        raise ConfigError(
            f"split_episodes: expected at least 2 episodes to hold one out, got {n}. "
            "Record more, or train without validation (val_fraction=0)."
        )
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for episode in episodes:
        groups[episode.instruction].append(episode.index)
    names = sorted(groups)
    quota = {k: len(groups[k]) * val_fraction for k in names}
    take = {k: int(quota[k]) for k in names}  # below the group's size, as the fraction is below 1
    budget = min(max(1, round(n * val_fraction)), n - 1)
    while sum(take.values()) < budget:
        spare = [k for k in names if take[k] < len(groups[k]) - 1] or [k for k in names if take[k] < len(groups[k])]
        best = max(spare, key=lambda k: (take[k] == 0, quota[k] - take[k]))
        take[best] += 1
    held: set[int] = set()
    for place, name in enumerate(names):
        order = np.random.default_rng([seed, place]).permutation(np.sort(groups[name]))
        held.update(order[: take[name]].tolist())
    return tuple(sorted(e.index for e in episodes if e.index not in held)), tuple(sorted(held))


def check_selection(dataset: Dataset, episodes: Sequence[int]) -> tuple[Episode, ...]:
    """The episodes with these numbers, in this order.

    Raises:
        InputError: an empty or repeating selection. DataError: an episode the dataset does not have.
    """
    chosen = [int(e) for e in episodes]
    if not chosen:
        raise InputError("episodes: expected at least one episode number, got none")
    if len(set(chosen)) != len(chosen):
        twice = next(e for e in chosen if chosen.count(e) > 1)
        raise InputError(f"episodes: expected every episode once, got {twice} more than once")
    known = {e.index: e for e in dataset.episodes}
    for index in chosen:
        if index not in known:
            find_episode(dataset.episodes, index)
    return tuple(known[e] for e in chosen)
