"""System: every part of a run as one frozen value. It builds a policy, prints, saves as JSON and can be overridden.

A system never changes in place: ``system.override({"head.steps": 5})`` is another system with another fingerprint.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from vola.cite import Source
from vola.data.transforms import RelativeActions, Transforms
from vola.ensemble import Ensemble
from vola.errors import ConfigError, expect_positive
from vola.executor import Receding
from vola.fit import Fitted, NormaliserKind
from vola.heads.categorical import Autoregressive, Categorical
from vola.heads.cvae import Cvae
from vola.heads.diffusion import Diffusion
from vola.heads.fast import Fast
from vola.heads.flow import Flow
from vola.heads.pairing import Network, Rule, Sizes, build_head, check_known, check_pair, reach, reader
from vola.heads.regression import Regression
from vola.model.backbone import Backbone, BackboneConfig
from vola.model.decoders import CrossAttention, Detr
from vola.model.language import WordEmbedding
from vola.model.networks import ExpertNetwork
from vola.model.positions import Learned, NoPositions, Rotary, Sinusoidal
from vola.model.readout import ReadoutMLP
from vola.model.token_networks import TextTokens, TokenExpert
from vola.model.trunk import ExpertConfig, TrunkConfig
from vola.model.unet import Unet1d
from vola.model.vision import ConvStem, PatchViT
from vola.policy import Policy
from vola.realtime import RealTime
from vola.tokenizers.bins import QuantileBins, UniformBins
from vola.tokenizers.fast import FastConfig
from vola.types import ActionSpec, CameraSpec, RobotSpec, StateSpec


@dataclass(frozen=True)
class TrainConfig:
    """How weights are found. A step is one optimiser step on ``accumulate`` batches of ``batch`` samples.

    ``warmup`` steps rise linearly to ``lr``, then a cosine falls to ``final`` * lr at ``steps``. ``ema`` 0 turns the
    average of weights off; else the average is what is evaluated and saved as the policy. ``clip`` bounds the global
    gradient norm. ``stride`` starts training windows at every n-th frame only.
    """

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Loshchilov & Hutter 2019, Decoupled weight decay regularization",
            "algorithm 2",
            "decay on matrices only",
            "https://arxiv.org/abs/1711.05101",
        ),
    )
    steps: int = 3000
    batch: int = 64
    accumulate: int = 1
    lr: float = 3e-3
    warmup: int = 50
    final: float = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 1.0
    ema: float = 0.99
    precision: Literal["fp32", "bf16"] = "fp32"
    stride: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = {"steps": self.steps, "batch": self.batch, "accumulate": self.accumulate, "stride": self.stride}
        expect_positive("train", **sizes)
        ranges = {"ema": (0, 1), "lr": (0, math.inf), "weight_decay": (0, math.inf), "final": (0, math.inf)}
        for name, (low, high) in ranges.items():
            if not low <= getattr(self, name) < high:
                raise ConfigError(f"train: expected {low} <= {name} < {high}, got {getattr(self, name)}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"train: expected two betas in [0, 1), got {self.betas}")
        if not self.clip > 0 or self.warmup < 0 or not 0 <= self.seed < 2**63:
            raise ConfigError(
                f"train: expected clip > 0, warmup >= 0, 0 <= seed < 2^63, got {self.clip}, {self.warmup}, {self.seed}"
            )


@dataclass(frozen=True)
class System:
    """All settings of a run. ``name`` is what reports call it.

    T observation window, H chunk length; ``image_size`` rows, columns the model sees; ``normalise_*`` how numbers are
    scaled; ``transforms`` between dataset actions and normalised ones; ``execute`` how chunks become actions.
    """

    name: str
    robot: RobotSpec
    image_size: tuple[int, int]
    T: int
    H: int
    trunk: TrunkConfig
    backbone: BackboneConfig
    network: Network
    head: Rule
    normalise_state: NormaliserKind = "mean_std"
    normalise_actions: NormaliserKind = "mean_std"
    transforms: Transforms = field(default_factory=Transforms)
    execute: Receding | Ensemble | RealTime = field(default_factory=Receding)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ConfigError(f"system: expected a name, got {self.name!r}")
        expect_positive("system", T=self.T, H=self.H, image_size=min(self.image_size))
        check_known(self.head, self.network)
        check_pair(self.head, self.network, self.sizes)
        if self.normalise_actions == "mean_std" and reach(self.head) <= 1:
            raise ConfigError(
                f"system: {type(self.head).__name__} covers [-1, 1] and clips the rest, and "
                "normalise_actions='mean_std' does not keep actions there. Use 'min_max' (nothing is clipped) or "
                "'quantile' (the outer 2 % are)."
            )
        if isinstance(self.execute, RealTime):
            check_guidance(self.head, self.execute)
        self.execute.start(1, self.H, self.robot.action.size)

    @property
    def sizes(self) -> Sizes:
        """What head and network have to fit."""
        return Sizes(self.trunk, self.backbone.expert.width, self.H, self.robot.action.size, self.robot.state.size)

    def build(self, fitted: Fitted) -> Policy:
        """A fresh policy. Weights depend on ``train.seed`` alone; torch's global generator is left as it was.

        Raises:
            ConfigError: statistics were fitted for other transforms or another robot, or the head clips actions that
                the training data hold.
        """
        fitted.check(self.robot, self.transforms)
        largest = fitted.normaliser("action", self.normalise_actions).largest().max()
        if self.normalise_actions in ("mean_std", "identity") and largest > reach(self.head) * (1 + 1e-6):
            raise ConfigError(
                f"system: {type(self.head).__name__} holds normalised actions within {reach(self.head):g}, and the "
                f"training data reach {largest:.3g} under normalise_actions={self.normalise_actions!r}. Use 'min_max', "
                "or raise the head's clip."
            )
        S, cameras = self.robot.state.size, tuple(c.name for c in self.robot.cameras)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.train.seed)
            vocabulary = len(fitted.tokenizer.words)
            wanted = reader(self.head, self.network, self.sizes, fitted.action_tokenizer)
            backbone = Backbone(self.backbone, self.trunk, cameras, self.image_size, S, self.T, vocabulary, wanted)
            head = build_head(self.head, self.network, self.sizes, fitted.action_tokenizer)
        for i, camera in enumerate(cameras):
            mean, std = fitted.pixels[camera]
            backbone.image_mean[i] = torch.tensor(mean)
            backbone.image_std[i] = torch.tensor(std)
        return Policy(
            self.robot,
            self.image_size,
            self.T,
            self.H,
            self.transforms,
            fitted.normaliser("state", self.normalise_state),
            fitted.normaliser("action", self.normalise_actions),
            fitted.tokenizer,
            backbone,
            head,
        )

    def override(self, changes: Mapping[str, Any]) -> System:
        """Another system with some settings changed, named by dotted paths: ``{"train.steps": 500, "H": 32}``.

        Raises:
            ConfigError: no such setting (with the nearest name), or a value of another type.
        """
        return _override(self, {tuple(path.split(".")): value for path, value in changes.items()}, "")

    def to_json(self) -> str:
        """Readable JSON; every part carries its class name under "part"."""
        return json.dumps(_encode(self), indent=2)

    @staticmethod
    def from_json(text: str) -> System:
        """Raises ConfigError on an unknown part or setting."""
        system = _decode(json.loads(text))
        if not isinstance(system, System):
            raise ConfigError(f"system.json: expected a System, got {type(system).__name__}")
        return system

    def fingerprint(self) -> str:
        """Twelve hex digits that change when any setting changes."""
        return hashlib.sha256(json.dumps(_encode(self)).encode()).hexdigest()[:12]


def check_guidance(rule: Rule, execute: RealTime) -> None:
    """Raises ConfigError when a head cannot follow the guide that real-time chunking hands it."""
    if not isinstance(rule, Flow):
        raise ConfigError(
            f"system: RealTime guides a flow-matching head while it samples, got {type(rule).__name__}. Execute with "
            "Receding or Ensemble."
        )
    if execute.method == "prefix" and rule.prefix < execute.delay:
        raise ConfigError(
            f"system: RealTime(method='prefix', delay={execute.delay}) needs a head trained with head.prefix >= "
            f"{execute.delay}, got {rule.prefix}"
        )


# Everything that may stand in a system.json. A closed list: a file cannot name any other class.
PARTS = {
    c.__name__: c
    for c in (
        *(System, TrainConfig, RobotSpec, CameraSpec, StateSpec, ActionSpec, TrunkConfig, ExpertConfig, BackboneConfig),
        *(ConvStem, PatchViT, WordEmbedding, Transforms, RelativeActions, Receding, Ensemble, RealTime),
        *(Flow, Diffusion, Cvae, Regression, Categorical, Autoregressive, Fast, UniformBins, QuantileBins, FastConfig),
        *(ExpertNetwork, ReadoutMLP, CrossAttention, Unet1d, Detr, TokenExpert, TextTokens),
        *(Rotary, Sinusoidal, Learned, NoPositions),
    )
}


def _encode(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {"part": type(value).__name__} | {f.name: _encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_encode(v) for v in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decode(v) for v in value)
    if not isinstance(value, dict):
        return value
    name = value.get("part")
    if not isinstance(name, str) or name not in PARTS:
        raise ConfigError(f"system.json: expected one of the parts {sorted(PARTS)}, got {name!r}")
    settings = {k: _decode(v) for k, v in value.items() if k != "part"}
    names = {f.name for f in fields(PARTS[name])}
    if set(settings) != names:
        raise ConfigError(
            f"system.json: {name}: missing {sorted(names - set(settings))}, unknown {sorted(set(settings) - names)}. "
            "It was written by another version; see CHANGELOG."
        )
    hints = typing.get_type_hints(PARTS[name])
    return PARTS[name](**{k: _fit(v, hints[k], f"{name}.{k}") for k, v in settings.items()})


def _override(part: Any, changes: Mapping[tuple[str, ...], Any], above: str) -> Any:
    """``part`` with all changes at once, so that settings which only fit together can change together."""
    names = [f.name for f in fields(part)]
    hints = typing.get_type_hints(type(part))
    new: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in changes):
        whole = f"{above}{name}"
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            deeper = [f"{n}.{name}" for n in names if hasattr(getattr(part, n), name)]
            close = deeper[:1] or close
            hint = f" Did you mean {above + close[0]!r}?" if close else ""
            raise ConfigError(f"setting {whole!r}: {type(part).__name__} has no {name!r}; it has {names}.{hint}")
        value = getattr(part, name)
        if (name,) in changes:
            value = _fit(changes[name,], hints[name], whole)
        inner = {path[1:]: v for path, v in changes.items() if path[0] == name and len(path) > 1}
        if inner and not is_dataclass(value):
            raise ConfigError(f"setting {whole!r}: it is {value!r} and has no settings of its own")
        new[name] = _override(value, inner, f"{whole}.") if inner else value
    return replace(part, **new)


def _fit(value: Any, wanted: Any, whole: str) -> Any:
    """The value as the annotated type, or ConfigError: integers widen to floats, lists become tuples."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Literal:
        if value in arguments:
            return value
        raise ConfigError(f"setting {whole!r}: expected one of {list(arguments)}, got {value!r}")
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is tuple and isinstance(value, list | tuple) and arguments[-1] is Ellipsis:
        return tuple(_fit(v, arguments[0], whole) for v in value)
    if origin is tuple and isinstance(value, list | tuple) and len(value) == len(arguments):
        return tuple(_fit(v, kind, whole) for v, kind in zip(value, arguments, strict=True))
    if origin is tuple:
        raise ConfigError(f"setting {whole!r}: expected a list such as [64, 64], of {len(arguments)}, got {value!r}")
    allowed = arguments if origin in (typing.Union, types.UnionType) else (wanted,)
    plain = tuple(a for a in allowed if isinstance(a, type))
    if isinstance(value, str) and PARTS.get(value) in plain:
        return _default(PARTS[value], whole)
    if isinstance(value, plain) and not (isinstance(value, bool) and bool not in plain):
        return value
    shown = " or ".join(getattr(a, "__name__", str(a)) for a in allowed)
    raise ConfigError(f"setting {whole!r}: expected {shown}, got {value!r} ({type(value).__name__})")


def _default(part: Any, whole: str) -> Any:
    """A part named by its class name alone, as on the command line."""
    needed = [
        f.name for f in fields(part) if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if needed:
        raise ConfigError(
            f"setting {whole!r}: {part.__name__} needs {needed}; give it in Python: "
            f"system.override({{{whole!r}: {part.__name__}(...)}})"
        )
    return part()


def describe(system: System) -> str:
    """The settings, one line each, indented by part."""
    lines: list[str] = []

    def walk(value: Any, name: str, depth: int) -> None:
        pad = "  " * depth
        if is_dataclass(value) and not isinstance(value, type):
            lines.append(f"{pad}{name}: {type(value).__name__}")
            for f in dataclasses.fields(value):
                walk(getattr(value, f.name), f.name, depth + 1)
        else:
            lines.append(f"{pad}{name} = {value!r}")

    walk(system, system.name, 0)
    return "\n".join(lines)
