"""What a loss gives of one step."""

from typing import NamedTuple

from torch import Tensor


class Terms(NamedTuple):
    """What one step gives. Only ``loss`` carries a gradient."""

    loss: Tensor
    """The mean over this rank's rows, weighted so that DDP's average is the mean over the global batch."""
    means: Tensor
    """ce, prior and estep, means over this rank's rows, at places 0 to 2."""
    sample_loss: Tensor
    """-log q_i[y_i], [B]."""
    set_size: Tensor
    """|S_i|, [B]."""
    covered: Tensor | None
    """Whether S_i holds the clean label, [B]; None where it is not known."""

    @property
    def ce(self) -> Tensor:
        return self.means[0]

    @property
    def prior(self) -> Tensor:
        return self.means[1]

    @property
    def estep(self) -> Tensor:
        return self.means[2]
