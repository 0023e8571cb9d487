"""MemoryPlanner: chooses KV cache formats and a context length that fit on a device, before loading anything.

Formats are tried best first: 16 bits if a tenth of the memory stays free, 8 bits, fewer bits for V, fewer for
both. The token embedding in host memory and smaller prefill chunks are tried before a format with fewer bits.
Unless a context was requested, it is shortened before formats below 8 bits are used.

Sequences that run at once share one pool of KV pages, which holds at least one whole context. Where their
number was not requested, it is what fits beside the plan for one of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from bough.config import EngineConfig
from bough.errors import ResourceError, UsageError
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType, tile_type
from bough.kernels.kv_cache.format import BLOCK, FORMATS
from bough.kernels.tree import MAX_ROWS
from bough.memory.device import (
    CUDA_LIBRARIES,
    KVFormats,
    MemoryBudget,
    available_memory,
    gib,
    kv_formats,
    memory_budget,
)
from bough.memory.estimate import (
    EMBEDDING,
    KV_CACHE,
    DeviceType,
    MemoryEstimate,
    estimate_memory,
    kv_bytes_per_token,
)
from bough.models.native import native_gap
from bough.models.spec import ModelSpec

# K and V formats that "auto" chooses from on a GPU, best first.
AUTO_FORMATS: tuple[tuple[str, str], ...] = (
    ("f16", "f16"),
    ("q8_0", "q8_0"),
    ("q8_0", "q5_0"),
    ("q5_0", "q5_0"),
    ("q4_0", "q4_0"),
)
OPT_IN_FORMATS: tuple[str, str] = ("tq3_0", "tq3_0")  # only on request
# A larger context is used only on request: most prompts are far shorter, and on a CPU prefill is slow.
DEFAULT_CTX = {"cpu": 32768, "cuda": 262144}
_PREFERRED_CTX = 32768  # a context shorter than this is lengthened by formats with fewer bits
_MIN_CTX = 256
_SHORTER = tuple(_PREFERRED_CTX >> n for n in range(8))  # down to the shortest
_CHUNK_SHARE = 0.03  # of the memory, for a chunk of a prompt that is larger than the ordinary one
_ORDINARY_CHUNK = 2048  # tokens
_SMALL = 32 << 20  # bytes of weights: such a model is fast in any way
# Sequences to try on a GPU where their number was not requested, and the share of memory that those beyond
# the first may take from a context that had to be shortened anyway.
_SEQUENCES, _SEQUENCES_SHARE = (8, 6, 4, 3, 2), 1 / 16
_HOST_SPARE = 1 << 30  # bytes of main memory that pinned experts leave to other programs
_SPARE = 0.1  # share kept free of a CPU's memory, and of a GPU's with 16-bit formats


@dataclass(frozen=True, slots=True)
class FormatOption:
    """How a model would fit with these KV cache formats, the token embedding in host memory if necessary."""

    formats: KVFormats
    max_ctx: int  # the longest that fits
    total: int  # bytes in use with the planned context
    host_embedding: bool
    fits: bool  # whether the planned context does


@dataclass(frozen=True, slots=True)
class _LoadOptions:
    """Settings that trade a little speed, and no precision, for memory."""

    host_embedding: bool
    chunk: int  # of prefill, in tokens


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes in use on a device once a model is loaded, by part, and the settings that lead to them."""

    parts: Mapping[str, int]
    kv: KVFormats
    max_ctx: int
    reason: str
    budget: MemoryBudget
    estimate: MemoryEstimate
    prefill_chunk: int
    host_embedding: bool = False
    kv_tokens: int = 0  # of all sequences together; at least `max_ctx`

    @property
    def sequences(self) -> int:
        return self.estimate.sequences

    @property
    def kv_pages(self) -> int:
        return self.estimate.pool_pages(self.kv_tokens)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def expanded(self) -> bool:
        """Return whether weights are used as stored: as floats, or on a GPU in the tiles its kernels read."""
        return self.estimate.expanded

    @property
    def weights(self) -> int:
        """Return the bytes of the weights, the token embedding included, also where it is in host memory."""
        return self.estimate.parts["weights"] + self.estimate.parts[EMBEDDING]

    @property
    def draft(self) -> int:
        return self.estimate.parts.get("draft", 0)

    @property
    def recurrent(self) -> int:
        return self.estimate.parts["recurrent states"]

    @property
    def kv_per_token(self) -> int:
        return kv_bytes_per_token(self.estimate.spec, self.kv)

    def notes(self) -> list[str]:
        notes = []
        if widened := self.estimate.widened:
            held = [f"{name} (held as {tile_type(QuantType[name]).name})" for name in widened]
            notes.append(
                f"weights in {', '.join(held)} have no GPU kernel of their own: "
                f"{gib(sum(widened.values()))} more than in the file; "
                "a quantisation of the K family, Q8_0, Q4_0, Q5_0 or IQ4 is faster"
            )
        return notes

    def backend_note(self) -> str:
        """Return why native code does not run the model on a CPU; nothing if it does, or hardly matters."""
        gap = self.estimate.native_gap
        if not gap or self.weights < _SMALL:
            return ""
        return f"The native CPU code is not used, {gap}: PyTorch computes, more slowly"

    def line(self) -> str:
        """Return formats, context and total in one line, printed at start-up."""
        embedding = f", token embedding in host memory ({gib(self.estimate.parts[EMBEDDING])})"
        slots, host = self.estimate.expert_slots, ""
        if slots is not None and (experts := self.estimate.spec.experts) is not None:
            host = f", experts in host memory ({gib(self.estimate.host_experts)}),"
            host += f" {slots} of {experts.count} in each layer cached on the card"
        shared = f", {self.sequences} requests at once share {self.kv_tokens:,}" if self.sequences > 1 else ""
        return (
            f"KV cache in {format_names(self.kv)} ({self.reason}), context {self.max_ctx:,} tokens{shared}, "
            f"{gib(self.total)} of {gib(self.budget.limit)}{embedding if self.host_embedding else ''}{host}"
        )


