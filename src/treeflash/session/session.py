"""A loaded model that turns text into text: messages or a raw prompt in, pieces of text out.

Stop strings end the text exactly before their first character, wherever token borders fall.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from treeflash.config import EngineConfig
from treeflash.engine.engine import Done, Engine, Request, Tokens, Tree
from treeflash.engine.sampler import SamplingParams, TokenLogprob
from treeflash.errors import BadGGUF, UsageError
from treeflash.gguf.reader import GGUFFile
from treeflash.hub.catalog import Card, recognise
from treeflash.kernels.quant_matmul import prepare
from treeflash.memory.device import available_memory, device_name, limit_allocator, pick_device
from treeflash.memory.estimate import compute_dtype, draft_quant, ring_dtype
from treeflash.memory.planner import MemoryPlan, plan_memory
from treeflash.models.decoder import Decoder
from treeflash.models.dflash import DFlashDraft
from treeflash.models.spec import ModelSpec
from treeflash.models.step import MAX_ROWS, SIZES
from treeflash.models.weights import Progress as LoadProgress
from treeflash.prefix_cache.files import SnapshotFiles, identity
from treeflash.session.prompts import Prompts
from treeflash.session.requests import (
    Finished,
    Progress,
    Reasoning,
    SessionEvent,
    Text,
    TextRequest,
    TreeStep,
)
from treeflash.spec.controller import BUCKETS, Costs
from treeflash.spec.cost_file import CostFile
from treeflash.spec.draft import BlockDraft, Drafter, NoDrafter
from treeflash.spec.speculator import Speculator
from treeflash.state.draft_ring import DEFAULT_CONTEXT, draft_buffers
from treeflash.text.template import ChatTemplate
from treeflash.text.tokenizer import Tokenizer

__all__ = ["Finished", "Progress", "Session", "Text", "TextRequest"]

# Our name of a setting, and the file's below general.sampling.
_FILE_SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


class Session:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        plan: MemoryPlan,
        *,
        card: Card | None = None,
        file_sampling: SamplingParams | None = None,
        save_costs: Callable[[], None] = lambda: None,
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.plan = plan
        self.card = card
        self._file_sampling = file_sampling or SamplingParams()
        self._save_costs = save_costs
        self._prompts = Prompts(tokenizer, template)

    @classmethod
    def load(
        cls,
        path: Path,
        config: EngineConfig | None = None,
        *,
        progress: LoadProgress | None = None,
        warming: Callable[[int, int], None] | None = None,
        graphs: bool = True,
    ) -> "Session":
        """`progress`: of reading; `warming`: of making CUDA graphs of the steps, unless told not to."""
        config = config or EngineConfig()
        device = pick_device(config.device)
        if config.speculation is not None and not 1 <= config.speculation.budget < MAX_ROWS:
            raise UsageError(f"--budget is {config.speculation.budget}, needed 1 to {MAX_ROWS - 1} nodes")
        with GGUFFile.open(path) as file:
            spec = ModelSpec.from_gguf(file)
            tokenizer = Tokenizer.from_metadata(file.metadata, source=str(path))
            template = ChatTemplate.from_metadata(file.metadata, source=str(path))
            if tokenizer.vocab_size != spec.vocab_size:
                raise BadGGUF(
                    f"{path}: tokenizer.ggml.tokens has {tokenizer.vocab_size} entries, "
                    f"needed {spec.vocab_size}, the rows of token_embd.weight"
                )
            plan = plan_memory(file, spec, config, device)
            if device.type == "cuda":
                limit_allocator(plan.budget, device)
            card = recognise(
                [spec.name, path.stem],
                architecture=spec.architecture,
                width=spec.width,
                layers=len(spec.layers),
            )
            recommended = file_sampling(file.metadata)
            target = Decoder.load(
                file,
                device=device,
                dtype=compute_dtype(device.type),
                expand=plan.expanded,
                host_embedding=plan.host_embedding,
                progress=progress,
            )
            computing = device_name(device) if device.type == "cuda" else f"CPU {compute_dtype(device.type)}"
            files = _prefix_files(config, file, plan, computing)
        prepare(target.layouts, device)
        kept = "/".join(format.name for format in plan.kv)
        cost_file = CostFile(config.costs, f"{device_name(device)} / {path.name} / {config.draft} / {kept}")
        costs = cost_file.load()
        _free_scraps(device)
        drafter = _drafter(config, target, plan, costs)
        _free_scraps(device)
        engine = Engine(
            target,
            max_ctx=plan.max_ctx,
            prefill_chunk=plan.prefill_chunk,
            drafter=drafter,
            max_rows=config.max_rows,
            prefix_cache=_prefix_cache(config),
            prefix_files=files,
            kv=plan.kv,
            window=config.window,
        )
        if device.type == "cuda" and graphs:
            engine.capture(warming)
            _free_scraps(device)
        return cls(
            engine,
            tokenizer,
            template,
            plan,
            card=card,
            file_sampling=recommended,
            save_costs=lambda: cost_file.save(costs),
        )

    @property
    def max_ctx(self) -> int:
        return self.engine.max_ctx

    @property
    def default_sampling(self) -> SamplingParams:
        """What the model's makers recommend: its card, else its file; greedy where neither says anything."""
        return self.sampling_for(None)

    def sampling_for(self, thinking: bool | None) -> SamplingParams:
        """The same for a request that thinks or does not; None: as the model does by default."""
        if self.card is None:
            return self._file_sampling
        thinks = self.card.thinking if thinking is None else thinking
        return SamplingParams(**asdict(self.card.sampling["thinking" if thinks else "plain"]))

    def encode(self, request: TextRequest) -> list[int]:
        """The prompt's token ids; raises where the template refuses the messages."""
        return self._prompts.encode(request).ids

    def generate(self, request: TextRequest) -> Iterator[SessionEvent]:
        prompt = self._prompts.encode(request)
        answer = self._prompts.output(request, prompt)
        tokens: list[int] = []
        logprobs: list[TokenLogprob] | None = None if request.sampling.logprobs is None else []
        fresh: list[TokenLogprob] | None = None if logprobs is None else []
        room = self.max_ctx - len(prompt.ids) + 1
        events = self.engine.generate(
            Request(
                prompt=prompt.ids,
                max_tokens=max(1, room) if request.max_tokens is None else request.max_tokens,
                sampling=request.sampling,
                stop_ids=self.tokenizer.stop_ids,
                cut=answer.write,
                may_cut=answer.may_end,
                cancelled=request.cancelled,
                guide=self._prompts.constraint(request, prompt),
                draft_budget=request.draft_budget,
                trees=request.trees,
                boundaries=prompt.boundaries,
            )
        )
        with contextlib.closing(events):
            for event in events:
                match event:
                    case Progress():
                        yield event
                    case Tokens(new, measured):
                        tokens += new
                        if logprobs is not None:
                            logprobs += measured or []
                            fresh = (fresh or []) + (measured or [])
                        for piece in answer.take(fresh):
                            yield piece
                            fresh = None if isinstance(piece, Text | Reasoning) else fresh
                    case Tree():
                        yield self._shown(event)
                    case Done(reason, stats):
                        answer.finish(whole=reason == "stop")
                        yield from answer.take(fresh)
                        self._save_costs()
                        stats.reasoning_tokens = min(answer.reasoning_tokens, len(tokens))
                        called = reason == "stop" and answer.called
                        yield Finished(
                            reason="tool_calls" if called else reason,
                            stop_string=answer.stop_string,
                            tokens=tokens,
                            stats=stats,
                            logprobs=logprobs,
                        )

    def _shown(self, tree: Tree) -> TreeStep:
        texts = [self.tokenizer.token_bytes(token).decode(errors="replace") for token in tree.tokens]
        return TreeStep(texts, tree.parents, tree.accepted, 1000 * tree.draft_s, 1000 * tree.step_s)


