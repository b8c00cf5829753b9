"""Rule x network: which pairs make sense, and how a pair is built.

A pair that makes no sense is refused when a system is constructed, before any weight exists, with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias, get_args

from torch import nn

from vola.errors import ConfigError
from vola.heads.base import Head
from vola.heads.categorical import Autoregressive, AutoregressiveHead, Categorical, CategoricalHead
from vola.heads.cvae import Cvae, CvaeHead
from vola.heads.diffusion import Diffusion, DiffusionHead
from vola.heads.fast import Fast, FastHead
from vola.heads.flow import Flow, FlowHead
from vola.heads.regression import Regression, RegressionHead
from vola.model.backbone import Reader
from vola.model.decoders import CrossAttention, CrossAttentionDecoder, Detr, DetrDecoder
from vola.model.networks import ExpertInTrunk, ExpertNetwork, Ports
from vola.model.readout import ReadoutMLP, ReadoutNetwork
from vola.model.token_networks import TextTokens, TokenExpert, TokenNetwork, TokenPorts, TokensAsWords, TokensInTrunk
from vola.model.trunk import TrunkConfig
from vola.model.unet import ConditionalUnet1d, Unet1d
from vola.tokenizers.actions import ActionTokenizer
from vola.tokenizers.bins import QuantileBins, UniformBins
from vola.tokenizers.fast import FastConfig

Rule: TypeAlias = Flow | Diffusion | Cvae | Regression | Categorical | Autoregressive | Fast
ChunkNetwork: TypeAlias = ExpertNetwork | ReadoutMLP | CrossAttention | Unet1d | Detr
TokenWriter: TypeAlias = TokenExpert | TextTokens
Network: TypeAlias = ChunkNetwork | TokenWriter


@dataclass(frozen=True)
class Sizes:
    """What rule and network have to fit: shared trunk, prefix width D, chunk H x A, state S."""

    trunk: TrunkConfig
    width: int
    H: int
    A: int
    S: int


def tokenizer_config(rule: Rule) -> UniformBins | QuantileBins | FastConfig | None:
    """The action tokenizer that a rule wants fitted; None for continuous rules."""
    match rule:
        case Categorical() | Autoregressive():
            return rule.bins
        case Fast():
            return rule.tokens
    return None


def sampling_settings(rule: Rule) -> tuple[str, ...]:
    """The settings of a rule that only say how chunks are drawn, so that they may change after training."""
    match rule:
        case Flow():
            names: tuple[str, ...] = ("steps", "solver")
        case Diffusion():
            names = ("steps", "sampler", "eta", "variance", "spacing", "clip", "limit")
        case Cvae():
            names = ("draw",)
        case Categorical() | Autoregressive() | Fast():
            names = ("pick", "temperature")
        case _:
            names = ()
    return tuple(f"head.{name}" for name in names)


def reach(rule: Rule) -> float:
    """The largest normalised action that a rule can express; infinite where nothing is clipped."""
    if isinstance(rule, Diffusion):
        return min((x for x in (rule.clip, rule.limit) if x > 0), default=math.inf)
    return 1.0 if isinstance(tokenizer_config(rule), UniformBins | FastConfig) else math.inf


def ports(rule: Rule, sizes: Sizes, K: int = 2) -> Ports:
    """What a rule that asks for a whole chunk at once plugs into a network; K classes per number where it has any."""
    common = (sizes.trunk, sizes.width, sizes.H, sizes.A)
    match rule:
        case Flow():
            return Ports(*common, out=sizes.A, time=True, per_step_time=rule.prefix > 0, noise=True)
        case Diffusion():
            return Ports(*common, out=sizes.A, time=True, noise=True)
        case Cvae():
            return Ports(*common, out=sizes.A, latent=rule.latent)
        case Categorical():
            return Ports(*common, out=sizes.A * K)
    return Ports(*common, out=sizes.A)


def check_known(rule: object, network: object) -> None:
    """Raises ConfigError for a rule or network that is not the library's own: nothing here would build it."""
    for what, value, known in (("head", rule, get_args(Rule)), ("network", network, get_args(Network))):
        if type(value) not in known:
            raise ConfigError(
                f"{what}: expected one of {sorted(c.__name__ for c in known)}, got {type(value).__name__}. A new one "
                "needs its branch in heads/pairing.py and its name in system.PARTS (ARCHITECTURE.md, Extending)."
            )


