"""Tiny random models that see: a target and its vision tower in one folder."""

import io
from pathlib import Path
from typing import Any

from bough.engine.images import PlacedPicture
from bough.engine.sequence import Request
from bough.images.opening import ImageFile
from bough.images.pixels import Picture, picture
from tests.images.oracle_pixels import image
from tests.images.tiny_tower import random_weights, vision_settings, write_mmproj
from workshop.tiny import make_tiny


def make_seeing(folder: Path, *, width: int = 64, kind: str = "F32", **options: Any) -> Path:
    """Write a model and its image encoder; return the model's file."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = vision_settings("small", out=width)
    write_mmproj(folder / f"mmproj-{kind}.gguf", settings, random_weights(settings), kind=kind)
    return make_tiny(folder / "model.gguf", width=width, images=True, **options)


def png(width: int, height: int, *, shade: int = 0) -> ImageFile:
    """Return a file of noise; `shade` makes it another picture of the same size."""
    data = io.BytesIO()
    image(width, height).point(lambda value: (value + shade) % 256).save(data, "PNG")
    return ImageFile(data.getvalue())


def shown(width: int, height: int, *, shade: int = 0) -> Picture:
    return picture(image(width, height).point(lambda value: (value + shade) % 256), most_tokens=96)


def seeing_request(parts: list[int | Picture], *, seed: int = 0, **options: Any) -> Request:
    """Return a request of runs of text, of so many tokens that repeat themselves, and of pictures."""
    ids: list[int] = []
    images: list[PlacedPicture] = []
    boundaries = {}
    for part in parts:
        if isinstance(part, Picture):
            images.append(PlacedPicture(len(ids), part))
            ids += part.ids
            boundaries[len(ids)] = "image"
        else:
            ids += [40 + (seed + index % 7) % 50 for index in range(part)]
    return Request(ids, images=tuple(images), **{"boundaries": boundaries} | options)
