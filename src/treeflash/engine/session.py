"""A loaded model that turns text into text: messages or a raw prompt in, pieces of text out.

Stop strings end the text exactly before their first character, wherever token borders fall.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from treeflash.config import EngineConfig
from treeflash.engine.cost_file import CostFile
from treeflash.engine.engine import Done, Engine, Progress, Request, Tokens
from treeflash.engine.memory import MemoryPlan, device_name, pick_device, plan_memory
from treeflash.engine.sampler import SamplingParams, TokenLogprob
from treeflash.engine.stats import RequestStats
from treeflash.errors import BadGGUF, UsageError
from treeflash.gguf.reader import GGUFFile
from treeflash.gguf.types import QuantType
from treeflash.models.decoder import Decoder
from treeflash.models.dflash import DFlashDraft
from treeflash.models.spec import ModelSpec
from treeflash.models.step import MAX_ROWS
from treeflash.models.weights import Progress as LoadProgress
from treeflash.spec.controller import Costs
from treeflash.spec.draft import BlockDraft, Drafter, NoDrafter
from treeflash.spec.speculator import Speculator
from treeflash.state.draft_ring import draft_buffers
from treeflash.text.stops import StopStrings
from treeflash.text.template import ChatTemplate
from treeflash.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Exactly one of `messages` (rendered by the chat template) and `prompt` (taken as it is)."""

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | None = None
    max_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: Sequence[str] = ()
    thinking: bool | None = None
    cancelled: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of the answer; whole characters."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    reason: Literal["stop", "length", "cancelled"]
    tokens: list[int]  # delivered, end tokens not among them
    stats: RequestStats
    logprobs: list[TokenLogprob] | None = None  # one for each token, when asked for


class Session:
    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        plan: MemoryPlan,
        *,
        save_costs: Callable[[], None] = lambda: None,
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.plan = plan
        self._save_costs = save_costs

    @classmethod
    def load(
        cls, path: Path, config: EngineConfig | None = None, *, progress: LoadProgress | None = None
    ) -> "Session":
        config = config or EngineConfig()
        device = pick_device(config.device)
        # Matrix products of bfloat16 are slow or missing on many CPUs; GPUs have them since Ampere.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        with GGUFFile.open(path) as file:
            spec = ModelSpec.from_gguf(file)
            tokenizer = Tokenizer.from_metadata(file.metadata, source=str(path))
            template = ChatTemplate.from_metadata(file.metadata, source=str(path))
            if tokenizer.vocab_size != spec.vocab_size:
                raise BadGGUF(
                    f"{path}: tokenizer.ggml.tokens has {tokenizer.vocab_size} entries, "
                    f"needed {spec.vocab_size}, the rows of token_embd.weight"
                )
            if config.max_ctx is not None and not 1 <= config.max_ctx <= spec.context_length:
                raise UsageError(
                    f"--max-ctx is {config.max_ctx}, {spec.name} takes 1 to {spec.context_length} tokens"
                )
            plan = plan_memory(
                file,
                spec,
                device,
                dtype=dtype,
                max_ctx=config.max_ctx,
                weights=config.weights,
                draft=config.draft.path if config.draft else None,
            )
            target = Decoder.load(file, device=device, dtype=dtype, expand=plan.expanded, progress=progress)
        cost_file = CostFile(config.costs, f"{device_name(device)} / {path.name} / {config.draft}")
        costs = cost_file.load()
        engine = Engine(
            target,
            max_ctx=plan.max_ctx,
            prefill_chunk=config.prefill_chunk,
            drafter=_drafter(config, target, plan, costs, dtype),
            max_rows=config.speculation.budget + 1 if config.speculation else 1,
        )
        return cls(engine, tokenizer, template, plan, save_costs=lambda: cost_file.save(costs))

    def encode(self, request: TextRequest) -> list[int]:
        """The prompt's token ids; raises where the template refuses the messages."""
        if (request.messages is None) == (request.prompt is None):
            raise UsageError("give either messages or a raw prompt")
        if request.messages is not None:
            rendered = self.template.render(request.messages, thinking=request.thinking)
            # What a message merely spells like a control token stays text. Templates write the first token
            # themselves, all but the one we supply.
            ids = self.tokenizer.encode(rendered.text, literals=rendered.literals)
            return self._begun(ids) if self.template.is_fallback else ids
        return self._begun(self.tokenizer.encode(request.prompt or ""))

    def _begun(self, ids: list[int]) -> list[int]:
        return ids if self.tokenizer.bos_id is None else [self.tokenizer.bos_id, *ids]

    def generate(self, request: TextRequest) -> Iterator[Progress | Text | Finished]:
        text = _Writer(self.tokenizer, request.stop)
        tokens: list[int] = []
        logprobs: list[TokenLogprob] | None = None if request.sampling.logprobs is None else []
        events = self.engine.generate(
            Request(
                prompt=self.encode(request),
                max_tokens=request.max_tokens,
                sampling=request.sampling,
                stop_ids=self.tokenizer.stop_ids,
                cut=text.write,
                cancelled=request.cancelled,
            )
        )
        with contextlib.closing(events):
            for event in events:
                match event:
                    case Progress():
                        yield event
                    case Tokens(new, fresh):
                        tokens += new
                        if logprobs is not None:
                            logprobs += fresh or []
                        if piece := text.take():
                            yield Text(piece)
                    case Done(reason, stats):
                        text.finish()
                        if piece := text.take():
                            yield Text(piece)
                        self._save_costs()
                        yield Finished(reason, tokens, stats, logprobs)


def _drafter(
    config: EngineConfig, target: Decoder, plan: MemoryPlan, costs: Costs, dtype: torch.dtype
) -> Drafter:
    if config.speculation is None:
        return NoDrafter(target.device)
    if not 1 <= config.speculation.budget < MAX_ROWS:
        raise UsageError(f"--budget is {config.speculation.budget}, needed 1 to {MAX_ROWS - 1} nodes")
    block = None
    if config.draft is not None:
        quant = config.draft.quant
        if quant == "auto":
            quant = "q8_0" if target.device.type == "cuda" else "none"
        draft = DFlashDraft.load(
            config.draft.path,
            target.spec,
            device=target.device,
            dtype=dtype,
            expand=plan.expanded,
            quant={"q8_0": QuantType.Q8_0, "q4_k": QuantType.Q4_K, "none": None}[quant],
            causal=config.draft.causal,
        )
        context = config.draft.context
        buffers = draft_buffers(draft.spec, max_ctx=plan.max_ctx, context=context, device=target.device)
        block = BlockDraft(draft, target, buffers)
    return Speculator(block, config.speculation, costs, device=target.device)


class _Writer:
    """Turns committed tokens into text and says where a stop string ends it."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._stream = tokenizer.stream()
        self._stops = StopStrings(stop)
        self._ready = ""

    def write(self, tokens: list[int]) -> int | None:
        for count, token in enumerate(tokens, 1):
            self._ready += self._stops.push(self._stream.push([token]))
            if self._stops.hit is not None:
                return count
        return None

    def finish(self) -> None:
        self._ready += self._stops.push(self._stream.flush()) + self._stops.flush()

    def take(self) -> str:
        ready, self._ready = self._ready, ""
        return ready
