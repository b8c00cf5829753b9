"""What is learnt from the training episodes before the first step: statistics, vocabularies, brightness of images.

``Fitted`` travels inside every checkpoint. A policy cannot be built without it, and a key it lacks is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float32

from vola.data.episodes import Dataset, check_selection
from vola.data.stats import Normaliser, Statistics, compute_statistics, encoded_chunks
from vola.data.transforms import Transforms
from vola.errors import CheckpointError, ConfigError, DataError
from vola.tokenizers.actions import ActionTokenizer
from vola.tokenizers.bins import BinTokenizer, QuantileBins, UniformBins
from vola.tokenizers.fast import FastConfig, FastTokenizer
from vola.tokenizers.text import TextTokenizer
from vola.types import RobotSpec

NormaliserKind = Literal["identity", "mean_std", "min_max", "quantile", "quantile10"]
Pixels = tuple[tuple[float, ...], tuple[float, ...]]

# Brightness needs no more frames than this: it only centres the input of the first convolution.
PIXEL_FRAMES = 256
# An action tokenizer is fitted on at most this many evenly spread chunks.
TOKENIZER_CHUNKS = 20_000
TokenizerConfig = UniformBins | QuantileBins | FastConfig
TOKENIZERS: Mapping[str, type[BinTokenizer] | type[FastTokenizer]] = {"bins": BinTokenizer, "fast": FastTokenizer}


@dataclass(frozen=True)
class Fitted:
    """Statistics of state and (transformed) action, the tokenizer of text and, for token heads, that of actions; per
    camera the channel mean and standard deviation of pixels in [-1, 1]; the transforms these belong to, and
    ``dataset``: which data and episodes all of it is from."""

    statistics: Statistics
    tokenizer: TextTokenizer
    pixels: Mapping[str, Pixels]
    transforms: str
    instructions: tuple[str, ...]
    action_tokenizer: ActionTokenizer | None = None

    @property
    def dataset(self) -> str:
        """Identity of the training data: content fingerprint of the dataset, and of which episodes were trained on."""
        chosen = hashlib.sha256(repr(self.statistics.episodes).encode()).hexdigest()[:8]
        return f"{self.statistics.dataset}/{len(self.statistics.episodes)}-{chosen}"

    def normaliser(self, key: Literal["state", "action"], kind: NormaliserKind) -> Normaliser:
        """The normaliser of a key; raises DataError where the statistics lack it."""
        return Normaliser.fit(kind, self.statistics[key])

    def check(self, robot: RobotSpec, transforms: Transforms) -> None:
        """Raises ConfigError when these were fitted for another robot or other action transforms."""
        if self.transforms != transforms.fingerprint():
            raise ConfigError(
                f"statistics: fitted for the action representation {self.transforms!r}, the system uses "
                f"{transforms.fingerprint()!r}. Fit again with the system's transforms."
            )
        for key, names in (("state", robot.state.names), ("action", robot.action.names)):
            if self.statistics[key].names != names:
                raise ConfigError(
                    f"statistics of {key}: expected the dimensions {names}, got {self.statistics[key].names}. "
                    "Fit again on data of this robot."
                )
        cameras = {c.name for c in robot.cameras}
        if cameras - set(self.pixels):
            raise ConfigError(f"pixels: expected the cameras {sorted(cameras)}, got {sorted(self.pixels)}. Fit again.")

    def to_json(self) -> str:
        return json.dumps(
            {
                "statistics": self.statistics.to_json(),
                "tokenizer": json.loads(self.tokenizer.to_json()),
                "pixels": {k: [list(mean), list(std)] for k, (mean, std) in self.pixels.items()},
                "transforms": self.transforms,
                "instructions": list(self.instructions),
                "action_tokenizer": None if self.action_tokenizer is None else self.action_tokenizer.to_json(),
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str) -> Fitted:
        """Raises CheckpointError when an entry is missing."""
        data: dict[str, Any] = json.loads(text)
        wanted = {"statistics", "tokenizer", "pixels", "transforms", "instructions", "action_tokenizer"}
        missing = wanted - set(data)
        if missing:
            raise CheckpointError(
                f"fitted.json: missing {sorted(missing)}. Restore the file; nothing stands in for it."
            )
        return Fitted(
            Statistics.from_json(data["statistics"]),
            TextTokenizer.from_json(json.dumps(data["tokenizer"])),
            {k: (tuple(mean), tuple(std)) for k, (mean, std) in data["pixels"].items()},
            data["transforms"],
            tuple(data["instructions"]),
            _tokenizer_from(data["action_tokenizer"]),
        )


def fit(
    dataset: Dataset,
    episodes: Sequence[int],
    H: int,
    transforms: Transforms,
    tokens: TokenizerConfig | None = None,
    normalise_actions: NormaliserKind = "mean_std",
) -> Fitted:
    """Fit on exactly these (training) episodes; no other episode is read.

    Args:
        tokens: the action tokenizer of a token head; it is fitted on chunks scaled by ``normalise_actions``.

    Raises:
        DataError: non-finite values, or a camera without any picture.
        InputError: no episode, or no instruction with a word in it.
    """
    chosen = check_selection(dataset, episodes)
    instructions = tuple(dict.fromkeys(e.instruction for e in chosen))
    statistics = compute_statistics(dataset, episodes, H, transforms)
    tokenizer: ActionTokenizer | None = None
    if tokens is not None:
        normaliser = Normaliser.fit(normalise_actions, statistics["action"])
        tokenizer = tokens.fit(*training_chunks(dataset, episodes, H, transforms, normaliser))
    return Fitted(
        statistics,
        TextTokenizer.fit(instructions),
        {c.name: _brightness(dataset, c.name, episodes) for c in dataset.spec.cameras},
        transforms.fingerprint(),
        instructions,
        tokenizer,
    )


def training_chunks(
    dataset: Dataset,
    episodes: Sequence[int],
    H: int,
    transforms: Transforms,
    normaliser: Normaliser,
    most: int = TOKENIZER_CHUNKS,
) -> tuple[Float32[np.ndarray, "N H A"], Bool[np.ndarray, "N H"]]:
    """At most ``most`` evenly spread chunks of these episodes as a head sees them, and which steps are valid."""
    chosen = check_selection(dataset, episodes)
    starts = np.cumsum([0, *(e.length for e in chosen)])
    wanted = np.unique(np.linspace(0, starts[-1] - 1, min(most, int(starts[-1]))).round().astype(int))
    chunks, valids = [], []
    for i, episode in enumerate(chosen):
        frames = wanted[(wanted >= starts[i]) & (wanted < starts[i + 1])] - starts[i]
        state, action = (dataset.column(name, episode.index) for name in ("state", "action"))
        made, valid = encoded_chunks(state, action, H, transforms)
        chunks.append(normaliser.encode(made[frames]))
        valids.append(valid[frames])
    return np.concatenate(chunks), np.concatenate(valids)


def _tokenizer_from(data: Mapping[str, Any] | None) -> ActionTokenizer | None:
    if data is None:
        return None
    kind = str(data.get("kind"))
    if kind not in TOKENIZERS:
        raise CheckpointError(f"fitted.json: expected an action tokenizer of kind {sorted(TOKENIZERS)}, got {kind!r}")
    return TOKENIZERS[kind].from_json(data)


def _brightness(dataset: Dataset, camera: str, episodes: Sequence[int]) -> Pixels:
    """Channel mean and standard deviation over evenly spread frames, in [-1, 1]."""
    lengths = {e.index: e.length for e in dataset.episodes if camera not in e.blind}
    episodes = [e for e in episodes if e in lengths]
    if not episodes:
        raise DataError(
            f"camera {camera!r}: expected pictures in at least one training episode, found none. Fetch its videos, or "
            "leave the camera out."
        )
    spread = np.unique(np.linspace(0, len(episodes) - 1, min(PIXEL_FRAMES, len(episodes))).round().astype(int))
    each = max(1, PIXEL_FRAMES // len(spread))
    pixels = []
    for place in spread:
        index = episodes[place]
        frames = np.unique(np.linspace(0, lengths[index] - 1, each).round().astype(int)).tolist()
        pixels.append(dataset.frames(camera, index, frames).transpose(0, 2, 3, 1).reshape(-1, 3))
    flat = np.concatenate(pixels).astype(np.float64) / 127.5 - 1
    return tuple(flat.mean(0).tolist()), tuple(np.maximum(flat.std(0), 1e-3).tolist())
