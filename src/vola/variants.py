"""Every action head on the backbone of one system: the same prefix, another rule or network.

    vola train vola/Detour-v0 --system pi0 --head bins      (names: HEADS; `vola show heads` lists them)

The sizes are those of the small systems. Networks depart from the papers' own on purpose: here only the head differs.
"""

from __future__ import annotations

from vola.errors import ConfigError
from vola.heads.categorical import Autoregressive, Categorical
from vola.heads.cvae import Cvae
from vola.heads.diffusion import Diffusion
from vola.heads.fast import Fast
from vola.heads.flow import Flow
from vola.heads.pairing import Network, Rule, reach
from vola.heads.regression import Regression
from vola.model.decoders import CrossAttention, Detr
from vola.model.networks import ExpertNetwork
from vola.model.readout import ReadoutMLP
from vola.model.token_networks import TextTokens, TokenExpert
from vola.model.trunk import ExpertConfig
from vola.model.unet import Unet1d
from vola.system import System
from vola.tokenizers.bins import UniformBins
from vola.tokenizers.fast import FastConfig

# The published tokenizer (scale 10, 1024 tokens, merges over bytes) needs more data than a few thousand demonstrations:
# there hardly any sequence a small model writes decodes. Coarse coefficients and few merges learn (`vola lab modes`).
SMALL_FAST = FastConfig(scale=5.0, vocabulary=64, pieces="whole", on_malformed="repair")
HEADS: dict[str, str] = {
    "l2": "one answer, the mean",
    "l1": "one answer, the median",
    "l1-mlp": "the same on a readout token and an MLP (OpenVLA-OFT's head)",
    "bins-parallel": "64 bins per number, all at once (RT-1)",
    "bins": "64 bins per number, one after the other",
    "bins-text": "the same as words of the text vocabulary (RT-2, OpenVLA)",
    "fast": "FAST tokens, one after the other (pi0-FAST)",
    "cvae": "a latent says which chunk is meant, drawn from the prior",
    "cvae-detr": "the same on a DETR-style decoder, at z = 0 (ACT)",
    "diffusion": "denoising, 10 DDIM steps",
    "diffusion-mlp": "the same on a readout token and an MLP (Octo)",
    "diffusion-unet": "the same on a 1-D UNet (Diffusion Policy)",
    "flow": "flow matching, 10 Euler steps (pi0)",
    "flow-cross": "the same on a decoder that reads the prefix's outputs",
}


def with_head(system: System, name: str) -> System:
    """``system`` with another head; its name gets the head's. Heads that are bounded scale actions by min and max.

    Raises:
        ConfigError: no such head, or a chunk length that its network cannot have.
    """
    expert = system.network.expert if isinstance(system.network, ExpertNetwork) else system.backbone.expert
    if name not in HEADS:
        raise ConfigError(f"head: expected one of {list(HEADS)}, got {name!r}")
    rule, network = _pair(name, expert)
    changes: dict[str, object] = {"name": f"{system.name}-{name}", "head": rule, "network": network}
    if reach(rule) <= 1:
        changes["normalise_actions"] = "min_max"
    return system.override(changes)


def _pair(name: str, expert: ExpertConfig) -> tuple[Rule, Network]:
    silent, timed, writer = ExpertNetwork(expert, "none"), ExpertNetwork(expert, "concat"), TokenExpert(expert)
    width = expert.width
    mlp = ReadoutMLP(width=2 * width, readouts=4)
    # A KL weight of 0.001 leaves 12 nats in the latent, unknown to the prior; 0.03 leaves the one bit of a side.
    cvae = Cvae(latent=4, weight=0.03, encoder=ExpertConfig(width, 2 * width, norm="layer"), depth=2, heads=2)
    pairs: dict[str, tuple[Rule, Network]] = {
        "l2": (Regression("l2"), silent),
        "l1": (Regression("l1"), silent),
        "l1-mlp": (Regression("l1"), mlp),
        "bins-parallel": (Categorical(UniformBins(64)), silent),
        "bins": (Autoregressive(UniformBins(64)), writer),
        "bins-text": (Autoregressive(UniformBins(64)), TextTokens()),
        "fast": (Fast(SMALL_FAST), writer),
        "cvae": (Cvae(cvae.latent, cvae.weight, draw="prior", encoder=cvae.encoder, depth=2, heads=2), silent),
        "cvae-detr": (cvae, Detr(width=width, hidden=2 * width, heads=2, encoder=1, decoder=1)),
        "diffusion": (Diffusion(), timed),
        "diffusion-mlp": (Diffusion(), mlp),
        "diffusion-unet": (
            Diffusion(),
            Unet1d(channels=(width // 2, width, 2 * width), readouts=4, groups=4, final_groups=4, step_width=width),
        ),
        "flow": (Flow(), timed),
        "flow-cross": (Flow(), CrossAttention(width=width, hidden=2 * width, heads=2, layers=2)),
    }
    return pairs[name]
