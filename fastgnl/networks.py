"""Small backbones for CPUs and demos: modules that return features, with their width as ``num_features``."""

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