def check_pair(rule: Rule, network: Network, sizes: Sizes) -> None:
    """Raises ConfigError with the reason when this rule cannot work with this network."""
    if isinstance(rule, Flow) and rule.prefix >= sizes.H:
        raise ConfigError(f"head: expected prefix < H = {sizes.H}, got {rule.prefix}. Predict more or freeze less.")
    writes, chunked = isinstance(rule, Autoregressive | Fast), not isinstance(network, TokenExpert | TextTokens)
    if writes and chunked:
        raise ConfigError(
            f"head: {type(rule).__name__} writes tokens one after the other and needs a network that scores them "
            f"(TokenExpert or TextTokens), got {type(network).__name__}. For bins in one pass use Categorical."
        )
    if not writes and not chunked:
        raise ConfigError(
            f"head: {type(network).__name__} writes tokens, {type(rule).__name__} wants a whole chunk per pass. Use "
            "Autoregressive or Fast with it, or another network."
        )
    if not isinstance(network, TokenExpert | TextTokens):
        network.check(ports(rule, sizes))


def reader(rule: Rule, network: Network, sizes: Sizes, tokenizer: ActionTokenizer | None) -> Reader:
    """What the pair wants of the prefix. Raises ConfigError when a token rule's tokenizer was not fitted."""
    if tokenizer_config(rule) is not None and tokenizer is None:
        raise ConfigError(
            f"head: {type(rule).__name__} needs a fitted action tokenizer and the statistics hold none. Fit with "
            "tokens=tokenizer_config(system.head)."
        )
    if isinstance(network, TokenExpert | TextTokens):
        assert tokenizer is not None  # check_pair: only token rules come with such a network
        return network.reader(tokenizer.longest(sizes.H, sizes.A), tokenizer.vocabulary)
    return network.reader(sizes.H)


def build_head(rule: Rule, network: Network, sizes: Sizes, tokenizer: ActionTokenizer | None) -> Head:
    """A head with fresh weights, drawn by torch's current generator.

    Raises:
        ConfigError: what ``check_pair`` and ``reader`` refuse.
    """
    check_pair(rule, network, sizes)
    H, A = sizes.H, sizes.A
    if isinstance(network, TokenExpert | TextTokens):
        length, K = reader(rule, network, sizes, tokenizer).action, tokenizer.vocabulary if tokenizer else 0
        token_ports = TokenPorts(sizes.trunk, sizes.width, length, K)
        writer: TokenNetwork
        if isinstance(network, TokenExpert):
            writer = TokensInTrunk(network, token_ports)
        else:
            writer = TokensAsWords(network, token_ports)
        if isinstance(rule, Fast) and tokenizer is not None:
            return FastHead(rule, writer, H, A, tokenizer)
        if isinstance(rule, Autoregressive) and tokenizer is not None:
            return AutoregressiveHead(rule, writer, H, A, tokenizer)
        raise ConfigError(f"head: {type(rule).__name__} needs a fitted action tokenizer")
    made = build_network(network, ports(rule, sizes, tokenizer.vocabulary if tokenizer else 2))
    match rule:
        case Flow():
            return FlowHead(rule, made, H, A)
        case Diffusion():
            return DiffusionHead(rule, made, H, A)
        case Cvae():
            return CvaeHead(rule, made, H, A, sizes.S)
        case Regression():
            return RegressionHead(rule, made, H, A)
        case Categorical() if tokenizer is not None:
            return CategoricalHead(rule, made, H, A, tokenizer)
    raise ConfigError(f"head: {type(rule).__name__} needs a fitted action tokenizer")


def build_network(config: ChunkNetwork, plugs: Ports) -> nn.Module:
    """The module of a network's settings."""
    match config:
        case ExpertNetwork():
            return ExpertInTrunk(config, plugs)
        case ReadoutMLP():
            return ReadoutNetwork(config, plugs)
        case CrossAttention():
            return CrossAttentionDecoder(config, plugs)
        case Unet1d():
            return ConditionalUnet1d(config, plugs)
        case Detr():
            return DetrDecoder(config, plugs)
