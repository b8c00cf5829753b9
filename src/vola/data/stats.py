"""Exact statistics of the training episodes, and the affine map to model units that is made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vola.data.episodes import Dataset, Episode, check_selection
from vola.data.transforms import Transforms
from vola.errors import ConfigError, DataError, InputError
from vola.types import Observation

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
MOMENTS = ("mean", "std", "min", "max")
FIELDS = (*MOMENTS, *QUANTILES)
KINDS = ("identity", "mean_std", "min_max", "quantile", "quantile10")

# A dimension that moves by less than this (relative to its magnitude, or in its own unit near zero) is constant:
# float32 rounding of one value already spreads over 1e-7 of it.
CONSTANT_RANGE = 1e-6


@dataclass(frozen=True)
class FeatureStats:
    """Statistics of one vector feature: float64 arrays (dim,), pooled over ``count`` rows, in physical units.

    std is the population one; quantiles interpolate linearly (numpy's default). ``names`` labels the dimensions;
    ``transform`` is the fingerprint of the representation the numbers describe ("absolute": untouched).
    """

    names: tuple[str, ...]
    count: int
    transform: str
    mean: np.ndarray
    std: np.ndarray
    min: np.ndarray
    max: np.ndarray
    q01: np.ndarray
    q10: np.ndarray
    q50: np.ndarray
    q90: np.ndarray
    q99: np.ndarray

    def __post_init__(self) -> None:
        for field in FIELDS:
            if np.shape(getattr(self, field)) != (len(self.names),):
                raise DataError(
                    f"statistics: expected {field} of shape ({len(self.names)},) for {self.names}, got "
                    f"{np.shape(getattr(self, field))}. Compute the statistics again from the data."
                )

    def to_json(self) -> dict[str, Any]:
        """Plain lists; Python floats, so that a JSON round trip is exact."""
        values = {f: getattr(self, f).tolist() for f in FIELDS}
        return {"names": list(self.names), "count": self.count, "transform": self.transform, **values}

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str) -> FeatureStats:
        """The inverse of ``to_json``; raises DataError naming ``where`` and the missing entry."""
        missing = [k for k in ("names", "count", "transform", *FIELDS) if k not in data]
        if missing:
            raise DataError(
                f"{where}: expected all of {FIELDS}, got none for {missing}. Nothing stands in for a missing "
                "statistic; compute them again from the training episodes."
            )
        values = {f: np.array(data[f], np.float64) for f in FIELDS}
        return FeatureStats(tuple(data["names"]), int(data["count"]), str(data["transform"]), **values)


@dataclass(frozen=True)
class Statistics:
    """Statistics per key ("state", "action") and which data they are of (dataset fingerprint, episode numbers)."""

    features: Mapping[str, FeatureStats]
    dataset: str
    episodes: tuple[int, ...]

    def __getitem__(self, key: str) -> FeatureStats:
        if key not in self.features:
            raise DataError(f"statistics: expected one of the keys {sorted(self.features)}, got {key!r}")
        return self.features[key]

    def to_json(self) -> dict[str, Any]:
        features = {k: v.to_json() for k, v in self.features.items()}
        return {"dataset": self.dataset, "episodes": list(self.episodes), "features": features}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Statistics:
        name = str(data.get("dataset", "unnamed data"))
        features = {k: FeatureStats.from_json(v, f"statistics of {name}, {k}") for k, v in data["features"].items()}
        return Statistics(features, name, tuple(int(e) for e in data["episodes"]))


def describe_rows(rows: np.ndarray, names: Sequence[str], transform: str = "absolute") -> FeatureStats:
    """Exact statistics of finite rows ``(n, dim)``, n >= 1, in float64; raises DataError on any other shape."""
    if rows.ndim != 2 or len(rows) == 0 or rows.shape[1] != len(names):
        raise DataError(f"statistics: expected rows of shape (n >= 1, {len(names)}), got {rows.shape}")
    wide = rows.astype(np.float64)
    quantiles = np.quantile(wide, list(QUANTILES.values()), axis=0)
    moments = {"mean": wide.mean(0), "std": wide.std(0), "min": wide.min(0), "max": wide.max(0)}
    return FeatureStats(tuple(names), len(rows), transform, **moments, **dict(zip(QUANTILES, quantiles, strict=True)))


def compute_statistics(
    dataset: Dataset, episodes: Sequence[int], H: int = 1, transforms: Transforms | None = None
) -> Statistics:
    """Statistics of state and action over exactly these (training) episodes; no other episode is read.

    Untouched actions are pooled row by row, each counting once. With transforms the actions are what a head will
    see: every valid entry of every chunk of H steps, encoded against the state at the start of its chunk, pooled
    over h. Needs memory for one float32 copy of that pool (done in groups of dimensions above 1 GB).

    Raises:
        DataError: a value that is not finite (names episode, frame and dimension). ConfigError: H below 1.
    """
    transforms = transforms or Transforms()
    if H < 1:
        raise ConfigError(f"H: expected a chunk length >= 1, got {H}")
    chosen = check_selection(dataset, episodes)
    spec = dataset.spec
    state = [finite_column(dataset, e, "state", spec.state.names) for e in chosen]
    action = [finite_column(dataset, e, "action", spec.action.names) for e in chosen]
    features = {"state": describe_rows(np.concatenate(state), spec.state.names)}
    if not transforms.steps:
        features["action"] = describe_rows(np.concatenate(action), spec.action.names)
    else:
        features["action"] = _describe_chunks(state, action, spec.action.names, H, transforms)
    return Statistics(features, dataset.fingerprint(), tuple(e.index for e in chosen))


def finite_column(dataset: Dataset, episode: Episode, name: str, names: Sequence[str]) -> np.ndarray:
    """The column of one episode; raises DataError naming episode, frame and dimension of a NaN or infinity."""
    part = dataset.column(name, episode.index)
    bad = np.argwhere(~np.isfinite(part))
    if len(bad):
        frame, dim = (int(i) for i in bad[0])
        raise DataError(
            f"{name}: expected finite numbers, got {part[frame, dim]} in episode {episode.index}, frame {frame}, "
            f"dimension {dim} ({names[dim]}). Repair the recording or leave the episode out."
        )
    return part


def _describe_chunks(
    state: list[np.ndarray], action: list[np.ndarray], names: Sequence[str], H: int, transforms: Transforms
) -> FeatureStats:
    total = sum(int(np.minimum(H, np.arange(len(a), 0, -1)).sum()) for a in action)
    group = max(1, (1 << 28) // total)
    columns: list[FeatureStats] = []
    for start in range(0, len(names), group):
        dims = slice(start, start + group)
        parts = [encoded_chunks(s, a, H, transforms) for s, a in zip(state, action, strict=True)]
        pool = np.concatenate([chunks[valid][:, dims] for chunks, valid in parts])
        columns.append(describe_rows(pool, names[dims], transforms.fingerprint()))
    values = {f: np.concatenate([getattr(c, f) for c in columns]) for f in FIELDS}
    return FeatureStats(tuple(names), total, transforms.fingerprint(), **values)


def encoded_chunks(
    state: np.ndarray, action: np.ndarray, H: int, transforms: Transforms
) -> tuple[np.ndarray, np.ndarray]:
    """The encoded chunks ``L H A`` that start at each frame of one episode, and which steps are valid ``L H``."""
    L = len(action)
    rows = np.arange(L)[:, None] + np.arange(H)
    valid = np.ones((L, 1), bool)
    observation = Observation({}, {}, state[:, None], valid, ("",) * L)
    encoded = transforms.encode(observation, action[np.minimum(rows, L - 1)])
    return encoded, rows < L


@dataclass(frozen=True)
class Normaliser:
    """Per dimension z = (x - shift) / scale and x = z * scale + shift; the same numbers both ways, never clipped.

    Constant dimensions have scale 0: they encode to 0 and decode to the constant, whatever comes in. ``guarded``
    dimensions had so small a spread beside their outliers that the scale was widened (see ``fit``). ``low`` and
    ``high`` are the training range in physical units; ``transform`` the representation it was fitted on.
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    transform: str
    shift: np.ndarray
    scale: np.ndarray
    low: np.ndarray
    high: np.ndarray
    guarded: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for field in ("kinds", "shift", "scale", "low", "high"):
            if np.shape(getattr(self, field)) != (len(self.names),):
                raise ConfigError(
                    f"Normaliser: expected {field} of shape ({len(self.names)},), got {np.shape(getattr(self, field))}"
                )
        if not (np.isfinite(self.shift).all() and np.isfinite(self.scale).all() and (self.scale >= 0).all()):
            raise ConfigError(f"Normaliser: expected finite shift and scale >= 0, got {self.shift}, {self.scale}")

    @staticmethod
    def fit(
        kind: str | Sequence[str],
        stats: FeatureStats,
        *,
        epsilon: float = 0.0,
        floor: float = 0.0,
        limit: float = 20.0,
    ) -> Normaliser:
        """Make the map from statistics; ``kind`` is one name or one per dimension.

        identity: z = x. mean_std: zero mean, unit std. min_max, quantile (q01, q99), quantile10 (q10, q90): that
        range to [-1, 1], values outside stay outside. A dimension whose range is at most ``CONSTANT_RANGE`` is
        constant (not under identity). The scale is widened until the training data stay within ``limit``, so that a
        dimension which hardly moves but for one outlier cannot reach thousands; such dimensions are ``guarded``.

        Published variants: ``epsilon`` is added to the std or range (openpi 1e-6, LeRobot 1e-8), ``floor`` is a
        lower bound of the std (ACT 0.01), ``limit=inf`` switches the guard off.

        Raises:
            ConfigError: an unknown kind or not one per dimension, a negative setting, or a dimension that moves but
                whose quantiles are equal, with the guard switched off.
        """
        n = len(stats.names)
        kinds = (kind,) * n if isinstance(kind, str) else tuple(kind)
        if len(kinds) != n or set(kinds) - set(KINDS):
            raise ConfigError(f"kind: expected one of {KINDS}, or one per dimension ({n}), got {kind!r}")
        if not (epsilon >= 0 and floor >= 0 and limit > 0):
            raise ConfigError(f"expected epsilon >= 0, floor >= 0, limit > 0, got {epsilon}, {floor}, {limit}")
        which = np.array(kinds)
        shift, scale = np.zeros(n), np.ones(n)
        ends = {"min_max": (stats.min, stats.max), "quantile": (stats.q01, stats.q99)}
        ends["quantile10"] = (stats.q10, stats.q90)
        for name, (low, high) in ends.items():
            half = np.maximum((high - low + epsilon) / 2, floor)
            shift = np.where(which == name, low + half, shift)
            scale = np.where(which == name, half, scale)
        shift = np.where(which == "mean_std", stats.mean, shift)
        scale = np.where(which == "mean_std", np.maximum(stats.std + epsilon, floor), scale)
        mapped = which != "identity"
        magnitude = np.maximum(1.0, np.maximum(np.abs(stats.min), np.abs(stats.max)))
        constant = mapped & (stats.max - stats.min <= CONSTANT_RANGE * magnitude)
        shift, scale = np.where(constant, stats.q50, shift), np.where(constant, 0.0, scale)
        needed = np.maximum(stats.max - shift, shift - stats.min) / limit
        guarded = mapped & ~constant & (scale < needed)
        scale = np.where(guarded, needed, scale)
        flat = np.flatnonzero(mapped & ~constant & ~(scale > 0))
        if len(flat):
            raise ConfigError(
                f"kind: {kinds[flat[0]]} cannot scale {stats.names[flat[0]]}, whose range between the quantiles is 0 "
                "although it moves. Use min_max for it, an epsilon, or a finite limit."
            )
        dims = tuple(int(d) for d in np.flatnonzero(guarded))
        return Normaliser(stats.names, kinds, stats.transform, shift, scale, stats.min, stats.max, dims)

    @property
    def constant(self) -> tuple[int, ...]:
        """Dimensions that carry no information."""
        return tuple(int(d) for d in np.flatnonzero(self.scale == 0))

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Physical ``(..., dim)`` -> model units, float32."""
        self._check(values)
        inverse = np.divide(1.0, self.scale, out=np.zeros_like(self.scale), where=self.scale > 0)
        return ((values - self.shift) * inverse).astype(np.float32)

    def decode(self, values: np.ndarray) -> np.ndarray:
        """Model units ``(..., dim)`` -> physical, float32."""
        self._check(values)
        return (values * self.scale + self.shift).astype(np.float32)

    def largest(self) -> np.ndarray:
        """Largest |z| that the training data reach, per dimension: look at it before training."""
        ends = np.stack([self.low, self.high])
        return np.abs(self.encode(ends)).max(0)

    def count_outside(self, values: np.ndarray, valid: np.ndarray | None = None) -> tuple[np.ndarray, int]:
        """How many physical values ``(..., dim)`` lie outside the training range: (count per dimension, rows).

        ``valid`` (...) limits the rows; float32 rounding at the ends does not count.
        """
        self._check(values)
        rows = values.reshape(-1, len(self.names)) if valid is None else values[valid]
        slack = CONSTANT_RANGE * np.maximum(1.0, np.maximum(np.abs(self.low), np.abs(self.high)))
        outside = (rows < self.low - slack) | (rows > self.high + slack) | ~np.isfinite(rows)
        return outside.sum(0), len(rows)

    def require(self, transforms: Transforms) -> None:
        """Refuse statistics of another representation, e.g. of absolute actions for relative ones.

        Raises:
            ConfigError: the fingerprints differ.
        """
        wanted = transforms.fingerprint()
        if self.transform != wanted:
            raise ConfigError(
                f"normaliser: expected statistics of the action representation {wanted!r}, got {self.transform!r}. "
                "Compute them with the transforms that the policy uses: compute_statistics(..., H, transforms)."
            )

    def to_json(self) -> dict[str, Any]:
        """Plain lists; Python floats, so that a JSON round trip is exact."""
        arrays = {f: getattr(self, f).tolist() for f in ("shift", "scale", "low", "high")}
        texts = {"names": list(self.names), "kinds": list(self.kinds), "guarded": list(self.guarded)}
        return {"transform": self.transform, **texts, **arrays}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Normaliser:
        """The inverse of ``to_json``; raises ConfigError naming a missing entry."""
        wanted = ("names", "kinds", "transform", "shift", "scale", "low", "high", "guarded")
        missing = [k for k in wanted if k not in data]
        if missing:
            raise ConfigError(f"normaliser: expected the entries {wanted}, got none for {missing}")
        arrays = {f: np.array(data[f], np.float64) for f in ("shift", "scale", "low", "high")}
        return Normaliser(
            tuple(data["names"]), tuple(data["kinds"]), str(data["transform"]), guarded=tuple(data["guarded"]), **arrays
        )

    def _check(self, values: np.ndarray) -> None:
        if np.ndim(values) < 1 or np.shape(values)[-1] != len(self.names):
            raise InputError(f"values: expected (..., {len(self.names)}) for {self.names}, got {np.shape(values)}")
