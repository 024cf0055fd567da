"""The embedded data: scikit-learn's 1,797 handwritten digits with instance-dependent noise."""

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from fastgnl.noise import Noise, instance_dependent


class Digits(NamedTuple):
    """Images [N, 1, 8, 8] in [0, 1] and labels; the training labels also as given, with their noise."""

    train_x: Tensor
    train_clean: Tensor
    train_given: Tensor
    test_x: Tensor
    test_y: Tensor
    noise: Noise


def noisy_digits(rate: float = 0.4, seed: int = 0) -> Digits:
    """A stratified fifth for testing, the rest with ``rate`` instance-dependent noise."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=0.2, random_state=seed, stratify=labels
    )
    noise = instance_dependent(train_x, train_y, rate, seed, num_classes=10)
    return Digits(
        torch.from_numpy(train_x).view(-1, 1, 8, 8),
        torch.from_numpy(train_y),
        torch.from_numpy(noise.labels),
        torch.from_numpy(test_x).view(-1, 1, 8, 8),
        torch.from_numpy(test_y),
        noise,
    )
