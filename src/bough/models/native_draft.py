"""The DFlash draft as the native CPU library runs it: packed weights, one call for a block.

Its numbers never reach the text, so its activations are rounded to 8 bits.
"""

import ctypes

import torch
from torch import Tensor

from bough.gguf.rotation import rotation_of
from bough.kernels import native
from bough.kernels.native import INT8
from bough.kernels.native.library import MAX_ROWS, Layer, NativeBlock, Ring
from bough.models.dflash import DFlashDraft, DraftBuffers
from bough.models.draft_spec import SHARED_TENSORS, DraftSpec
from bough.models.native import NativeLoader, packed_tensors_bytes, weights_gap
from bough.models.weights import TensorSource

_CPU = torch.device("cpu")


def draft_gap(source: TensorSource, spec: DraftSpec) -> str | None:
    """Return why the native library cannot run this draft, in words; None: it can."""
    if (reason := native.unavailable()) is not None:
        return reason
    if spec.second is not None or spec.markov is not None:
        return f"the draft is a {'DFlash2' if spec.second else 'DSpark'} draft"
    if spec.refine is not None:
        return "the draft refines its rows by the token before them"
    if spec.reduced:
        return "the draft has a vocabulary of its own"
    for name, size in {"width": spec.width, "feed-forward": spec.feed_forward, "head": spec.head_dim}.items():
        if size % 8:
            return f"the draft has a {name} size of {size}, needed a multiple of 8"
    if rotation_of(source) is not None:
        return "the draft's weights are rotated"
    return weights_gap(source, without=SHARED_TENSORS)


def packed_draft_bytes(source: TensorSource) -> int:
    return packed_tensors_bytes({n: i for n, i in source.tensors.items() if n not in SHARED_TENSORS})


class NativeDraft(DFlashDraft):
    """`DFlashDraft` with its two computations in the native library: K and V of features, and a block."""

    def __init__(self, spec: DraftSpec, loader: NativeLoader):
        self.spec, self.device, self.layouts = spec, _CPU, set()
        self.selector = self.refiner = None
        self._library = loader.library
        self._held = loader.held
        blocks = [f"blk.{index}" for index in range(len(spec.layers))]
        self._array = (Layer * len(blocks))(*(loader.attention(spec, block, norms=True) for block in blocks))
        pairs = torch.arange(spec.head_dim // 2, dtype=torch.float32)
        columns = len(spec.taps) * spec.width
        self._fuse_norm = loader.vector("enc.output_norm.weight", spec.width)
        self._model = loader.model(
            *(spec, self._array, spec.rope_theta ** (-2 * pairs / spec.head_dim)),
            rope_dim=spec.head_dim,
            mode=INT8,
            features=columns,
            head=loader.packed_matrix("fc.weight", spec.width, columns).struct,
        )
        size = self._library.c.tf_step_scratch(self._model, self._library.threads)
        self._scratch, self._scores = torch.empty(size, dtype=torch.uint8), torch.empty(0)

    def _append(self, features: Tensor, first: Tensor, slots: Tensor, buffers: DraftBuffers) -> None:
        for b, slot in enumerate(slots.tolist()):
            rows, rings, at = features[b].contiguous(), self._rings(buffers, slot), int(first[b])
            block = NativeBlock(norm=self._fuse_norm.data_ptr())
            for start in range(0, len(rows), MAX_ROWS):
                part = rows[start : start + MAX_ROWS]
                block.rows, block.length, block.in_ = len(part), at + start, part.data_ptr()
                wrong = self._library.c.tf_draft_append(
                    self._library.pool, self._model, rings, block, self._scratch.data_ptr()
                )
                assert not wrong, f"native draft refused with code {wrong}: {len(part)} rows"

    def commit(
        self,
        features: Tensor,
        slots: Tensor,
        buffers: DraftBuffers,
        count: Tensor,
        after: Tensor | None = None,
    ) -> None:
        first = buffers.lengths[slots] if after is None else buffers.lengths[slots] + after
        for b, rows in enumerate(count.tolist()):
            if rows:
                self._append(features[b : b + 1, :rows], first[b : b + 1], slots[b : b + 1], buffers)
        buffers.lengths.index_add_(0, slots, count)

    def block(
        self, embeddings: Tensor, slots: Tensor, buffers: DraftBuffers, anchors: Tensor | None = None
    ) -> Tensor:
        x = (embeddings * self.spec.embedding_scale).contiguous()
        hidden = torch.empty_like(x)
        for b, slot in enumerate(slots.tolist()):
            length, start = int(buffers.lengths[slot]), int(buffers.starts[slot])
            span = min(length, max(keys.shape[1] for keys in buffers.keys)) + x.shape[1]
            self._reserve_scores(span)
            block = NativeBlock(x.shape[1], length, start, x[b].data_ptr(), None, hidden[b].data_ptr())
            wrong = self._library.c.tf_draft_block(
                self._library.pool,
                self._model,
                self._rings(buffers, slot),
                block,
                self._scratch.data_ptr(),
                self._scores.data_ptr(),
                span,
            )
            assert not wrong, f"native draft refused with code {wrong}: {x.shape[1]} rows at {length}"
        return hidden

    def _reserve_scores(self, span: int) -> None:
        size, threads = self._library.c.tf_step_scores, self._library.threads
        if self._scores.numel() < size(threads, span):
            self._scores = torch.empty(size(threads, 2 * span))

    def _rings(self, buffers: DraftBuffers, slot: int) -> "ctypes.Array[Ring]":
        spec, rings = self.spec, []
        for index, (keys, values) in enumerate(zip(buffers.keys, buffers.values, strict=True)):
            assert keys.dtype == values.dtype == torch.float32 and keys[slot].is_contiguous()
            window = spec.window if spec.layers[index] == "sliding" else 0
            addresses = (keys[slot].data_ptr(), values[slot].data_ptr())
            rings.append(Ring(*addresses, keys.shape[1], window, spec.causal[index]))
        return (Ring * len(rings))(*rings)
