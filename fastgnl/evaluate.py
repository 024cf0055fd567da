"""What a trained network says of every sample, in eval mode; the ranks share the work."""

import torch
from torch import Tensor

from fastgnl.distributed import sum_over_ranks
from fastgnl.loader import Source, once
from fastgnl.transition import PairNet, TransitionNet


def _device(net: TransitionNet | PairNet) -> torch.device:
    return next(net.parameters()).device


@torch.no_grad()
def predict_proba(net: TransitionNet | PairNet, samples: Source) -> Tensor:
    """q of every sample, by sample id, [N, C]."""
    net.eval()
    q_NC = torch.zeros(len(samples.labels), net.num_classes, dtype=next(net.parameters()).dtype)
    for batch in once(samples):
        q_NC[batch.index] = net.predict_proba(batch.x.to(_device(net))).cpu()
    return sum_over_ranks(q_NC)


@torch.no_grad()
def accuracy(net: TransitionNet | PairNet, samples: Source) -> float:
    """Share of the samples whose label is the argmax of q."""
    net.eval()
    right = torch.zeros(1, dtype=torch.float64)
    for batch in once(samples):
        right += (net.predict_proba(batch.x.to(_device(net))).argmax(1).cpu() == batch.labels).sum()
    return float(sum_over_ranks(right)) / len(samples.labels)


@torch.no_grad()
def eval_losses(net: TransitionNet | PairNet, samples: Source) -> Tensor:
    """-log q_i[y_i] of every sample, by sample id, [N], or [2, N] of two networks."""
    net.eval()
    count = 2 if isinstance(net, PairNet) else 1
    losses = torch.zeros(count, len(samples.labels))
    for batch in once(samples):
        z, _ = net(batch.x.to(_device(net)))
        l = torch.log_softmax(z.float(), -1).view(count, -1, net.num_classes).cpu()
        given = batch.labels.expand(count, -1)[..., None]
        losses[:, batch.index] = -l.gather(-1, given).squeeze(-1)
    losses = sum_over_ranks(losses)
    return losses if isinstance(net, PairNet) else losses[0]
