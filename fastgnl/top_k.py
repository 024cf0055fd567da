"""M as the k largest entries of each row, for label sets where N x C does not fit."""

import torch
from torch import Tensor, nn

OFFSET = 2**15
"""Classes are kept as int16, from -2^15 up, where there are no more than 2^16 of them."""
CHUNK = 1 << 18
"""Entries to sum up at a time: as float64 and int64, with their copies, they take eight times the room."""


class TopK(nn.Module):
    """k classes and their shares (float16) a sample; what is left of 1 is spread evenly over the other classes.

    4k bytes a sample up to 65,536 classes, 6k beyond."""

    class_NK: Tensor
    share_NK: Tensor

    def __init__(self, num_samples: int, num_classes: int, k: int) -> None:
        super().__init__()
        self.num_classes, self.k = num_classes, k
        kind = torch.int16 if num_classes <= 2 * OFFSET else torch.int32
        self.offset = OFFSET if kind == torch.int16 else 0
        first_K = (torch.arange(k) - self.offset).to(kind)
        self.register_buffer("class_NK", first_K.repeat(num_samples, 1))
        self.register_buffer("share_NK", torch.full((num_samples, k), 1 / num_classes, dtype=torch.float16))

    def _rest(self, share: Tensor) -> Tensor:
        """The share of each class that is not kept."""
        return ((1 - share.sum(-1)) / max(self.num_classes - self.k, 1)).clamp(min=0)

    def read(self, slots: Tensor) -> Tensor:
        """Whole rows of M, float32 [B, C]."""
        share_BK = self.share_NK[slots].float()
        rows_BC = self._rest(share_BK)[:, None].repeat(1, self.num_classes)
        return rows_BC.scatter_(1, self.class_NK[slots].long() + self.offset, share_BK)

    def write(self, slots: Tensor, rows_BC: Tensor) -> None:
        """Keep the k largest of each row."""
        share_BK, class_BK = rows_BC.topk(self.k, 1, sorted=False)
        self.class_NK[slots] = (class_BK - self.offset).to(self.class_NK.dtype)
        self.share_NK[slots] = share_BK.to(torch.float16)

    def column_sum(self) -> Tensor:
        """sum_i M_ij, float64 [C]."""
        total_C = torch.zeros(self.num_classes, dtype=torch.float64, device=self.share_NK.device)
        rows = max(CHUNK // self.k, 1)
        for class_NK, share_NK in zip(self.class_NK.split(rows), self.share_NK.split(rows), strict=True):
            share = share_NK.double()
            rest_N = self._rest(share)
            total_C += rest_N.sum()
            total_C.index_add_(0, class_NK.flatten().long() + self.offset, (share - rest_N[:, None]).flatten())
        return total_C
