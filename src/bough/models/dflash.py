"""The DFlash draft: predicts a block of masked tokens from the target's hidden states. Owns no state."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.kernels.attention import block_attention
from bough.kernels.kv_cache.format import KVRing
from bough.kernels.norm_rope import add_rms_norm, head_rope, ring_heads, rms_norm, rope_angles
from bough.kernels.quant_matmul import PackedRows
from bough.kernels.tree import MAX_ROWS
from bough.models.draft_spec import OWN_IDS, DraftSpec
from bough.models.layers import FeedForward, by_sequence, takes_packed
from bough.models.measure import measured, weight_loader
from bough.models.refine import AdjacentInjection, CandidateMLP, Refiner
from bough.models.safetensors_source import SafetensorsSource, find_checkpoint, read_config
from bough.models.spec import ModelSpec
from bough.models.weights import Progress, TensorSource, WeightLoader, project_all

PIECE = 2048  # rows of `append` at a time: fused features are wide


@dataclass(frozen=True, slots=True)
class DraftBuffers:
    """The draft's KV rings, computed from context features: position p is at p modulo the layer's ring."""

    keys: tuple[Tensor, ...]  # a layer: [slots, ring, KV, D], after norm and rope
    values: tuple[Tensor, ...]
    lengths: Tensor  # [slots] int64: number of committed positions
    starts: Tensor  # [slots] int64: positions below it were skipped

    def layer(self, index: int, slots: Tensor) -> KVRing:
        return KVRing(self.keys[index], self.values[index], slots, self.lengths, self.starts)


Half = Callable[[Tensor | PackedRows], Tensor]  # of a layer


def plainly(x: Tensor | PackedRows, half: Half) -> Tensor:
    """Return the output of half a layer, where there are no convolutions."""
    return half(x)


class DynamicConvolution:
    """A causal convolution over a block's rows, whose kernel is a constant plus what each row asks for.

    One projection of a half layer's input gives the dynamic parts of two: before and after that half.
    """

    def __init__(self, spec: DraftSpec, loader: WeightLoader, name: str):
        assert spec.second is not None
        self._taps, self._group = spec.second.kernel, spec.second.group
        suffix = ".weight" if loader.has(f"{name}_base.weight") else ""
        self._base = loader.vector(f"{name}_base{suffix}", 2, self._taps, spec.width)
        rows = 2 * self._taps * spec.width // self._group
        self._project = loader.matrix(f"{name}_proj.weight", rows, spec.width)

    def __call__(self, x: Tensor | PackedRows, half: Half) -> Tensor:
        """Return the output of half a layer [B, T, width] of x [B, T, width], convolved before and after."""
        assert isinstance(x, Tensor), "packed rows for a convolution"
        kernels = self._project(x).unflatten(-1, (2, self._taps, -1))
        return self._convolve(half(self._convolve(x, kernels, 0)), kernels, 1)

    def _convolve(self, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        out = torch.zeros_like(x)
        for back in range(min(self._taps, x.shape[1])):
            dynamic = kernels[:, :, side, back].repeat_interleave(self._group, -1)
            # Rows before the block are zero.
            earlier = pad(x, (0, 0, back, 0))[:, : x.shape[1]]
            out = out + (self._base[side, back] + dynamic) * earlier
        return out


class CandidateSelector:
    """Scores pairs of candidates of neighbouring positions: a low-rank bilinear form, gated by the row."""

    def __init__(self, spec: DraftSpec, loader: WeightLoader, vocabulary: int):
        assert spec.second is not None
        rank = spec.second.rank
        self.candidates = spec.second.candidates
        self._before = loader.embedding("selector_predecessor.weight", vocabulary, rank)
        self._after = loader.embedding("selector_successor.weight", vocabulary, rank)
        self._hidden = loader.matrix("selector_hidden.weight", rank, spec.width)

    def __call__(self, hidden: Tensor, before: Tensor, ids: Tensor) -> Tensor:
        """Return scores [K, n, k] of ids [K, k] after each of the tokens before [K, n]; hidden [K, width]."""
        gated = self._before(before) * self._hidden(hidden)[:, None]
        return gated @ self._after(ids).transpose(1, 2)

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """Return None: DFlash2 does not predict acceptance."""
        return None


class MarkovHead:
    """DSpark's head: scores a token after another one, and predicts how likely the next is accepted."""

    # Of a position. The head scores the whole vocabulary; what it lifts from below these is not proposed.
    candidates = 24

    def __init__(self, spec: DraftSpec, loader: WeightLoader, vocabulary: int):
        assert spec.markov is not None
        rank = spec.markov.rank
        self._before = loader.embedding("markov_w1.weight", vocabulary, rank)
        size = spec.draft_vocab_size if spec.reduced else None
        self._after = loader.embedding("markov_w2.weight", size or vocabulary, rank)
        self._places: Tensor | None = None  # of the target's tokens in a vocabulary of its own
        if size is not None:
            self._places = loader.token_places(OWN_IDS, size, below=vocabulary)
        self._width, self._confidence, self._bias = spec.width, None, None
        if spec.markov.confidence:
            self._confidence = loader.vector("conf_proj.weight", spec.width + rank)
            if loader.has("conf_proj.bias"):
                self._bias = loader.vector("conf_proj.bias", 1)

    def __call__(self, hidden: Tensor, before: Tensor, ids: Tensor) -> Tensor:
        """Return scores [K, n, k] of ids [K, k] after each of the tokens before [K, n]."""
        if self._places is not None:
            ids = self._places[ids]
        return self._before(before) @ self._after(ids).transpose(1, 2)

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor | None:
        """Return the log probability [K, n, 1] that the next token is accepted after the tokens before it."""
        if self._confidence is None:
            return None
        bias, pair = self._confidence.split([self._width, len(self._confidence) - self._width])
        logits = (hidden @ bias)[:, None] + self._before(before) @ pair
        return logsigmoid(logits if self._bias is None else logits + self._bias)[..., None]


