"""Image files to pixels and back."""

import io
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

Pixels = NDArray[np.uint8]
"""[H, W, 3], red, green, blue."""

LARGEST = 1 << 28
"""Pixels of the largest image that is decoded: a small file can unfold to any size."""


def decode(data: Any) -> Pixels:
    """The pixels of an image file. ``OSError`` or ``ValueError`` when it has none."""
    return np.asarray(open_image(data))


def open_image(data: Any) -> Image.Image:
    """An image file of any colour space, decoded, in RGB. ``OSError`` or ``ValueError`` when it is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image: Image.Image = Image.open(io.BytesIO(data))
        except UnidentifiedImageError as error:  # its own words hold an address in memory
            raise ValueError("no image, or of a kind that PIL does not know") from error
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
        return image if image.mode == "RGB" else image.convert("RGB")


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


def window_of(
    image: Image.Image, top: int, left: int, rows: int, cols: int, height: int, width: int, flip: bool = False
) -> Pixels:
    """A window of the image, black beyond it, at another size (the mean over the pixels that fall on one, or between
    them), mirrored or not."""
    image = image.crop((left, top, left + cols, top + rows))
    if (rows, cols) != (height, width):
        shrinks = rows >= height and cols >= width
        image = image.resize((width, height), Image.Resampling.BOX if shrinks else Image.Resampling.BILINEAR)
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)
