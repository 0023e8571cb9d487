"""The target model, built from a GGUF file's metadata. Owns the weights."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from bough.errors import UnsupportedModel, UsageError
from bough.gguf.quants import check_decodable
from bough.gguf.reader import GGUFFile
from bough.kernels.causal_conv import ConvRows, conv_index
from bough.kernels.delta_rule import DeltaRows, tree_order
from bough.kernels.norm_rope import add_rms_norm, rms_norm, rope_angles
from bough.kernels.quant_matmul import ROW_BLOCK, Layout, PackedRows, PackedWeight, Unfinished
from bough.kernels.slot_mapping import SlotMapping, slot_mapping
from bough.models.expert_caches import ExpertCaches
from bough.models.layers import (
    Attention,
    Experts,
    FeedForward,
    ForwardContext,
    GatedDelta,
    Mixer,
    Norm,
    by_sequence,
    finished,
    in_stream,
    takes_packed,
)
from bough.models.measure import MeasuringLoader, measured, weight_loader
from bough.models.pooling import CLASSIFIER
from bough.models.spec import ModelSpec
from bough.models.step import AttentionBuffers, Buffers, DeltaBuffers, Pending, Step
from bough.models.weights import Embedding, Matrix, Progress, WeightLoader

Result = TypeVar("Result")
EMBEDDING_TAP = -1  # as a tap: the embedding of the token


@dataclass(frozen=True, slots=True)
class Output:
    hidden: Tensor  # [B, T, width] after the final norm; `Decoder.logits` turns rows of it into logits
    features: Tensor  # [B, n, taps * width]: the residual stream after the tapped layers, of the last rows


@dataclass(frozen=True, slots=True)
class VerifyBuffers:
    """Static buffers for the results of a forward pass over trees."""

    features: Tensor  # [rows, taps * width]
    logits: Tensor  # [rows, vocabulary]


class Target(Protocol):
    """A loaded target model: `Decoder` in torch, or `NativeDecoder` on a CPU."""

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    layouts: set[Layout]

    @property
    def threads(self) -> int:
        """Return how many threads of a CPU compute."""
        ...

    @property
    def approximate(self) -> tuple[str, ...]:
        """Return which settings may change the text, in words."""
        ...

    @property
    def embed(self) -> Callable[[Tensor], Tensor]: ...

    def forward(
        self, step: Step, buffers: Buffers, *, taps: Sequence[int] = (), tapped: int | None = None
    ) -> Output: ...

    def forward_by_layers(
        self, step: Step, buffers: Callable[[], Buffers], taps: Sequence[int], tapped: int | None
    ) -> Generator[None, None, Output]: ...

    def verify(
        self, step: Step, buffers: Buffers, *, taps: Sequence[int] = (), into: VerifyBuffers | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def draft_logits(self, hidden: Tensor) -> Tensor: ...

    def head_rows(self, tokens: Tensor) -> Tensor:
        """Return the head's rows [..., width] for tokens [...], for drafts that score few of them."""
        ...


class Block:
    """A transformer block: a token mixer (attention or Gated DeltaNet) and a feed-forward layer."""

    def __init__(self, spec: ModelSpec, loader: WeightLoader, index: int):
        block = f"blk.{index}"
        mixer_norm = loader.vector(f"{block}.attn_norm.weight", spec.width)
        kind = Attention if spec.layers[index] == "attention" else GatedDelta
        self._mixer: Mixer = kind(spec, loader, index)
        ffn_norm = loader.vector(f"{block}.{spec.family.feed_forward_norm}.weight", spec.width)
        self._ffn: FeedForward | Experts
        if spec.experts is not None:
            self._ffn = Experts(spec, loader, block)
        else:
            self._ffn = FeedForward(loader, block, width=spec.width, inner=spec.feed_forward)
        self.norm = Norm(mixer_norm, spec.eps, self._mixer.takes_packed)
        self._ffn_norm = Norm(ffn_norm, spec.eps, self._ffn.takes_packed)
        self._closing: Sequence[Tensor] = ()  # norms of what the mixer and the feed-forward layer return
        self._closing_eps = spec.family.closing_eps
        if self._closing_eps:
            names = ("post_attention_norm", "post_ffw_norm")
            self._closing = [loader.vector(f"{block}.{name}.weight", spec.width) for name in names]
        self._mixer.fused = self._ffn_norm.pack and not self._closing

    @property
    def experts(self) -> Experts | None:
        return self._ffn if isinstance(self._ffn, Experts) else None

    def __call__(
        self,
        x: Tensor,
        add: Tensor | Unfinished | None,
        context: ForwardContext,
        buffers: AttentionBuffers | DeltaBuffers,
        *,
        fused: bool,
    ) -> tuple[Tensor, Tensor, Tensor | Unfinished]:
        """Return the residual stream before and within the block, and the block's output, to be added to it.

        x [B, T, width] and `add`, the previous block's output, are the residual stream before this block.
        `fused`: the next norm packs its rows, and can complete the output.
        """
        residual, rows = self.norm(x, add)
        mixed = self._closed(self._mixer(rows, context, buffers), 0)
        x, rows = self._ffn_norm(residual, mixed)
        out = self._ffn.unfinished(rows) if fused and not self._closing else self._ffn(rows)
        return residual, x, self._closed(in_stream(out, context.batch), 1)

    def _closed(self, out: Tensor | Unfinished, half: int) -> Tensor | Unfinished:
        if not self._closing:
            return out
        assert isinstance(out, Tensor), "partial sums under a norm of their own"
        return rms_norm(out, self._closing[half], self._closing_eps)


