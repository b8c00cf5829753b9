"""The words every part speaks: what a robot sees (Observation), what it will do (Chunk), and both (Batch).

Letter legend, used in every shape of this library:

    B batch                    H chunk length (predicted action steps)
    T observation window       k executed steps of a chunk before replanning
    C, Y, X  channels, rows, columns of an image
    N tokens                   A action dimension
    D width                    S state (proprioception) dimension
    K bins, or integration/denoising steps (said which)

These records hold numpy arrays in physical units and uint8 images, as they lie on disk and cross a network.
Normalising and moving to a device happen in one place, ``Policy.prepare``.
Masks are named ``*_valid`` and are True where a value counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from jaxtyping import Bool, Float32, Int64, UInt8

from vola.errors import InputError, expect_shape


@dataclass(frozen=True)
class CameraSpec:
    """One camera: its name and the image size it delivers (rows, columns), three RGB channels."""

    name: str
    height: int
    width: int


@dataclass(frozen=True)
class StateSpec:
    """Names and units of the S state dimensions, e.g. ``("x", "y")`` in ``("m", "m")``."""

    names: tuple[str, ...]
    units: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.units):
            raise InputError(
                f"StateSpec: expected one unit per name, got {len(self.names)} names, {len(self.units)} units"
            )

    @property
    def size(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class ActionSpec:
    """Names, units and kind of the A action dimensions and the control rate.

    ``kinds`` says how a number moves the robot: "position" (absolute target), "delta" (added to where the
    robot is), "velocity", "gripper", or "unknown" when a dataset does not say. ``rate`` is in Hz.
    """

    names: tuple[str, ...]
    units: tuple[str, ...]
    kinds: tuple[str, ...]
    rate: float

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.units) == len(self.kinds):
            raise InputError(
                "ActionSpec: expected one unit and one kind per name, got "
                f"{len(self.names)} names, {len(self.units)} units, {len(self.kinds)} kinds"
            )

    @property
    def size(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class RobotSpec:
    """What a policy is built for: cameras, state, action. Two datasets with equal specs are interchangeable."""

    cameras: tuple[CameraSpec, ...]
    state: StateSpec
    action: ActionSpec


@dataclass(frozen=True)
class Observation:
    """What the robot sees at B moments, each with a window of T frames ending now (index T-1 is now).

    images: per camera uint8 ``B T C Y X``; a missing picture is any array with its ``images_valid`` False.
    images_valid: per camera bool ``B T``.
    state: float32 ``B T S`` in the units of ``StateSpec``; ``state_valid`` bool ``B T`` is False for frames
        before the start of the episode.
    instruction: B sentences.
    """

    images: Mapping[str, UInt8[np.ndarray, "B T C Y X"]]
    images_valid: Mapping[str, Bool[np.ndarray, "B T"]]
    state: Float32[np.ndarray, "B T S"]
    state_valid: Bool[np.ndarray, "B T"]
    instruction: tuple[str, ...]

    @property
    def size(self) -> int:
        """B."""
        return int(self.state.shape[0])

    def check(self, spec: RobotSpec) -> None:
        """Refuse what a policy built for ``spec`` must not be fed.

        Raises:
            InputError: missing or extra camera, wrong shape or dtype, NaN in a valid state, empty instruction.
        """
        sizes = expect_shape("state", self.state, "B T S", S=spec.state.size)
        B, T = sizes["B"], sizes["T"]
        expect_shape("state_valid", self.state_valid, "B T", B=B, T=T)
        wanted, got = {c.name for c in spec.cameras}, set(self.images)
        if wanted != got:
            raise InputError(
                f"images: expected the cameras {sorted(wanted)}, got {sorted(got)}. For a camera that is absent "
                "for now pass any uint8 image and images_valid=False; do not rename or add cameras."
            )
        for name, image in self.images.items():
            expect_shape(f"images[{name!r}]", image, "B T 3 Y X", B=B, T=T)
            if image.dtype != np.uint8:
                raise InputError(
                    f"images[{name!r}]: expected uint8 in 0..255, got {image.dtype}. Convert float images with "
                    "(x * 255).round().astype('uint8') after checking that they lie in [0, 1]."
                )
            if name not in self.images_valid:
                raise InputError(f"images_valid: expected an entry for camera {name!r}, got none")
            expect_shape(f"images_valid[{name!r}]", self.images_valid[name], "B T", B=B, T=T)
        bad = ~np.isfinite(self.state) & self.state_valid[..., None]
        if bad.any():
            b, t, s = (int(i[0]) for i in np.nonzero(bad))
            raise InputError(
                f"state: expected finite numbers, got {self.state[b, t, s]} in sample {b}, frame {t}, dimension "
                f"{s} ({spec.state.names[s]}). Drop the sample or repair the sensor reading."
            )
        if len(self.instruction) != B or isinstance(self.instruction, str):
            raise InputError(
                f"instruction: expected {B} sentences (one per sample), got {self.instruction!r:.80}. "
                "Pass a tuple of strings, also for a single sample."
            )
        for b, text in enumerate(self.instruction):
            if not isinstance(text, str) or not text.strip():
                raise InputError(
                    f"instruction: expected a sentence for sample {b}, got {text!r}. Say what the robot shall do; "
                    "a dataset without instructions gets one with `--instruction`."
                )


@dataclass(frozen=True)
class Chunk:
    """The H actions from now on: float32 ``B H A`` in physical units.

    valid: bool ``B H``. In training False past the end of the episode; in a plan False where the step carries no
        decision, and the executor repeats the last executed action.
    malformed: bool ``B``, True where the tokens of a plan did not decode; None where there are no tokens.
    """

    actions: Float32[np.ndarray, "B H A"]
    valid: Bool[np.ndarray, "B H"]
    malformed: Bool[np.ndarray, " B"] | None = None

    def check(self, spec: ActionSpec, H: int) -> None:
        """Raises InputError on a wrong shape."""
        sizes = expect_shape("actions", self.actions, "B H A", H=H, A=spec.size)
        expect_shape("valid", self.valid, "B H", B=sizes["B"], H=H)
        if self.malformed is not None:
            expect_shape("malformed", self.malformed, "B", B=sizes["B"])


@dataclass(frozen=True)
class Guide:
    """What a new plan has to continue (real-time chunking, Black et al. 2025). Index 0 is the first action of the
    new chunk, which is the action of this tick.

    actions: float32 ``B H A``, physical units: the rest of the chunk in execution; zeros where the weight is 0.
    weights: float32 ``B H``: 1 = keep this step, 0 = free.
    delay: int64 ``B``: the first ``delay`` steps will be executed before the new chunk takes over.
    method: "vjp" guides each integration step by the vector-Jacobian product of the paper, "identity" by the
        weighted error itself (LeRobot), "prefix" hands the first ``delay`` steps over as clean actions, for
        networks trained that way (arXiv 2512.05964).
    limit: largest gain of the guidance (beta_max of the paper).
    """

    actions: Float32[np.ndarray, "B H A"]
    weights: Float32[np.ndarray, "B H"]
    delay: Int64[np.ndarray, " B"]
    method: Literal["vjp", "identity", "prefix"]
    limit: float


@dataclass(frozen=True)
class Batch:
    """A training batch: observation, chunk, and which (episode, frame) each of the B samples came from."""

    observation: Observation
    chunk: Chunk
    episode: Int64[np.ndarray, " B"]
    frame: Int64[np.ndarray, " B"]

    @property
    def size(self) -> int:
        """B."""
        return self.observation.size


class Planner(Protocol):
    """Whatever turns an observation into a chunk: a trained Policy or an expert bound to an environment.

    ``rngs`` holds one generator per sample, all the randomness a plan may use: what sample b gets does not depend
    on which other samples share the batch. ``guide`` is given only by executors that guide; a planner that cannot
    be guided refuses it with a ConfigError.
    """

    @property
    def observation_window(self) -> int: ...

    @property
    def chunk_length(self) -> int: ...

    def plan(
        self, observation: Observation, rngs: Sequence[np.random.Generator], guide: Guide | None = None
    ) -> Chunk: ...


def select(observation: Observation, rows: np.ndarray) -> Observation:
    """The observation of some of the B moments; ``rows`` is an index or bool array."""
    return replace(
        observation,
        images={k: v[rows] for k, v in observation.images.items()},
        images_valid={k: v[rows] for k, v in observation.images_valid.items()},
        state=observation.state[rows],
        state_valid=observation.state_valid[rows],
        instruction=tuple(np.asarray(observation.instruction, dtype=object)[rows].tolist()),
    )


def pick(chunk: Chunk, rows: np.ndarray) -> Chunk:
    """The chunks of some of the B samples; ``rows`` is an index or bool array."""
    malformed = None if chunk.malformed is None else chunk.malformed[rows]
    return Chunk(chunk.actions[rows], chunk.valid[rows], malformed)


def fake(spec: RobotSpec, B: int, T: int, H: int, rng: np.random.Generator) -> Batch:
    """A random batch of the right shapes, everything valid: for tests, profiling and warm-up."""
    observation = Observation(
        images={c.name: rng.integers(0, 256, (B, T, 3, c.height, c.width), dtype=np.uint8) for c in spec.cameras},
        images_valid={c.name: np.ones((B, T), bool) for c in spec.cameras},
        state=rng.standard_normal((B, T, spec.state.size)).astype(np.float32),
        state_valid=np.ones((B, T), bool),
        instruction=tuple(rng.choice(["push the red disc", "go to the blue ring"], B).tolist()),
    )
    actions = rng.standard_normal((B, H, spec.action.size)).astype(np.float32)
    chunk = Chunk(actions, np.ones((B, H), bool))
    return Batch(observation, chunk, np.arange(B), np.zeros(B, np.int64))
