"""Loading: from a GGUF file and its draft to a session, within the memory that there is."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from treeflash.compress.scorer import MixedScorer, Scorer
from treeflash.compress.words import WordScorer
from treeflash.config import CompressConfig, DraftConfig, EngineConfig
from treeflash.engine.engine import Engine
from treeflash.engine.sampler import SamplingParams
from treeflash.errors import BadGGUF, UsageError
from treeflash.gguf.reader import GGUFFile
from treeflash.hub.catalog import Card, recognise
from treeflash.kernels.native import INT8, INT16, Library
from treeflash.kernels.quant_matmul import prepare
from treeflash.kernels.tree import MAX_ROWS
from treeflash.memory.device import (
    available_memory,
    device_name,
    limit_allocator,
    pick_device,
)
from treeflash.memory.estimate import compute_dtype, draft_quant, ring_dtype, uses_mtp
from treeflash.memory.planner import MemoryPlan, plan_memory
from treeflash.models.decoder import Decoder, Target
from treeflash.models.dflash import DFlashDraft, open_draft
from treeflash.models.mtp import MTPBlock
from treeflash.models.native import NativeDecoder, NativeLoader
from treeflash.models.native_draft import NativeDraft, draft_gap
from treeflash.models.spec import ModelSpec
from treeflash.models.step import SIZES
from treeflash.models.weights import Progress as LoadProgress
from treeflash.prefix_cache.cache import PrefixCacheConfig
from treeflash.prefix_cache.files import SnapshotFiles, identity
from treeflash.session.attention_scorer import AttentionScorer
from treeflash.session.compression import Compression
from treeflash.session.session import Session
from treeflash.session.threads import checked_threads, torch_threads
from treeflash.spec.cost_file import CostFile
from treeflash.spec.dflash import DFlashModel, DraftModel
from treeflash.spec.drafter import Drafter, NoDrafter
from treeflash.spec.mtp import MTPModel
from treeflash.spec.policy import EAGER_SIZES, StepCosts
from treeflash.spec.speculator import Speculator
from treeflash.state.draft_ring import DEFAULT_CONTEXT, draft_buffers, mtp_buffers
from treeflash.state.sequences import CacheConfig
from treeflash.text.template import ChatTemplate
from treeflash.text.tokenizer import Tokenizer

_TORCH_THREADS = torch.get_num_threads()  # torch's own choice: one for each core, or OMP_NUM_THREADS
# Our name of a sampling parameter, and the file's below general.sampling.
_FILE_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def load_session(
    path: Path,
    config: EngineConfig | None = None,
    *,
    progress: LoadProgress | None = None,
    warming: Callable[[int, int], None] | None = None,
    graphs: bool = True,
) -> Session:
    """Load a model and its draft; `progress` of reading weights, `warming` of capturing CUDA graphs."""
    config = config or EngineConfig()
    device = pick_device(config.device)
    if config.speculation is not None and not 1 <= config.speculation.budget < MAX_ROWS:
        raise UsageError(
            f"`budget` is {config.speculation.budget}, needed 1 to {MAX_ROWS - 1} nodes", param="budget"
        )
    # Before memory is planned: the target gets what the scorer leaves.
    scorer = _scorer(config.compress, device)
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file)
        tokenizer, template = _text_of(file, spec)
        plan = plan_memory(file, spec, config, device)
        if device.type == "cuda":
            limit_allocator(plan.budget, device)
        card = _card_of(file, spec)
        file_sampling = sampling_of(file.metadata)
        target = _target(file, config, plan, device, progress)
        mtp = _mtp(config, file, target, plan)
        prefix_cache = _prefix_cache(config, file, plan, device)
    prepare(target.layouts, device)
    cost_file = _cost_file(config, path, plan, target, mtp)
    costs = cost_file.load()
    _empty_cache(device)
    drafter = _drafter(config, target, plan, costs, mtp)
    _empty_cache(device)
    engine = Engine(
        target,
        max_ctx=plan.max_ctx,
        slots=plan.sequences,
        prefill_chunk=plan.prefill_chunk,
        drafter=drafter,
        max_rows=config.max_rows,
        cache=CacheConfig(*plan.kv, window=config.window, pages=plan.kv_pages),
        prefix_cache=prefix_cache,
    )
    if device.type == "cuda" and graphs:
        engine.capture(warming)
        _empty_cache(device)
    return Session(
        engine,
        tokenizer,
        template,
        plan,
        card=card,
        file_sampling=file_sampling,
        save_costs=lambda: cost_file.save(costs),
        compression=Compression(config.compress, scorer),
    )


def _scorer(config: CompressConfig, device: torch.device) -> Scorer:
    """Return what scores the units of long prompts: words, and a model's attention beside them."""
    words = WordScorer()
    return (
        words
        if config.scorer is None
        else MixedScorer(AttentionScorer.load(config.scorer, device=device), words)
    )


def _target(
    file: GGUFFile,
    config: EngineConfig,
    plan: MemoryPlan,
    device: torch.device,
    progress: LoadProgress | None,
) -> Target:
    if plan.estimate.native:
        # What is left to torch is small, and threads of both would wait for each other's cores.
        torch.set_num_threads(1)
        library = Library(checked_threads(config.threads) or _TORCH_THREADS)
        mode = INT8 if config.cpu_activations == "int8" else INT16
        return NativeDecoder.load(file, library, mode=mode, progress=progress)
    if device.type == "cpu":
        torch.set_num_threads(checked_threads(config.threads) or torch_threads(_TORCH_THREADS))
    return Decoder.load(
        file,
        device=device,
        dtype=compute_dtype(device.type),
        expand=plan.expanded,
        host_embedding=plan.host_embedding,
        progress=progress,
    )


