"""Inception-ResNet-v2 (Szegedy et al. 2016), with the names of timm's weights."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from fastgnl.backbones.initialise import initialise


class ConvNorm(nn.Module):
    """relu(bn(conv(x))); a size is a number, or (height, width)."""

    def __init__(
        self, inputs: int, outputs: int, size: int | tuple[int, int], stride: int = 1, pad: bool = False
    ) -> None:
        super().__init__()
        height, width = (size, size) if isinstance(size, int) else size
        padding = (height // 2, width // 2) if pad else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).relu_()


class Branches(nn.Module):
    """Several ways for x, ``branch0`` and so on; their channels are joined."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.names = [f"branch{i}" for i in range(len(branches))]
        for name, branch in zip(self.names, branches, strict=True):
            self.add_module(name, branch)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([getattr(self, name)(x) for name in self.names], 1)


class Residual(Branches):
    """x + scale conv2d(branches): conv2d brings their ``joined`` channels back to the ``channels`` of x."""

    def __init__(self, channels: int, joined: int, scale: float, *branches: nn.Module) -> None:
        super().__init__(*branches)
        self.scale = scale
        self.conv2d = nn.Conv2d(joined, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.conv2d(super().forward(x))


class ResidualReLU(Residual):
    """relu(x + scale conv2d(branches))."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu_()


def block35() -> nn.Module:
    """The residual block at 35x35 positions (in images of 299)."""
    return ResidualReLU(
        *(320, 128, 0.17),
        ConvNorm(320, 32, 1),
        nn.Sequential(ConvNorm(320, 32, 1), ConvNorm(32, 32, 3, pad=True)),
        nn.Sequential(ConvNorm(320, 32, 1), ConvNorm(32, 48, 3, pad=True), ConvNorm(48, 64, 3, pad=True)),
    )


def block17() -> nn.Module:
    """The residual block at 17x17 positions."""
    return ResidualReLU(
        *(1088, 384, 0.1),
        ConvNorm(1088, 192, 1),
        nn.Sequential(
            ConvNorm(1088, 128, 1), ConvNorm(128, 160, (1, 7), pad=True), ConvNorm(160, 192, (7, 1), pad=True)
        ),
    )


def block8(last: bool = False) -> nn.Module:
    """The residual block at 8x8 positions; the last is not scaled and has no ReLU."""
    branches = (
        ConvNorm(2080, 192, 1),
        nn.Sequential(
            ConvNorm(2080, 192, 1), ConvNorm(192, 224, (1, 3), pad=True), ConvNorm(224, 256, (3, 1), pad=True)
        ),
    )
    return Residual(2080, 448, 1.0, *branches) if last else ResidualReLU(2080, 448, 0.2, *branches)


class InceptionResNetV2(nn.Module):
    """The stem, 10 + 20 + 10 residual blocks with reductions between them, the mean over positions."""

    num_features = 1536
    smallest: ClassVar[int] = 75
    classifier_keys: ClassVar[tuple[str, ...]] = ("classif.", "last_linear.", "fc.", "head.")

    def __init__(self) -> None:
        super().__init__()
        self.conv2d_1a = ConvNorm(3, 32, 3, stride=2)
        self.conv2d_2a = ConvNorm(32, 32, 3)
        self.conv2d_2b = ConvNorm(32, 64, 3, pad=True)
        self.maxpool_3a = nn.MaxPool2d(3, 2)
        self.conv2d_3b = ConvNorm(64, 80, 1)
        self.conv2d_4a = ConvNorm(80, 192, 3)
        self.maxpool_5a = nn.MaxPool2d(3, 2)
        self.mixed_5b = Branches(
            ConvNorm(192, 96, 1),
            nn.Sequential(ConvNorm(192, 48, 1), ConvNorm(48, 64, 5, pad=True)),
            nn.Sequential(ConvNorm(192, 64, 1), ConvNorm(64, 96, 3, pad=True), ConvNorm(96, 96, 3, pad=True)),
            nn.Sequential(nn.AvgPool2d(3, 1, padding=1, count_include_pad=False), ConvNorm(192, 64, 1)),
        )
        self.repeat = nn.Sequential(*(block35() for _ in range(10)))
        self.mixed_6a = Branches(
            ConvNorm(320, 384, 3, stride=2),
            nn.Sequential(ConvNorm(320, 256, 1), ConvNorm(256, 256, 3, pad=True), ConvNorm(256, 384, 3, stride=2)),
            nn.MaxPool2d(3, 2),
        )
        self.repeat_1 = nn.Sequential(*(block17() for _ in range(20)))
        self.mixed_7a = Branches(
            nn.Sequential(ConvNorm(1088, 256, 1), ConvNorm(256, 384, 3, stride=2)),
            nn.Sequential(ConvNorm(1088, 256, 1), ConvNorm(256, 288, 3, stride=2)),
            nn.Sequential(ConvNorm(1088, 256, 1), ConvNorm(256, 288, 3, pad=True), ConvNorm(288, 320, 3, stride=2)),
            nn.MaxPool2d(3, 2),
        )
        self.repeat_2 = nn.Sequential(*(block8() for _ in range(9)))
        self.block8 = block8(last=True)
        self.conv2d_7b = ConvNorm(2080, self.num_features, 1)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x.mean((2, 3))
