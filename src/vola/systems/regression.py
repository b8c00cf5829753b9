"""Regression: pi0's backbone and expert, asked for one answer instead of a distribution (the L2 baseline).

Source    The oldest head of imitation learning; with norm="l1" the parallel decoding of OpenVLA-OFT (arXiv 2502.19645).
Command   vola demo   (or: vola train vola/Detour-v0 --system regression --set train.steps=4000 train.stride=4)
Expected  0 % [0, 2] on vola/Detour-v0 at k = 4: the mean of "go left" and "go right" is "go through the wall".
Departs   From OFT: the readout is pi0's expert (one pass over zero action tokens), not an MLP on a language model.
"""

from __future__ import annotations

from vola.heads.regression import Regression
from vola.system import System
from vola.systems import pi0
from vola.types import RobotSpec


def small(robot: RobotSpec) -> System:
    """``pi0.small`` with the head replaced; everything else, training budget included, is the same."""
    return pi0.small(robot).override({"name": "regression", "head": Regression("l2"), "network.time": "none"})


def tiny(robot: RobotSpec) -> System:
    """Every part at size 8."""
    return pi0.tiny(robot).override({"name": "regression", "head": Regression("l2"), "network.time": "none"})
