"""Methods that are a loss of the logits and the given labels, a number a row."""

from torch import Tensor

from fastgnl.methods.base import Method, given_loss, global_mean, terms_of
from fastgnl.terms import Terms


class RowLoss(Method):
    """The mean of ``rows(z, t, labels, index)`` over the global batch."""

    def rows(self, z: Tensor, t: Tensor | None, labels: Tensor, index: Tensor) -> Tensor:
        """The loss of each row, [B]."""
        raise NotImplementedError

    def forward(
        self,
        z: Tensor,
        t: Tensor | None,
        labels: Tensor,
        index: Tensor,
        clean: Tensor | None = None,
        momentum: Tensor | None = None,
    ) -> Terms:
        loss_B = self.rows(z, t, labels, index)
        return terms_of(global_mean(loss_B), given_loss(z.detach(), labels), labels, clean)
