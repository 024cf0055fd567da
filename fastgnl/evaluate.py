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
def scores(net: TransitionNet | PairNet, samples: Source) -> dict[str, float]:
    """Shares of the samples whose label is the argmax of q ("top1") or, of more than five classes, among the five
    largest q ("top5"). Of two networks q is the mean, and each is scored alone too ("network 1 top1")."""
    net.eval()
    names = ["top1"]
    if net.num_classes > 5:
        names.append("top5")
    if isinstance(net, PairNet):
        names += ["network 1 top1", "network 2 top1"]
    right = torch.zeros(len(names), dtype=torch.float64)
    for batch in once(samples):
        z, _ = net(batch.x.to(_device(net)))
        q_KBC = z.softmax(-1).view(-1, *z.shape[-2:])
        q_BC, labels = q_KBC.mean(0), batch.labels.to(z.device)
        hits = [q_BC.argmax(1) == labels]
        if net.num_classes > 5:
            hits.append((q_BC.topk(5).indices == labels[:, None]).any(1))
        if isinstance(net, PairNet):
            hits += q_KBC.argmax(-1) == labels
        right += torch.stack(hits).sum(1).cpu()
    return dict(zip(names, (sum_over_ranks(right) / len(samples.labels)).tolist(), strict=True))


def accuracy(net: TransitionNet | PairNet, samples: Source) -> float:
    """Share of the samples whose label is the argmax of q."""
    return scores(net, samples)["top1"]


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
