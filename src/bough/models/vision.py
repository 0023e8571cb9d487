"""The vision tower: from an image's pixels to the rows that stand for it in the target's input.

Read from a GGUF file of its own ("mmproj"), one image in a forward pass: its bits depend on nothing else.
"""

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from bough.gguf.quants import dequantise
from bough.gguf.reader import GGUFFile
from bough.models.vision_spec import MERGE, PATCH, PATCHES, VisionSpec

_EPS = 1e-6
_THETA = 10_000.0
# Scores of 65,536 patches in memory would be hundreds of GiB; these two write none.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


@dataclass(frozen=True, slots=True)
class _Affine:
    """A weight and its bias: of a matmul, or of a norm."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def norm(self, x: Tensor) -> Tensor:
        return layer_norm(x, (x.shape[-1],), self.weight, self.bias, _EPS)


@dataclass(frozen=True, slots=True)
class _Block:
    attention_norm: _Affine
    projections: _Affine  # query, key, value
    out: _Affine
    norm: _Affine
    up: _Affine
    down: _Affine


class VisionTower:
    """The encoder's weights on a device, as one type: matmuls accumulate in float32."""

    def __init__(
        self, file: GGUFFile, device: torch.device, dtype: torch.dtype, *, threads: int | None = None
    ):
        """`threads` of a CPU that encode; None: as many as torch has."""
        self.threads = threads
        self.spec = spec = VisionSpec.from_gguf(file)
        self.device, self.dtype = device, dtype
        self._file = file
        patches = [self._read(name, spec.width, 3, PATCH, PATCH) for name in PATCHES]
        # A still image is the same frame twice: the two kernels are one.
        kernel = (patches[0] + patches[1]).flatten(1).to(dtype)
        self._patches = _Affine(kernel, self._read("v.patch_embd.bias", spec.width).to(dtype))
        self._table = self._read("v.position_embd.weight", spec.side**2, spec.width)
        self._blocks = [self._block(f"v.blk.{index}") for index in range(spec.depth)]
        merged = MERGE**2 * spec.width
        self._merger_norm = self._affine("v.post_ln", spec.width)
        self._merger = self._affine("mm.0", merged, merged), self._affine("mm.2", spec.out, merged)
        del self._file
        pairs = torch.arange(0, spec.width // spec.heads // 2, 2, dtype=torch.float32, device=device)
        self._frequencies = 1.0 / _THETA ** (pairs / (spec.width // spec.heads // 2))

    def _read(self, name: str, *shape: int) -> Tensor:
        info = self._file.require_tensor(name, shape)
        packed = torch.from_numpy(self._file.raw(name).copy()).to(self.device)
        return dequantise(packed, info.type)

    def _affine(self, name: str, *shape: int) -> _Affine:
        weight, bias = self._read(f"{name}.weight", *shape), self._read(f"{name}.bias", shape[0])
        return _Affine(weight.to(self.dtype), bias.to(self.dtype))

    def _block(self, name: str) -> _Block:
        width, inner = self.spec.width, self.spec.inner
        up, down = f"{name}.ffn_up", f"{name}.ffn_down"
        if self._file.require_tensor(f"{up}.bias").shape == (width,) != (inner,):
            up, down = down, up  # older converters took the one for the other
        return _Block(
            self._affine(f"{name}.ln1", width),
            self._affine(f"{name}.attn_qkv", 3 * width, width),
            self._affine(f"{name}.attn_out", width, width),
            self._affine(f"{name}.ln2", width),
            self._affine(up, inner, width),
            self._affine(down, width, inner),
        )

    def encode(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Return the rows [tokens, out] of pixels [height, width, 3] uint8; pause after every block."""
        rows, columns = (side // (PATCH * MERGE) for side in pixels.shape[:2])
        x = self._patches(patches_of(pixels.to(self.device)).to(self.dtype))
        x = x + in_blocks(self._positions(MERGE * rows, MERGE * columns)).to(self.dtype)
        cos, sin = self._angles(MERGE * rows, MERGE * columns)
        for block in self._blocks:
            x = x + self._attention(block, block.attention_norm.norm(x), cos, sin)
            x = x + block.down(gelu(block.up(block.norm.norm(x)), approximate="tanh"))
            yield
        first, second = self._merger
        # Exact, unlike that of the blocks.
        return second(gelu(first(self._merger_norm.norm(x).unflatten(0, (rows * columns, -1)).flatten(1))))

    def _positions(self, height: int, width: int) -> Tensor:
        """Return the position embeddings [height, width, tower's width]; the corners are the table's."""
        table = self._table.view(self.spec.side, self.spec.side, -1)
        (low, high), (fall, rise) = _taps(height, self.spec.side, self.device)
        table = table[low] * fall[:, None, None] + table[high] * rise[:, None, None]
        (low, high), (fall, rise) = _taps(width, self.spec.side, self.device)
        return table[:, low] * fall[:, None] + table[:, high] * rise[:, None]

    def _angles(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin [patches, 1, head_dim / 2]: one half of the row, the other of the column."""
        down, across = (torch.arange(count, device=self.device) for count in (height, width))
        places = in_blocks(torch.stack(torch.meshgrid(down, across, indexing="ij"), -1))
        angles = (places[..., None] * self._frequencies).flatten(1)[:, None]
        return angles.cos(), angles.sin()

    def _attention(self, block: _Block, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = block.projections(x).view(len(x), 3, self.spec.heads, -1).unbind(1)
        q, k = (_turned(part, cos, sin) for part in (q, k))
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        with sdpa_kernel(_ATTENTION):
            out = scaled_dot_product_attention(q, k, v)
        return block.out(out[0].transpose(0, 1).flatten(1))


def patches_of(pixels: Tensor) -> Tensor:
    """Return the patches [n, 3 * 16 * 16] float32 in -1 to 1 of pixels [height, width, 3] uint8."""
    rows, columns, _ = pixels.shape
    parts = pixels.view(rows // PATCH, PATCH, columns // PATCH, PATCH, 3).permute(0, 2, 4, 1, 3)
    return (in_blocks(parts).flatten(1).float() / 255 - 0.5) / 0.5


def in_blocks(grid: Tensor) -> Tensor:
    """Return [n, ...] of a grid of patches [height, width, ...]: the four of a token after each other."""
    tokens = grid.unflatten(1, (-1, MERGE)).unflatten(0, (-1, MERGE))
    return tokens.transpose(1, 2).flatten(0, 3)


def _taps(count: int, side: int, device: torch.device) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return two indices [count] each into a line of `side` values that is stretched, and their weights."""
    places = torch.arange(count, dtype=torch.float32, device=device) * (side - 1) / max(1, count - 1)
    low = places.floor()
    return (low.long(), (low + 1).clamp(max=side - 1).long()), (1 - (places - low), places - low)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [patches, heads, head_dim], the first half with the second, in float32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
