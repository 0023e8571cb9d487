"""What the file of an image encoder (mmproj) says: sizes, and whether it fits a target. Imports no torch."""

from dataclasses import dataclass
from math import isqrt, prod

from bough.errors import UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.models.spec import ModelSpec

ARCHITECTURE = "clip"  # of the file
PROJECTOR = "qwen3vl_merger"
PATCH, MERGE = 16, 2  # pixels on a side; patches on a side of a token
REMEMBERED = 8192  # tokens of images whose rows stay on the device
PATCHES = ("v.patch_embd.weight", "v.patch_embd.weight.1")  # of a frame and the next


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """The sizes of a tower, all from its file."""

    depth: int
    width: int
    heads: int
    inner: int  # of the feed-forward
    side: int  # of the square table of position embeddings
    out: int  # the target's width

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> "VisionSpec":
        def count(key: str) -> int:
            value = file.require(f"clip.vision.{key}", int)
            if value < 1:
                raise UnsupportedModel(f"{file.path}: clip.vision.{key} is {value}, needed at least 1")
            return value

        check_encoder(file)
        for key, needed in (("patch_size", PATCH), ("spatial_merge_size", MERGE)):
            if count(key) != needed:
                raise UnsupportedModel(f"{file.path}: clip.vision.{key} is {count(key)}, needed {needed}")
        for key in ("image_mean", "image_std"):
            if (values := file.get(f"clip.vision.{key}", list, [0.5] * 3)) != [0.5] * 3:
                raise UnsupportedModel(f"{file.path}: clip.vision.{key} is {values}, needed 0.5 three times")
        if any(file.get("clip.vision.is_deepstack_layers", list, [])):
            raise UnsupportedModel(
                f"{file.path}: the image encoder adds features to the target's first layers (deepstack),"
                " as those of Qwen3-VL do; needed one of Qwen3.5 or later"
            )
        width, heads = count("embedding_length"), count("attention.head_count")
        if width % (4 * heads):
            raise UnsupportedModel(
                f"{file.path}: {heads} heads in a width of {width}, needed a multiple of 4"
            )
        table = file.require_tensor("v.position_embd.weight").shape
        side = isqrt(table[0])
        if side * side != table[0]:
            raise UnsupportedModel(f"{file.path}: {table[0]} position embeddings, needed a square")
        sizes = (count("block_count"), width, heads, count("feed_forward_length"))
        return cls(*sizes, side, count("projection_dim"))

    def check_target(self, file: GGUFFile, target: ModelSpec) -> None:
        """Raise if the encoder was made for another model."""
        if self.out != target.width:
            raise UnsupportedModel(
                f"{file.path}: the image encoder writes rows of {self.out} values"
                f" (clip.vision.projection_dim), {target.name} has {target.width}: it is of another model",
                "name the right file as `mmproj`, or set `no_images`",
            )
        if not target.rope_sections:
            raise UnsupportedModel(
                f"{target.name} takes no images: its file has no rope.dimension_sections for them",
                "set `no_images`",
            )


def check_encoder(file: GGUFFile) -> None:
    """Raise if a file is no image encoder of the kind that is supported."""
    kind = file.get("general.architecture", str, "")
    if kind != ARCHITECTURE or not file.get("clip.has_vision_encoder", bool, False):
        raise UnsupportedModel(
            f"{file.path}: general.architecture is {kind!r}, needed {ARCHITECTURE!r}: an image encoder"
        )
    projector = file.get("clip.projector_type", str, "")
    if projector != PROJECTOR:
        raise UnsupportedModel(
            f"{file.path}: clip.projector_type is {projector!r}, needed {PROJECTOR!r}, that of Qwen3.5"
        )


def tower_bytes(file: GGUFFile, item: int) -> int:
    """Return the bytes of a tower's weights, `item` for each value but those of the position table."""
    values = sum(prod(info.shape) for name, info in file.tensors.items() if name != PATCHES[1])
    table = prod(file.require_tensor("v.position_embd.weight").shape)
    return item * (values - table) + 4 * table


def workspace_bytes(spec: VisionSpec, tokens: int, item: int) -> int:
    """Return the bytes that an image of so many tokens takes while it is encoded, at most."""
    pixels = 3 * PATCH**2 * (1 + 4 + 4 + item)
    rows = item * (2 * spec.width + max(6 * spec.width, 2 * spec.inner)) + 4 * 6 * spec.width
    return MERGE**2 * tokens * (pixels + rows)