def _text_of(file: GGUFFile, spec: ModelSpec) -> tuple[Tokenizer, ChatTemplate]:
    source = str(file.path)
    tokenizer = Tokenizer.from_metadata(file.metadata, source=source)
    if tokenizer.vocab_size != spec.vocab_size:
        raise BadGGUF(
            f"{file.path}: tokenizer.ggml.tokens has {tokenizer.vocab_size} entries, "
            f"needed {spec.vocab_size}, the rows of token_embd.weight"
        )
    return tokenizer, ChatTemplate.from_metadata(file.metadata, source=source)


def _card_of(file: GGUFFile, spec: ModelSpec) -> Card | None:
    names = [spec.name, file.path.stem]
    return recognise(names, architecture=spec.architecture, width=spec.width, layers=len(spec.layers))


def _empty_cache(device: torch.device) -> None:
    """Return memory that torch reserved while loading: the KV cache needs it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _cost_file(
    config: EngineConfig, path: Path, plan: MemoryPlan, target: Target, mtp: MTPModel | None
) -> CostFile:
    formats = "/".join(format.name for format in plan.kv)
    native = f", native, {config.cpu_activations}" if plan.estimate.native else ""
    computing = device_name(target.device, target.threads) + native
    draft = "mtp" if mtp else config.draft
    return CostFile(config.costs, f"{computing} / {path.name} / {draft} / {formats}")


def _mtp(config: EngineConfig, file: GGUFFile, target: Target, plan: MemoryPlan) -> MTPModel | None:
    """Return the MTP block of the target's file, if it is to propose tokens."""
    if not uses_mtp(config, file, target.spec):
        return None
    kind, device = target.device.type, target.device
    block = MTPBlock.load(file, target.spec, device=device, dtype=compute_dtype(kind), expand=plan.expanded)
    prepare(block.layouts, device)
    buffers = mtp_buffers(
        target.spec, max_ctx=plan.max_ctx, slots=plan.sequences, device=device, dtype=ring_dtype(kind)
    )
    return MTPModel(block, target, buffers)


def _drafter(
    config: EngineConfig, target: Target, plan: MemoryPlan, costs: StepCosts, mtp: MTPModel | None
) -> Drafter:
    if config.speculation is None:
        return NoDrafter()
    kind = target.device.type
    model: DraftModel | None = mtp
    if config.draft is not None:
        draft = _draft(config.draft, target, plan)
        buffers = draft_buffers(
            draft.spec,
            max_ctx=plan.max_ctx,
            context=config.draft.context,
            slots=plan.sequences,
            device=target.device,
            dtype=ring_dtype(kind),
        )
        model = DFlashModel(draft, target, buffers)
        prepare(draft.layouts, target.device)
    # A padded step costs what the next larger size does.
    sizes = SIZES if kind == "cuda" else EAGER_SIZES
    return Speculator(model, config.speculation, costs, device=target.device, sizes=sizes)


def _draft(config: DraftConfig, target: Target, plan: MemoryPlan) -> DFlashDraft:
    """Load the draft: into the native library where the target is, if it can run it."""
    kind, native = target.device.type, isinstance(target, NativeDecoder)
    quant = draft_quant(config, kind, native=native)
    if isinstance(target, NativeDecoder):
        with open_draft(config.path, target.spec, quant=quant, causal=config.causal) as (spec, source):
            if draft_gap(source, spec) is None:
                return NativeDraft(spec, NativeLoader(source, target.library))
    return DFlashDraft.load(
        config.path,
        target.spec,
        device=target.device,
        dtype=compute_dtype(kind),
        expand=plan.expanded,
        quant=quant,
        causal=config.causal,
    )


def _computing(plan: MemoryPlan, device: torch.device) -> str:
    """Return what decides the bits of a saved state, beside the files and settings."""
    if device.type == "cuda":
        return device_name(device)
    return "CPU native int16" if plan.estimate.native else f"CPU {compute_dtype(device.type)}"


def _prefix_cache(
    config: EngineConfig, file: GGUFFile, plan: MemoryPlan, device: torch.device
) -> PrefixCacheConfig:
    budget = config.prefix_cache
    if budget is None:
        budget = min(available_memory(torch.device("cpu")) // 4, 8 << 30)
    if config.prefix_cache_dir is None or config.prefix_cache == 0:
        return PrefixCacheConfig(budget, exact=config.prefix_cache_exact)
    draft = config.draft if config.speculation else None
    facts: list[Any] | None = None
    if draft is not None:
        facts = [draft.quant, draft.causal, min(plan.max_ctx, draft.context or DEFAULT_CONTEXT)]
    elif uses_mtp(config, file, ModelSpec.from_gguf(file)):
        facts = ["mtp", min(plan.max_ctx, DEFAULT_CONTEXT)]
    made_of = identity(
        [*file.paths, *([draft.path] if draft else ())],
        computing=_computing(plan, device),
        kv=[format.name for format in plan.kv],
        window=config.window,
        chunk=plan.prefill_chunk,
        draft=facts,
    )
    files = SnapshotFiles(config.prefix_cache_dir, made_of, limit=config.prefix_cache_dir_size)
    return PrefixCacheConfig(budget, files, config.prefix_cache_exact)


def sampling_of(metadata: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling that a file's metadata recommends, without values that make no sense."""
    found: dict[str, Any] = {}
    for field, key in _FILE_SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        with contextlib.suppress(UsageError, TypeError, ValueError):
            if value is not None:
                wanted: dict[str, Any] = {field: int(value) if field == "top_k" else float(value)}
                SamplingParams(**wanted)
                found |= wanted
    return SamplingParams(**found)
