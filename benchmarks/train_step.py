"""Where the time of a training step goes, as ratios measured in one run (medians; one thread unless said).

    python benchmarks/train_step.py

Prints: samples/s and share of the machine's fp32 peak for pi0.small on vola/Detour-v0; the same step with RMSNorm, with
the stem's convolutions as conv2d instead of matrix products, in bf16, and with two threads, each against the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from vola.data.episodes import Episode, MemoryDataset
from vola.data.windows import Windows, batch_indices
from vola.envs.tabletop import make_tabletop
from vola.fit import fit
from vola.model.vision import ConvEncoder
from vola.policy import Policy
from vola.rollout.collect import demonstrate
from vola.system import System
from vola.systems import pi0
from vola.train.optim import gradient_norm, make_optimiser
from vola.train.throughput import peak_flops, step_flops

ROUNDS = 30


class ConvolutionStem(nn.Module):
    """``ConvEncoder`` with the same weights, computed by conv2d."""

    def __init__(self, stem: ConvEncoder) -> None:
        super().__init__()
        c = stem.config
        self.stem = stem
        self.first = nn.Conv2d(3, c.channels, c.patch, stride=c.patch)
        self.second = nn.Conv2d(c.channels, c.features, c.merge, stride=c.merge)

    def forward(self, image: Tensor, sentence: Tensor) -> Tensor:
        assert self.stem.film is not None
        scale, shift = self.stem.film.modulation(sentence)[:, :, None, None].chunk(2, dim=1)
        x = torch.nn.functional.gelu(torch.addcmul(shift, self.first(image), 1 + scale))
        x = torch.nn.functional.gelu(self.second(x))
        return self.stem.globals(x.flatten(1)).unflatten(1, (self.stem.config.tokens, self.stem.width))


def demonstrations() -> MemoryDataset:
    table = make_tabletop("vola/Detour-v0", noise=0.15)
    demos = list(demonstrate(table.config, 64))
    images = [np.ascontiguousarray(d.images["top"].transpose(0, 3, 1, 2)) for d in demos]
    return MemoryDataset(
        table.spec,
        table.spec.action.rate,
        tuple(Episode(i, len(d.state), d.instruction) for i, d in enumerate(demos)),
        {"state": [d.state for d in demos], "action": [d.action for d in demos]},
        {"top": images},
    )


def stepper(system: System, data: MemoryDataset, conv2d: bool = False) -> tuple[Callable[[], None], Policy, Windows]:
    episodes = [e.index for e in data.episodes]
    policy = system.build(fit(data, episodes, system.H, system.transforms))
    if conv2d:
        policy.backbone.vision = ConvolutionStem(policy.backbone.vision)
    optimiser = make_optimiser(policy, system.train)
    windows = Windows(data, episodes, system.T, system.H, resize=system.image_size)
    rng, count = torch.Generator(), iter(range(10**9))

    def step() -> None:
        batch = windows.batch(batch_indices(len(windows), system.train.batch, 0, next(count)))
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=system.train.precision == "bf16"):
            loss = policy.loss(batch, rng).mean()
        loss.backward()
        gradient_norm(policy.parameters(), system.train.clip)
        optimiser.step()

    return step, policy, windows


def main() -> None:
    torch.set_num_threads(1)
    data = demonstrations()
    base = pi0.small(data.spec)
    rms = base.override({"backbone.expert.norm": "rms", "network.expert.norm": "rms"})
    variants = {
        "pi0.small": stepper(base, data)[0],
        "RMSNorm instead of LayerNorm": stepper(rms, data)[0],
        "conv2d instead of matrix products": stepper(base, data, conv2d=True)[0],
        "bf16 autocast": stepper(base.override({"train.precision": "bf16"}), data)[0],
    }
    times: dict[str, list[float]] = {name: [] for name in [*variants, "two threads"]}
    for _ in range(ROUNDS):  # interleaved, so that a busy moment of the machine hits all alike
        for name, step in [*variants.items(), ("two threads", variants["pi0.small"])]:
            torch.set_num_threads(2 if name == "two threads" else 1)
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    torch.set_num_threads(1)
    _, policy, windows = stepper(base, data)
    first = float(np.median(times["pi0.small"]))
    flops = step_flops(policy, windows.batch(np.arange(base.train.batch)))
    print(f"pi0.small: {1e3 * first:.1f} ms for {base.train.batch} samples, {base.train.batch / first:.0f} samples/s")
    print(f"  {flops / 1e9:.2f} GFLOP a step = {flops / first / peak_flops(1.0):.1%} of this thread's fp32 peak")
    for name, values in times.items():
        print(f"{np.median(values) / first:5.2f} x  {name}")


if __name__ == "__main__":
    main()
