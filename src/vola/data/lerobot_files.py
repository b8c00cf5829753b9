"""One data file of a LeRobot dataset: numeric columns as arrays, read once; picture bytes only where asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vola.data.lerobot_meta import ACTION, AUTOMATIC, STATE, EpisodeEntry, read_parquet
from vola.errors import DataError

# Picture bytes are read in blocks of whole row groups: a group is one episode in files LeRobot writes, and reading
# thousands of small ones singly costs more than decoding them.
_BLOCK_BYTES = 16 << 20
_KEPT_BLOCKS = 4


class DataFile:
    """``column(key)`` gives (rows, *shape) with the shape declared in info.json: (1,) stays (1,)."""

    def __init__(self, path: Path, features: Mapping[str, Mapping[str, Any]]) -> None:
        self.path = path
        self._features = features
        eager = [k for k in (STATE, ACTION, *AUTOMATIC) if k in features or k in AUTOMATIC]
        table = read_parquet(path, eager)
        self.rows = table.num_rows
        self._columns = {k: self._array(table[k], k) for k in eager}
        self._parquet: Any = None
        self._blocks: list[list[int]] = []
        self._ends = np.empty(0, np.int64)
        self._kept: OrderedDict[tuple[str, int], Any] = OrderedDict()

    def column(self, key: str) -> np.ndarray:
        """(rows, *shape); read on first use."""
        if key not in self._columns:
            self._columns[key] = self._array(read_parquet(self.path, [key])[key], key)
        return self._columns[key]

    def pictures(self, key: str, rows: Sequence[int]) -> list[bytes]:
        """Encoded pictures (PNG) of these rows, in this order."""
        if self._parquet is None:
            self._parquet, self._blocks, self._ends = self._open()
        out = []
        for row in rows:
            place = int(np.searchsorted(self._ends, row, side="right"))
            start = int(self._ends[place - 1]) if place else 0
            data = self._block(key, place)[row - start].as_py()
            if data is None:
                raise DataError(
                    f"{self.path}: row {row} of {key} holds no picture bytes, only a path. "
                    "Write the dataset with its pictures embedded."
                )
            out.append(data)
        return out

    def _open(self) -> tuple[Any, list[list[int]], np.ndarray]:
        """The file, its row groups gathered into blocks, and the row at which each block ends."""
        try:
            parquet = pq.ParquetFile(self.path, memory_map=True)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.path}: cannot be read any more ({error})") from error
        blocks: list[list[int]] = []
        ends: list[int] = []
        size = _BLOCK_BYTES
        for group in range(parquet.num_row_groups):
            described = parquet.metadata.row_group(group)
            if size + described.total_byte_size > _BLOCK_BYTES:
                blocks.append([])
                ends.append(ends[-1] if ends else 0)
                size = 0
            blocks[-1].append(group)
            ends[-1] += described.num_rows
            size += described.total_byte_size
        return parquet, blocks, np.array(ends)

    def _block(self, key: str, place: int) -> Any:
        if (key, place) not in self._kept:
            try:
                column = self._parquet.read_row_groups(self._blocks[place], columns=[key], use_threads=False)[key]
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{self.path}: {key} cannot be read ({error}). Copy the file again.") from error
            if not pa.types.is_struct(column.type):
                raise DataError(f"{self.path}: expected {key} as struct<bytes, path>, got {column.type}")
            self._kept[key, place] = column.combine_chunks().field("bytes")
            if len(self._kept) > _KEPT_BLOCKS:
                self._kept.popitem(last=False)
        self._kept.move_to_end((key, place))
        return self._kept[key, place]

    def _array(self, column: pa.ChunkedArray, key: str) -> np.ndarray:
        declared = self._features.get(key, {}).get("shape")
        shape = tuple(declared) if declared is not None else (1,)
        values: Any = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if isinstance(values, pa.ExtensionArray):
            values = values.storage
        nested = values
        while pa.types.is_list(nested.type) or pa.types.is_fixed_size_list(nested.type):
            nested = nested.flatten()
        numeric = (
            pa.types.is_integer(nested.type) or pa.types.is_floating(nested.type) or pa.types.is_boolean(nested.type)
        )
        if not numeric:
            raise DataError(f"{self.path}: expected numbers in {key}, got {values.type}")
        flat = nested.to_numpy(zero_copy_only=False)
        if nested.null_count or flat.size != len(values) * int(np.prod(shape, dtype=int)):
            raise DataError(
                f"{self.path}: expected {key} to hold {shape} numbers in every one of {len(values)} rows "
                f"(declared in info.json), got {flat.size} numbers, {nested.null_count} of them null"
            )
        return flat.reshape(len(values), *shape)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parquet": None, "_kept": OrderedDict()}


def locate(file: DataFile, entry: EpisodeEntry, fps: float, tolerance_s: float) -> int:
    """The row of ``file`` at which the episode starts, after checking that all its rows are really its own.

    Raises:
        DataError: span outside the file, rows of another episode, frame numbers with gaps, or a time stamp that is
        further than ``tolerance_s`` from frame / fps.
    """
    # An empty file has no first row to count from; the check below then says so.
    first = int(file.column("index")[0, 0]) if file.rows else 0
    start = 0 if entry.start is None else entry.start - first
    end = start + entry.length
    if start < 0 or end > file.rows or (entry.start is None and end != file.rows):
        raise DataError(
            f"{file.path}: episode {entry.index} claims the rows {start}..{end} (end exclusive), but the file has "
            f"{file.rows} rows. The episode table does not fit this file; fetch both again."
        )
    owner = file.column("episode_index")[start:end, 0]
    if (owner != entry.index).any():
        frame = int(np.argmax(owner != entry.index))
        raise DataError(
            f"{file.path}: frame {frame} of episode {entry.index} (row {start + frame}) belongs to episode "
            f"{owner[frame]} according to the row itself. The lengths in the episode table are wrong."
        )
    number = file.column("frame_index")[start:end, 0]
    if (number != np.arange(entry.length)).any():
        frame = int(np.argmax(number != np.arange(entry.length)))
        raise DataError(
            f"{file.path}: expected frame_index {frame} in row {start + frame} of episode {entry.index}, got "
            f"{number[frame]}. Frames are missing or out of order."
        )
    stamps = file.column("timestamp")[start:end, 0]
    gap = np.abs(stamps.astype(np.float64) - np.arange(entry.length) / fps)
    # float32 seconds are themselves only exact to their spacing, which exceeds 1e-4 s after half an hour.
    late = ~(gap <= tolerance_s + np.spacing(np.abs(stamps)))
    if late.any():
        frame = int(np.argmax(late))
        raise DataError(
            f"{file.path}: episode={entry.index}, frame={frame}: expected the time {frame / fps:.6f} s "
            f"({frame} / {fps:g} fps), got {float(stamps[frame]):.6f} s, off by {gap[frame]:.6f} s with tolerance_s = "
            f"{tolerance_s:g}. Pass a larger tolerance_s (e.g. {0.5 / fps:.4f}) to keep every row with its own frame."
        )
    return start
