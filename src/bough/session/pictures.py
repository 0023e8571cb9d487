"""Images of requests: counted by their headers, decoded once, and kept: the next turn has them, too."""

import hashlib
import threading
from collections import OrderedDict
from pathlib import Path

from bough.errors import UnsupportedModel
from bough.images.opening import ImageFile, ImageLimits, image_size, open_image
from bough.images.pixels import TOKEN, Picture, picture, smart_resize
from bough.text.tokenizer import Tokenizer

PAD, VISION_END = "<|image_pad|>", "<|vision_end|>"  # control tokens: an image's slot, and what follows it
_REMEMBERED = 64 << 20  # bytes of pixels


def check_pads(tokenizer: Tokenizer, path: Path) -> None:
    """Raise unless the tokens of images are control tokens, which no message can spell."""
    for token in (PAD, VISION_END):
        id = tokenizer.id_of(token)
        if id is None or not tokenizer.is_control(id):
            seen = "is none" if id is None else f"{id} is an ordinary token"
            raise UnsupportedModel(
                f"{path.name}: the token {token} {seen}, needed: a control token, for images",
                "set `no_images`",
            )


class Pictures:
    """Decodes images, in any thread but the engine's; the tower is elsewhere."""

    def __init__(self, limits: ImageLimits):
        self.limits = limits
        self._decoded: OrderedDict[bytes, Picture] = OrderedDict()  # the last used at the end
        self._lock = threading.Lock()

    def tokens(self, file: ImageFile) -> int:
        """Return how many tokens an image takes, from its header alone."""
        width, height = image_size(file.data, self.limits, where=file.where)
        rows, columns = smart_resize(height, width, most_tokens=self._most(file))
        return rows * columns // TOKEN**2

    def of(self, file: ImageFile) -> Picture:
        most = self._most(file)
        key = hashlib.sha256(most.to_bytes(4, "little") + file.data).digest()
        with self._lock:
            if key in self._decoded:
                self._decoded.move_to_end(key)
                return self._decoded[key]
        result = picture(open_image(file.data, self.limits, where=file.where), most_tokens=most)
        with self._lock:
            self._decoded[key] = result
            while (
                len(self._decoded) > 1
                and sum(each.pixels.nbytes for each in self._decoded.values()) > _REMEMBERED
            ):
                self._decoded.popitem(last=False)
        return result

    def _most(self, file: ImageFile) -> int:
        return min(self.limits.tokens, file.most_tokens or self.limits.tokens)
