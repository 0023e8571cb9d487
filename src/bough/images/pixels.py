"""Pixels of an image as the vision tower takes them: resized by Pillow to whole tokens, in bytes.

Equal to the reference's bit for bit: its Pillow backend resizes bytes, and the tower normalises them.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from bough.errors import UsageError

TOKEN = 32  # pixels on a side: 2 x 2 patches of 16
LEAST_TOKENS, MOST_TOKENS = 64, 16_384  # of the family's preprocessor_config.json
_LONGEST = 200  # times the short side


def smart_resize(height: int, width: int, *, most_tokens: int) -> tuple[int, int]:
    """Return height and width of whole tokens, near the image's and within the limits of tokens."""
    if max(height, width) > _LONGEST * min(height, width):
        raise UsageError(
            f"the image is {width} x {height} pixels; "
            f"the long side may be at most {_LONGEST} times the short one"
        )
    least, most = LEAST_TOKENS * TOKEN**2, most_tokens * TOKEN**2
    rows, columns = (round(side / TOKEN) for side in (height, width))
    if rows * columns * TOKEN**2 > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(side / shrink / TOKEN)) for side in (height, width))
    elif rows * columns * TOKEN**2 < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * grow / TOKEN) for side in (height, width))
    return rows * TOKEN, columns * TOKEN


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """An image as the tower takes it."""

    pixels: np.ndarray  # [height, width, 3] uint8
    digest: bytes  # of the pixels and their form: two pictures with one digest are the same

    @property
    def ids(self) -> list[int]:
        """Return what stands for its tokens in a prompt: its digest as ids that are in no vocabulary."""
        words = np.frombuffer(self.digest, dtype="<i4") | np.int32(-(2**31))
        return np.resize(words, self.tokens).tolist()

    @property
    def rows(self) -> int:
        return self.pixels.shape[0] // TOKEN

    @property
    def columns(self) -> int:
        return self.pixels.shape[1] // TOKEN

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


def picture(image: Image.Image, *, most_tokens: int) -> Picture:
    """Return the pixels of an image, resized to at most so many tokens."""
    height, width = smart_resize(image.height, image.width, most_tokens=most_tokens)
    resized = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.array(resized)
    form = np.array(pixels.shape, dtype="<i8").tobytes()
    return Picture(pixels, hashlib.sha256(form + pixels.tobytes()).digest())
