"""The baseline: plain cross-entropy."""

from torch import Tensor

from fastgnl.methods.base import Method, given_loss, global_mean, terms_of
from fastgnl.terms import Terms


class CrossEntropy(Method):
    """-log q_i[y_i]; of two networks, the sum."""

    def forward(
        self,
        z: Tensor,
        t: Tensor | None,
        labels: Tensor,
        index: Tensor,
        clean: Tensor | None = None,
        momentum: Tensor | None = None,
    ) -> Terms:
        loss_B = given_loss(z, labels)
        return terms_of(global_mean(loss_B if z.dim() == 2 else loss_B.sum(0)), loss_B, labels, clean)
