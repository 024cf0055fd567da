"""DivideMix: Li, Socher, Hoi, ICLR 2020."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastgnl.engine import Engine
from fastgnl.loader import Batch
from fastgnl.methods.base import Method, Setting, given_loss, global_mean, terms_of
from fastgnl.mixture import noise_probability
from fastgnl.terms import Terms


@dataclass(frozen=True)
class DivideMixOptions:
    threshold: float = 0.5
    """A row is taken for rightly labelled where the other network says so with at least this probability."""
    temperature: float = 0.5
    """Of sharpening."""
    alpha: float = 4.0
    """Of MixMatch's Beta(alpha, alpha)."""
    unlabelled: float = 0.0
    """lambda_u, the weight of the rows without a label. The paper chooses it by a validation set, from 0 (CIFAR-10 with
    20% or with asymmetric noise) to 150. It is ..."""
    rampup: int = 16
    """... reached in a line over so many epochs after the warm-up."""
    confidence: float = 1.0
    """Weight of the penalty -H(q) in the warm-up, which the paper has for noise that is not symmetric."""


def sharpened(p_BC: Tensor, temperature: float) -> Tensor:
    """p^(1/T) / Z."""
    power_BC = p_BC ** (1 / temperature)
    return power_BC / power_BC.sum(-1, keepdim=True)


def targets(q_2VBC: Tensor, labels: Tensor, clean_2B: Tensor, options: DivideMixOptions) -> tuple[Tensor, Tensor]:
    """What each network is taught of each row [2, B, C], and whether the row counts as labelled [2, B].

    ``q_2VBC``: what both say of V views. ``clean_2B``: the probability that the label is right, of the network itself.
    Network k takes the other's: w = clean[1 - k]. Labelled rows (w at least the threshold) are refined by its own mean,
    w y + (1 - w) mean_v q_k; the others are guessed by the mean of both networks. All are sharpened."""
    w_2B1 = clean_2B.flip(0)[..., None]
    given_BC = nn.functional.one_hot(labels, q_2VBC.shape[-1]).to(q_2VBC.dtype)
    refined_2BC = w_2B1 * given_BC + (1 - w_2B1) * q_2VBC.mean(1)
    guessed_BC = q_2VBC.mean((0, 1))
    labelled_2B = w_2B1.squeeze(-1) >= options.threshold
    chosen_2BC = torch.where(labelled_2B[..., None], refined_2BC, guessed_BC)
    return sharpened(chosen_2BC, options.temperature), labelled_2B


class Mixed(NamedTuple):
    """A batch as MixMatch has it: V views of B rows, R = V B, mixed for each network on its own."""

    x: tuple[Tensor, Tensor]
    target_2RC: Tensor
    labelled_2R: Tensor
    z_2BC: Tensor
    """What the networks said of the first view, before."""


def mean_of(loss_R: Tensor, chosen_R: Tensor) -> Tensor:
    """The mean over the chosen rows, 0 where there are none."""
    return (loss_R * chosen_R).sum() / chosen_R.sum().clamp(min=1)


def confidence_penalty(z: Tensor) -> Tensor:
    """-H(q) of each row."""
    l = torch.log_softmax(z.float(), -1)
    return (l.exp() * l).sum(-1)


