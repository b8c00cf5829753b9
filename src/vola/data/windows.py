"""Training samples: for a frame t of an episode the window of observations up to t and the chunk of actions from t."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from rich.progress import Progress

from vola.data.episodes import Dataset, Episode, check_selection
from vola.data.transforms import Fit, resize_images
from vola.errors import ConfigError, DataError, InputError
from vola.types import Batch, Chunk, Observation, RobotSpec

_PIECE = 32  # frames decoded at native size at a time: 30 MB at 640x480, where a whole episode would be gigabytes


class Windows:
    """All samples (t = 0, stride, 2 stride, ... of each episode), addressed by 0..len-1 in stored order.

    A sample is the T frames t-T+1..t and the H actions t..t+H-1, all from t's own episode. Before the first frame
    the first frame is repeated with ``state_valid``/``images_valid`` False; past the last action the last action is
    repeated with ``valid`` False. Every array keeps its axes, also for T=1 (``B 1 S``) and H=1 (``B 1 A``).

    Only frames that some sample needs are ever decoded; they are resized once and kept as uint8 in a cache of at
    most ``cache_bytes``. What does not fit is decoded again when asked for (the first frames to come stay: with
    shuffled epochs a cache that evicts would hit less often). ``prefetch`` fills the cache in file order.

    resize: (height, width) for every camera, or None for native sizes. fit: see ``transforms.resize_images``.
    starts: per episode number a bool array (L) of frames at which a sample may start (e.g. ``~idle``); windows and
    chunks still run through the others.

    Raises:
        ConfigError: T, H or stride below 1, or not an integer. InputError: empty or repeating episodes,
        or ``starts`` that leave an episode without a sample.
        DataError: an episode that does not exist.
    """

    def __init__(
        self,
        dataset: Dataset,
        episodes: Sequence[int],
        T: int = 1,
        H: int = 1,
        resize: tuple[int, int] | None = None,
        cache_bytes: int = 2 << 30,
        stride: int = 1,
        fit: Fit = "stretch",
        starts: Mapping[int, np.ndarray] | None = None,
    ) -> None:
        for name, value in (("T", T), ("H", H), ("stride", stride)):
            _check_whole(name, value, dataset.fps)
        self.dataset, self.T, self.H, self.stride, self.fit = dataset, T, H, stride, fit
        self.episodes = check_selection(dataset, episodes)
        self.resize = resize
        cameras = dataset.spec.cameras
        if resize is not None:
            cameras = tuple(replace(c, height=resize[0], width=resize[1]) for c in cameras)
        self.spec: RobotSpec = replace(dataset.spec, cameras=cameras)
        self._state = _pool(dataset, self.episodes, "state")
        self._action = _pool(dataset, self.episodes, "action")
        lengths = np.array([e.length for e in self.episodes])
        first = np.concatenate([[0], np.cumsum(lengths)])
        frames = [_starts(e, stride, starts) for e in self.episodes]
        place = np.repeat(np.arange(len(lengths)), [len(f) for f in frames])
        self._place = place  # per sample: place of its episode in self.episodes
        self._frame = np.concatenate(frames)
        self._row = first[place] + self._frame  # per sample: row in the pooled columns
        self._low, self._high = first[place], first[place + 1]  # rows of its episode, end exclusive
        self._first = first
        self._ids = np.array([e.index for e in self.episodes], np.int64)
        self._instructions = np.array([e.instruction for e in self.episodes], dtype=object)
        self._sighted = {c.name: np.array([c.name not in e.blind for e in self.episodes]) for c in cameras}
        self._back = np.arange(-T + 1, 1)
        self._ahead = np.arange(H)
        self._cache = _FrameCache(self, cache_bytes)

    def __len__(self) -> int:
        return len(self._row)

    @property
    def frame(self) -> np.ndarray:
        """Per sample the number of its frame inside its episode, int64 ``(len,)``."""
        return self._frame

    def batch(self, indices: np.ndarray | Sequence[int]) -> Batch:
        """The samples with these numbers, as a ``Batch`` (see the class for its masks).

        Raises:
            InputError: not a one-axis list of whole numbers in 0..len-1.
        """
        index = np.asarray(indices)
        if index.ndim != 1 or not np.issubdtype(index.dtype, np.integer) or index.size == 0:
            raise InputError(f"indices: expected (B) whole numbers, got {index.dtype} of shape {index.shape}")
        if index.min() < 0 or index.max() >= len(self):
            raise InputError(f"indices: expected 0..{len(self) - 1}, got {index.min()}..{index.max()}")
        row, low, high = self._row[index, None], self._low[index, None], self._high[index, None]
        back, ahead = row + self._back, row + self._ahead
        seen = back >= low
        back = np.maximum(back, low)
        place = self._place[index]
        observation = Observation(
            images={c.name: self._cache.get(c.name, back) for c in self.spec.cameras},
            images_valid={c.name: seen & self._sighted[c.name][place, None] for c in self.spec.cameras},
            state=self._state[back],
            state_valid=seen,
            instruction=tuple(self._instructions[place].tolist()),
        )
        chunk = Chunk(self._action[np.minimum(ahead, high - 1)], ahead < high)
        return Batch(observation, chunk, self._ids[place], self._frame[index])

    def prefetch(self, progress: Progress | None = None) -> int:
        """Decode into the cache, episode by episode in file order, until everything is there or the bound is met.

        Returns the number of frames now in the cache. May be interrupted: what was decoded stays.
        """
        return self._cache.fill(progress)

    @property
    def cached(self) -> tuple[int, int]:
        """(frames in the cache, frames that the samples need), over all cameras."""
        needed = self._cache.needed
        return self._cache.count, sum(int(self._cache._sighted_rows(c.name)[needed].sum()) for c in self.spec.cameras)


def _starts(episode: Episode, stride: int, starts: Mapping[int, np.ndarray] | None) -> np.ndarray:
    frames = np.arange(0, episode.length, stride)
    if starts is None:
        return frames
    mask = np.asarray(starts.get(episode.index))
    if mask.shape != (episode.length,) or mask.dtype != bool:
        raise InputError(
            f"starts: expected a bool array ({episode.length},) for episode {episode.index}, got {mask.dtype} of shape "
            f"{mask.shape}"
        )
    kept = frames[mask[::stride]]
    if not len(kept):
        raise InputError(f"starts: episode {episode.index} has no frame left to start from. Leave the episode out.")
    return kept


def _check_whole(name: str, value: object, fps: float) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return
    hint = f"Seconds become frames by multiplying with fps = {fps:g}."
    if isinstance(value, float) and value > 0:
        hint = f"As seconds it is {value * fps:g} frames at {fps:g} fps; the nearest is {max(1, round(value * fps))}."
    raise ConfigError(f"{name}: expected a whole number of frames >= 1, got {value!r}. {hint}")


def _pool(dataset: Dataset, episodes: Sequence[Episode], name: str) -> np.ndarray:
    parts = [dataset.column(name, e.index) for e in episodes]
    for episode, part in zip(episodes, parts, strict=True):
        if part.ndim != 2 or len(part) != episode.length:
            raise DataError(f"{name}: expected ({episode.length}, dim) in episode {episode.index}, got {part.shape}")
    return np.ascontiguousarray(np.concatenate(parts), dtype=np.float32)


class _FrameCache:
    """Resized frames by row, at most ``limit`` bytes over all cameras; the memory is taken as it fills."""

    def __init__(self, windows: Windows, limit: int) -> None:
        self._windows = windows
        rows = np.maximum(windows._row[:, None] + windows._back, windows._low[:, None])
        self.needed = np.unique(rows)
        cameras = windows.spec.cameras
        frame_bytes = sum(3 * c.height * c.width for c in cameras)
        self._capacity = min(len(self.needed), limit // frame_bytes) if cameras else 0
        # One black frame, behind the others, stands for all pictures of the episodes that a camera missed.
        self._slot = {
            c.name: np.where(self._sighted_rows(c.name), -1, self._capacity).astype(np.int64) for c in cameras
        }
        self._used = {c.name: 0 for c in cameras}
        self._store = {c.name: np.zeros((self._capacity + 1, 3, c.height, c.width), np.uint8) for c in cameras}

    def _sighted_rows(self, camera: str) -> np.ndarray:
        windows = self._windows
        return np.repeat(windows._sighted[camera], np.diff(windows._first))

    @property
    def count(self) -> int:
        return sum(self._used.values())

    def get(self, camera: str, rows: np.ndarray) -> np.ndarray:
        """uint8 ``*rows.shape C Y X``."""
        slots = self._slot[camera][rows]
        if slots.size and slots.min() >= 0:
            return self._store[camera][slots]
        wanted, place = np.unique(rows, return_inverse=True)
        slots = self._slot[camera][wanted]
        fresh = self._decode(camera, wanted[slots < 0])
        frames = np.empty((len(wanted), *fresh.shape[1:]), np.uint8)
        frames[slots < 0] = fresh
        if (slots >= 0).any():
            frames[slots >= 0] = self._store[camera][slots[slots >= 0]]
        return frames[place.reshape(rows.shape)]

    def fill(self, progress: Progress | None) -> int:
        task = progress.add_task("decoding frames", total=len(self._windows.episodes)) if progress else None
        first = self._windows._first
        # The cameras advance together, so that a cache that is too small holds complete observations.
        order = sorted(range(len(first) - 1), key=lambda p: self._windows.episodes[p].index)
        for place in order:
            left, right = np.searchsorted(self.needed, first[place : place + 2])
            rows = self.needed[left:right]
            for camera, slot in self._slot.items():
                room = self._capacity - self._used[camera]
                missing = rows[slot[rows] < 0][:room]
                if len(missing):
                    self._decode(camera, missing)
            if progress is not None and task is not None:
                progress.advance(task)
        return self.count

    def _decode(self, camera: str, rows: np.ndarray) -> np.ndarray:
        """Frames of ascending rows, one decoder call per episode; kept as long as there is room."""
        windows = self._windows
        spec = next(c for c in windows.spec.cameras if c.name == camera)
        out = np.empty((len(rows), 3, spec.height, spec.width), np.uint8)
        edges = np.searchsorted(rows, windows._first)
        for place in np.flatnonzero(edges[1:] > edges[:-1]):
            for start in range(edges[place], edges[place + 1], _PIECE):
                part = slice(start, min(start + _PIECE, edges[place + 1]))
                frames = (rows[part] - windows._first[place]).tolist()
                images = windows.dataset.frames(camera, windows.episodes[place].index, frames)
                out[part] = resize_images(images, spec.height, spec.width, windows.fit)
        self._keep(camera, rows, out)
        return out

    def _keep(self, camera: str, rows: np.ndarray, frames: np.ndarray) -> None:
        used = self._used[camera]
        room = min(self._capacity - used, len(rows))
        if room <= 0:
            return
        self._store[camera][used : used + room] = frames[:room]
        self._slot[camera][rows[:room]] = np.arange(used, used + room)
        self._used[camera] = used + room


@lru_cache(maxsize=4)
def _permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    order = np.random.default_rng([seed, epoch]).permutation(n)
    order.flags.writeable = False
    return order


def batch_indices(n: int, batch_size: int, seed: int, step: int, shuffle: bool = True) -> np.ndarray:
    """Which of n samples make up batch number ``step``: int64 ``(batch_size,)``.

    Position p = step * batch_size + i lies in epoch p // n at place p % n; every epoch visits every sample once, in
    an order that is a function of (seed, epoch) alone. So a run resumes at any step, and the stream does not depend
    on how it is cut into batches. ``shuffle=False`` gives stored order, every epoch.

    Raises:
        ConfigError: n or batch_size below 1, or a negative seed or step.
    """
    if n < 1 or batch_size < 1 or seed < 0 or step < 0:
        raise ConfigError(
            f"batch_indices: expected n >= 1, batch_size >= 1, seed >= 0, step >= 0, got {n}, {batch_size}, {seed}, "
            f"{step}"
        )
    position = step * batch_size + np.arange(batch_size, dtype=np.int64)
    return place_in_epochs(n, seed, position) if shuffle else position % n


def place_in_epochs(n: int, seed: int, position: np.ndarray) -> np.ndarray:
    """Which of n samples stands at each position of the endless stream of shuffled epochs: int64, same shape."""
    epoch, place = np.divmod(position, n)
    out = np.empty(position.shape, np.int64)
    for e in np.unique(epoch):
        here = epoch == e
        out[here] = _permutation(n, seed, int(e))[place[here]]
    return out
