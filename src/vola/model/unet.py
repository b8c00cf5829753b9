"""Diffusion Policy's conditional 1-D UNet: convolutions over the steps of a chunk, told everything else by FiLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, cast, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vola.cite import Source
from vola.errors import ConfigError, expect_positive
from vola.model.backbone import Context, Reader
from vola.model.conditioning import expect_inputs, index_code, noise_index
from vola.model.networks import Ports


@dataclass(frozen=True)
class Unet1d:
    """One level per entry of ``channels``; every level but the last halves the number of steps.

    The condition is [time code, ``readouts`` tokens, latent]; ``film`` "scale_and_bias" makes h scale + bias of it
    (no 1 + scale, as released), "bias" only adds. The time code is a sinusoid of the noise index (1 - tau)
    ``time_steps``, ``step_width`` wide. ``final_groups`` are those of the last block, which the original fixes at 8.
    """

    sources: ClassVar[tuple[Source, ...]] = (
        Source(
            "Chi et al. 2023, Diffusion policy: Visuomotor policy learning via action diffusion",
            "section III-A, conditional 1-D UNet of the released code",
            "tau = 1 - t / time_steps; the condition are readout tokens of the backbone",
            "https://arxiv.org/abs/2303.04137",
        ),
        Source(
            "Janner et al. 2022, Planning with diffusion for flexible behavior synthesis",
            "appendix C",
            "",
            "https://arxiv.org/abs/2205.09991",
        ),
    )
    channels: tuple[int, ...] = (256, 512, 1024)
    readouts: int = 1
    kernel: int = 5
    groups: int = 8
    final_groups: int = 8
    step_width: int = 256
    film: Literal["scale_and_bias", "bias"] = "scale_and_bias"
    time_steps: int = 100

    def __post_init__(self) -> None:
        sizes = {"readouts": self.readouts, "kernel": self.kernel, "groups": self.groups}
        sizes |= {"final_groups": self.final_groups, "step_width": self.step_width, "time_steps": self.time_steps}
        expect_positive("Unet1d", **sizes, **{f"channels[{i}]": c for i, c in enumerate(self.channels)})
        if not self.channels:
            raise ConfigError("Unet1d: expected channels of at least one level, got none")
        if not self.kernel % 2:
            raise ConfigError(f"Unet1d: expected an odd kernel, which keeps the number of steps, got {self.kernel}")
        if self.step_width < 4 or self.step_width % 2:
            raise ConfigError(f"Unet1d: expected an even step_width >= 4, got {self.step_width}")
        if self.film not in ("scale_and_bias", "bias"):
            raise ConfigError(f"Unet1d: expected film 'scale_and_bias' or 'bias', got {self.film!r}")
        for c, groups in [*((c, self.groups) for c in self.channels), (self.channels[0], self.final_groups)]:
            if c % groups:
                name = "groups" if groups == self.groups else "final_groups"
                raise ConfigError(
                    f"Unet1d: expected {name} that divide every number of channels they norm, got {name}={groups} and "
                    f"{c} channels"
                )

    @property
    def shrink(self) -> int:
        """Steps of the chunk per step of the coarsest level; it must divide H."""
        return 2 ** (len(self.channels) - 1)

    def reader(self, length: int) -> Reader:
        """The outputs of ``readouts`` tokens."""
        return Reader(readouts=self.readouts, outputs=True)

    def check(self, ports: Ports) -> None:
        """Raises ConfigError for a rule without noisy actions, one with a time per step, or a horizon that does not fit
        the levels."""
        if not ports.noise:
            raise ConfigError(
                "Unet1d: a convolution knows the step of the chunk only through its input, and this rule feeds zeros: "
                "it would give nearly the same action at every step. Use a rule that feeds noisy actions (flow or "
                "diffusion), or another network."
            )
        if ports.per_step_time:
            raise ConfigError(
                "Unet1d: this rule has a time per step of the chunk and the UNet takes one per sample (its coarser "
                "levels hold several steps each). Use ExpertNetwork, CrossAttention, Detr or ReadoutMLP, or set the "
                "rule's prefix to 0."
            )
        if ports.H % self.shrink:
            below = ports.H - ports.H % self.shrink
            near = f"{below} or {below + self.shrink}" if below else f"{self.shrink}"
            raise ConfigError(
                f"Unet1d: {len(self.channels)} levels halve the chunk {len(self.channels) - 1} times and need H "
                f"divisible by {self.shrink}, got H={ports.H}. Use H={near}, or fewer channels."
            )
        norms = [(c, self.groups, ports.H >> i) for i, c in enumerate(self.channels)]
        for c, groups, steps in [*norms, (self.channels[0], self.final_groups, ports.H)]:
            if c // groups * steps < 2:
                raise ConfigError(
                    f"Unet1d: {c} channels in {groups} groups over {steps} step leave one number per group, which its "
                    "norm turns into zero. Use a longer H, fewer groups or more channels."
                )


@final
class ConvBlock(nn.Module):
    """Convolution over steps, GroupNorm, Mish. ``x`` and result ``B C H``."""

    def __init__(self, entering: int, leaving: int, kernel: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(entering, leaving, kernel, padding=kernel // 2)
        self.norm = nn.GroupNorm(groups, leaving)

    def forward(self, x: Float[Tensor, "B C H"]) -> Float[Tensor, "B E H"]:
        return F.mish(self.norm(self.conv(x)))


@final
class FilmBlock(nn.Module):
    """Convolution, FiLM, convolution, and a 1x1 convolution around them where the channels change."""

    def __init__(self, config: Unet1d, entering: int, leaving: int, condition: int) -> None:
        super().__init__()
        self.scales = config.film == "scale_and_bias"
        self.first = ConvBlock(entering, leaving, config.kernel, config.groups)
        self.film = nn.Linear(condition, 2 * leaving if self.scales else leaving)
        self.second = ConvBlock(leaving, leaving, config.kernel, config.groups)
        self.skip = nn.Conv1d(entering, leaving, 1) if entering != leaving else nn.Identity()

    def forward(self, x: Float[Tensor, "B C H"], condition: Float[Tensor, "B E"]) -> Tensor:
        """``condition`` has been through Mish already, which all blocks share."""
        h, film = self.first(x), self.film(condition)[..., None]
        if self.scales:
            scale, bias = film.chunk(2, dim=1)
            h = scale * h + bias
        else:
            h = h + film
        return self.second(h) + self.skip(x)


Levels: TypeAlias = Sequence[Sequence[FilmBlock]]


@final
class ConditionalUnet1d(nn.Module):
    """The network of ``Unet1d``. The output map starts at zero."""

    def __init__(self, config: Unet1d, ports: Ports) -> None:
        super().__init__()
        config.check(ports)
        self.config, self.ports = config, ports
        condition = config.readouts * ports.width + ports.latent
        if ports.time:
            self.time_up = nn.Linear(config.step_width, 4 * config.step_width)
            self.time_down = nn.Linear(4 * config.step_width, config.step_width)
            condition += config.step_width
        channels, top = config.channels, config.channels[-1]

        def pair(entering: int, leaving: int) -> nn.ModuleList:
            return nn.ModuleList(FilmBlock(config, c, leaving, condition) for c in (entering, leaving))

        steps = list(zip((ports.A, *channels[:-1]), channels, strict=True))
        self.down = cast("Levels", nn.ModuleList(pair(a, b) for a, b in steps))
        self.shrink = nn.ModuleList(nn.Conv1d(c, c, 3, 2, 1) for c in channels[:-1])
        self.middle = cast("Sequence[FilmBlock]", pair(top, top))
        self.up = cast("Levels", nn.ModuleList(pair(2 * b, a) for a, b in reversed(steps[1:])))
        self.grow = nn.ModuleList(nn.ConvTranspose1d(c, c, 4, 2, 1) for c in reversed(channels[:-1]))
        self.last = ConvBlock(channels[0], channels[0], config.kernel, config.final_groups)
        self.leave = nn.Conv1d(channels[0], ports.out, 1)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(cast(Tensor, self.leave.bias))

    def forward(
        self,
        context: Context,
        x: Float[Tensor, "B H A"],
        tau: Float[Tensor, " B"] | None,
        latent: Float[Tensor, "B Z"] | None = None,
    ) -> Float[Tensor, "B H out"]:
        """One pass. Raises InputError when x, tau or latent are not what the ports announce."""
        expect_inputs(self.ports, x, tau, latent)
        condition = F.mish(self.condition(context, tau, latent))
        h, levels = x.transpose(1, 2), []
        for i, blocks in enumerate(self.down):
            for block in blocks:
                h = block(h, condition)
            levels.append(h)
            if i < len(self.shrink):
                h = self.shrink[i](h)
        for block in self.middle:
            h = block(h, condition)
        # As in the original, the coarsest level joins right after the middle, and the finest is never read again.
        for blocks, grow in zip(self.up, self.grow, strict=True):
            h = torch.cat([h, levels.pop()], dim=1)
            for block in blocks:
                h = block(h, condition)
            h = grow(h)
        return self.leave(self.last(h)).transpose(1, 2)

    def condition(self, context: Context, tau: Tensor | None, latent: Tensor | None) -> Float[Tensor, "B E"]:
        """[time embedding, readout tokens, latent], before the Mish of the blocks."""
        parts = [context.readout.flatten(1)]
        if tau is not None:
            parts.insert(0, self.embed_time(noise_index(tau, self.config.time_steps)))
        if latent is not None:
            parts.append(latent)
        return torch.cat([p.to(parts[0].dtype) for p in parts], dim=1)

    def embed_time(self, t: Float[Tensor, " B"]) -> Float[Tensor, "B E"]:
        """Code of the noise index, Linear x4, Mish, Linear."""
        code = index_code(t, self.config.step_width).to(self.time_up.weight.dtype)
        return self.time_down(F.mish(self.time_up(code)))
