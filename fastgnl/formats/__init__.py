"""Readers of data sets in their published layouts, one module a family."""

from typing import Any

from fastgnl.formats.cifar import Cifar10, Cifar10N, Cifar100, Cifar100N
from fastgnl.formats.clothing1m import Clothing1M
from fastgnl.formats.embedded import Digits
from fastgnl.formats.folders import Animal10N, ImageFolder, ImageNetVal, RedMiniImageNet
from fastgnl.formats.synthetic import Web
from fastgnl.formats.tables import ImageCsv, Npz
from fastgnl.formats.text import AGNews, Jsonl, Newsgroups20
from fastgnl.formats.webvision import WebVision

FORMATS: dict[str, Any] = {
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "cifar10n": Cifar10N,
    "cifar100n": Cifar100N,
    "animal10n": Animal10N,
    "red-mini-imagenet": RedMiniImageNet,
    "clothing1m": Clothing1M,
    "webvision": WebVision,
    "imagenet-val": ImageNetVal,
    "folder": ImageFolder,
    "csv": ImageCsv,
    "npz": Npz,
    "agnews": AGNews,
    "newsgroups20": Newsgroups20,
    "jsonl": Jsonl,
}
"""Layouts on disk, by the name of their ``fastgnl convert``."""

EMBEDDED: dict[str, Any] = {"digits": Digits, "web": Web}
"""Data that need no files."""
