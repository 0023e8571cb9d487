"""Vectors of prompts: the decoder reads each alone, and its hidden states after the last norm are pooled.

A prompt's chunks depend on its length alone, so its vector is the same to the bit in any company.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from bough.config import CompressConfig, EngineConfig
from bough.engine.engine import Engine
from bough.engine.events import Failed
from bough.engine.stats import RequestStats
from bough.errors import ModelFileError
from bough.gguf.quants import dequantise
from bough.gguf.reader import GGUFFile
from bough.kernels.runtime.device import on_device
from bough.models.pooling import CLASSIFIER, Pooling, VectorSpec
from bough.models.step import Step
from bough.session.events import Finished, SessionEvent, Vector
from bough.session.requests import TextRequest
from bough.text.tokenizer import Tokenizer


def vector_config(config: EngineConfig) -> EngineConfig:
    """Return the configuration of a model that generates nothing: it needs room for one prompt alone."""
    compress = CompressConfig()
    return replace(config, speculation=None, draft=None, parallel=1, prefix_cache=0, compress=compress)


class VectorGeneration:
    """A request for a vector, and how far it has come."""

    def __init__(self, request: TextRequest, ids: list[int]):
        self.request, self.ids = request, ids
        self.ended = False
        self.stats = RequestStats(len(ids))
        self.pooled: Tensor | None = None  # [width] float64, so far

    def finished(self, reason: Literal["stop", "cancelled"]) -> Finished:
        self.stats.token_arrived()  # its time is what the prompt took
        return Finished(reason=reason, tokens=[], stats=self.stats)


class Vectors:
    """The requests for vectors of one engine, which runs nothing else; one chunk of one prompt a step."""

    def __init__(self, engine: Engine, file: GGUFFile, spec: VectorSpec, tokenizer: Tokenizer):
        self._engine, self.spec = engine, spec
        self._queue: list[VectorGeneration] = []
        self._slot = -1  # of the first one, once it is being read
        self._classifier: Tensor | None = None  # [labels, width]
        if spec.labels:
            info = file.require_tensor(CLASSIFIER, (len(spec.labels), spec.width))
            self._classifier = dequantise(torch.tensor(file.raw(CLASSIFIER)), info.type).double()
        self._answers = [tokenizer.encode(word)[0] for word in ("yes", "no")]

    def __len__(self) -> int:
        return len(self._queue)

    def begin(self, request: TextRequest, ids: list[int]) -> VectorGeneration:
        generation = VectorGeneration(request, ids)
        self._queue.append(generation)
        return generation

    def end(self, generation: VectorGeneration) -> None:
        """Free what a generation holds. Idempotent."""
        generation.ended = True
        if self._queue and self._queue[0] is generation:
            self._close()
        self._queue = [each for each in self._queue if each is not generation]

    @torch.inference_mode()
    def step(self) -> list[tuple[VectorGeneration, SessionEvent | Failed]]:
        """Read a chunk of the oldest prompt; return what that brought to whom."""
        if not self._queue:
            return []
        generation = self._queue[0]
        try:
            if generation.request.cancelled():
                events: list[SessionEvent | Failed] = [generation.finished("cancelled")]
            elif self._read(generation) < len(generation.ids):
                return []
            else:
                events = [Vector(self._values(generation)), generation.finished("stop")]
        except Exception as error:  # of any kind: it is this request's alone
            events = [Failed(error)]
        self.end(generation)
        return [(generation, event) for event in events]

    def _read(self, generation: VectorGeneration) -> int:
        """Run the next chunk; return how many tokens have been read."""
        states, target = self._engine.states, self._engine.target
        if self._slot < 0:
            self._slot = states.open()
        start = states.lengths[self._slot]
        tokens = generation.ids[start : start + self._engine.prefill_chunk]
        stop = start + len(tokens)
        states.reserve(self._slot, len(tokens))
        slots = on_device([self._slot], target.device)
        lengths = states.buffers.lengths[slots]
        step = Step.chunk(slots, on_device([tokens], target.device), lengths, span=stop)
        hidden = target.forward(step, states.buffers).hidden[0]  # [T, width]
        states.advance(step, [self._slot])
        before = generation.pooled
        match self.spec.pooling:
            case Pooling.mean:
                total = hidden.double().sum(0) / len(generation.ids)
                generation.pooled = total if before is None else before + total
            case Pooling.cls:
                generation.pooled = hidden[0].double() if before is None else before
            case _:
                generation.pooled = hidden[-1].double()
        return stop

    def _values(self, generation: VectorGeneration) -> list[float]:
        """Return the vector, or how probable it is that the document answers the query."""
        pooled = generation.pooled
        assert pooled is not None
        if self.spec.pooling is not Pooling.rank:
            values = pooled.float().cpu()
        elif self._classifier is not None:
            shares = (self._classifier @ pooled.cpu()).softmax(0)
            values = shares[self.spec.labels.index("yes")][None]
        else:
            logits = self._engine.target.logits(pooled.float()[None])[0, self._answers]
            values = logits.double().softmax(0)[:1].cpu()
        if not bool(values.isfinite().all()):
            raise ModelFileError(
                "the model's hidden states of this input are not finite numbers: its weights are damaged",
                "download the file again, or set `device` to cpu",
            )
        return values.tolist()

    def _close(self) -> None:
        if self._slot >= 0:
            self._engine.states.close(self._slot)
            self._slot = -1