def format_names(formats: KVFormats) -> str:
    """Return q8_0, or q8_0/q5_0 where K and V differ."""
    return "/".join(dict.fromkeys(format.name for format in formats))


def plan_memory(file: GGUFFile, spec: ModelSpec, config: EngineConfig, device: torch.device) -> MemoryPlan:
    return MemoryPlanner.create(file, spec, config, device, memory_budget(device, config.vram_limit)).plan()


@dataclass(frozen=True, slots=True)
class MemoryPlanner:
    """Plans one model with one configuration for one memory budget."""

    file: GGUFFile
    spec: ModelSpec
    config: EngineConfig
    device: torch.device  # need not be installed
    budget: MemoryBudget
    estimate: MemoryEstimate
    candidates: Sequence[KVFormats]  # formats that the configuration allows, best first

    @classmethod
    def create(
        cls,
        file: GGUFFile,
        spec: ModelSpec,
        config: EngineConfig,
        device: torch.device,
        budget: MemoryBudget,
    ) -> "MemoryPlanner":
        if config.max_ctx is not None and not 1 <= config.max_ctx <= spec.context_length:
            raise UsageError(
                f"`max_ctx` is {config.max_ctx}, {spec.name} takes 1 to {spec.context_length} tokens"
            )
        if config.parallel is not None and not 1 <= config.parallel <= MAX_ROWS:
            raise UsageError(f"`parallel` is {config.parallel}, needed 1 to {MAX_ROWS}")
        device_type: DeviceType = "cuda" if device.type == "cuda" else "cpu"
        _check_experts(spec, config, device_type)
        context = config.max_ctx or min(spec.context_length, DEFAULT_CTX[device_type])
        estimated = partial(estimate_memory, file, spec, config, device_type, context=context)
        candidates = _candidates(spec, config, device)
        gap = _native_gap(file, spec, config, candidates[0]) if device_type == "cpu" else ""
        if gap is None:
            return cls(file, spec, config, device, budget, estimated(native=True), candidates)
        expand = config.weights != "packed"
        estimate = estimated(expand=expand)
        if device_type == "cpu" and config.weights == "auto" and estimate.without_kv() >= 0.8 * budget.free:
            estimate = estimated(expand=False)
        estimate = replace(estimate, native_gap=gap)
        _check_host(estimate)
        return cls(file, spec, config, device, budget, estimate, candidates)

    @property
    def context(self) -> int:
        return self.config.max_ctx or min(self.spec.context_length, DEFAULT_CTX[self.device.type])

    def plan(self) -> MemoryPlan:
        """Return the best plan that fits; raise ResourceError with alternatives if none does."""
        if (cached := self._if_too_large()) is not None:
            return cached.plan()
        plan = self._planned()
        return self._widened(plan) if self.config.parallel is None and self._on_gpu else plan

    def _if_too_large(self) -> "MemoryPlanner | None":
        """Return a planner with experts in host memory, if the model has some and all of it does not fit."""
        if self.config.experts_host is not None or self.spec.experts is None or not self._on_gpu:
            return None
        try:
            short = self._planned().max_ctx < min(self.context, _PREFERRED_CTX)
        except ResourceError:
            return self._with_cache()
        try:
            return self._with_cache() if short else None
        except ResourceError:
            return None  # too little main memory: a short context it is

    def _with_cache(self) -> "MemoryPlanner | None":
        """Return a planner with as many experts on the card as fit beside a context; None if too few do."""
        experts = self.spec.experts
        if experts is None or not self._on_gpu:
            return None
        least = self._holding(experts.used)
        context = self.config.max_ctx or min(self.context, _PREFERRED_CTX)
        fit = (least if self.config.max_ctx is not None else least._without_lossy())._best_fit(context)
        if fit is None:
            return None
        room = least._limit(fit[0]) - least._total(fit[0], context, fit[1])
        more = room * experts.count // least.estimate.host_experts
        return self._holding(min(experts.count - 1, experts.used + more))

    def _holding(self, slots: int) -> "MemoryPlanner":
        assert self.spec.experts is not None
        config = replace(self.config, experts_host=self.spec.experts.count - slots)
        return MemoryPlanner.create(self.file, self.spec, config, self.device, self.budget)

    def _widened(self, plan: MemoryPlan) -> MemoryPlan:
        """Return the plan for as many sequences as fit, with the same formats and load options."""
        options = _LoadOptions(plan.host_embedding, plan.prefill_chunk)
        shortened = plan.max_ctx < self.context
        for sequences in _SEQUENCES:
            config = replace(self.config, parallel=sequences)
            wider = MemoryPlanner.create(self.file, self.spec, config, self.device, self.budget)
            wider = replace(wider, candidates=self.candidates)
            context = min(plan.max_ctx, wider._longest(plan.kv, options))
            more = wider.estimate.without_kv() - self.estimate.without_kv()
            room = context >= _PREFERRED_CTX and more <= _SEQUENCES_SHARE * self.budget.limit
            if context == plan.max_ctx or (shortened and room):
                return wider._plan(plan.kv, options, context, plan.reason)
        return plan

    def _planned(self) -> MemoryPlan:
        """Return the plan for the requested number of sequences, or for one."""
        context = self.context
        # The default context is no reason to use fewer than 8 bits for K or V.
        precise = self if self.config.max_ctx is not None else self._without_lossy()
        if (fit := precise._best_fit(context)) is not None:
            formats, options = fit
            return self._plan(formats, options, context, self._reason(formats))
        if self.config.max_ctx is None:
            smallest_precise = replace(precise, candidates=precise.candidates[-1:])
            rest = ((self, least) for least in _SHORTER)
            for planner, least in ((smallest_precise, _PREFERRED_CTX), *rest):
                if least < context and (fit := planner._best_fit(least)) is not None:
                    formats, options = fit
                    longest = min(planner._longest(formats, options), context)
                    return self._plan(formats, options, longest, self._reason_for_shorter(context))
            context = min(context, _MIN_CTX)
        raise self._does_not_fit(context)

    def options(self) -> tuple[FormatOption, ...]:
        """Return all automatic and opt-in formats, then the requested ones that are not among them."""
        offered = self._offered()
        return tuple(
            self._option(formats)
            for formats in (*offered, *(each for each in self.candidates if each not in offered))
        )

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _offered(self) -> list[KVFormats]:
        if not self._on_gpu:
            return []
        divisible = not self.spec.head_dim % BLOCK
        names = (*AUTO_FORMATS, OPT_IN_FORMATS) if divisible else AUTO_FORMATS[:1]
        return [(FORMATS[k], FORMATS[v]) for k, v in names]

    def _load_options(self) -> list[_LoadOptions]:
        """Return the load options, the fastest first, the one with the least memory last."""
        preferred, *smaller = self.estimate.prefill
        if not self._on_gpu:
            return [_LoadOptions(False, preferred)]
        # The largest chunk is a few percent faster: not worth context on a small card. The size of the card
        # decides, not what is free on it: bits depend on the chunk, and should not on other programs.
        room = _CHUNK_SHARE * self.budget.limit
        if preferred > _ORDINARY_CHUNK and smaller and self.estimate.prefill[preferred] > room:
            preferred, *smaller = smaller
        ordinary = [size for size in (preferred, *smaller) if size <= _ORDINARY_CHUNK] or [preferred]
        return [
            *(_LoadOptions(False, chunk) for chunk in dict.fromkeys((preferred, ordinary[0]))),
            *(_LoadOptions(True, chunk) for chunk in ordinary),
        ]

    def _total(self, formats: KVFormats, context: int, options: _LoadOptions) -> int:
        libraries = CUDA_LIBRARIES if self._on_gpu else 0
        model = self.estimate.without_kv(host_embedding=options.host_embedding)
        workspace = self.estimate.prefill[options.chunk]
        return self.budget.in_use + libraries + model + workspace + self.estimate.kv_bytes(formats, context)

    def _limit(self, formats: KVFormats) -> int:
        choosing = len(self.candidates) > 1 and not any(format.quantised for format in formats)
        choosing = choosing and self.estimate.expert_slots is None  # experts take what is free
        limit = self.budget.limit
        return int((1 - _SPARE) * limit) if choosing or not self._on_gpu else limit

    def _best_fit(self, context: int) -> tuple[KVFormats, _LoadOptions] | None:
        """Return the best formats with which a context fits, and the load options it needs."""
        for formats in self.candidates:
            for options in self._load_options():
                if self._total(formats, context, options) <= self._limit(formats):
                    return formats, options
        return None

    def _longest(self, formats: KVFormats, options: _LoadOptions) -> int:
        """Return the longest context that fits."""
        empty = self._total(formats, 0, options) - self.estimate.kv_bytes(formats, 0)
        return self.estimate.max_context(formats, self._limit(formats) - empty)

    def _without_lossy(self) -> "MemoryPlanner":
        """Return a planner for the candidates of 8 bits and more, or for all if there are none."""
        precise = [formats for formats in self.candidates if not any(format.lossy for format in formats)]
        return replace(self, candidates=precise or self.candidates)

    def _reason_for_shorter(self, context: int) -> str:
        if (fit := self._best_fit(context)) is None:
            return f"{context:,} tokens do not fit in {format_names(self.candidates[-1])}"
        return f"`max_ctx` {context} fits in {format_names(fit[0])}"

    def _reason(self, formats: KVFormats) -> str:
        if "auto" not in (self.config.kv_k, self.config.kv_v):
            return "as requested"
        if len(self.candidates) == 1:
            return "the default"
        if formats == self.candidates[0]:
            return f"{_SPARE:.0%} of the memory or more stay free"
        return "the most bits in which the context fits"

    def _plan(self, formats: KVFormats, options: _LoadOptions, context: int, reason: str) -> MemoryPlan:
        estimate, budget = self.estimate, self.budget
        tokens = max(context, self._most_tokens(formats, options, context))
        parts = dict(estimate.parts) | {"prefill": estimate.prefill[options.chunk]}
        if options.host_embedding:
            parts.pop(EMBEDDING)
        # On a CPU the pool grows with use; one context is what a request may need.
        parts[KV_CACHE] = estimate.kv_bytes(formats, context, tokens if self._on_gpu else 0)
        if self._on_gpu:
            parts |= {"CUDA libraries": CUDA_LIBRARIES, "in use before": budget.in_use}
        parts = {name: size for name, size in parts.items() if size}
        return MemoryPlan(
            parts, formats, context, reason, budget, estimate, options.chunk, options.host_embedding, tokens
        )

    def _most_tokens(self, formats: KVFormats, options: _LoadOptions, context: int) -> int:
        """Return how many tokens of all sequences fit, with a tenth of the memory free."""
        empty = self._total(formats, 0, options) - self.estimate.kv_bytes(formats, 0)
        return self.estimate.max_tokens(formats, context, int((1 - _SPARE) * self.budget.limit) - empty)

    def _option(self, formats: KVFormats) -> FormatOption:
        alone = replace(self, candidates=(formats,))
        fit = alone._best_fit(self.context)
        options = self._load_options()[-1] if fit is None else fit[1]
        total = alone._total(formats, self.context, options)
        longest = alone._longest(formats, self._load_options()[-1])
        return FormatOption(formats, longest, total, options.host_embedding, fit is not None)

    def _does_not_fit(self, context: int) -> ResourceError:
        smallest = self.candidates[-1]
        needed = gib(self._total(smallest, context, self._load_options()[-1]))
        limited = self.config.vram_limit is not None
        available = "are free" if not self._on_gpu else "may be used" if limited else "are installed"
        alternatives = tuple(self._alternatives(context))
        return ResourceError(
            f"{self.file.path.name} needs {needed} with a context of {context:,} tokens in "
            f"{format_names(smallest)}, {gib(self.budget.limit)} {available} on {self.device}",
            f"{'any of these' if len(alternatives) > 1 else 'this'} would fit: {'; '.join(alternatives)}",
        )

    def _alternatives(self, context: int) -> Iterator[str]:
        """Yield up to three settings with which the model would fit."""
        smallest = self.candidates[-1]
        if (shorter := self._longest(smallest, self._load_options()[-1]) // 1024 * 1024) >= 1024:
            yield f"`max_ctx` {shorter}"
        others = replace(self, candidates=[each for each in self._offered() if each not in self.candidates])
        if (other := others._best_fit(context)) is not None:
            k, v = (format.name for format in other[0])
            yield f"`kv` {k}" if k == v else f"`kv_k` {k} `kv_v` {v}"
        if self.config.experts_host is not None and self._fits_with_cache():
            yield "`experts_host` auto"
        for setting, lighter in _lighter_drafts(self.config):
            planner = MemoryPlanner.create(self.file, self.spec, lighter, self.device, self.budget)
            if planner._best_fit(context) is not None:
                yield setting
                return
        # The size of weights with which the rest would fit.
        excess = self._total(smallest, context, self._load_options()[-1]) - self._limit(smallest)
        left = self.estimate.parts["weights"] - excess
        yield f"a model whose weights take {gib(left)}" if left > 0 else "a smaller model"

    def _fits_with_cache(self) -> bool:
        try:
            return self._with_cache() is not None
        except ResourceError:
            return False


def _check_experts(spec: ModelSpec, config: EngineConfig, device_type: DeviceType) -> None:
    """Raise for experts in host memory where there are none, or where all weights are there anyway."""
    experts, count = spec.experts, config.experts_host or 0
    most = experts.count - experts.used if experts is not None else 0
    if not 0 <= count <= most:
        which = f"0 to {most}" if most else f"0: {spec.name} has no routed experts"
        raise UsageError(f"`experts_host` is {count}, needed {which}")
    if count and device_type == "cpu":
        raise UsageError(f"`experts_host` is {count}, but on a CPU all weights are in host memory")


def _check_host(estimate: MemoryEstimate) -> None:
    """Raise if host memory does not hold the experts that are to be there."""
    if not estimate.host_experts:
        return
    free = available_memory(torch.device("cpu"))
    if estimate.host_experts + _HOST_SPARE > free:
        raise ResourceError(
            f"the experts of {estimate.spec.name} do not fit on the card and take "
            f"{gib(estimate.host_experts)} of main memory, of which {gib(_HOST_SPARE)} must stay free: "
            f"{gib(free)} are free",
            "end other programs, take a smaller quantisation, or run it on the CPU alone: `device` cpu",
        )


def _native_gap(file: GGUFFile, spec: ModelSpec, config: EngineConfig, kv: KVFormats) -> str | None:
    """Return None if the native library is to run the model, else why not; "": it was not asked for."""
    if config.cpu_backend == "torch" or config.weights == "expanded":
        return ""
    context = config.max_ctx or DEFAULT_CTX["cpu"]
    window = None if config.window is not None and config.window >= context else config.window
    gap = native_gap(file, spec, kv, window)
    if gap is not None and config.cpu_backend == "native":
        raise UsageError(f"`cpu_backend` is native, but {gap}", "use `cpu_backend` auto or torch")
    return gap


def _candidates(spec: ModelSpec, config: EngineConfig, device: torch.device) -> list[KVFormats]:
    requested = (config.kv_k, config.kv_v)
    if device.type != "cuda" or "auto" not in requested:
        return [kv_formats(spec, device, requested)]
    usable = [names for names in AUTO_FORMATS if names == AUTO_FORMATS[0] or not spec.head_dim % BLOCK]
    k_names, v_names = (
        [names[side] if requested[side] == "auto" else requested[side] for names in usable] for side in (0, 1)
    )
    return [kv_formats(spec, device, names) for names in dict.fromkeys(zip(k_names, v_names, strict=True))]


def _lighter_drafts(config: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
    """Yield settings that shrink or drop the draft, and the configuration with each."""
    draft, speculation = config.draft, config.speculation
    if speculation is None or (draft is None and speculation.mtp == "off"):
        return
    if draft is not None and draft.quant != "q4_k" and draft.path.suffix != ".gguf":
        yield "`draft_quant` q4_k", replace(config, draft=replace(draft, quant="q4_k"))
    if draft is not None and speculation.mtp == "on":
        yield "a draft without the MTP block", replace(config, speculation=replace(speculation, mtp="auto"))
    yield "`no_draft`", replace(config, draft=None, speculation=replace(speculation, mtp="off"))