class DraftLayer:
    def __init__(self, spec: DraftSpec, loader: WeightLoader, index: int):
        self._spec, self._index = spec, index
        block, width, kv = f"blk.{index}", spec.width, spec.kv_heads * spec.head_dim
        self._query = loader.matrix(f"{block}.attn_q.weight", spec.heads * spec.head_dim, width)
        names = [f"{block}.attn_k.weight", f"{block}.attn_v.weight"]
        self.to_key_value = loader.projections(names, [kv, kv], width)
        self._out = loader.matrix(f"{block}.attn_output.weight", width, spec.heads * spec.head_dim)
        self._query_norm = loader.vector(f"{block}.attn_q_norm.weight", spec.head_dim)
        self._key_norm = loader.vector(f"{block}.attn_k_norm.weight", spec.head_dim)
        self._norm = loader.vector(f"{block}.attn_norm.weight", width)
        self._ffn_norm = loader.vector(f"{block}.ffn_norm.weight", width)
        self._ffn = FeedForward(loader, block, width=width, inner=spec.feed_forward)
        self.key_value_takes_packed = takes_packed(self.to_key_value)
        self._around: Sequence[Callable[[Tensor | PackedRows, Half], Tensor]] = (plainly, plainly)
        self._pack = takes_packed(self._query, self.to_key_value), self._ffn.takes_packed
        if spec.second is not None:
            names = (f"{block}.attn_conv", f"{block}.ffn_conv")
            self._around = [DynamicConvolution(spec, loader, name) for name in names]
            self._pack = False, False

    def key_value(self, x: Tensor | PackedRows, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return k and v [B, T, KV, D] of x [B, T, width]: context features or normed block rows."""
        k, v = self._heads(self.to_key_value(x), len(angles[0]))
        return head_rope(k, self._key_norm, self._spec.eps, *angles, interleaved=False), v

    def _heads(self, rows: tuple[Tensor, ...], batch: int) -> tuple[Tensor, Tensor]:
        k, v = by_sequence(rows, batch)
        return k.unflatten(-1, (self._spec.kv_heads, -1)), v.unflatten(-1, (self._spec.kv_heads, -1))

    def commit(
        self,
        rows: tuple[Tensor, ...],
        angles: tuple[Tensor, Tensor],
        slots: Tensor,
        buffers: DraftBuffers,
        **tables: Tensor,
    ) -> None:
        """Write rows of `to_key_value`'s output to the layer's ring; `tables` are those of `ring_heads`."""
        k, v = self._heads(rows, len(slots))
        ring = buffers.layer(self._index, slots)
        ring_heads(k, v, self._key_norm, self._spec.eps, *angles, ring=ring, **tables)

    def __call__(
        self,
        x: Tensor,
        add: Tensor | None,
        positions: Tensor,
        angles: tuple[Tensor, Tensor],
        slots: Tensor,
        buffers: DraftBuffers,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream of the block's rows and the layer's output, to be added to it.

        x [B, T, width] and `add`, the previous layer's output, are the residual stream before this layer.
        """
        eps, (pack, pack_ffn), (around_attention, around_ffn) = self._spec.eps, self._pack, self._around
        x, h = add_rms_norm(x, add, self._norm, eps, pack=pack)
        out = around_attention(h, lambda h: self._attend(h, positions, angles, slots, buffers))
        x, h = add_rms_norm(x, out, self._ffn_norm, eps, pack=pack_ffn)
        return x, around_ffn(h, lambda h: self._ffn(h).view_as(x))

    def _attend(
        self,
        h: Tensor | PackedRows,
        positions: Tensor,
        angles: tuple[Tensor, Tensor],
        slots: Tensor,
        buffers: DraftBuffers,
    ) -> Tensor:
        """Return the attention of normed rows [B, T, width] over the context and each other."""
        spec, index = self._spec, self._index
        q = self._query(h).view(*positions.shape, spec.heads, -1)
        q = head_rope(q, self._query_norm, spec.eps, *angles, interleaved=False)
        k, v = self.key_value(h, angles)
        window = spec.window if spec.layers[index] == "sliding" else None
        ring, causal = buffers.layer(index, slots), spec.causal[index]
        out = block_attention(q, k, v, positions, ring, window=window, causal=causal)
        return self._out(out.flatten(-2))


@contextmanager
def open_draft(
    path: Path, target: ModelSpec, *, quant: QuantType | None = None, causal: bool | None = None
) -> Generator[tuple[DraftSpec, TensorSource]]:
    """Open a draft and yield its spec, checked against the target, and its tensors."""
    if path.suffix == ".gguf":
        with GGUFFile.open(path) as file:
            depth = len(target.layers)
            spec = DraftSpec.from_gguf(file, causal=causal, target_depth=depth)
            spec = spec.with_heads(file.tensors, causal=causal).with_logits(target)
            spec.check_target(target)
            spec.check_tensors(file.tensors, target, str(path))
            yield spec, file
        return
    weights, config = find_checkpoint(path)
    spec = DraftSpec.from_config(
        read_config(config), source=str(config), target_depth=len(target.layers), causal=causal
    )
    source = SafetensorsSource(weights, quant=quant)
    spec = spec.with_heads(source.tensors, causal=causal).with_logits(target)
    spec.check_target(target)
    spec.check_tensors(source.tensors, target, str(weights))
    yield spec, source


class OwnVocabulary:
    """The head of a draft that knows some of the target's tokens only, and their ids."""

    def __init__(self, spec: DraftSpec, loader: WeightLoader, vocabulary: int):
        """`vocabulary`: the target's."""
        assert spec.draft_vocab_size is not None
        self._vocabulary = vocabulary
        self._head = loader.matrix("output.weight", spec.draft_vocab_size, spec.width)
        self._ids = loader.token_ids(OWN_IDS, spec.draft_vocab_size, below=vocabulary)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., vocabulary] of the target's tokens; -inf for those that it does not know."""
        logits = self._head(hidden, exact=True)
        every = logits.new_full((*logits.shape[:-1], self._vocabulary), -torch.inf)
        return every.index_copy_(-1, self._ids, logits)


