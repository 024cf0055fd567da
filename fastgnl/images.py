"""Image files to pixels and back."""

import io
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

Pixels = NDArray[np.uint8]
"""[H, W, 3], red, green, blue."""

LARGEST = 1 << 28
"""Pixels of the largest image that is decoded: a small file can unfold to any size."""


def decode(data: Any) -> Pixels:
    """The pixels of an image file, of any colour space, in RGB. ``OSError`` or ``ValueError`` when it has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image: Image.Image = Image.open(io.BytesIO(data))
        if image.width * image.height > LARGEST:
            raise ValueError(f"{image.width} x {image.height} pixels are more than are decoded ({LARGEST})")
        try:
            image.load()
        except SyntaxError as error:  # a broken PNG
            raise ValueError(str(error)) from error
        if image.mode.startswith("I;16") or image.mode == "I":  # 16 bits a pixel, which convert() would clip
            image = Image.fromarray((np.asarray(image, np.int64) >> 8).clip(0, 255).astype(np.uint8))
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image)
        return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def resize(pixels: Pixels, size: int, square: bool) -> Pixels:
    """Shrink until the shorter side is ``size``; or, ``square``, to size x size whatever the proportions."""
    height, width = pixels.shape[:2]
    if square:
        wanted = (size, size)
    else:
        scale = size / min(height, width)
        if scale >= 1:
            return pixels
        wanted = (max(round(width * scale), size), max(round(height * scale), size))
    if wanted == (width, height):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(wanted, Image.Resampling.BILINEAR, reducing_gap=3.0))


def encode_jpeg(pixels: Pixels, quality: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """An image, or a window of one, at another size: bilinear, over all pixels that fall on one. PIL's does the same,
    two or three times as slowly."""
    x = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None]  # a copy: colours stay last only in whole arrays
    found = functional.interpolate(x, (height, width), mode="bilinear", antialias=True)
    return np.ascontiguousarray(found[0].permute(1, 2, 0).numpy())