def _free_scraps(device: torch.device) -> None:
    """What torch keeps for later of memory that was used while loading would not be there for the cache."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _drafter(config: EngineConfig, target: Decoder, plan: MemoryPlan, costs: Costs) -> Drafter:
    if config.speculation is None:
        return NoDrafter()
    block = None
    if config.draft is not None:
        kind = target.device.type
        draft = DFlashDraft.load(
            config.draft.path,
            target.spec,
            device=target.device,
            dtype=compute_dtype(kind),
            expand=plan.expanded,
            quant=draft_quant(config.draft, kind),
            causal=config.draft.causal,
        )
        context = config.draft.context
        buffers = draft_buffers(
            draft.spec,
            max_ctx=plan.max_ctx,
            context=context,
            device=target.device,
            dtype=ring_dtype(kind),
        )
        block = BlockDraft(draft, target, buffers)
        prepare(draft.layouts, target.device)
    # Padded steps cost what the next larger size does.
    sizes = SIZES if target.device.type == "cuda" else BUCKETS
    return Speculator(block, config.speculation, costs, device=target.device, sizes=sizes)


def _prefix_cache(config: EngineConfig) -> int:
    if config.prefix_cache is not None:
        return config.prefix_cache
    return min(available_memory(torch.device("cpu")) // 4, 8 << 30)


def _prefix_files(
    config: EngineConfig, file: GGUFFile, plan: MemoryPlan, computing: str
) -> SnapshotFiles | None:
    if config.prefix_cache_dir is None or config.prefix_cache == 0:
        return None
    draft = config.draft if config.speculation else None
    made_of = identity(
        [*file.paths, *([draft.path] if draft else ())],
        computing=computing,
        kv=[format.name for format in plan.kv],
        window=config.window,
        chunk=plan.prefill_chunk,
        draft=draft and [draft.quant, draft.causal, min(plan.max_ctx, draft.context or DEFAULT_CONTEXT)],
    )
    return SnapshotFiles(config.prefix_cache_dir, made_of, limit=config.prefix_cache_dir_size)


def file_sampling(metadata: Mapping[str, Any]) -> SamplingParams:
    """What a file's own metadata recommends; a value that makes no sense there is left out."""
    found: dict[str, Any] = {}
    for field, key in _FILE_SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        with contextlib.suppress(UsageError, TypeError, ValueError):
            if value is not None:
                wanted: dict[str, Any] = {field: int(value) if field == "top_k" else float(value)}
                SamplingParams(**wanted)
                found |= wanted
    return SamplingParams(**found)
