"""Loading: from a GGUF file and its draft to a session, within the memory that there is."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bough.compress.scorer import MixedScorer, Scorer
from bough.compress.words import WordScorer
from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Engine
from bough.engine.sequence import Limits
from bough.errors import BadGGUF, UsageError
from bough.gguf.reader import GGUFFile
from bough.hub.recommended import recommended
from bough.images.opening import ImageLimits
from bough.kernels.native import INT8, INT16, Library
from bough.kernels.runtime import backends
from bough.kernels.runtime.device import capability_of
from bough.kernels.tree import MAX_ROWS
from bough.memory.device import (
    available_memory,
    check_triton,
    device_name,
    limit_allocator,
    pick_device,
    unused_gpu,
)
from bough.memory.estimate import compute_dtype, draft_quant, uses_mtp
from bough.memory.planner import MemoryPlan, plan_memory
from bough.models.decoder import Decoder, Target
from bough.models.dflash import DFlashDraft, open_draft
from bough.models.mtp import MTPBlock
from bough.models.native import NativeDecoder, NativeLoader, native_gap
from bough.models.native_draft import NativeDraft, draft_gap
from bough.models.pooling import VectorSpec
from bough.models.small import is_small_model, open_small_model
from bough.models.spec import ModelSpec
from bough.models.vision import VisionTower
from bough.models.weaver import WeaverHead
from bough.models.weights import Progress as LoadProgress
from bough.models.weights import WeightLoader
from bough.prefix_cache.cache import PrefixCacheConfig
from bough.prefix_cache.files import SnapshotFiles, identity
from bough.session.attention_scorer import AttentionScorer
from bough.session.building import (
    build_engine,
    compile_ahead,
    draft_model,
    mtp_model,
    small_model,
    speculator,
    weaver_model,
)
from bough.session.compression import Compression, Elsewhere
from bough.session.expert_uses import ExpertUses, caches_of
from bough.session.pairing import card_of, with_encoder
from bough.session.phases import Phases
from bough.session.pictures import check_pads
from bough.session.reader import RequestReader
from bough.session.session import Session
from bough.session.threads import checked_threads, torch_threads
from bough.session.vectors import Vectors, vector_config
from bough.spec.cost_file import CostFile
from bough.spec.costs import StepCosts
from bough.spec.dflash import DFlashModel
from bough.spec.draft_model import DraftModel
from bough.spec.drafter import Drafter, NoDrafter
from bough.spec.mixed import MixedModel
from bough.spec.mtp import MTPModel
from bough.spec.small_model import SMALL_KV, SmallModel
from bough.state.draft_ring import DEFAULT_CONTEXT
from bough.text.template import ChatTemplate
from bough.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_TORCH_THREADS = torch.get_num_threads()  # torch's own choice: one for each core, or OMP_NUM_THREADS
_KERNELS = 2  # raised when kernels give prompts other bits than those that wrote saved states


def load_session(
    path: Path,
    config: EngineConfig | None = None,
    *,
    progress: LoadProgress | None = None,
    compiling: Callable[[int, int], None] | None = None,
    warming: Callable[[int, int], None] | None = None,
    graphs: bool = True,
) -> Session:
    """Load a model and its draft.

    `progress` of reading weights, `compiling` of kernels, `warming` of capturing CUDA graphs.
    """
    load = partial(_loaded, path, config or EngineConfig(), progress, compiling, warming, graphs=graphs)
    try:
        return load()
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
    # Without the first attempt's memory; the second plan counts what is in use now.
    log.warning("%s: planning again, for another program may have taken memory of the GPU meanwhile", reason)
    return load()


def _loaded(
    path: Path,
    config: EngineConfig,
    progress: LoadProgress | None,
    compiling: Callable[[int, int], None] | None,
    warming: Callable[[int, int], None] | None,
    *,
    graphs: bool,
) -> Session:
    phases = Phases()
    device = pick_device(config.device)
    check_triton(device)
    if config.device == "auto" and (reason := unused_gpu()) is not None:
        log.warning("%s", reason)
    _check_speculation(config)
    _check_prefill(config, device)
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file)
        vector_spec = VectorSpec.from_gguf(file, spec.width)
        config = config if vector_spec is None else vector_config(config)
        advice = recommended(card_of(file), file.metadata)
        tokenizer, template = _text_of(file, spec, config.effort or advice.effort)
        config = with_encoder(file, config)
        if config.mmproj is not None:
            check_pads(tokenizer, path)
        # Before memory is planned: the target gets what the scorer leaves.
        scorer = _scorer(config, device, tokenizer)
        plan = plan_memory(file, spec, config, device)
        if device.type == "cuda":
            limit_allocator(plan.budget, device)
        phases.end("planning")
        with compile_ahead(file, config, plan, device) as ahead:
            target = _target(file, config, plan, device, progress)
            mtp = _mtp(config, file, target, plan)
            tower = None if config.mmproj is None else _tower(config.mmproj, device, _threads(config, plan))
            cost_file = _cost_file(config, path, plan, target, mtp)
            costs = cost_file.load()
            uses = ExpertUses(config.costs, path, caches_of(target))
            _empty_cache(device)
            drafter = _drafter(config, file, target, plan, costs, mtp)
            _empty_cache(device)
            phases.end("reading")
            if ahead is not None:
                ahead.wait(compiling)
                phases.end("compiling")
                ahead.check()
                phases.end("checking")
            # The bits of saved states depend on what computes.
            prefix_cache = _prefix_cache(config, file, plan, device)
            engine = build_engine(config, plan, target, drafter, prefix_cache, tower)
            vectors = None if vector_spec is None else Vectors(engine, file, vector_spec, tokenizer)
    if device.type == "cuda" and graphs and vectors is None:
        engine.warmup.capture(warming)
        times = engine.warmup.measure_steps()
        whole_s = min((each.draft_s for each in times.values()), default=0.0)
        draft_s = whole_s / drafter.passes if drafter.passes else 0.0
        steps = {rows: each.verify_s + _missing_s(plan, target, rows) for rows, each in times.items()}
        costs.fill(steps, draft_s)
        phases.end("capturing")
    elif device.type == "cpu" and config.speculation is not None:
        _measure(engine, costs, drafter)
        phases.end("measuring")
    uses.warm()  # what was captured and measured has used experts as no text does
    session = Session(
        engine,
        tokenizer,
        template,
        plan,
        recommended=advice,
        break_loops=config.break_loops,
        save_costs=lambda: (cost_file.save(costs), uses.save()),
        compression=Compression(config.compress, scorer),
        images=_image_limits(config),
    )
    if vectors is not None:
        session.compute_vectors(vectors)
    session.load_seconds = phases.seconds
    return session


def _check_speculation(config: EngineConfig) -> None:
    speculation = config.speculation
    if speculation is None:
        return
    if not 1 <= speculation.budget < MAX_ROWS:
        raise UsageError(f"`budget` is {speculation.budget}, needed 1 to {MAX_ROWS - 1} nodes")
    if speculation.mtp == "on" and config.draft is not None and config.draft.head is not None:
        raise UsageError(
            "a Weaver head and the MTP block are to propose together: their paths are more than a tree takes",
            "name one of them",
            param="draft",
        )
    if speculation.chain and speculation.mtp == "on" and config.draft is not None:
        raise UsageError(
            "`chain` is set, and a draft and the MTP block are to propose: a chain has one proposer",
            "name one of them as `draft`",
        )
    if config.draft is not None and is_small_model(config.draft.path):
        _check_small_model(config.draft, speculation)


def _check_small_model(draft: DraftConfig, speculation: SpecConfig) -> None:
    if speculation.mtp == "on":
        raise UsageError(
            f"`draft` is {draft.path.name}, a model, and the MTP block is to propose beside it: each depth of"
            " the tree costs a forward pass of the model, which the block does not make cheaper",
            "name one of them as `draft`; a draft made for the target is faster than both",
        )
    if draft.head is not None:
        raise UsageError(
            f"`draft` is {draft.path.name}, a model, and {draft.head.name} is a head over a draft",
            "leave the head away",
        )
    if draft.quant != "auto":
        raise UsageError(
            f"`draft_quant` is {draft.quant}, but {draft.path.name} is a model: it stays as it is",
            "leave it auto, or take a file of other types",
        )


def _check_prefill(config: EngineConfig, device: torch.device) -> None:
    if config.prefill == "exact":
        return
    if device.type == "cpu":
        raise UsageError(
            "`prefill` is int8, which a GPU computes, but the model runs on a CPU", "leave it exact"
        )
    capability = capability_of(device) or (8, 0)
    if capability < (8, 0):
        raise UsageError(
            f"`prefill` is int8, needed a card of compute capability 8.0, this one has {capability[0]}."
            f"{capability[1]}",
            "leave it exact",
        )


def load_reader(path: Path, config: EngineConfig, limits: Limits) -> RequestReader:
    """Load what encodes and checks requests for an engine in another process."""
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file)
        advice = recommended(card_of(file), file.metadata)
        tokenizer, template = _text_of(file, spec, config.effort or advice.effort)
        scorer = WordScorer() if config.compress.scorer is None else Elsewhere()
        return RequestReader(
            tokenizer,
            template,
            limits,
            recommended=advice,
            break_loops=config.break_loops,
            compression=Compression(config.compress, scorer),
            vector_spec=VectorSpec.from_gguf(file, spec.width),
            images=_image_limits(with_encoder(file, config)),
        )


def _image_limits(config: EngineConfig) -> ImageLimits | None:
    """Return what images may be; None: the model is loaded without an image encoder."""
    return None if config.mmproj is None else ImageLimits(tokens=config.image_tokens)


def _tower(path: Path, device: torch.device, threads: int) -> VisionTower:
    with GGUFFile.open(path) as file:
        return VisionTower(file, device, compute_dtype(device.type), threads=threads)


def _threads(config: EngineConfig, plan: MemoryPlan) -> int:
    """Return the threads of the tower on a CPU, where those of torch may be few."""
    return (
        checked_threads(config.threads) or _TORCH_THREADS if plan.estimate.native else torch.get_num_threads()
    )


def _scorer(config: EngineConfig, device: torch.device, tokenizer: Tokenizer) -> Scorer:
    """Return what scores the units of long prompts: words, and a model's attention beside them."""
    words = WordScorer()
    if config.compress.scorer is None:
        return words
    model = AttentionScorer.load(
        config.compress.scorer,
        device=device,
        target=tokenizer,
        native=config.cpu_backend != "torch",
        threads=checked_threads(config.threads) or _TORCH_THREADS,
    )
    return MixedScorer(model, words)


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
        expert_slots=plan.estimate.expert_slots,
        int8_prefill=config.prefill == "int8",
        progress=progress,
    )


