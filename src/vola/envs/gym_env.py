"""Tabletop as a Gymnasium environment, single and vectorised.

Observation: ``{"image": uint8 Y X 3, "state": float32 S, "instruction": str}``; action: float32 2, a displacement or
a place (m). Reward 1 in the step that succeeds, else 0. ``info`` holds seed, start_hash, success and failure ("" or
one of ``vola.envs.scene.FAILURES``) in every step. A scene's seed is the ``seed`` of reset; later episodes draw theirs
from the environment's own generator, so a vector environment plays the same episodes as single ones.
"""

from __future__ import annotations

import string
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vola.envs.tabletop import RATE, Tabletop, make_tabletop
from vola.errors import InputError

PEOPLE_SIZE = 256  # pixels of a picture painted for people
Observed = dict[str, Any]


class TabletopEnv(gymnasium.Env[Observed, np.ndarray]):
    """One scene. ``overrides`` as in ``make_tabletop``; ``render_mode`` None or "rgb_array" (256 x 256)."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": int(RATE)}

    def __init__(self, env_id: str = "vola/Detour-v0", render_mode: str | None = None, **overrides: Any) -> None:
        self.table = make_tabletop(env_id, **overrides)
        self.render_mode = _checked_mode(render_mode)
        self.observation_space = observation_space(self.table)
        self.action_space = action_space(self.table)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observed, dict[str, Any]]:
        """Start an episode; ``seed`` names its scene. Raises InputError for options (there are none)."""
        super().reset(seed=seed)
        _refuse(options)
        self.table.reset([_draw_seed(self.np_random) if seed is None else seed])
        return self._observed(), _info(self.table)

    def step(self, action: np.ndarray) -> tuple[Observed, float, bool, bool, dict[str, Any]]:
        """One control step. Raises InputError for an action that is not two finite numbers."""
        was_done = bool(self.table.done[0])
        result = self.table.step(np.asarray(action)[None])
        reward = float(result.success[0] and not was_done)
        return (
            self._observed(),
            reward,
            bool(result.terminated[0]),
            bool(result.truncated[0]),
            _info(self.table),
        )

    def _observed(self) -> Observed:
        table = self.table
        return {"image": table.render()[0], "state": table.state[0], "instruction": table.instructions[0]}

    def render(self) -> np.ndarray:
        """uint8 256 256 3. Raises InputError unless made with render_mode="rgb_array"."""
        _refuse_render(self.render_mode)
        return self.table.render(PEOPLE_SIZE)[0]


class TabletopVectorEnv(gymnasium.vector.VectorEnv[Observed, np.ndarray, np.ndarray]):
    """``num_envs`` scenes on one Tabletop. Autoreset is Gymnasium's NEXT_STEP: the step after an episode's last one
    ignores its action, returns the first observation of a new episode and reward 0."""

    metadata: dict[str, Any] = {
        "render_modes": ["rgb_array"],
        "render_fps": int(RATE),
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self, env_id: str = "vola/Detour-v0", num_envs: int = 1, render_mode: str | None = None, **overrides: Any
    ) -> None:
        if num_envs < 1:
            raise InputError(f"num_envs: expected at least 1, got {num_envs}")
        self.table = make_tabletop(env_id, **overrides)
        self.num_envs = num_envs
        self.render_mode = _checked_mode(render_mode)
        self.single_observation_space = observation_space(self.table)
        self.single_action_space = action_space(self.table)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._generators = [seeding.np_random(None)[0] for _ in range(num_envs)]

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observed, dict[str, Any]]:
        """Start all episodes: an int ``seed`` gives seed, seed + 1, ...; a list gives one each (None: random).

        Raises:
            InputError: a list of the wrong length, or options (there are none).
        """
        _refuse(options)
        if seed is None or isinstance(seed, int):
            seeds = [None if seed is None else seed + i for i in range(self.num_envs)]
        else:
            seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise InputError(f"seed: expected {self.num_envs} seeds, got {len(seeds)}")
        scenes = []
        for i, s in enumerate(seeds):
            if s is not None:
                self._generators[i] = seeding.np_random(s)[0]
            scenes.append(_draw_seed(self._generators[i]) if s is None else s)
        self.table.reset(scenes)
        return self._observed(), self._info()

    def step(self, actions: np.ndarray) -> tuple[Observed, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One control step of every running episode; finished ones start anew.

        Raises:
            InputError: wrong shape, or numbers that are not finite for a running episode.
        """
        ended = self.table.done
        self.table.step(actions)
        rows = np.flatnonzero(ended)
        if len(rows):
            self.table.reset([_draw_seed(self._generators[i]) for i in rows], rows)
        table = self.table
        reward = table.success.astype(np.float64)  # a new episode has none yet
        return self._observed(), reward, table.terminated.copy(), table.truncated.copy(), self._info()

    def _observed(self) -> Observed:
        table = self.table
        return {"image": table.render(), "state": table.state, "instruction": table.instructions}

    def _info(self) -> dict[str, Any]:
        table = self.table
        columns: dict[str, np.ndarray] = {
            "seed": table.seeds.copy(),
            "start_hash": np.array([table.start_hash(i) for i in range(table.n)], object),
            "success": table.success.copy(),
            "failure": table.failure.astype(object),
        }
        # Gymnasium's form: beside every column a mask of the episodes that have it (here all).
        return columns | {f"_{name}": np.ones(table.n, bool) for name in columns}

    def render(self) -> tuple[np.ndarray, ...]:
        """One uint8 256 256 3 picture per episode. Raises InputError unless made with render_mode="rgb_array"."""
        _refuse_render(self.render_mode)
        return tuple(self.table.render(PEOPLE_SIZE))


def observation_space(table: Tabletop) -> spaces.Dict:
    """The Gymnasium space of one scene's observation."""
    size, limit = table.config.image_size, np.array(table.config.task.state_limit, np.float32)
    return spaces.Dict(
        {
            "image": spaces.Box(0, 255, (size, size, 3), np.uint8),
            "state": spaces.Box(-limit, limit, dtype=np.float32),
            "instruction": spaces.Text(64, min_length=1, charset=string.ascii_lowercase + " "),
        }
    )


def action_space(table: Tabletop) -> spaces.Box:
    """Displacement per axis (m), or a place (m) for "position" actions; the core shortens to the speed limit."""
    task = table.config.task
    most = 1.0 if task.action_kind == "position" else task.speed
    return spaces.Box(-most, most, (table.spec.action.size,), np.float32)


def _draw_seed(rng: np.random.Generator) -> int:
    return int(rng.integers(2**31))


def _info(table: Tabletop) -> dict[str, Any]:
    return {
        "seed": int(table.seeds[0]),
        "start_hash": table.start_hash(0),
        "success": bool(table.success[0]),
        "failure": str(table.failure[0]),
    }


def _checked_mode(render_mode: str | None) -> str | None:
    if render_mode not in (None, "rgb_array"):
        raise InputError(f'render_mode: expected None or "rgb_array", got {render_mode!r}')
    return render_mode


def _refuse(options: dict[str, Any] | None) -> None:
    if options:
        raise InputError(f"options: expected none, got {sorted(options)}. Settings are arguments of gymnasium.make.")


def _refuse_render(render_mode: str | None) -> None:
    if render_mode is None:
        raise InputError('render: expected an environment made with render_mode="rgb_array", got render_mode=None')
