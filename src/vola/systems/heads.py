"""Every action head on the backbone of one system: the same prefix, another rule or network.

Command   vola train vola/Detour-v0 --system pi0 --head bins   (names: HEADS; `vola lab heads` compares them all)
Departs   From the papers' own networks, on purpose: here only the head differs. The papers' systems stand beside this.
"""

from __future__ import annotations

from vola.errors import ConfigError
from vola.heads.categorical import Autoregressive, Categorical
from vola.heads.fast import Fast
from vola.heads.flow import Flow
from vola.heads.pairing import Network, Rule
from vola.heads.regression import Regression
from vola.model.networks import ExpertNetwork
from vola.model.token_networks import TextTokens, TokenExpert
from vola.system import System
from vola.tokenizers.bins import UniformBins

HEADS = ("l2", "l1", "bins-parallel", "bins", "bins-text", "fast", "flow")


def with_head(system: System, name: str) -> System:
    """``system`` with another head; its name gets the head's. Heads that quantise scale actions by min and max.

    Raises:
        ConfigError: no such head.
    """
    expert = system.network.expert if isinstance(system.network, ExpertNetwork) else system.backbone.expert
    silent, timed, writer = ExpertNetwork(expert, "none"), ExpertNetwork(expert, "concat"), TokenExpert(expert)
    pairs: dict[str, tuple[Rule, Network]] = {
        "l2": (Regression("l2"), silent),
        "l1": (Regression("l1"), silent),
        "bins-parallel": (Categorical(UniformBins(64)), silent),
        "bins": (Autoregressive(UniformBins(64)), writer),
        "bins-text": (Autoregressive(UniformBins(64)), TextTokens()),
        "fast": (Fast(), writer),
        "flow": (Flow(), timed),
    }
    if name not in pairs:
        raise ConfigError(f"head: expected one of {sorted(pairs)}, got {name!r}")
    rule, network = pairs[name]
    changes: dict[str, object] = {"name": f"{system.name}-{name}", "head": rule, "network": network}
    if isinstance(rule, Categorical | Autoregressive | Fast):
        changes["normalise_actions"] = "min_max"
    return system.override(changes)