def _text_of(file: GGUFFile, spec: ModelSpec, effort: str) -> tuple[Tokenizer, ChatTemplate]:
    source = str(file.path)
    tokenizer = Tokenizer.from_metadata(file.metadata, source=source)
    if tokenizer.vocab_size != spec.vocab_size:
        raise BadGGUF(
            f"{file.path}: tokenizer.ggml.tokens has {tokenizer.vocab_size} entries, "
            f"needed {spec.vocab_size}, the rows of token_embd.weight"
        )
    return tokenizer, ChatTemplate.from_metadata(file.metadata, source=source, effort=effort or None)


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
    drafts = " + ".join([*([str(config.draft)] if config.draft else ()), *(["mtp"] if mtp else ())])
    slots = plan.estimate.expert_slots
    cached = "" if slots is None else f" / {slots} experts"
    return CostFile(config.costs, f"{computing} / {path.name} / {drafts} / {formats}{cached}")


def _mtp(config: EngineConfig, file: GGUFFile, target: Target, plan: MemoryPlan) -> MTPModel | None:
    """Return the MTP block of the target's file, if it is to propose tokens."""
    if not uses_mtp(config, file, target.spec):
        if config.speculation is not None and config.speculation.mtp == "on":
            raise UsageError(
                f"the MTP block is to propose beside a draft, but {file.path.name} has none",
                "name the draft alone",
                param="draft",
            )
        return None
    kind, device = target.device.type, target.device
    block = MTPBlock.load(file, target.spec, device=device, dtype=compute_dtype(kind), expand=plan.expanded)
    return mtp_model(block, target, plan)


