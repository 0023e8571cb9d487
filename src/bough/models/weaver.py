"""Weaver (arXiv 2607.06763): a small causal transformer that scores a draft's candidates along a path.

It reads the target's last hidden state and the draft's rows once, the prefix, and then each drafted token
after those before it. A token's logit is the draft's and what the head adds. Owns no state.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from bough.gguf.types import QuantType
from bough.kernels.norm_rope import rms_norm, rope_angles
from bough.kernels.norm_rope.reference import rope
from bough.models.measure import measured, weight_loader
from bough.models.weaver_spec import POSITIONS, WeaverFile, WeaverSpec
from bough.models.weights import WeightLoader

_EPS = 1e-6
KeyValue = tuple[Tensor, Tensor]  # [S, ..., heads, D] of one layer


class BiasedNorm:
    def __init__(self, loader: WeightLoader, name: str, width: int):
        self._weight, self._bias = (loader.vector(f"{name}.{kind}", width) for kind in ("weight", "bias"))

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x.contiguous(), self._weight, _EPS) + self._bias


class WeaverBlock:
    def __init__(self, spec: WeaverSpec, loader: WeightLoader, index: int):
        block, width, inner = f"blocks.{index}.", spec.width, spec.inner
        self._spec = spec
        self._norm = BiasedNorm(loader, f"{block}norm_attn", width)
        names, sizes = [f"{block}qkv_proj.weight"], [3 * width]
        if spec.learned:
            names, sizes = [f"{block}{name}_proj.weight" for name in "qkv"], [width] * 3
        self._inputs = loader.projections(names, sizes, width)
        self._out = loader.matrix(f"{block}o_proj.weight", width, width)
        self._mlp_norm = BiasedNorm(loader, f"{block}norm_mlp", width)
        up, down = ("fc1", "fc2") if spec.learned else ("gate_up_proj", "down_proj")
        self._up = loader.projections([f"{block}{up}.weight"], [inner if spec.learned else 2 * inner], width)
        self._down = loader.projections([f"{block}{down}.weight"], [width], inner)

    def heads(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v [S, n, heads, D] of rows [S, n, width]; `angles`: with rope."""
        q, k, v = (
            torch.cat(self._inputs(self._norm(x)), -1).unflatten(-1, (3, self._spec.heads, -1)).unbind(2)
        )
        if angles is not None:
            q, k = (rope(part, *angles, interleaved=False) for part in (q, k))
        return q, k, v

    def rest(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Return the block's output of rows [S, n, width] from its heads.

        q [S, n, heads, D]; k and v [S, n or 1, m, heads, D] of what each may see; seen [S or 1, n, m] bool.
        """
        scores = (q[:, :, None] * k).sum(-1) * q.shape[-1] ** -0.5  # [S, n, m, heads]
        weights = scores.masked_fill(~seen[..., None], -torch.inf).softmax(2)
        x = x + self._out((weights[..., None] * v).sum(2).flatten(2))
        (up,) = self._up(self._mlp_norm(x))
        if self._spec.learned:
            up = gelu(up, approximate="tanh")
        else:
            gate, up = up.chunk(2, -1)
            up = silu(gate) * up
        return x + self._down(up)[0]


class WeaverHead:
    def __init__(self, spec: WeaverSpec, loader: WeightLoader, device: torch.device):
        self.spec, self.layouts = spec, loader.layouts
        width, target = spec.width, spec.target_width
        self._embedding_norm = BiasedNorm(loader, "embed_norm", target)
        self._hidden_norm = BiasedNorm(loader, "output_norm", target)
        self._token = loader.projections(["token_in.weight"], [width], target)
        self._hidden = loader.projections(["proposal_in.weight"], [width], target)
        self._blocks = [WeaverBlock(spec, loader, index) for index in range(spec.layers)]
        self._norm = BiasedNorm(loader, "out_norm", width)
        self._query = loader.matrix("lm_head_query_in.weight", target, width)
        self._learned: Tensor | None = None
        if spec.learned:
            self._learned = loader.vector(POSITIONS, spec.depth, width)
        size = width // spec.heads
        pairs = torch.arange(size // 2, dtype=torch.float32, device=device)
        self._frequencies = spec.rope_theta ** (-2 * pairs / size)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        expand: bool = True,
        quant: QuantType | None = None,
    ) -> "WeaverHead":
        device, file = torch.device(device), WeaverFile(path, quant=quant)
        plan = measured(file, lambda loader: cls(file.spec, loader, torch.device("cpu")))
        with weight_loader(file, plan, device, dtype=dtype, expand=expand) as loader:
            return cls(file.spec, loader, device)

    def prefix(self, last: Tensor, rows: Tensor) -> list[KeyValue]:
        """Return each layer's K and V [S, 1 + K, heads, D] of what every path sees.

        last [S, 1, width]: the target's hidden state before the anchor, after its final norm;
        rows [S, K, width]: the draft's, after its own.
        """
        (x,) = self._hidden(self._hidden_norm(torch.cat([last, rows], 1)))
        if self._learned is not None:
            x = torch.cat([x[:, :1], x[:, 1:] + self._learned[: rows.shape[1]]], 1)
        places = torch.arange(x.shape[1], device=x.device)
        angles, seen = self._angles(places[None]), (places <= places[:, None])[None]
        keys_values = []
        for block in self._blocks:
            q, k, v = block.heads(x, angles)
            keys_values.append((k, v))
            x = block.rest(x, q, k[:, None], v[:, None], seen)
        return keys_values

    def step(
        self, embeddings: Tensor, depths: Tensor, prefix: Sequence[KeyValue], above: Sequence[KeyValue]
    ) -> tuple[Tensor, list[KeyValue]]:
        """Return queries for the target's head [S, W, width], and each layer's K and V [S, W, heads, D].

        embeddings [S, W, width] of tokens at depths [S, W], the anchor's is 0; above: each layer's K and V
        [S, W, K, heads, D] of the tokens before them, of which the first `depth` count.
        """
        (x,) = self._token(self._embedding_norm(embeddings))
        if self._learned is not None:
            x = x + self._learned[depths]
        angles, sizes = self._angles(depths + 1), (prefix[0][0].shape[1], above[0][0].shape[2])
        before = torch.arange(sizes[1], device=depths.device) < depths[..., None]
        seen = torch.cat(
            [before.new_ones(*depths.shape, sizes[0]), before, before.new_ones(*depths.shape, 1)], -1
        )
        keys_values = []
        for block, fixed, path in zip(self._blocks, prefix, above, strict=True):
            q, *own = block.heads(x, angles)
            k, v = (
                torch.cat(
                    [first[:, None].expand(-1, len(depths[0]), -1, -1, -1), middle, last[:, :, None]], 2
                )
                for first, middle, last in zip(fixed, path, own, strict=True)
            )
            keys_values.append((own[0], own[1]))
            x = block.rest(x, q, k, v, seen)
        return self._query(self._norm(x)), keys_values

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        return None if self.spec.learned else rope_angles(positions, self._frequencies)
