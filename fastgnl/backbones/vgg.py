"""VGG-19 with BatchNorm, with the names of torchvision's weights."""

from typing import ClassVar

from torch import Tensor, nn

from fastgnl.backbones.initialise import initialise

STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
"""(channels, 3x3 convolutions); a max-pool halves the side after each."""


def convolutions() -> nn.Sequential:
    """The 16 convolutions (BatchNorm, ReLU) and the five max-pools, numbered through."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, count in STAGES:
        for _ in range(count):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


class VGG19BN(nn.Module):
    """16 convolutions, 7x7 means of what is left of the image, two layers of 4,096 with ReLU and dropout."""

    num_features = 4096
    smallest: ClassVar[int] = 32
    classifier_keys: ClassVar[tuple[str, ...]] = ("classifier.6.",)

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = convolutions()
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout)),
            *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout)),
        )
        initialise(self)
        for layer in (self.classifier[0], self.classifier[3]):
            assert isinstance(layer, nn.Linear)
            nn.init.normal_(layer.weight, 0, 0.01)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))
