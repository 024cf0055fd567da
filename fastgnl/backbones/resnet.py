"""ResNets, with the names of torchvision's weights: ResNet-34 for small images, ResNet-50 for large ones."""

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from fastgnl.backbones.initialise import initialise


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A square convolution without bias that keeps the side of the image, but for the stride."""
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


def downsample(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The way around a block: x itself, or a 1x1 convolution where the shape changes."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """relu(downsample(x) + f(x)), f two 3x3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """relu(downsample(x) + f(x)), f a 1x1, a 3x3 (which has the stride) and a 1x1 convolution."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = conv(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = conv(width, outputs, 1)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.downsample(x))


def stage(block: type[Any], inputs: int, width: int, count: int, stride: int) -> nn.Sequential:
    """``count`` blocks; the first has the stride and takes ``inputs`` channels."""
    outputs = width * block.expansion
    return nn.Sequential(
        block(inputs, width, stride),
        *(block(outputs, width, 1) for _ in range(count - 1)),
    )


class ResNet(nn.Module):
    """A stem, four stages that halve the side and double the channels from one to the next, the mean over positions."""

    smallest: ClassVar[int] = 1
    classifier_keys: ClassVar[tuple[str, ...]] = ("fc.", "last_linear.", "linear.", "classifier.", "head.")

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], counts: Sequence[int], stem: nn.Conv2d) -> None:
        super().__init__()
        self.num_features = 512 * block.expansion
        self.conv1 = stem
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool: nn.Module = nn.Identity()
        self.layer1 = stage(block, 64, 64, counts[0], 1)
        self.layer2 = stage(block, 64 * block.expansion, 128, counts[1], 2)
        self.layer3 = stage(block, 128 * block.expansion, 256, counts[2], 2)
        self.layer4 = stage(block, 256 * block.expansion, 512, counts[3], 2)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean((2, 3))


class ResNet34Cifar(ResNet):
    """ResNet-34 whose stem is a 3x3 convolution that keeps the side, for images of 32 pixels or so."""

    def __init__(self) -> None:
        super().__init__(BasicBlock, (3, 4, 6, 3), conv(3, 64, 3))


class ResNet50(ResNet):
    """ResNet-50 whose stem divides the side by four, for images of 224 pixels or so."""

    def __init__(self) -> None:
        super().__init__(Bottleneck, (3, 4, 6, 3), conv(3, 64, 7, 2))
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