class Decoder:
    """A model of any supported family; its spec holds the differences."""

    def __init__(self, spec: ModelSpec, loader: WeightLoader, device: torch.device):
        self.spec = spec
        self.device = device
        self.dtype = loader.dtype  # of matmuls
        self.layouts = loader.layouts  # of matrices in tiles, whose kernels can be compiled ahead
        self._int8_prefill = loader.int8_prefill
        self.embed: Embedding = loader.embedding("token_embd.weight", spec.vocab_size, spec.width)
        self._blocks = [Block(spec, loader, i) for i in range(len(spec.layers))]
        self._experts = [block.experts for block in self._blocks if block.experts is not None]
        self.expert_caches = ExpertCaches.of(self._experts)
        self._norm = loader.vector("output_norm.weight", spec.width)
        head = "token_embd.weight" if spec.tied_head else "output.weight"
        self._head: Matrix = loader.matrix(head, spec.vocab_size, spec.width)
        self._head_takes_packed = takes_packed(self._head)
        self._draft_head: Matrix | None = None
        self._head_table: Embedding | None = (
            self.embed if spec.tied_head else None
        )  # the head's rows by token
        self._prepare(spec, loader)

    def _prepare(self, spec: ModelSpec, loader: WeightLoader) -> None:
        """Make what all layers share, and no file has as it is used."""
        thetas = dict.fromkeys(layer.rope_theta for layer in spec.attention)
        self._frequencies = {
            theta: rope_frequencies(spec, loader, self.device, theta=theta) for theta in thetas
        }
        self._axes = torch.tensor(spec.rope_axes, device=self.device)
        self._embedding_norm: Tensor | None = None
        if spec.family.normed_embedding:
            self._embedding_norm = torch.ones(spec.width, device=self.device)

    @classmethod
    def load(
        cls,
        file: GGUFFile,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        expand: bool = True,
        host_embedding: bool = False,
        expert_slots: int | None = None,
        int8_prefill: bool = False,
        progress: Progress | None = None,
    ) -> "Decoder":
        """Read all weights and hold them as `dtype`; without `expand` they stay quantised.

        `host_embedding`: the embedding table stays in the host's pinned memory; `expert_slots`: routed
        experts do, and so many of each layer have a place on the device. `int8_prefill`: prompts are
        multiplied in int8, on a GPU.
        """
        device = torch.device(device)
        spec = ModelSpec.from_gguf(file)
        check_decodable(info.type for info in file.tensors.values())
        # Before weights are read, which may take minutes.
        plan = check_tensors(file, spec, expert_slots=expert_slots)
        hosted = {"host_embedding": host_embedding, "expert_slots": expert_slots}
        options = {"dtype": dtype, "expand": expand, "int8_prefill": int8_prefill, "progress": progress}
        with weight_loader(file, plan, device, **options, **hosted) as loader:
            return cls(spec, loader, device)

    @property
    def routed(self) -> Sequence[Any]:
        """Return the matrices of routed experts, of which a step reads some."""
        return [matrices for layer in self._experts for matrices in layer.routed]

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @property
    def approximate(self) -> tuple[str, ...]:
        return ("prefill in int8",) if self._int8_prefill else ()

    def forward(
        self, step: Step, buffers: Buffers, *, taps: Sequence[int] = (), tapped: int | None = None
    ) -> Output:
        """Run one forward pass over a step's rows.

        A chunk advances the recurrent states; a tree only saves its rows for the commit. The caller advances
        lengths and pages. A tap is the residual stream after a layer, or before the first one (-1), of the
        last `tapped` rows; None: all.
        """
        return _to_end(self.forward_by_layers(step, lambda: buffers, taps, tapped))

    def forward_by_layers(
        self, step: Step, buffers: Callable[[], Buffers], taps: Sequence[int], tapped: int | None
    ) -> Generator[None, None, Output]:
        """Do the same and pause after every layer but the last: others may decode meanwhile.

        The sequences of the step must not be used before the end; `buffers` are asked for after every pause.
        """
        hidden, features = yield from self._forward(step, buffers, taps, tapped, pack=False)
        assert isinstance(hidden, Tensor)
        return Output(hidden, features)

    def verify(
        self, step: Step, buffers: Buffers, *, taps: Sequence[int] = (), into: VerifyBuffers | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the forward pass over trees; return features and the logits [B, T, vocabulary] of all rows.

        `into`: where they are put, for one batch item.
        """
        pack = self._head_takes_packed
        features = None if into is None else into.features[None, : step.rows]
        layers = self._forward(step, lambda: buffers, taps, None, pack=pack, features=features)
        hidden, features = _to_end(layers)
        logits = self._head(hidden, exact=True, into=None if into is None else into.logits)
        return features, by_sequence((finished(logits, self.spec.logits),), len(step.tokens))[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocabulary] of hidden [..., width]."""
        return finished(self._head(hidden, exact=True), self.spec.logits)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Return the head's output for a draft, which has a scale and a cap of its own; -inf after its
        shortlist."""
        if self._draft_head is None:
            return self._head(hidden, exact=True)
        partial = self._draft_head(hidden, exact=True)
        logits = partial.new_full((*partial.shape[:-1], self.spec.vocab_size), -torch.inf)
        logits[..., : partial.shape[-1]] = partial
        return logits

    def head_rows(self, tokens: Tensor) -> Tensor:
        return self._head.rows(tokens) if self._head_table is None else self._head_table(tokens)

    def keep_head_rows(self, loader: WeightLoader) -> None:
        """Hold the head's rows by token, too, where it is in tiles, which are not read by row."""
        if self._head_table is None and isinstance(self._head.data, PackedWeight):
            self._head_table = loader.embedding("output.weight", self.spec.vocab_size, self.spec.width)

    def limit_drafts(self, tokens: int) -> None:
        """Have drafts scored by the head's first `tokens` rows alone."""
        if tokens % ROW_BLOCK or not 0 < tokens <= self.spec.vocab_size:
            raise UsageError(
                f"`shortlist` is {tokens}, needed a multiple of {ROW_BLOCK} up to {self.spec.vocab_size}",
                param="shortlist",
            )
        self._draft_head = self._head.first_rows(tokens)

    def _forward(
        self,
        step: Step,
        buffers: Callable[[], Buffers],
        taps: Sequence[int],
        tapped: int | None,
        *,
        pack: bool,
        features: Tensor | None = None,
    ) -> Generator[None, None, tuple[Tensor | PackedRows, Tensor]]:
        """Return hidden states, packed for the head with `pack`, and features, in `features` if given."""
        check_taps(self.spec, taps)
        context = self._context(step, buffers())
        x, add = self._embedded(step), None
        skipped = 0 if tapped is None else max(0, step.rows - tapped)
        if features is None:
            features = torch.empty(*x[:, skipped:].shape[:2], len(taps) * self.spec.width, device=x.device)
        parts = features.split(self.spec.width, -1) if taps else ()
        copies = []
        for index, block in enumerate(self._blocks):
            last = index + 1 == len(self._blocks)
            fused = pack if last else self._blocks[index + 1].norm.pack
            residual, x, add = block(x, add, context, buffers().layers[index], fused=fused)
            copies += [(part, residual) for tap, part in zip(taps, parts, strict=True) if tap == index - 1]
            # A chunk's streams are large; a tree's are copied at the end, off the critical path.
            if step.is_chunk:
                _copy_taps(copies, skipped)
            if not last:
                yield
        # Every delta layer has committed its path. A slot without rows has none: it may be that of another.
        buffers().pending.count.index_add_(0, step.slots, context.pending.count, alpha=-1)
        total, hidden = add_rms_norm(x, add, self._norm, self.spec.eps, pack=pack)
        end = len(self._blocks) - 1
        copies += [(part, total) for tap, part in zip(taps, parts, strict=True) if tap == end]
        _copy_taps(copies, skipped)
        return hidden, features

    def _embedded(self, step: Step) -> Tensor:
        """Return what enters the first layer [B, T, width]: embeddings of tokens, and rows of images."""
        x = self.embed(step.tokens)
        if self._embedding_norm is not None:
            x = rms_norm(x, self._embedding_norm, self.spec.eps)
        if (images := step.images) is not None:
            x = x.index_copy(1, images.rows, images.embeddings.to(x.dtype)[None])
        return x

    def _context(self, step: Step, buffers: Buffers) -> ForwardContext:
        positions = step.rope_positions(buffers.offsets)
        if step.images is not None:
            positions = positions[self._axes].movedim(0, -1).contiguous()  # [B, T, R/2], as kernels read it
        ropes = {
            theta: rope_angles(positions, frequencies) for theta, frequencies in self._frequencies.items()
        }
        page = next((b.keys.page for b in buffers.layers if isinstance(b, AttentionBuffers)), 1)
        tables = (buffers.lengths, buffers.page_table, buffers.pending.path, buffers.pending.count)
        ragged = {"first": step.first, "spare_page": buffers.spare_page}
        mapping = slot_mapping(step.slots, *tables, rows=step.rows, page=page, **ragged)
        pending, conv, delta = _pending(mapping), None, None
        if self.spec.delta is not None:
            parents = step.tokens[:, :0] if step.parents is None else step.parents
            tree, width = step.ancestors, self.spec.delta.conv_width
            if step.first is not None and tree is not None:
                parents, tree = parents[0], tree[0]
            index = conv_index(parents, width, pending.count, pending.path.shape[1], step.first)
            conv = ConvRows(step.slots, pending.path, pending.count, index, step.first)
            if tree is not None:
                order = tree_order(tree, step.first, step.most)
                delta = DeltaRows(step.slots, pending.count, order, step.first, step.most)
        return ForwardContext(
            batch=len(step.tokens),
            slots=step.slots,
            ropes=ropes,
            ancestors=step.ancestors,
            first=step.first,
            conv=conv,
            delta=delta,
            page_table=mapping.page_table,
            lengths=mapping.lengths,
            pages=mapping.pages,
            offsets=mapping.offsets,
            window=None if step.is_chunk else buffers.window,
            span=(step.span or int(mapping.lengths.max()) + step.rows) if step.is_chunk else 0,
            pending=pending,
        )


def _to_end(parts: Generator[None, None, Result]) -> Result:
    """Run a generator to its end; return what it returns."""
    try:
        while True:
            next(parts)
    except StopIteration as end:
        return end.value


def rope_frequencies(
    spec: ModelSpec, loader: WeightLoader, device: torch.device | str = "cpu", *, theta: float
) -> Tensor:
    """Return the angles [rope_dim / 2] by which a position turns the pairs of a head; 0 for a theta of 0."""
    pairs = torch.arange(spec.rope_dim // 2, dtype=torch.float32, device=device)
    if not theta:
        return torch.zeros_like(pairs)
    frequencies = theta ** (-2 * pairs / spec.rope_dim) / spec.rope_factor
    if loader.has("rope_freqs.weight"):  # Llama 3's stretched low frequencies
        factors = loader.vector("rope_freqs.weight", len(pairs))
        frequencies = frequencies.to(factors.device) / factors  # a loader that only measures has no values
    return frequencies


def check_tensors(file: GGUFFile, spec: ModelSpec, *, expert_slots: int | None = None) -> MeasuringLoader:
    """Raise if a tensor is missing or not used: the model would compute something else.

    MTP blocks may be unused. Return the order of the tensors and the bytes of the weights as tiles.
    """
    cpu = torch.device("cpu")
    plan = measured(file, lambda loader: Decoder(spec, loader, cpu), expert_slots=expert_slots)
    prediction = {f"blk.{len(spec.layers) + i}" for i in range(spec.mtp_layers)}
    for name in plan.unread():
        if name != CLASSIFIER and ".".join(name.split(".")[:2]) not in prediction:
            raise UnsupportedModel(
                f"{file.path}: tensor {name} is not part of a supported {spec.architecture} model"
            )
    return plan


def check_taps(spec: ModelSpec, taps: Sequence[int]) -> None:
    """Raise for taps that are neither layers nor -1, the embedding."""
    outside = [tap for tap in taps if not -1 <= tap < len(spec.layers)]
    if outside:
        raise UnsupportedModel(
            f"tap at layer {outside[0]}, the target has layers 0 to {len(spec.layers) - 1}"
        )


def _copy_taps(copies: list[tuple[Tensor, Tensor]], skipped: int) -> None:
    """Copy residual streams, without their first `skipped` rows, to the features; empty the list."""
    while copies:
        part, stream = copies.pop()
        part.copy_(stream[:, skipped:])


def _pending(mapping: SlotMapping) -> Pending:
    """Return the paths that the delta layers of these slots have to commit first."""
    if mapping.count.is_cuda:
        # No host/device synchronisation: kernels read the counts themselves.
        return Pending(mapping.path, mapping.count)
    return Pending(mapping.path[:, : int(mapping.count.max())], mapping.count)
