"""Small backbones for CPUs and demos: modules that return features, with their width as ``num_features``."""

from typing import ClassVar

from torch import Tensor, nn


class MLP(nn.Sequential):
    """One hidden layer for embeddings: Linear, BatchNorm, ReLU, dropout."""

    def __init__(self, inputs: int, hidden: int = 512, dropout: float = 0.2) -> None:
        super().__init__(nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(dropout))
        self.num_features = hidden


class SmallCNN(nn.Module):
    """Three 3x3 convolutions (BatchNorm, ReLU), one or two halvings, then the mean over positions."""

    def __init__(self, channels: int = 1, width: int = 32, halvings: int = 1) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
            )

        self.num_features = 4 * width
        self.layers = nn.Sequential(
            block(channels, width),
            *([nn.MaxPool2d(2)] if halvings == 2 else []),
            block(width, 2 * width),
            nn.MaxPool2d(2),
            block(2 * width, 4 * width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean((2, 3))


class FastCNN(nn.Module):
    """A small residual network for images of 8 pixels a side and more: four 3x3 convolutions, of which the last three
    halve the side, two residual blocks, then the largest value over positions."""

    smallest: ClassVar[int] = 8

    def __init__(self, width: int = 16) -> None:
        super().__init__()

        def block(inputs: int, outputs: int, pool: bool = False) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                *([nn.MaxPool2d(2)] if pool else []),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            )

        def residual(width: int) -> nn.Module:
            return _Around(block(width, width), block(width, width))

        self.num_features = 8 * width
        self.layers = nn.Sequential(
            block(3, width),
            block(width, 2 * width, pool=True),
            residual(2 * width),
            block(2 * width, 4 * width, pool=True),
            block(4 * width, 8 * width, pool=True),
            residual(8 * width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).amax((2, 3))


class _Around(nn.Sequential):
    """x + f(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)
