"""PreAct ResNet-18 for small images: BatchNorm and ReLU come before a convolution, and nothing after the last sum."""

from typing import ClassVar

from torch import Tensor, nn

from fastgnl.backbones.initialise import initialise
from fastgnl.backbones.resnet import conv, stage


class PreActBlock(nn.Module):
    """With a = relu(bn1(x)): y = shortcut + conv2(relu(bn2(conv1(a)))).

    The shortcut is x, or a 1x1 convolution of a where the shape changes.
    """

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv(inputs, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = conv(width, width, 3)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride != 1 or inputs != width:
            self.shortcut = nn.Sequential(conv(inputs, width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        a = self.relu(self.bn1(x))
        around = x if self.shortcut is None else self.shortcut(a)
        return around + self.conv2(self.relu(self.bn2(self.conv1(a))))


class PreActResNet18(nn.Module):
    """A 3x3 convolution, four stages of two blocks, the mean over positions."""

    num_features = 512
    smallest: ClassVar[int] = 1
    classifier_keys: ClassVar[tuple[str, ...]] = ("linear.", "fc.", "classifier.", "head.")

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = conv(3, 64, 3)
        self.layer1 = stage(PreActBlock, 64, 64, 2, 1)
        self.layer2 = stage(PreActBlock, 64, 128, 2, 2)
        self.layer3 = stage(PreActBlock, 128, 256, 2, 2)
        self.layer4 = stage(PreActBlock, 256, 512, 2, 2)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer4(self.layer3(self.layer2(self.layer1(self.conv1(x))))).mean((2, 3))