class DFlashDraft:
    _own: OwnVocabulary | None = None

    def __init__(self, spec: DraftSpec, loader: WeightLoader, device: torch.device, vocabulary: int = 0):
        """`vocabulary`: rows of the target's embedding, and of the tables that score pairs of tokens."""
        self.spec = spec
        self.selector: CandidateSelector | MarkovHead | None = None  # of DFlash2 and DSpark
        self.refiner: Refiner | None = None  # of DSpine, or an MLP over candidates
        self._injection: AdjacentInjection | None = None
        if spec.second is not None:
            self.selector = CandidateSelector(spec, loader, vocabulary)
        elif spec.markov is not None:
            self.selector = MarkovHead(spec, loader, vocabulary)
        self.device = device
        self.layouts = loader.layouts
        self._fuse = loader.matrix("fc.weight", spec.width, len(spec.taps) * spec.width)
        self._fuse_norm = loader.vector("enc.output_norm.weight", spec.width)
        self._layers = [DraftLayer(spec, loader, index) for index in range(len(spec.layers))]
        self._norm = loader.vector("output_norm.weight", spec.width)
        if spec.refine is not None:
            if spec.refine.rank is not None:
                self._injection = AdjacentInjection(spec, loader, vocabulary)
            self.refiner = Refiner(spec, self._injection or CandidateMLP(spec, loader), self._norm)
        if spec.reduced:
            self._own = OwnVocabulary(spec, loader, vocabulary)
        self._columns = torch.arange(MAX_ROWS, device=device)
        pairs = torch.arange(spec.head_dim // 2, dtype=torch.float32, device=device)
        self._frequencies = spec.rope_theta ** (-2 * pairs / spec.head_dim)

    @classmethod
    def load(
        cls,
        path: Path,
        target: ModelSpec,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        expand: bool = True,
        quant: QuantType | None = None,
        causal: bool | None = None,
        progress: Progress | None = None,
    ) -> "DFlashDraft":
        """Load a safetensors checkpoint (a folder or its file) or a `dflash` GGUF.

        Raise for a draft of another target. `quant` quantises a safetensors checkpoint's matrices; `causal`
        overrides the file for every layer.
        """
        device = torch.device(device)
        with open_draft(path, target, quant=quant, causal=causal) as (spec, source):
            rows = target.vocab_size
            plan = measured(source, lambda loader: cls(spec, loader, torch.device("cpu"), rows))
            options = {"dtype": dtype, "expand": expand, "progress": progress}
            with weight_loader(source, plan, device, **options) as loader:
                return cls(spec, loader, device, rows)

    def append(self, features: Tensor, slots: Tensor, buffers: DraftBuffers, *, skipped: int = 0) -> None:
        """Append the features [B, n, taps * width] of newly committed positions to the slots' rings.

        `skipped` positions before them have no features: no ring has to hold them.
        """
        longest = max(keys.shape[1] for keys in buffers.keys)
        beyond = max(0, features.shape[1] - longest)
        features, skipped = features[:, beyond:], skipped + beyond
        first = buffers.lengths[slots] + skipped
        if skipped:
            buffers.lengths[slots] = buffers.starts[slots] = first
        if features.shape[1] > PIECE:
            for piece in features.split(PIECE, 1):
                self.append(piece, slots, buffers)
            return
        if features.shape[1]:
            self._append(features, first, slots, buffers)
            buffers.lengths[slots] = first + features.shape[1]

    def _append(self, features: Tensor, first: Tensor, slots: Tensor, buffers: DraftBuffers) -> None:
        """Write the K and V of features [B, n, taps * width] at positions from `first` [B] on."""
        positions = first[:, None] + torch.arange(features.shape[1], device=self.device)
        x = rms_norm(self._fuse(features), self._fuse_norm, self.spec.eps)
        angles = rope_angles(positions, self._frequencies)
        # A ring holds only the newest rows; most layers have rings of one size.
        sizes = {keys.shape[1] for keys in buffers.keys}
        indices = {ring: (slots[:, None], positions[:, -ring:] % ring) for ring in sizes}
        for layer, keys, values in zip(self._layers, buffers.keys, buffers.values, strict=True):
            ring = keys.shape[1]
            for pool, rows in zip((keys, values), layer.key_value(x, angles), strict=True):
                pool[indices[ring]] = rows[:, -ring:].to(pool.dtype)

    def commit(
        self,
        features: Tensor,
        slots: Tensor,
        buffers: DraftBuffers,
        count: Tensor,
        after: Tensor | None = None,
    ) -> None:
        """Append the first `count` [B] positions only, without host/device synchronisation.

        after [B]: positions of the same slot that other items of the batch append before.
        """
        rows = features.shape[1]
        positions = buffers.lengths[slots][:, None] + self._columns[:rows]
        if after is not None:
            positions = positions + after[:, None]
        pack = all(layer.key_value_takes_packed for layer in self._layers)
        fused = self._fuse(features)
        _, x = add_rms_norm(fused, None, self._fuse_norm, self.spec.eps, pack=pack)
        angles = rope_angles(positions, self._frequencies)
        projected = project_all(x, [layer.to_key_value for layer in self._layers])
        for layer, key_value in zip(self._layers, projected, strict=True):
            layer.commit(key_value, angles, slots, buffers, positions=positions, count=count)
        buffers.lengths.index_add_(0, slots, count)

    def block(
        self, embeddings: Tensor, slots: Tensor, buffers: DraftBuffers, anchors: Tensor | None = None
    ) -> Tensor:
        """Return hidden rows [B, block, width] of the embeddings [B, block, width] of anchor and masks.

        Row i predicts the token at its own position, lengths + i; row 0, the anchor, predicts nothing. With
        `from_anchor` row i predicts the token after it.
        """
        return self.rows(embeddings, slots, buffers, anchors)[1]

    def rows(
        self, embeddings: Tensor, slots: Tensor, buffers: DraftBuffers, anchors: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return what the refiner refines [B, block, width], and the rows that `block` returns.

        anchors [B]: the tokens of the first rows, for messages.
        """
        positions = buffers.lengths[slots][:, None] + torch.arange(embeddings.shape[1], device=self.device)
        angles = rope_angles(positions, self._frequencies)
        x, add, before = embeddings * self.spec.embedding_scale, None, None
        for index, layer in enumerate(self._layers):
            x, add = layer(x, add, positions, angles, slots, buffers)
            if self._injection is not None:
                assert anchors is not None, "messages begin at the anchor's token"
                before, add = x + add, None
                x = self._injection.between_rows(before, index, anchors)
        whole, normed = add_rms_norm(x, add, self._norm, self.spec.eps)
        assert isinstance(normed, Tensor)
        return (whole if before is None else before), normed

    def logits(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the logits [..., vocabulary] of rows, by its own head or the target's."""
        return self.scaled(head(hidden) if self._own is None else self._own.logits(hidden))

    def scaled(self, logits: Tensor) -> Tensor:
        """Return logits of the head with the scale and softcap that this draft was trained with."""
        spec = self.spec
        if spec.output_multiplier != 1.0:
            logits = logits * spec.output_multiplier
        return spec.softcap * torch.tanh(logits / spec.softcap) if spec.softcap else logits
