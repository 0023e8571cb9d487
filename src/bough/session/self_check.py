"""The self-check of a model's kernels at its first start on a card: which kernels those are."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bough.config import EngineConfig
from bough.gguf.reader import GGUFFile
from bough.gguf.rotation import rotation_of
from bough.gguf.types import QuantType, tile_type
from bough.kernels.check.cases import Case, cases_of
from bough.kernels.check.first_start import Verdict, decide
from bough.kernels.check.shapes import Shapes
from bough.kernels.runtime import backends
from bough.kernels.runtime import device as cards
from bough.memory.estimate import draft_quant
from bough.memory.planner import MemoryPlan
from bough.models.dflash import open_draft
from bough.models.small import is_small_model, open_small_model
from bough.models.spec import ModelSpec
from bough.models.step import SIZES, largest_padded
from bough.spec.small_model import SMALL_KV

log = logging.getLogger(__name__)

_NOT_MATMULS = ("token_embd", "conv1d", "ffn_gate_inp", "_norm", "_exps", "selector", "markov")
_EMBEDDED = (QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0)


def shapes_of(file: GGUFFile, config: EngineConfig, plan: MemoryPlan) -> list[Shapes]:
    """Return what decides the kernels of a model that is loaded by a plan, and of a small one beside it."""
    draft, target = config.draft, plan.estimate.spec
    if config.speculation is None or draft is None or not is_small_model(draft.path):
        return [_shapes(file, target, config, plan)]
    alone, own = replace(config, draft=None), replace(config, draft=None, window=None)
    with open_small_model(draft.path, file) as (small, spec):
        small_plan = replace(plan, kv=SMALL_KV, host_embedding=False)
        shapes = replace(_shapes(small, spec, own, small_plan), name="draft")
    return [_shapes(file, target, alone, plan), shapes]


def _shapes(file: GGUFFile, spec: ModelSpec, config: EngineConfig, plan: MemoryPlan) -> Shapes:
    speculation = config.speculation
    matrices = [info for name, info in file.tensors.items() if _multiplied(name, info.shape, spec.tied_head)]
    types = {tile_type(info.type) for info in matrices}
    routed = {tile_type(info.type) for name, info in file.tensors.items() if "_exps" in name}
    draft = None
    if speculation is not None and config.draft is not None:
        with open_draft(config.draft.path, spec, causal=config.draft.causal) as (draft_shape, _):
            draft = (draft_shape.heads, draft_shape.kv_heads, draft_shape.head_dim)
        types.add(draft_quant(config.draft, "cuda") or QuantType.F16)
    delta, experts, embedding = spec.delta, spec.experts, file.require_tensor("token_embd.weight").type
    return Shapes(
        name="",
        width=spec.width,
        feed_forward=spec.feed_forward or (experts.shared_width if experts else 0) or spec.width,
        heads=(spec.heads, spec.kv_heads, spec.head_dim),
        rope_dim=spec.rope_dim,
        delta=(delta.key_heads, delta.value_heads, delta.head_dim, delta.conv_width) if delta else None,
        experts=(experts.count, experts.used, experts.width) if experts else None,
        types=tuple(sorted(types)),
        expert_types=tuple(sorted(routed)),
        embedding=embedding if embedding in _EMBEDDED and not plan.host_embedding else None,
        kv=((plan.kv[0].name, plan.kv[1].name),),
        rows=tuple(size for size in SIZES if size <= largest_padded(config.max_rows)),
        draft=draft,
        interleaved=spec.family.rope_interleaved,
        head_norms=spec.family.query_key_norm,
        int8=config.prefill == "int8",
        eps=spec.eps,
        window=config.window,
        sliding=next((layer.window for layer in spec.attention if layer.window is not None), None),
        host_embedding=plan.host_embedding,
        cached_experts=plan.estimate.expert_slots is not None,
        rotation=None if (rotated := rotation_of(file)) is None else rotated.block,
        sequences=plan.sequences,
    )


def _multiplied(name: str, shape: tuple[int, ...], tied: bool) -> bool:
    embedding = name.startswith("token_embd") and tied
    return len(shape) == 2 and (embedding or not any(part in name for part in _NOT_MATMULS))


class SelfCheck:
    """Decides the implementations of a model's kernels: by an earlier verdict, or by running them."""

    def __init__(self, shapes: Callable[[], Sequence[Shapes]], device: torch.device):
        self._shapes, self._device = shapes, device
        self._verdict: Verdict | None = None

    def begin(self, path: Path) -> None:
        """Take the verdict of an earlier start, before a kernel is chosen."""
        if not cards.usable(self._device):
            backends.leave_out_cuda()
        self._verdict = Verdict.load(path)
        self._verdict.apply()

    @property
    def needed(self) -> bool:
        return self._verdict is not None and not self._verdict.complete

    @property
    def cases(self) -> list[Case]:
        return [case for shapes in self._shapes() for case in cases_of(shapes, self._device)]

    def rehearse(self) -> None:
        """Run all cases in a dry run, which finds kernels that the model's rehearsal does not launch."""
        for case in self.cases if self.needed else ():
            try:
                work = case.make()
                work.run(*work.fresh())
            except Exception:  # it will show when it is run
                log.debug("%s cannot be rehearsed", case.name, exc_info=True)

    @torch.inference_mode()
    def decide(self) -> None:
        """Run the cases on a first start; nothing on others."""
        if self._verdict is None:
            return
        if self._verdict.complete:
            backends.settle()
            return
        before = backends.replaced()
        decide(self._verdict, self.cases)
        torch.cuda.empty_cache()
        backends.settle()
        if backends.replaced() == before:
            log.debug("all kernels of this model are right on this GPU")
