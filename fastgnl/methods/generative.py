"""The generative model of CausalNL (Yao, Liu, Gong, Han, Niu, Zhang, NeurIPS 2021): two classifiers with a VAE each.

p(x, given label | y, z) = p(x | y, z) p(given label | x, y), with q(y | x), the classifier, and q(z | x, y).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fastgnl.errors import check
from fastgnl.methods.base import Setting
from fastgnl.transition import PairNet, TransitionNet

Likelihood = Literal["gaussian", "continuous bernoulli"]
HALF = 0.02
"""So near to 1/2 the continuous Bernoulli's normaliser is a series: the formula divides zero by zero there."""
LEAST = 1e-4


class Generate(NamedTuple):
    """Asks a ``GenerativePair`` for all of its outputs."""

    inputs: tuple[Tensor, Tensor] | None
    """What the classifiers are to say something of besides: an input each."""
    raw: Tensor
    """What is to be reconstructed, [B, ...]."""


class Generated(NamedTuple):
    """What a ``GenerativePair`` gives of it; the first axis of each is the network."""

    z: Tensor | None
    """Clean logits of the inputs."""
    z_raw: Tensor
    """Clean logits of what is reconstructed, [2, B, C]."""
    x_hat: Tensor
    """The reconstruction; its logits, for the continuous Bernoulli."""
    mean: Tensor
    log_var: Tensor
    """Of q(z | x, y), [2, B, Z]."""
    t: Tensor
    """Logits of the given label, [2, B, C]."""


