"""Several datasets of one robot as one: for data that grow in rounds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from vola.data.episodes import Dataset, Episode, find_episode
from vola.errors import ConfigError
from vola.types import RobotSpec


@dataclass(frozen=True)
class JoinedDataset:
    """The episodes of all ``parts``, in order. Those of part 0 keep their numbers; later ones count on from there.

    Raises:
        ConfigError: no part, or parts of different spec or rate.
    """

    parts: tuple[Dataset, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("JoinedDataset: expected at least one dataset, got none")
        for place, part in enumerate(self.parts):
            if part.spec != self.spec or part.fps != self.fps:
                raise ConfigError(
                    f"JoinedDataset: expected every part to have the spec and rate of part 0 ({self.spec}, {self.fps} "
                    f"Hz), part {place} has {part.spec}, {part.fps} Hz"
                )

    @property
    def spec(self) -> RobotSpec:
        return self.parts[0].spec

    @property
    def fps(self) -> float:
        return self.parts[0].fps

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for part in self.parts for note in part.notes)

    @cached_property
    def _places(self) -> dict[int, tuple[Dataset, Episode]]:
        places = {e.index: (self.parts[0], e) for e in self.parts[0].episodes}
        following = max(places) + 1
        for part in self.parts[1:]:
            for episode in part.episodes:
                places[following] = (part, episode)
                following += 1
        return places

    @cached_property
    def episodes(self) -> tuple[Episode, ...]:
        return tuple(replace(e, index=index) for index, (_, e) in self._places.items())

    def column(self, name: str, episode_index: int) -> np.ndarray:
        """As in the part the episode is from; raises DataError on an unknown name or episode."""
        part, episode = self._find(episode_index)
        return part.column(name, episode.index)

    def frames(self, camera: str, episode_index: int, frames: Sequence[int]) -> np.ndarray:
        """As in the part the episode is from; raises DataError on an unknown camera or episode, or a frame outside."""
        part, episode = self._find(episode_index)
        return part.frames(camera, episode.index, frames)

    def fingerprint(self) -> str:
        """Identity of all parts and their order."""
        return hashlib.sha256("/".join(part.fingerprint() for part in self.parts).encode()).hexdigest()[:16]

    def _find(self, episode_index: int) -> tuple[Dataset, Episode]:
        if episode_index not in self._places:
            find_episode(self.episodes, episode_index)
        return self._places[episode_index]
