"""DAgger in training: data grow by rounds, an interrupted run goes on exactly, statistics stay."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tools import dataset
from vola import checkpoint
from vola.dagger import DAGGER_SEED, Dagger, train_with_dagger
from vola.data.joined import JoinedDataset
from vola.data.lerobot import open_lerobot
from vola.envs.tabletop import make_tabletop
from vola.errors import ConfigError, DataError
from vola.systems import regression
from vola.train.loop import Schedule
from vola.workflow import collect, prepare

ENV = "vola/Detour-v0"
QUIET = Schedule(progress="none")


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dagger") / "demos"
    collect(ENV, folder, 8)
    return folder


def ready(demos: Path, steps: int = 6):
    made = regression.tiny(make_tabletop(ENV).spec).override({"train.steps": steps, "image_size": (16, 16)})
    return prepare(open_lerobot(demos), made, 0.25)


def test_rounds_are_collected_and_trained_on(demos: Path, tmp_path: Path) -> None:
    result = train_with_dagger(tmp_path / "run", ready(demos), Dagger(ENV, rounds=2, episodes=3), schedule=QUIET)
    assert result.step == 6
    rounds = json.loads((tmp_path / "run" / "dagger" / "rounds.json").read_text())
    assert [rounds[r]["first_seed"] for r in "12"] == [DAGGER_SEED, DAGGER_SEED + 3]
    for r in "12":
        collected = open_lerobot(tmp_path / "run" / "dagger" / r)
        assert len(collected.episodes) == 3
        assert sum(e.length for e in collected.episodes) == rounds[r]["frames"]
    # What is normalised and said keeps its meaning: statistics are those of the demonstrations.
    assert checkpoint.load(tmp_path / "run").fitted.to_json() == ready(demos).fitted.to_json()


def test_an_interrupted_run_goes_on_to_the_same_weights(demos: Path, tmp_path: Path) -> None:
    plan = Dagger(ENV, rounds=2, episodes=3)
    whole = train_with_dagger(tmp_path / "whole", ready(demos), plan, schedule=QUIET)
    broken = tmp_path / "broken"

    class StopError(Exception):
        pass

    def stop(*_: object) -> list[dict[str, object]]:
        if (broken / "dagger" / "1").exists():
            raise StopError
        return []

    with pytest.raises(StopError):
        train_with_dagger(broken, ready(demos), plan, stop, replace(QUIET, evaluate=1))
    (broken / "dagger" / ".2").mkdir()
    (broken / "dagger" / ".2" / "half").write_text("")  # a round that was broken off
    (broken / "dagger" / "2").mkdir()  # one whose record was not written any more
    again = train_with_dagger(broken, ready(demos), plan, schedule=QUIET, resume=True)
    for one, two in zip(whole.policy.state_dict().values(), again.policy.state_dict().values(), strict=True):
        assert torch.equal(one, two)


def test_joined_datasets_keep_their_parts_apart() -> None:
    first, second = dataset((7, 5)), dataset((4, 6, 3), seed=1)
    joined = JoinedDataset((first, second))
    assert [(e.index, e.length) for e in joined.episodes] == [(0, 7), (1, 5), (2, 4), (3, 6), (4, 3)]
    np.testing.assert_array_equal(joined.column("state", 3), second.column("state", 1))
    np.testing.assert_array_equal(joined.frames("top", 1, [2, 0]), first.frames("top", 1, [2, 0]))
    assert joined.fingerprint() != JoinedDataset((second, first)).fingerprint()
    with pytest.raises(DataError, match="expected one of the 5 episodes"):
        joined.column("state", 9)
    other = replace(first, fps=first.fps + 1)
    with pytest.raises(ConfigError, match="spec and rate of part 0"):
        JoinedDataset((first, other))


def test_dagger_settings() -> None:
    with pytest.raises(ConfigError, match="rounds"):
        Dagger(ENV, rounds=0)