def _drafter(
    config: EngineConfig,
    file: GGUFFile,
    target: Target,
    plan: MemoryPlan,
    costs: StepCosts,
    mtp: MTPModel | None,
) -> Drafter:
    if config.speculation is None:
        return NoDrafter()
    model: DraftModel | None = mtp
    if config.draft is not None and is_small_model(config.draft.path):
        model = _small_model(config.draft.path, config, file, target, plan, costs)
    elif config.draft is not None:
        loaded = _draft(config.draft, target, plan)
        if (loaded.refiner is not None or config.draft.head is not None) and isinstance(target, Decoder):
            target.keep_head_rows(WeightLoader(file, device=target.device, host_embedding=True))
        model = _headed(config.draft, file, target, plan, draft_model(loaded, config.draft, target, plan))
        if mtp is not None:
            model = MixedModel(model, mtp, width=target.spec.width)
    return speculator(model, config.speculation, costs, target.device)


def _headed(
    config: DraftConfig, file: GGUFFile, target: Target, plan: MemoryPlan, draft: DFlashModel
) -> DraftModel:
    if config.head is None:
        return draft
    kind = target.device.type
    options = {"dtype": compute_dtype(kind), "expand": plan.expanded, "quant": draft_quant(config, kind)}
    head = WeaverHead.load(config.head, device=target.device, **options)
    norm = WeightLoader(file, device=target.device).vector("output_norm.weight", target.spec.width)
    return weaver_model(head, draft, target, plan, final_norm=norm)


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


