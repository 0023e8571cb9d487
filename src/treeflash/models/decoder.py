"""The target model, built from a GGUF file's metadata. Owns weights; knows no sampling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treeflash.errors import UnsupportedModel
from treeflash.gguf.reader import GGUFFile
from treeflash.kernels.causal_conv import conv_index
from treeflash.kernels.norm_rope import add_rms_norm, rope_angles
from treeflash.kernels.quant_matmul import OpenSums, PackedRows
from treeflash.kernels.slot_mapping import Places, row_places
from treeflash.models.layers import Attention, Experts, FeedForward, Frame, GatedDelta, PackedInput, by_item
from treeflash.models.measure import tile_space
from treeflash.models.spec import ModelSpec
from treeflash.models.step import AttentionBuffers, Buffers, DeltaBuffers, Pending, Step
from treeflash.models.weights import Embedding, Matrix, Progress, WeightLoader


@dataclass(frozen=True, slots=True)
class Output:
    hidden: Tensor  # [B, T, width] after the final norm; `Decoder.logits` turns rows of it into logits
    features: Tensor  # [B, n, taps * width]: the last rows' residual stream behind the tapped layers


class Block:
    def __init__(self, spec: ModelSpec, loader: WeightLoader, index: int):
        block = f"blk.{index}"
        self._eps = spec.eps
        self._mixer_norm = loader.vector(f"{block}.attn_norm.weight", spec.width)
        mixer = (Attention if spec.layers[index] == "attention" else GatedDelta)(spec, loader, block)
        self._mixer: Callable[..., Tensor | OpenSums] = mixer
        self._ffn_norm = loader.vector(f"{block}.{spec.family.feed_forward_norm}.weight", spec.width)
        if spec.experts is not None:
            ffn = Experts(spec, loader, block)
        else:
            ffn = FeedForward(loader, block, width=spec.width, inner=spec.feed_forward)
        self._ffn: Callable[..., Tensor] = ffn
        self._open_ffn = ffn.left_open if isinstance(ffn, FeedForward) else None
        self.packs, self._packs_ffn = mixer.packs, ffn.packs  # whether these rows come packed

    def __call__(
        self,
        x: Tensor,
        add: Tensor | OpenSums | None,
        frame: Frame,
        buffers: AttentionBuffers | DeltaBuffers,
        *,
        leave_open: bool,
    ) -> tuple[Tensor, Tensor, Tensor | OpenSums]:
        """The residual stream x and what is yet to be added to it, in and out; first, what came in as one.

        `leave_open`: the next block, which packs its rows, adds up open sums.
        """
        rows = x.shape[0] * x.shape[1]
        pack_ffn = self._packs_ffn(rows)
        entered, h = add_rms_norm(x, add, self._mixer_norm, self._eps, pack=self.packs(rows))
        mixed = self._mixer(h, frame, buffers, leave_open=pack_ffn)
        x, h = add_rms_norm(entered, mixed, self._ffn_norm, self._eps, pack=pack_ffn)
        if leave_open and self._open_ffn is not None and isinstance(h, PackedRows):
            added = self._open_ffn(h)
        else:
            added = self._ffn(h)
        return entered, x, added if isinstance(added, OpenSums) else added.view_as(x)


class Decoder:
    """Any of the supported families; what differs is in its spec."""

    def __init__(self, spec: ModelSpec, loader: WeightLoader, device: torch.device):
        self.spec = spec
        self.device = device
        self.dtype = loader.dtype  # what matrix products are computed in
        self.layouts = loader.layouts  # of matrices in tiles, whose kernels can be made ready
        self.embed: Embedding = loader.embedding("token_embd.weight", spec.vocab_size, spec.width)
        self._blocks = [Block(spec, loader, i) for i in range(len(spec.layers))]
        self._norm = loader.vector("output_norm.weight", spec.width)
        head = "token_embd.weight" if spec.tied_head else "output.weight"
        self._head: Matrix = loader.matrix(head, spec.vocab_size, spec.width)
        self._packs_head = PackedInput(self._head)
        pairs = torch.arange(spec.rope_dim // 2, dtype=torch.float32, device=device)
        self._frequencies = spec.rope_theta ** (-2 * pairs / spec.rope_dim) / spec.rope_factor
        if loader.has("rope_freqs.weight"):  # Llama 3's stretched low frequencies
            self._frequencies = self._frequencies / loader.vector("rope_freqs.weight", len(pairs))

    @classmethod
    def load(
        cls,
        file: GGUFFile,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        expand: bool = True,
        host_embedding: bool = False,
        progress: Progress | None = None,
    ) -> "Decoder":
        """Reads all weights and holds them as `dtype`; without `expand` they stay packed.

        `host_embedding`: but for the embedding's rows, which stay in the host's memory, pinned.
        """
        device = torch.device(device)
        spec, space = ModelSpec.from_gguf(file), None
        if device.type == "cuda":
            space = tile_space(file, lambda measuring: cls(spec, measuring, torch.device("cpu")))
        loader = WeightLoader(
            file,
            device=device,
            dtype=dtype,
            expand=expand,
            space=space,
            host_embedding=host_embedding,
            progress=progress,
        )
        decoder = cls(spec, loader, device)
        _refuse_unknown(file, spec, loader.unread())
        return decoder

    def forward(
        self, step: Step, buffers: Buffers, *, taps: Sequence[int] = (), tapped: int | None = None
    ) -> Output:
        """One pass over a step's rows; a chunk advances the recurrent states, a tree only leaves its rows
        behind.

        Lengths and pages are the caller's to advance. A tap is the residual stream behind that layer,
        of the last `tapped` rows only; None: of all.
        """
        hidden, features = self._forward(step, buffers, taps, tapped, pack=False)
        assert isinstance(hidden, Tensor)
        return Output(hidden, features)

    def look(self, step: Step, buffers: Buffers, *, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """The same over a tree, all of whose rows go to the head: features and logits [B, T, vocabulary]."""
        pack = self._packs_head(step.tokens.numel())
        hidden, features = self._forward(step, buffers, taps, None, pack=pack)
        return features, by_item((self._head(hidden, exact=True),), len(step.slots))[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., width] to [..., vocabulary]."""
        return self._head(hidden, exact=True)

    def _forward(
        self, step: Step, buffers: Buffers, taps: Sequence[int], tapped: int | None, *, pack: bool
    ) -> tuple[Tensor | PackedRows, Tensor]:
        """What `forward` gives; the hidden states as the head reads them in tiles with `pack`."""
        check_taps(self.spec, taps)
        frame = self._frame(step, buffers)
        x, add = self.embed(step.tokens), None
        skipped = 0 if tapped is None else max(0, step.rows - tapped)
        features = torch.empty(*x[:, skipped:].shape[:2], len(taps) * self.spec.width, device=x.device)
        parts = features.split(self.spec.width, -1) if taps else ()
        rows, waiting = step.tokens.numel(), []
        for index, (block, layer) in enumerate(zip(self._blocks, buffers.layers, strict=True)):
            last = index + 1 == len(self._blocks)
            leave_open = pack if last else self._blocks[index + 1].packs(rows)
            entered, x, add = block(x, add, frame, layer, leave_open=leave_open)
            waiting += [(part, entered) for tap, part in zip(taps, parts, strict=True) if tap == index - 1]
            if step.is_chunk:  # large; of a tree copies wait for the end, where they hold nothing up
                _take(waiting, skipped)
        buffers.pending.count.index_fill_(0, step.slots, 0)  # every delta layer has advanced by it
        total, hidden = add_rms_norm(x, add, self._norm, self.spec.eps, pack=pack)
        end = len(self._blocks) - 1
        waiting += [(part, total) for tap, part in zip(taps, parts, strict=True) if tap == end]
        _take(waiting, skipped)
        return hidden, features

    def _frame(self, step: Step, buffers: Buffers) -> Frame:
        cos, sin = rope_angles(step.positions, self._frequencies)
        page = next((b.keys.page for b in buffers.layers if isinstance(b, AttentionBuffers)), 1)
        tables = (buffers.lengths, buffers.page_table, buffers.pending.path, buffers.pending.count)
        places = row_places(step.slots, *tables, rows=step.rows, page=page)
        pending, index = _pending(places), None
        if step.parents is not None and self.spec.delta is not None:
            width = self.spec.delta.conv_width
            index = conv_index(step.parents, width, pending.count, pending.path.shape[1])
        return Frame(
            slots=step.slots,
            cos=cos,
            sin=sin,
            ancestors=step.ancestors,
            conv_index=index,
            page_table=places.page_table,
            lengths=places.lengths,
            pages=places.pages,
            offsets=places.offsets,
            positions=step.positions,
            window=None if step.is_chunk else buffers.window,
            span=int(places.lengths.max()) + step.rows if step.is_chunk else 0,
            pending=pending,
        )


