"""Builds an engine of loaded models, or of models without weights, for a dry run that finds its kernels."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Engine
from bough.gguf.reader import GGUFFile
from bough.memory.estimate import draft_quant, ring_dtype, uses_mtp
from bough.memory.planner import MemoryPlan
from bough.models.decoder import Decoder, Target
from bough.models.dflash import DFlashDraft, open_draft
from bough.models.measure import MeasuringLoader
from bough.models.mtp import MTPBlock
from bough.models.newest import NewestHidden
from bough.models.small import is_small_model, open_small_model
from bough.models.step import SIZES
from bough.models.vision import VisionTower
from bough.models.weaver import WeaverHead
from bough.models.weaver_spec import WeaverFile
from bough.prefix_cache.cache import PrefixCacheConfig
from bough.spec.costs import StepCosts
from bough.spec.dflash import DFlashModel
from bough.spec.draft_model import DraftModel
from bough.spec.drafter import Drafter, NoDrafter
from bough.spec.mixed import MixedModel
from bough.spec.mtp import MTPModel
from bough.spec.policy import EAGER_SIZES
from bough.spec.small_model import SmallModel, small_states
from bough.spec.speculator import Speculator
from bough.spec.weaver import WeaverModel
from bough.state.draft_ring import draft_buffers, mtp_buffers
from bough.state.sequences import CacheConfig

if TYPE_CHECKING:
    from bough.kernels.runtime.ahead import CompileAhead
    from bough.session.self_check import SelfCheck


def build_engine(
    config: EngineConfig,
    plan: MemoryPlan,
    target: Target,
    drafter: Drafter,
    prefix_cache: PrefixCacheConfig | None = None,
    tower: VisionTower | None = None,
) -> Engine:
    return Engine(
        target,
        max_ctx=plan.max_ctx,
        slots=plan.sequences,
        prefill_chunk=plan.prefill_chunk,
        drafter=drafter,
        max_rows=config.max_rows,
        cache=CacheConfig(*plan.kv, window=config.window, pages=plan.kv_pages),
        prefix_cache=prefix_cache,
        tower=tower,
    )


def mtp_model(block: MTPBlock, target: Target, plan: MemoryPlan) -> MTPModel:
    options = {"device": target.device, "dtype": ring_dtype(target.device.type)}
    buffers = mtp_buffers(target.spec, max_ctx=plan.max_ctx, slots=plan.sequences, **options)
    return MTPModel(block, target, buffers)


def draft_model(draft: DFlashDraft, config: DraftConfig, target: Target, plan: MemoryPlan) -> DFlashModel:
    if config.shortlist is not None and isinstance(target, Decoder):
        target.limit_drafts(config.shortlist)
    options = {"device": target.device, "dtype": ring_dtype(target.device.type)}
    buffers = draft_buffers(
        draft.spec, max_ctx=plan.max_ctx, context=config.context, slots=plan.sequences, **options
    )
    return DFlashModel(draft, target, buffers)


def small_model(
    model: Target, config: EngineConfig, target: Target, plan: MemoryPlan, costs: StepCosts
) -> SmallModel:
    assert config.draft is not None and config.speculation is not None
    options = {"max_ctx": plan.max_ctx, "texts": plan.sequences}
    states = small_states(model.spec, config.draft, **options, device=model.device, dtype=model.dtype)
    return SmallModel(
        model,
        states,
        vocabulary=target.spec.vocab_size,
        budget=config.speculation.budget,
        costs=costs if config.speculation.adaptive else None,
        static=model.device.type == "cuda",
    )


def weaver_model(
    head: WeaverHead, draft: DFlashModel, target: Target, plan: MemoryPlan, *, final_norm: Tensor
) -> WeaverModel:
    """Return a draft with a Weaver head and the state of both; `final_norm` is the target's."""
    newest = NewestHidden.empty(plan.sequences, target.spec.width, target.device)
    return WeaverModel(head, draft, target, newest, final_norm=final_norm)


def speculator(
    model: DraftModel | None, config: SpecConfig, costs: StepCosts, device: torch.device
) -> Speculator:
    # A padded step costs what the next larger size does.
    sizes = SIZES if device.type == "cuda" else EAGER_SIZES
    return Speculator(model, config, costs, device=device, sizes=sizes)