def _small_model(
    path: Path, config: EngineConfig, file: GGUFFile, target: Target, plan: MemoryPlan, costs: StepCosts
) -> SmallModel:
    """Load a small model: into the native library where the target is, if it can run it."""
    model: Target
    with open_small_model(path, file) as (small, spec):
        if isinstance(target, NativeDecoder) and native_gap(small, spec, SMALL_KV) is None:
            model = NativeDecoder.load(small, target.library, mode=INT8)
        else:
            model = Decoder.load(small, device=target.device, dtype=target.dtype, expand=plan.expanded)
    return small_model(model, config, target, plan, costs)


def _measure(engine: Engine, costs: StepCosts, drafter: Drafter) -> None:
    """Measure on a CPU what earlier runs have not, so that it is not found out on the user's text."""
    if not {1, engine.max_rows} <= costs.step.keys():
        costs.fill({rows: each.verify_cost for rows, each in engine.warmup.measure_steps().items()}, 0.0)
    if drafter.passes and not costs.draft_call():
        costs.fill({}, engine.warmup.measure_draft())


def _missing_s(plan: MemoryPlan, target: Target, rows: int) -> float:
    """Return what a step waits for experts that have no place: measured steps repeat, and miss none.

    Too much rather than too little: a step that takes less is believed at once.
    """
    missed = plan.estimate.missed_bytes(rows)
    return missed / caches_of(target).copy_rate() if missed else 0.0


def _computing(config: EngineConfig, plan: MemoryPlan, device: torch.device) -> str:
    """Return what decides the bits of a saved state, beside the files and settings."""
    if device.type == "cuda":
        where = f"{device_name(device)}{backends.identity()}"
    elif plan.estimate.native:
        where = f"CPU native {config.cpu_activations}"
    else:
        where = f"CPU {compute_dtype(device.type)}, weights {'expanded' if plan.expanded else 'packed'}"
    return f"{where}, prefill {config.prefill}, kernels {_KERNELS}"


def _prefix_cache(
    config: EngineConfig, file: GGUFFile, plan: MemoryPlan, device: torch.device
) -> PrefixCacheConfig:
    budget = config.prefix_cache
    if budget is None:
        budget = min(available_memory(torch.device("cpu")) // 4, 8 << 30)
    if config.prefix_cache_dir is None or config.prefix_cache == 0:
        return PrefixCacheConfig(budget, exact=config.prefix_cache_exact)
    draft = config.draft if config.speculation else None
    facts: list[Any] = []
    if draft is not None:
        facts += [draft.quant, draft.causal, min(plan.max_ctx, draft.context or DEFAULT_CONTEXT)]
    if uses_mtp(config, file, ModelSpec.from_gguf(file)):
        facts += ["mtp", min(plan.max_ctx, DEFAULT_CONTEXT)]
    made_of = identity(
        # An image is named by its pixels: what its rows are is the encoder's.
        [*file.paths, *(draft.files if draft else ()), *([config.mmproj] if config.mmproj else ())],
        computing=_computing(config, plan, device),
        kv=[format.name for format in plan.kv],
        window=config.window,
        chunk=plan.prefill_chunk,
        draft=facts or None,
    )
    files = SnapshotFiles(config.prefix_cache_dir, made_of, limit=config.prefix_cache_dir_size)
    return PrefixCacheConfig(budget, files, config.prefix_cache_exact)
