"""pi0: one transformer, two experts; a flow-matching head reads images, words and state through shared attention.

Source    Black et al. 2024, "pi0: A Vision-Language-Action Flow Model for General Robot Control" (arXiv 2410.24164).
Command   vola demo   (or: vola train vola/Detour-v0 --system pi0 --set train.steps=4000 train.stride=4)
Expected  98 % [95, 99] of 200 held-out start states of vola/Detour-v0 at k = 4, 4 to 5 minutes on one CPU core.
Departs   The prefix is trained from scratch and is a small convolutional stem with early FiLM instead of PaliGemma; the
          state token uses the prefix expert's weights and can therefore be cached with it; positions are learned;
          LayerNorm instead of RMSNorm (its CPU kernel is fused: a training step is a tenth faster).
"""

from __future__ import annotations

from vola.heads.flow import Flow
from vola.model.backbone import BackboneConfig
from vola.model.language import WordEmbedding
from vola.model.networks import ExpertNetwork
from vola.model.positions import Learned
from vola.model.trunk import ExpertConfig, TrunkConfig
from vola.model.vision import ConvStem
from vola.system import System, TrainConfig
from vola.types import RobotSpec


def small(robot: RobotSpec) -> System:
    """Trains on a built-in task in minutes on one CPU core: 0.8 M weights, most of them in the stem's flatten layer."""
    expert = ExpertConfig(width=64, hidden=128, norm="layer")
    return System(
        name="pi0",
        robot=robot,
        image_size=(48, 48),
        T=1,
        H=16,
        trunk=TrunkConfig(depth=2, heads=4, kv_heads=4, head_dim=16, positions=Learned(512)),
        backbone=BackboneConfig(vision=ConvStem(), language=WordEmbedding(64), expert=expert),
        network=ExpertNetwork(expert, time="concat"),
        head=Flow(steps=10, time="uniform"),
        train=TrainConfig(steps=3600),
    )


def tiny(robot: RobotSpec) -> System:
    """Every part at size 8: for tests and for reading shapes."""
    expert = ExpertConfig(width=8, hidden=8)
    vision = ConvStem(channels=4, patch=4, merge=2, features=4, tokens=2)
    return small(robot).override(
        {
            "image_size": (8, 8),
            "H": 4,
            "trunk": TrunkConfig(depth=2, heads=2, kv_heads=1, head_dim=4, positions=Learned(32)),
            "backbone": BackboneConfig(vision, WordEmbedding(8), expert),
            "network": ExpertNetwork(expert, time="concat"),
            "head.steps": 3,
            "execute.k": 2,
            "train": TrainConfig(steps=2, batch=4, warmup=1),
        }
    )
