"""Two heads on one backbone (METHOD section 1), and the transition matrices they imply.

Axes: B rows, F features, C classes, K draws.
"""

from collections.abc import Iterator
from functools import cache
from typing import Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from fastgnl.distributed import sum_over_ranks
from fastgnl.errors import check, check_choice, check_count, check_seed
from fastgnl.kernels import philox
from fastgnl.loader import Source, once

TransitionInput = Literal["logits", "sample", "none"]
DOUBT = 0.1
"""A one-hot class as logits: the centred log-odds of 1 - DOUBT on it, the rest shared. Harder logits than the
head saw in training push T(x) towards the diagonal."""


class TransitionNet(nn.Module):
    """z = W_c feat, t = W_t [feat ; sg(z)] on the features of any backbone.

    ``net(x) -> (z, t)``. With ``transition_input="sample"``, t = W_t [feat ; onehot(y_hat)] for K draws
    y_hat ~ Cat(softmax(z)), of shape [B, K, C], and training needs the sample ids: ``net(x, index)``.
    With ``"none"`` there is no second head and t is None: a plain classifier.
    """

    step: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        num_features: int,
        num_classes: int,
        transition_input: TransitionInput = "logits",
        draws: int = 1,
        seed: int = 0,
        network: int = 0,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.clean = nn.Linear(num_features, num_classes)
        self.noisy = nn.Linear(num_features + num_classes, num_classes) if transition_input != "none" else None
        self.num_features, self.num_classes = num_features, num_classes
        self.transition_input, self.draws, self.seed, self.network = transition_input, draws, seed, network
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def features(self, x: Tensor) -> Tensor:
        feat_BF = self.backbone(x)
        check(isinstance(feat_BF, Tensor), f"the backbone returned a {type(feat_BF).__name__}, wanted a tensor")
        check(
            feat_BF.dim() == 2 and feat_BF.shape[1] == self.num_features,
            f"the backbone returned shape {tuple(feat_BF.shape)}, wanted (B, {self.num_features})",
        )
        return feat_BF

    def forward(self, x: Tensor, index: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        feat_BF = self.features(x)
        z_BC = self.clean(feat_BF)
        if self.noisy is None:
            return z_BC, None
        if self.transition_input == "logits":
            return z_BC, self.noisy(torch.cat([feat_BF, z_BC.detach()], 1))
        if not self.training:
            return z_BC, self.noisy(torch.cat([feat_BF, z_BC.detach().softmax(1)], 1))[:, None]
        check(index is not None, "net(x) was given no index, wanted the sample ids with transition_input='sample'")
        assert index is not None
        return z_BC, torch.stack([self.noisy(torch.cat([feat_BF, y], 1)) for y in self._draw(z_BC, index)], 1)

    @torch.no_grad()
    def _draw(self, z_BC: Tensor, index: Tensor) -> Iterator[Tensor]:
        """K one-hot y_hat ~ Cat(softmax(z)), by the same race as the coverage label."""
        streams = [philox.stream(philox.TRANSITION, self.network, k) for k in range(self.draws)]
        words_KBC = philox.words(self.seed, index, self.num_classes, self.step, streams)
        self.step += 1
        race_KBC = philox.exponential(words_KBC) / z_BC.float().softmax(1)
        return iter(nn.functional.one_hot(race_KBC.argmin(-1), self.num_classes).to(z_BC.dtype))

    @torch.no_grad()
    def transition(self, x: Tensor, clean: Tensor | None = None) -> Tensor:
        """T(x)[a, b] = p(noisy = b | clean = a, x), [B, C, C]; with ``clean``, its row T(x)[clean], [B, C]."""
        check(self.noisy is not None, "this network has no transition head, wanted transition_input other than 'none'")
        assert self.noisy is not None
        feat_BF, C = self.features(x), self.num_classes
        certain_CC = torch.eye(C, dtype=feat_BF.dtype, device=feat_BF.device)
        if self.transition_input == "logits":
            log_CC = (certain_CC * (1 - DOUBT) + (1 - certain_CC) * DOUBT / (C - 1)).log()
            certain_CC = log_CC - log_CC.mean(1, keepdim=True)
        # The head is linear: its value at [feat ; class] is a sum of two parts, each computed once.
        of_feat, of_class = self.noisy.weight.split([self.num_features, C], 1)
        t_BC, t_CC = feat_BF @ of_feat.T + self.noisy.bias, certain_CC @ of_class.T
        return (t_BC[:, None] + t_CC if clean is None else t_BC + t_CC[clean]).softmax(-1)

    def predict_proba(self, x: Tensor) -> Tensor:
        """q = softmax(z), [B, C]."""
        z_BC, _ = self(x)
        return torch.softmax(z_BC, 1)


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    """Always the same: the memory that a stream has freed is kept for it alone."""
    return torch.cuda.Stream(device)


class PairNet(nn.Module):
    """Two networks side by side: z and t of shape [2, B, C], test-time average of the two softmaxes.

    On a GPU the second runs on a stream of its own, at the same time as the first."""

    def __init__(self, first: TransitionNet, second: TransitionNet) -> None:
        super().__init__()
        self.nets = nn.ModuleList([first, second])
        self.num_classes = first.num_classes

    def forward(self, x: Tensor | tuple[Tensor, Tensor], index: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Two inputs are for a network each."""
        inputs = x if isinstance(x, tuple) else (x, x)
        if inputs[0].is_cuda:
            (z0, t0), (z1, t1) = self._on_streams(inputs, index)
        else:
            (z0, t0), (z1, t1) = (net(own, index) for net, own in zip(self.nets, inputs, strict=True))
        return torch.stack([z0, z1]), None if t0 is None or t1 is None else torch.stack([t0, t1])

    def _on_streams(self, inputs: tuple[Tensor, Tensor], index: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
        device = inputs[1].device
        own, other = torch.cuda.current_stream(device), _second_stream(device)
        other.wait_stream(own)  # before the first begins, for which it need not wait
        first = self.nets[0](inputs[0], index)
        with torch.cuda.stream(other):
            second = self.nets[1](inputs[1], index)
        own.wait_stream(other)
        inputs[1].record_stream(other)  # its backward reads it
        for part in second:
            if part is not None:
                part.record_stream(own)
        return [first, second]

    def predict_proba(self, x: Tensor) -> Tensor:
        return (self(x)[0].softmax(-1)).mean(0)

    def transition(self, x: Tensor, clean: Tensor | None = None) -> Tensor:
        """The mean of the two networks' T(x)."""
        first, second = (cast(TransitionNet, net).transition(x, clean) for net in self.nets)
        return (first + second) / 2


def with_transition(
    backbone: nn.Module | tuple[nn.Module, nn.Module],
    num_features: int,
    num_classes: int,
    *,
    transition_input: TransitionInput = "logits",
    draws: int = 1,
    seed: int = 0,
) -> TransitionNet | PairNet:
    """Wrap any module that returns features [B, num_features] into one that returns (z, t).

    ``draws`` is the paper's K, for ``transition_input="sample"``. Two backbones make two networks, for ``GNLPair``.
    """
    backbones = backbone if isinstance(backbone, tuple) else (backbone,)
    for part in backbones:
        check(isinstance(part, nn.Module), f"backbone is a {type(part).__name__}, wanted a torch.nn.Module")
    check_choice("the number of backbones", len(backbones), (1, 2))
    check(len(set(map(id, backbones))) == len(backbones), "backbone is one module twice, wanted two that differ")
    check_count("num_features", num_features, 1)
    check_count("num_classes", num_classes, 2)
    check_choice("transition_input", transition_input, get_args(TransitionInput))
    check_count("draws", draws, 1)
    check_seed(seed)
    nets = [
        TransitionNet(part, num_features, num_classes, transition_input, draws, seed, network)
        for network, part in enumerate(backbones)
    ]
    return nets[0] if len(nets) == 1 else PairNet(*nets)


@torch.no_grad()
def class_transition(net: TransitionNet | PairNet, samples: Source) -> Tensor:
    """The class-level matrix [C, C]: mean of T(x)[a] over the samples predicted as a; the ranks share the work.

    A class that no sample is predicted as takes the mean over the first thousand samples."""
    net.eval()
    C = net.num_classes
    total_CC = torch.zeros(C, C, dtype=torch.float64)
    count_C = torch.zeros(C, dtype=torch.float64)
    for batch in once(samples):
        a_B = net.predict_proba(batch.x).argmax(1)
        total_CC.index_add_(0, a_B.cpu(), net.transition(batch.x, a_B).double().cpu())
        count_C += torch.bincount(a_B.cpu(), minlength=C)
    total_CC, count_C = sum_over_ranks(total_CC), sum_over_ranks(count_C)
    absent = (count_C == 0).nonzero().flatten()
    if len(absent):
        x = next(samples.load([np.arange(min(1000, len(samples.labels)))]))
        for a in absent:
            total_CC[a] = net.transition(x, a.expand(len(x)).to(x.device)).double().mean(0).cpu()
    return total_CC / count_C.clamp(min=1)[:, None]
