"""Images of a prompt: which of its rows they are, how rope turns these, and their rows, encoded once."""

import time
from collections import OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.images.pixels import Picture
from bough.models.step import ImageRows
from bough.models.vision import VisionTower
from bough.models.vision_spec import REMEMBERED


@dataclass(frozen=True, slots=True)
class PlacedPicture:
    """An image in a prompt, whose ids from `start` on are the picture's: they name it, and embed nothing."""

    start: int
    picture: Picture

    @property
    def end(self) -> int:
        return self.start + self.picture.tokens

    @property
    def offset(self) -> int:
        """Return what the text after it has less than its indices: an image is as long as its longer side."""
        return max(self.picture.rows, self.picture.columns) - self.picture.tokens


def offset_at(images: Sequence[PlacedPicture], index: int) -> int:
    """Return the rope position of a prompt's row of text over its index."""
    return sum(image.offset for image in images if image.end <= index)


def rope_positions(images: Sequence[PlacedPicture], start: int, stop: int) -> Tensor:
    """Return time, height and width [3, stop - start] of a prompt's rows."""
    positions = torch.arange(start, stop).repeat(3, 1)
    for image in images:
        positions[:, max(0, image.end - start) :] += image.offset
    for image in images:
        rows = range(max(start, image.start), min(stop, image.end))
        if rows:
            index = torch.arange(rows.start, rows.stop) - image.start
            grid = torch.stack([0 * index, index // image.picture.columns, index % image.picture.columns])
            first = image.start + offset_at(images, image.start)
            positions[:, rows.start - start : rows.stop - start] = first + grid
    return positions


class PictureEncoder:
    """The vision tower and the rows of the images that it encoded last."""

    def __init__(self, tower: VisionTower, *, remembered: int = REMEMBERED):
        self._tower, self._most = tower, remembered
        self._rows: OrderedDict[bytes, Tensor] = OrderedDict()  # by digest, the last used at the end
        self.seconds = 0.0  # of all encoding
        self.encoded = 0  # images

    @property
    def steps(self) -> int:
        """Return how often encoding an image pauses."""
        return self._tower.spec.depth

    def chunk(
        self, images: Sequence[PlacedPicture], start: int, stop: int
    ) -> Generator[None, None, ImageRows | None]:
        """Return the rows of images in a prompt's chunk; None: there are none. Pause within the tower."""
        indices, parts = [], []
        for image in images:
            inside = range(max(start, image.start), min(stop, image.end))
            if inside:
                rows = yield from self._encode(image.picture)
                indices.append(torch.arange(inside.start - start, inside.stop - start))
                parts.append(rows[inside.start - image.start : inside.stop - image.start])
        if not parts:
            return None
        device = self._tower.device
        positions = rope_positions(images, start, stop).to(device)
        return ImageRows(torch.cat(indices).to(device), torch.cat(parts), positions)

    def _encode(self, picture: Picture) -> Generator[None, None, Tensor]:
        if (rows := self._rows.get(picture.digest)) is None:
            rows = yield from self._run(picture)
            self._rows[picture.digest] = rows
            while len(self._rows) > 1 and sum(map(len, self._rows.values())) > self._most:
                self._rows.popitem(last=False)
        self._rows.move_to_end(picture.digest)
        return rows

    def _run(self, picture: Picture) -> Generator[None, None, Tensor]:
        """Run the tower; what others do in its pauses is not counted."""
        layers = self._tower.encode(torch.from_numpy(picture.pixels))
        while True:
            begin, threads = time.perf_counter(), torch.get_num_threads()
            torch.set_num_threads(self._tower.threads or threads)
            try:
                next(layers)
            except StopIteration as end:
                if self._tower.device.type == "cuda":
                    torch.cuda.synchronize(self._tower.device)
                self.encoded += 1
                return end.value
            finally:
                torch.set_num_threads(threads)
                self.seconds += time.perf_counter() - begin
            yield