def _refuse_unknown(file: GGUFFile, spec: ModelSpec, unread: list[str]) -> None:
    """A tensor that nothing uses means another function than ours; prediction blocks are left out."""
    prediction = {f"blk.{len(spec.layers) + i}" for i in range(spec.mtp_layers)}
    for name in unread:
        if ".".join(name.split(".")[:2]) not in prediction:
            raise UnsupportedModel(
                f"{file.path}: tensor {name} is not part of a {spec.architecture} model as it is known here"
            )


def check_taps(spec: ModelSpec, taps: Sequence[int]) -> None:
    outside = [tap for tap in taps if not 0 <= tap < len(spec.layers)]
    if outside:
        raise UnsupportedModel(
            f"tap at layer {outside[0]}, the target has layers 0 to {len(spec.layers) - 1}"
        )


def _take(waiting: list[tuple[Tensor, Tensor]], skipped: int) -> None:
    """Copies the residual streams that wait, but for their first rows, to where they are wanted."""
    while waiting:
        part, stream = waiting.pop()
        part.copy_(stream[:, skipped:])


def _pending(places: Places) -> Pending:
    """By what the delta layers of these slots have to advance first."""
    if places.count.is_cuda:
        # No look at the device: its kernels read the counts themselves.
        return Pending(places.path, places.count)
    return Pending(places.path[:, : int(places.count.max())], places.count)