class _ImageEncoder(nn.Sequential):
    """Convolutions that halve the side down to 4 or 5 pixels, then one vector."""

    def __init__(self, shape: tuple[int, ...], width: int) -> None:
        channels, side = shape[0], min(shape[1:])
        layers: list[nn.Module] = []
        wide = width
        for _ in range(max(int(math.log2(side)) - 2, 1)):
            layers += [nn.Conv2d(channels, wide, 4, 2, 1, bias=False), nn.BatchNorm2d(wide), nn.LeakyReLU(0.1)]
            channels, wide = wide, min(2 * wide, 128)
        super().__init__(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.num_features = 16 * channels


class _ImageDecoder(nn.Module):
    """The way back, to the size of the images."""

    def __init__(self, inputs: int, shape: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.shape = shape
        steps = max(int(math.log2(min(shape[1:]))) - 2, 1)
        wide = [min(width * 2**i, 128) for i in range(steps)][::-1]
        self.first = nn.Linear(inputs, 16 * wide[0])
        layers: list[nn.Module] = []
        for i, channels in enumerate(wide):
            last = i + 1 == len(wide)
            layers.append(nn.ConvTranspose2d(channels, shape[0] if last else wide[i + 1], 4, 2, 1))
            if not last:
                layers += [nn.BatchNorm2d(wide[i + 1]), nn.LeakyReLU(0.1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, v: Tensor) -> Tensor:
        x = self.layers(self.first(v).view(len(v), -1, 4, 4))
        size = self.shape[1:]
        return x if x.shape[2:] == size else nn.functional.interpolate(x, size)


def _encoder(shape: tuple[int, ...], width: int) -> Any:
    if len(shape) == 3:
        return _ImageEncoder(shape, width)
    layers = nn.Sequential(nn.Linear(shape[0], 256), nn.LeakyReLU(0.1))
    layers.num_features = 256  # type: ignore[assignment]
    return layers


def _decoder(inputs: int, shape: tuple[int, ...], width: int) -> nn.Module:
    if len(shape) == 3:
        return _ImageDecoder(inputs, shape, width)
    return nn.Sequential(nn.Linear(inputs, 256), nn.LeakyReLU(0.1), nn.Linear(256, shape[0]))


class VAE(nn.Module):
    """q(z | x, y), p(x | y, z) and p(given label | x, y), where x of the last is the reconstruction."""

    def __init__(self, shape: tuple[int, ...], num_classes: int, latent: int = 25, width: int = 32) -> None:
        super().__init__()
        self.encoder = _encoder(shape, width)
        self.moments = nn.Linear(self.encoder.num_features + num_classes, 2 * latent)
        self.decoder = _decoder(latent + num_classes, shape, width)
        self.label_encoder = _encoder(shape, width)
        self.label = nn.Linear(self.label_encoder.num_features + num_classes, num_classes)

    def forward(self, x: Tensor, q_BC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(x_hat, mean, log-variance, logits of the given label)."""
        mean, log_var = self.moments(torch.cat([self.encoder(x), q_BC], 1)).chunk(2, 1)
        log_var = log_var.clamp(-10, 10)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp() if self.training else mean
        x_hat = self.decoder(torch.cat([z, q_BC], 1))
        return x_hat, mean, log_var, self.label(torch.cat([self.label_encoder(x_hat), q_BC], 1))


class GenerativePair(PairNet):
    """Two classifiers, each with a VAE. Given a ``Generate``, all outputs (``Generated``); else as ``PairNet``."""

    def __init__(self, backbones: list[Any], setting: Setting) -> None:
        first, second = (
            TransitionNet(part, part.num_features, setting.num_classes, "none", network=network)
            for network, part in enumerate(backbones)
        )
        super().__init__(first, second)
        check(
            len(setting.shape) in (1, 3),
            f"shape is {setting.shape}, wanted that of the inputs which are reconstructed: (C, H, W) or (F,)",
        )
        self.vaes = nn.ModuleList(VAE(setting.shape, setting.num_classes) for _ in backbones)

    def forward(self, x: Any, index: Tensor | None = None) -> Any:
        if not isinstance(x, Generate):
            said, _ = super().forward(x, index)
            if self.training:  # DDP waits for a gradient of every weight in every step, those of the VAEs too.
                said = said + 0 * sum(weight.sum() for weight in self.vaes.parameters())
            return said, None
        if x.inputs is None:
            z, (z_raw, _) = None, super().forward(x.raw)
        else:
            both, _ = super().forward((torch.cat([x.inputs[0], x.raw]), torch.cat([x.inputs[1], x.raw])))
            z, z_raw = both.split([len(x.inputs[0]), len(x.raw)], 1)
        parts = [vae(x.raw, q_BC) for vae, q_BC in zip(self.vaes, z_raw.float().softmax(-1), strict=True)]
        return Generated(z, z_raw, *(torch.stack(part) for part in zip(*parts, strict=True)))

    @torch.no_grad()
    def transition(self, x: Tensor, clean: Tensor | None = None) -> Tensor:
        """p(given label | x, y) of every class y, or of one for each row; the mean of both networks."""
        C = self.num_classes
        wanted = torch.arange(C, device=x.device).expand(len(x), C) if clean is None else clean[:, None]
        found = [
            torch.stack([vae(x, nn.functional.one_hot(y, C).float())[3].softmax(1) for y in wanted.T], 1)
            for vae in self.vaes
        ]
        mean = torch.stack(found).mean(0)
        return mean if clean is None else mean[:, 0]


@dataclass(frozen=True)
class ElboOptions:
    """Weights of the terms, those of a public implementation of CausalNL."""

    reconstruction: float = 0.1
    given: float = 0.1
    """Of the given label."""
    prior: float = 1e-5
    """Of KL(q(y | x) || uniform)."""
    latent: float = 0.01
    """Of KL(q(z | x, y) || N(0, 1)), a mean over rows (that implementation adds the rows of a batch up)."""


def log_normaliser(rate: Tensor) -> Tensor:
    """log C(r) of the continuous Bernoulli C(r) r^x (1 - r)^(1 - x): C = 2 atanh(1 - 2r) / (1 - 2r), 2 at r = 1/2."""
    gap = 1 - 2 * rate
    away = torch.where(gap.abs() > HALF, gap, torch.full_like(gap, 0.5))
    exact = (2 * torch.atanh(away) / away).log()
    series = math.log(2) + gap.square() / 3 + 13 * gap.square().square() / 90
    return torch.where(gap.abs() > HALF, exact, series)


def reconstruction_loss(x_hat: Tensor, x: Tensor, likelihood: Likelihood) -> Tensor:
    """-log p(x | y, z) but for constants, a mean over all numbers. The continuous Bernoulli is one of sigmoid(x), which
    puts normalised inputs between 0 and 1."""
    x_hat, x = x_hat.float(), x.float()  # 1 - LEAST is 1 in half precision, whose log(1 - rate) is infinite
    if likelihood == "gaussian":
        return (x_hat - x).square().mean()
    rate, target = x_hat.sigmoid().clamp(LEAST, 1 - LEAST), x.sigmoid()
    return -(target * rate.log() + (1 - target) * (1 - rate).log() + log_normaliser(rate)).mean()


def negative_elbo(made: Generated, x: Tensor, labels: Tensor, likelihood: Likelihood, options: ElboOptions) -> Tensor:
    """-E[log p(x | y, z)] - E[log p(given | x, y)] + KL(q(y | x) || uniform) + KL(q(z | x, y) || N(0, 1)), weighted;
    the sum of both networks."""
    l = torch.log_softmax(made.z_raw.float(), -1)
    uniform = (l.exp() * l).sum(-1).mean() + math.log(l.shape[-1])
    mean, log_var = made.mean.float(), made.log_var.float()
    latent = 0.5 * (mean.square() + log_var.exp() - log_var - 1).sum(-1).mean()
    given = nn.functional.cross_entropy(made.t.flatten(0, 1), labels.repeat(2))
    rebuilt = reconstruction_loss(made.x_hat, x.expand_as(made.x_hat), likelihood)
    return 2 * (
        options.reconstruction * rebuilt + options.given * given + options.prior * uniform + options.latent * latent
    )
