import json
from dataclasses import replace

import pytest
import torch

from tools import SPEC, fitted, system
from vola.data.transforms import RelativeActions, Transforms
from vola.errors import ConfigError
from vola.heads.flow import Flow
from vola.heads.regression import Regression
from vola.model.positions import Rotary
from vola.model.trunk import ExpertConfig, TrunkConfig
from vola.model.vision import PatchViT
from vola.system import System, describe
from vola.systems import pi0, regression

MADE = [
    pi0.small(SPEC),
    pi0.tiny(SPEC),
    regression.small(SPEC),
    system(trunk__positions=Rotary(500.0), backbone__vision=PatchViT(4, 1, 2, True)),
    replace(system(), transforms=Transforms((RelativeActions(((0, 1),)),))),
]


@pytest.mark.parametrize("made", MADE, ids=lambda s: s.name)
def test_json_round_trip_is_exact(made: System) -> None:
    again = System.from_json(made.to_json())
    assert again == made
    assert again.fingerprint() == made.fingerprint()


def test_fingerprint_changes_with_every_setting() -> None:
    base, seen = system(), {system().fingerprint()}
    changes = [
        {"H": 3}, {"T": 2}, {"head.steps": 4}, {"head.time": "beta"}, {"train.lr": 1e-4}, {"train.seed": 1},
        {"execute.k": 1}, {"normalise_actions": "quantile"}, {"trunk.depth": 1}, {"backbone.vision.film": False},
        {"image_size": (16, 16)}, {"train.betas": (0.9, 0.99)}, {"name": "x"},
        {"transforms": Transforms((RelativeActions(((0, 0),)),))},
    ]  # fmt: skip
    for change in changes:
        seen.add(base.override(change).fingerprint())
    assert len(seen) == len(changes) + 1


def test_override_reports_the_nearest_name_and_the_type() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'train.steps'"):
        system().override({"train.stpes": 3})
    with pytest.raises(ConfigError, match="expected int, got 'many'"):
        system().override({"train.steps": "many"})
    with pytest.raises(ConfigError, match="expected int, got True"):
        system().override({"H": True})
    with pytest.raises(ConfigError, match=r"one of \['uniform', 'beta'\]"):
        system().override({"head.time": "gauss"})
    with pytest.raises(ConfigError, match="no settings of its own"):
        system().override({"H.x": 1})
    assert system().override({"train.lr": 1}).train.lr == 1.0
    assert system().override({"image_size": [16, 16]}).image_size == (16, 16)


def test_parts_can_be_named() -> None:
    assert system().override({"trunk.positions": "Rotary"}).trunk.positions == Rotary()
    assert system().override({"head": "Regression", "network.time": "none"}).head == Regression()
    with pytest.raises(ConfigError, match=r"Learned needs \['length'\]"):
        system().override({"trunk.positions": "Learned"})
    with pytest.raises(ConfigError, match="expected .*Rotary.*got 'Spline'"):
        system().override({"trunk.positions": "Spline"})
    with pytest.raises(ConfigError, match="expected .* got 'System'"):
        system().override({"trunk.positions": "System"})
    with pytest.raises(ConfigError, match=r"a list such as \[64, 64\]"):
        system().override({"image_size": "64,64"})
    with pytest.raises(ConfigError, match="Did you mean"):
        system().override({"steps": 5})


def test_settings_that_only_fit_together_change_together() -> None:
    both = system().override({"head": Regression(), "network.time": "none"})
    assert isinstance(both.head, Regression)
    with pytest.raises(ConfigError, match="has a flow time"):
        both.override({"head": Flow()})
    with pytest.raises(ConfigError, match="k <= H"):
        system().override({"H": 1})


def test_contradictions_are_refused_at_construction() -> None:
    with pytest.raises(ConfigError, match="divisible by kv_heads"):
        TrunkConfig(2, 3, 2, 4, Rotary())
    with pytest.raises(ConfigError, match="even head_dim"):
        TrunkConfig(2, 2, 2, 3, Rotary())
    with pytest.raises(ConfigError, match="go together"):
        system(network__expert=ExpertConfig(8, 8, norm="adaptive_rms", condition=8))
    odd = system(image_size=(10, 8))
    with pytest.raises(ConfigError, match="divisible by 8"):
        odd.build(fitted(odd))
    with pytest.raises(ConfigError, match="steps >= 1"):
        Flow(steps=0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("trunk.depth", 0), ("trunk.heads", 0), ("trunk.kv_heads", 0), ("trunk.head_dim", -4),
        ("train.lr", float("nan")),
        ("train.lr", -1.0), ("train.betas", [1, 1]), ("train.betas", [0.9]), ("train.betas", ["a", 0.9]),
        ("train.seed", 10**23), ("train.weight_decay", float("nan")), ("train.clip", 0.0), ("train.ema", 1.0),
        ("image_size", [8]), ("image_size", [0, 0]), ("image_size", ["a", 8]), ("image_size", [8.0, 8.0]), ("H", 0),
        ("backbone.vision.patch", 0), ("backbone.vision.channels", 0), ("trunk.positions.length", -1),
        ("backbone.expert.width", 0), ("backbone.language.width", 0), ("train.batch", 0), ("train.stride", 0),
    ],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused_by_name(path: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"expected[^,]*.*{path.split('.')[-1].rstrip('s')}|{path}"):
        system().override({path: value})


def test_N04_statistics_of_another_action_representation_are_refused() -> None:
    relative = replace(system(), transforms=Transforms((RelativeActions(((0, 0),)),)))
    with pytest.raises(ConfigError, match="representation"):
        relative.build(fitted(system()))


def test_build_is_a_function_of_the_seed_and_touches_no_global_state() -> None:
    made = system()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two = made.build(fitted(made)), made.build(fitted(made))
    assert torch.equal(before, torch.get_rng_state())
    other = made.override({"train.seed": 1}).build(fitted(made))
    for (name, p), q, r in zip(one.named_parameters(), two.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        if p.ndim >= 2 and "leave" not in name:
            assert not torch.equal(p, r)


def test_a_file_cannot_name_any_class() -> None:
    text = system().to_json()
    data = json.loads(text)
    data["head"] = {"part": "Popen", "args": "ls"}
    with pytest.raises(ConfigError, match="expected one of the parts"):
        System.from_json(json.dumps(data))
    data = json.loads(text)
    del data["head"]["steps"]
    with pytest.raises(ConfigError, match=r"missing \['steps'\]"):
        System.from_json(json.dumps(data))


def test_describe_names_every_part() -> None:
    text = describe(pi0.small(SPEC))
    for word in ("ConvStem", "Flow", "Receding", "train", "steps = 3600", "head_dim = 16"):
        assert word in text
