"""Image files to pixels: every colour space, broken files, windows and sizes."""

import io

import numpy as np
import pytest
from PIL import Image

from fastgnl.images import decode, encode_jpeg, resize, window_of

SMOOTH = (
    np.stack(
        [
            np.linspace(0, 255, 64)[None].repeat(48, 0),
            np.linspace(255, 0, 48)[:, None].repeat(64, 1),
            np.full((48, 64), 99.0),
        ],
        2,
    )
    .round()
    .astype(np.uint8)
)


def saved(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_rgb_files_keep_their_pixels():
    np.testing.assert_array_equal(decode(saved(Image.fromarray(SMOOTH), "PNG")), SMOOTH)
    found = decode(saved(Image.fromarray(SMOOTH), "JPEG", quality=95)).astype(int)
    assert abs(found - SMOOTH).max() < 12


def test_greyscale():
    grey = Image.fromarray(SMOOTH[..., 0])
    for kind in ("PNG", "JPEG"):
        found = decode(saved(grey, kind))
        assert found.shape == (48, 64, 3)
        assert (found[..., 0] == found[..., 2]).all()
        assert abs(found[..., 1].astype(int) - SMOOTH[..., 0]).max() < 4


def test_cmyk_jpegs_come_out_in_the_right_colours():
    cmyk = Image.fromarray(SMOOTH).convert("CMYK")
    found = decode(saved(cmyk, "JPEG", quality=95)).astype(int)
    assert abs(found - SMOOTH).mean() < 4


def test_sixteen_bits_palettes_and_transparency():
    deep = Image.fromarray(SMOOTH[..., 0].astype(np.uint16) * 257)
    np.testing.assert_array_equal(decode(saved(deep, "PNG"))[..., 0], SMOOTH[..., 0])
    palette = Image.fromarray(SMOOTH).quantize(64)
    np.testing.assert_array_equal(decode(saved(palette, "PNG")), np.asarray(palette.convert("RGB")))
    seen_through = Image.fromarray(
        np.dstack([SMOOTH, np.where(np.arange(64) < 32, 0, 255) + np.zeros((48, 1))]).astype(np.uint8)
    )
    found = decode(saved(seen_through, "PNG"))
    assert (found[:, :32] == 255).all(), "white shines through"
    np.testing.assert_array_equal(found[:, 32:], SMOOTH[:, 32:])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP"])
def test_truncated_files_are_no_images(kind):
    data = saved(Image.fromarray(SMOOTH), kind)
    for cut in (10, len(data) // 3, len(data) * 2 // 3):
        with pytest.raises((OSError, ValueError)):
            decode(data[:cut])


def test_what_is_no_image(monkeypatch):
    for data in (b"", b"hello", b"\xff\xd8\xff" + b"\0" * 100):
        with pytest.raises((OSError, ValueError)):
            decode(data)
    monkeypatch.setattr("fastgnl.images.LARGEST", 1000)
    with pytest.raises(ValueError, match="64 x 48 pixels are more than are decoded"):
        decode(saved(Image.fromarray(SMOOTH), "PNG"))


def test_shrinking_keeps_proportions_and_never_enlarges():
    assert resize(SMOOTH, 24, square=False).shape == (24, 32, 3)
    assert resize(SMOOTH, 100, square=False) is SMOOTH
    assert resize(SMOOTH, 24, square=True).shape == (24, 24, 3)
    assert resize(SMOOTH, 100, square=True).shape == (100, 100, 3)
    thin = np.zeros((7, 1000, 3), np.uint8)
    assert resize(thin, 5, square=False).shape == (5, 714, 3)


def test_a_window_at_half_size_is_the_mean_of_its_pixels():
    image = Image.fromarray(SMOOTH)
    found = window_of(image, 8, 16, 16, 24, 8, 12)
    window = SMOOTH[8:24, 16:40].astype(float)
    means = window.reshape(8, 2, 12, 2, 3).mean((1, 3))
    assert abs(found - means).max() <= 1
    assert window_of(image, 8, 16, 4, 6, 8, 12).shape == (8, 12, 3)


def test_a_window_beyond_the_image_is_black_and_may_be_mirrored():
    image = Image.fromarray(SMOOTH)
    found = window_of(image, -2, 60, 10, 8, 10, 8)
    assert (found[:2] == 0).all()
    assert (found[:, 4:] == 0).all()
    np.testing.assert_array_equal(found[2:, :4], SMOOTH[:8, 60:])
    np.testing.assert_array_equal(window_of(image, -2, 60, 10, 8, 10, 8, flip=True), found[:, ::-1])


def test_jpeg_quality_is_used():
    assert len(encode_jpeg(SMOOTH, 95)) > len(encode_jpeg(SMOOTH, 20))