class DivideMix(Method):
    """L_X + lambda_u L_U + L_reg of two networks, each divided by the other.

    L_X = CE of the labelled rows, L_U = squared error of the others, L_reg = KL(uniform || mean q). The paper trains
    the networks one after the other and draws labelled and unlabelled batches; here both see every batch of the loader,
    whose rows each divides for itself, and the guesses are made in eval mode."""

    clean_N2: Tensor

    def __init__(self, setting: Setting, options: DivideMixOptions = DivideMixOptions()) -> None:
        super().__init__(setting)
        self.options = options
        self.keep_rows("clean_N2", torch.ones(setting.num_samples, 2))

    @property
    def views(self) -> int:
        return 1 if self.in_warmup else 2

    @property
    def wants_losses(self) -> bool:
        return self.now + 1 >= self.setting.warmup_epochs

    def end_epoch(self, losses: Tensor | None = None) -> None:
        """Co-divide: fit each network's losses, [2, N]."""
        super().end_epoch()
        if losses is None or self.in_warmup:
            return
        own = self.setting.own_ids
        for network in range(2):
            wrong = noise_probability(losses[network][own], of_all_ranks=True)
            self.clean_N2[own.to(self.clean_N2.device), network] = 1 - wrong.to(self.clean_N2)

    def run(self, engine: Engine, net: Any, batch: Batch) -> Terms:
        if self.in_warmup:
            z, _ = engine(batch.x, batch.index)
            return self.warmup_terms(z, batch)
        mixed = self.mixed(net, batch)
        z, _ = engine(mixed.x, batch.index)  # type: ignore[arg-type]
        return terms_of(self.mixmatch(z, mixed), given_loss(mixed.z_2BC, batch.labels), batch.labels, batch.clean)

    def warmup_terms(self, z: Tensor, batch: Batch) -> Terms:
        """CE(q_i, y_i) - H(q_i), of both."""
        loss_2B = given_loss(z, batch.labels)
        whole_B = (loss_2B + self.options.confidence * confidence_penalty(z)).sum(0)
        return terms_of(global_mean(whole_B), loss_2B, batch.labels, batch.clean)

    @torch.no_grad()
    def mixed(self, net: Any, batch: Batch) -> Mixed:
        """Guess, then mix: x~ = l x_i + (1 - l) x_j and the same of the targets, l = max(l', 1 - l'), l' ~ Beta."""
        x = torch.cat([batch.x, *batch.others])
        net.eval()
        z_2RC, _ = net(x)
        net.train()
        rows = len(batch.labels)
        q_2VBC = z_2RC.float().softmax(-1).view(2, -1, rows, z_2RC.shape[-1])
        target_2BC, labelled_2B = targets(q_2VBC, batch.labels, self.clean_N2[batch.index].T, self.options)
        views = q_2VBC.shape[1]
        target_2RC, labelled_2R = target_2BC.repeat(1, views, 1), labelled_2B.repeat(1, views)
        alpha = torch.tensor(self.options.alpha)
        inputs = []
        for network in range(2):
            share = float(torch.distributions.Beta(alpha, alpha).sample())
            share = max(share, 1 - share)
            other = torch.randperm(len(x), device=x.device)
            inputs.append(share * x + (1 - share) * x[other])
            target_2RC[network] = share * target_2RC[network] + (1 - share) * target_2RC[network][other]
        return Mixed((inputs[0], inputs[1]), target_2RC, labelled_2R, z_2RC[:, :rows])

    @property
    def weight(self) -> float:
        """lambda_u now."""
        over = self.now - self.setting.warmup_epochs
        return self.options.unlabelled * min(max(over / self.options.rampup, 0.0), 1.0)

    def mixmatch(self, z: Tensor, mixed: Mixed) -> Tensor:
        """L_X + lambda_u L_U + L_reg, the sum of both networks."""
        l_2RC = torch.log_softmax(z.float(), -1)
        loss = z.new_zeros(())
        for l_RC, target_RC, labelled_R in zip(l_2RC, mixed.target_2RC, mixed.labelled_2R, strict=True):
            labelled = labelled_R.to(l_RC.dtype)
            taught = mean_of(-(target_RC * l_RC).sum(1), labelled)
            guessed = mean_of((l_RC.exp() - target_RC).square().mean(1), 1 - labelled)
            mean_C = l_RC.exp().mean(0)
            uniform = -mean_C.log().mean() - torch.tensor(float(len(mean_C))).log()
            loss = loss + taught + self.weight * guessed + uniform
        return loss