def compile_ahead(
    file: GGUFFile, config: EngineConfig, plan: MemoryPlan, device: torch.device
) -> "AbstractContextManager[CompileAhead | None]":
    """Begin to compile the kernels of a model in threads, and to check those of a first start."""
    if device.type != "cuda":
        return nullcontext()
    from bough.session.self_check import SelfCheck, shapes_of

    return compile_found(
        lambda placed: rehearse(file, config, plan, placed),
        device,
        facts=_facts(file, config, plan),
        check=lambda placed: SelfCheck(lambda: shapes_of(file, config, plan), placed),
    )


def compile_found(
    rehearse: Callable[[torch.device], object],
    device: torch.device,
    *,
    facts: str,
    check: "Callable[[torch.device], SelfCheck] | None" = None,
) -> "AbstractContextManager[CompileAhead | None]":
    """Begin to compile the kernels of any work; on a CPU there is nothing to do."""
    if device.type != "cuda":
        return nullcontext()
    from bough.kernels.runtime.ahead import CompileAhead

    placed = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    checks = None if check is None else check(placed)
    return CompileAhead(lambda: rehearse(placed), placed, facts=facts, check=checks)


def rehearse(file: GGUFFile, config: EngineConfig, plan: MemoryPlan, device: torch.device) -> None:
    """Run the work of a model without weights once, within a dry run."""
    spec = plan.estimate.spec
    int8 = config.prefill == "int8"
    hosted = {"host_embedding": plan.host_embedding, "expert_slots": plan.estimate.expert_slots}
    loader = MeasuringLoader(file, tiles=True, int8_prefill=int8, **hosted)
    target, drafter = Decoder(spec, loader, device), NoDrafter()
    if config.speculation is not None:
        model: DraftModel | None = None
        if config.draft is not None and is_small_model(config.draft.path):
            with open_small_model(config.draft.path, file) as (small, shape):
                small_decoder = Decoder(shape, MeasuringLoader(small, tiles=True), device)
            model = small_model(small_decoder, config, target, plan, StepCosts())
            model.rehearse()
        elif config.draft is not None:
            quant = draft_quant(config.draft, device.type)
            with open_draft(config.draft.path, spec, quant=quant, causal=config.draft.causal) as opened:
                loader = MeasuringLoader(opened[1], tiles=True)
                draft = DFlashDraft(opened[0], loader, device, spec.vocab_size)
            head = config.draft.head
            if draft.refiner is not None or head is not None:
                target.keep_head_rows(MeasuringLoader(file, tiles=True, host_embedding=True))
            model = draft_model(draft, config.draft, target, plan)
            if head is not None:
                weights = WeaverFile(head, quant=quant)
                weaver = WeaverHead(weights.spec, MeasuringLoader(weights, tiles=True), device)
                norm = MeasuringLoader(file, tiles=True).vector("output_norm.weight", spec.width)
                model = weaver_model(weaver, model, target, plan, final_norm=norm)
        if uses_mtp(config, file, spec):
            mtp = mtp_model(MTPBlock(spec, MeasuringLoader(file, tiles=True), device), target, plan)
            model = mtp if model is None else MixedModel(model, mtp, width=spec.width)
        drafter = speculator(model, config.speculation, StepCosts(), device)
    build_engine(config, plan, target, drafter).warmup.rehearse()


def _facts(file: GGUFFile, config: EngineConfig, plan: MemoryPlan) -> str:
    """Return what decides a model's kernels, in words."""
    files = config.draft.files if config.draft else []
    drafts = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    kv = [format.name for format in plan.kv]
    shape = (plan.max_ctx, plan.sequences, plan.kv_pages, plan.prefill_chunk, plan.host_embedding)
    shape += (plan.estimate.expert_slots,)
    settings = (config.draft, config.speculation, config.window, config.prefill)
    return repr((plan.estimate.spec, tensor_kinds(file), drafts, settings, kv, shape))


def tensor_kinds(file: GGUFFile) -> list[tuple[str, tuple[int, ...]]]:
    """Return which types and shapes the tensors of a file have."""
    return sorted({(info.type.name, info.shape) for info in file.tensors.values()})
