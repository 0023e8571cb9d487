"""Sizes and pixels of images against the outputs of transformers that `oracle_pixels` stored."""

import json

import numpy as np
import pytest
from PIL import Image

from bough.errors import UsageError
from bough.images.pixels import Picture, picture, smart_resize
from tests.images.oracle_pixels import CAP, FILE, digest, image

ROWS = json.loads(FILE.read_text())


def patches(pixels: np.ndarray) -> np.ndarray:
    """Return [patches, 1536] normalised, in blocks of 2 x 2, each frame twice, as the reference has them."""
    height, width, _ = pixels.shape
    # The reference multiplies in float64 and rounds, then subtracts and divides.
    scaled = (pixels.astype(np.float64) / 255).astype(np.float32)
    values = (scaled - np.float32(0.5)) / np.float32(0.5)
    blocks = values.reshape(height // 32, 2, 16, width // 32, 2, 16, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    twice = np.broadcast_to(blocks[:, :, :, :, :, None], (*blocks.shape[:5], 2, 16, 16))
    return twice.reshape(-1, 1536)


def of(width: int, height: int, most: int = CAP) -> Picture:
    return picture(image(width, height), most_tokens=most)


@pytest.mark.parametrize(("width", "height", "down", "across", "expected"), ROWS)
def test_pixels_are_the_references(width: int, height: int, down: int, across: int, expected: str) -> None:
    result = of(width, height)
    assert (2 * result.rows, 2 * result.columns) == (down, across)
    assert digest(patches(result.pixels)) == expected


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [(640, 480, 300), (1024, 1024, 1024), (1920, 1080, 2040), (300, 200, 70), (32, 32, 64),
     (4032, 3024, 11844), (6000, 4000, 16224)],
)  # fmt: skip
def test_tokens_of_common_sizes(width: int, height: int, tokens: int) -> None:
    down, across = smart_resize(height, width, most_tokens=16_384)
    assert down * across == tokens * 1024


def test_a_strip_is_refused_with_its_size() -> None:
    with pytest.raises(UsageError, match="4021 x 20 pixels"):
        smart_resize(20, 4021, most_tokens=4096)
    assert smart_resize(20, 4000, most_tokens=4096)


def test_digests_are_of_pixels_and_form() -> None:
    tall, wide = of(256, 512), of(512, 256)
    flat = Picture(wide.pixels.reshape(tall.pixels.shape), b"")
    assert of(256, 512).digest == tall.digest != wide.digest
    assert flat.tokens == wide.tokens
    assert picture(Image.fromarray(flat.pixels), most_tokens=CAP).digest != wide.digest
    other = wide.pixels.copy()
    other[-3, 5, 1] ^= 1
    assert picture(Image.fromarray(other), most_tokens=CAP).digest != wide.digest
