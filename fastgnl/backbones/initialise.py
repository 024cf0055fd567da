"""How the convolutions of the larger backbones start."""

from torch import nn


def initialise(module: nn.Module) -> None:
    """Weights of convolutions from N(0, 2 / (k k outputs)), biases 0. BatchNorm keeps torch's 1 and 0."""
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)
