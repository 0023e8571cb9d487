"""Which formats of keys and values and how long a context fit on a device; decided before anything is loaded.

Best first: 16 bits if a tenth of the memory stays free, 8 bits, less for values, less for both. What fits
only with the token embedding in the host's memory, or with smaller chunks of prompts, comes before a format
with fewer bits; a context shorter than the model's, unless it was asked for, before one with fewer than 8.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from treeflash.config import EngineConfig
from treeflash.errors import ResourceError, UsageError
from treeflash.gguf.reader import GGUFFile
from treeflash.kernels.kv_cache.format import BLOCK, FORMATS
from treeflash.memory.device import CUDA_LIBRARIES, Room, gib, kv_pair, room_on
from treeflash.memory.estimate import EMBEDDING, Kind, Needs, Pair, measure, token_bytes
from treeflash.models.spec import ModelSpec

LADDER: tuple[tuple[str, str], ...] = (
    ("f16", "f16"),
    ("q8_0", "q8_0"),
    ("q8_0", "q5_0"),
    ("q5_0", "q5_0"),
    ("q4_0", "q4_0"),
)
LAST: tuple[str, str] = ("tq3_0", "tq3_0")  # only when asked for
# A context larger than this is taken only when asked for: most prompts are far shorter, and on a CPU
# prefill is slow.
DEFAULT_CTX = {"cpu": 32768, "cuda": 262144}
_USUAL_CTX = 32768  # what a shorter context than the default should still hold, if need be in fewer bits
_LEAST_CTX = 256
_SPARE = 0.1  # of a CPU's memory, and of a GPU's before it takes 16 bits


@dataclass(frozen=True, slots=True)
class Choice:
    """What a pair of formats would mean; the token embedding goes to the host where that is needed."""

    pair: Pair
    max_ctx: int  # the longest that fits
    total: int  # bytes in use with the context that is planned for
    host_embedding: bool
    fits: bool  # that context


@dataclass(frozen=True, slots=True)
class _Way:
    """What costs a little time, and no bits."""

    host_embedding: bool
    chunk: int  # of a prompt, in tokens


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes in use on a device once a model is loaded, by what they are for, and why so."""

    parts: Mapping[str, int]
    kv: Pair
    max_ctx: int
    reason: str
    room: Room
    needs: Needs
    prefill_chunk: int
    host_embedding: bool = False

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def expanded(self) -> bool:
        """Weights are used as they are held: as floats, or on a GPU in the tiles its kernels read."""
        return self.needs.expanded

    @property
    def weights(self) -> int:
        """The token embedding included, wherever it is."""
        return self.needs.parts["weights"] + self.needs.parts[EMBEDDING]

    @property
    def draft(self) -> int:
        return self.needs.parts.get("draft", 0)

    @property
    def recurrent(self) -> int:
        return self.needs.parts["recurrent states"]

    @property
    def kv_per_token(self) -> int:
        return token_bytes(self.needs.spec, self.kv)

    def notes(self) -> list[str]:
        """What the user should know, in words."""
        found = []
        if widened := self.needs.widened:
            found.append(
                f"weights in {', '.join(widened)} have no GPU kernel and are held as float16: "
                f"{gib(sum(widened.values()))} more than in the file; "
                "a quantisation of the K family, Q8_0, Q4_0, Q5_0 or IQ4 is faster and smaller"
            )
        return found

    def line(self) -> str:
        """Format, context and total, for the start of a program."""
        place = f", token embedding in host memory ({gib(self.needs.parts[EMBEDDING])})"
        return (
            f"Keys and values in {named(self.kv)} ({self.reason}), context {self.max_ctx:,} tokens, "
            f"{gib(self.total)} of {gib(self.room.limit)}{place if self.host_embedding else ''}"
        )


def named(pair: Pair) -> str:
    """q8_0, or q8_0/q5_0 for keys and values apart."""
    return "/".join(dict.fromkeys(format.name for format in pair))


def plan_memory(file: GGUFFile, spec: ModelSpec, config: EngineConfig, device: torch.device) -> MemoryPlan:
    return Survey.of(file, spec, config, device, room_on(device, config.vram_limit)).decide()


@dataclass(frozen=True, slots=True)
class Survey:
    """A model, a room and a wish: what would fit, and the plan that follows from it."""

    file: GGUFFile
    spec: ModelSpec
    config: EngineConfig
    device: torch.device  # need not be here
    room: Room
    needs: Needs
    pairs: Sequence[Pair]  # that honour what was asked for, best first

    @classmethod
    def of(
        cls, file: GGUFFile, spec: ModelSpec, config: EngineConfig, device: torch.device, room: Room
    ) -> "Survey":
        if config.max_ctx is not None and not 1 <= config.max_ctx <= spec.context_length:
            raise UsageError(
                f"--max-ctx is {config.max_ctx}, {spec.name} takes 1 to {spec.context_length} tokens"
            )
        kind: Kind = "cuda" if device.type == "cuda" else "cpu"
        context = config.max_ctx or min(spec.context_length, DEFAULT_CTX[kind])
        options = {"context": context, "memory": room.limit}
        needs = measure(file, spec, config, kind, expand=config.weights != "packed", **options)
        if kind == "cpu" and config.weights == "auto" and needs.fixed() >= 0.8 * room.free:
            needs = measure(file, spec, config, kind, expand=False, **options)
        return cls(file, spec, config, device, room, needs, _candidates(spec, config, device))

    @property
    def context(self) -> int:
        """That was asked for, or is the default."""
        return self.config.max_ctx or min(self.spec.context_length, DEFAULT_CTX[self.device.type])

    def decide(self) -> MemoryPlan:
        context = self.context
        # A context that nobody asked for is no reason to keep less than 8 bits of anything.
        faithful = self if self.config.max_ctx is not None else self._without_losses()
        if (found := faithful._first(context)) is not None:
            pair, way = found
            return self._plan(pair, way, context, self._why(pair))
        if self.config.max_ctx is None:
            fewest = replace(faithful, pairs=faithful.pairs[-1:])
            for survey, least in ((fewest, _USUAL_CTX), (self, _USUAL_CTX), (self, _LEAST_CTX)):
                if least < context and (found := survey._first(least)) is not None:
                    pair, way = found
                    longest = min(survey._longest(pair, way), context)
                    return self._plan(pair, way, longest, self._why_shorter(context))
            context = min(context, _LEAST_CTX)
        smallest = self.pairs[-1]
        need = gib(self._total(smallest, context, self._ways()[-1]))
        asked = self.config.vram_limit is not None
        ways = tuple(self._ways_out(context))
        free = "are free" if not self._on_gpu else "may be used" if asked else "are there"
        raise ResourceError(
            f"{self.file.path.name} needs {need} with a context of {context:,} tokens in {named(smallest)}, "
            f"{gib(self.room.limit)} {free} on {self.device}",
            f"{'any of these fits' if len(ways) > 1 else 'what would fit'}: {'; '.join(ways)}",
        )

    def choices(self) -> tuple[Choice, ...]:
        """Every pair of the ladder, the one below it, and what else was asked for."""
        pairs = [*self._ladder(), *(pair for pair in self.pairs if pair not in self._ladder())]
        return tuple(self._choice(pair) for pair in pairs)

    @property
    def _on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _ladder(self) -> list[Pair]:
        if not self._on_gpu:
            return []
        whole = not self.spec.head_dim % BLOCK
        return [(FORMATS[k], FORMATS[v]) for k, v in ((*LADDER, LAST) if whole else LADDER[:1])]

    def _ways(self) -> list[_Way]:
        """From what costs nothing to what takes least."""
        usual, *smaller = self.needs.prefill
        if not self._on_gpu:
            return [_Way(False, usual)]
        return [_Way(False, usual), *(_Way(True, chunk) for chunk in (usual, *smaller))]

    def _total(self, pair: Pair, context: int, way: _Way) -> int:
        """Bytes in use."""
        libraries = CUDA_LIBRARIES if self._on_gpu else 0
        fixed = self.needs.fixed(host_embedding=way.host_embedding) + self.needs.prefill[way.chunk]
        return self.room.taken + libraries + fixed + self.needs.kv(pair, context)

    def _most(self, pair: Pair) -> int:
        """Bytes that may be in use with these formats."""
        choosing = len(self.pairs) > 1 and not any(format.quantised for format in pair)
        return int((1 - _SPARE) * self.room.limit) if choosing or not self._on_gpu else self.room.limit

    def _first(self, context: int) -> tuple[Pair, _Way] | None:
        """The best pair that holds a context, and how."""
        for pair in self.pairs:
            for way in self._ways():
                if self._total(pair, context, way) <= self._most(pair):
                    return pair, way
        return None

    def _longest(self, pair: Pair, way: _Way) -> int:
        """The longest context that fits."""
        empty = self._total(pair, 0, way) - self.needs.kv(pair, 0)
        return self.needs.context(pair, self._most(pair) - empty)

    def _without_losses(self) -> "Survey":
        """The same with pairs of 8 bits and more, unless fewer were asked for."""
        pairs = [pair for pair in self.pairs if not any(format.lossy for format in pair)]
        return replace(self, pairs=pairs or self.pairs)

    def _why_shorter(self, context: int) -> str:
        if (found := self._first(context)) is None:
            return f"{context:,} tokens do not fit in {named(self.pairs[-1])}"
        return f"--max-ctx {context} fits in {named(found[0])}"

    def _why(self, pair: Pair) -> str:
        if "auto" not in (self.config.kv_k, self.config.kv_v):
            return "as asked for"
        if len(self.pairs) == 1:
            return "the default"
        if pair == self.pairs[0]:
            return f"{_SPARE:.0%} of the memory or more stay free"
        return "the most bits in which the context fits"

    def _plan(self, pair: Pair, way: _Way, context: int, reason: str) -> MemoryPlan:
        parts = dict(self.needs.parts) | {"prefill": self.needs.prefill[way.chunk]}
        if way.host_embedding:
            parts.pop(EMBEDDING)
        parts["keys and values"] = self.needs.kv(pair, context)
        if self._on_gpu:
            parts |= {"CUDA libraries": CUDA_LIBRARIES, "in use before": self.room.taken}
        parts = {name: size for name, size in parts.items() if size}
        return MemoryPlan(parts, pair, context, reason, self.room, self.needs, way.chunk, way.host_embedding)

    def _choice(self, pair: Pair) -> Choice:
        alone = replace(self, pairs=(pair,))
        found = alone._first(self.context)
        way = self._ways()[-1] if found is None else found[1]
        total = alone._total(pair, self.context, way)
        longest = alone._longest(pair, self._ways()[-1])
        return Choice(pair, longest, total, way.host_embedding, found is not None)

    def _ways_out(self, context: int) -> Iterator[str]:
        """Up to three things that would fit, as flags."""
        smallest = self.pairs[-1]
        if (shorter := self._longest(smallest, self._ways()[-1]) // 1024 * 1024) >= 1024:
            yield f"--max-ctx {shorter}"
        others = replace(self, pairs=[pair for pair in self._ladder() if pair not in self.pairs])
        if (other := others._first(context)) is not None:
            k, v = (format.name for format in other[0])
            yield f"--kv {k}" if k == v else f"--kv-k {k} --kv-v {v}"
        for flags, lighter in _lighter_drafts(self.config):
            survey = Survey.of(self.file, self.spec, lighter, self.device, self.room)
            if survey._first(context) is not None:
                yield flags
                return
        # What the weights would have to be for the rest to fit.
        over = self._total(smallest, context, self._ways()[-1]) - self._most(smallest)
        left = self.needs.parts["weights"] - over
        yield f"a model whose weights take {gib(left)}" if left > 0 else "a smaller model"


def _candidates(spec: ModelSpec, config: EngineConfig, device: torch.device) -> list[Pair]:
    asked = (config.kv_k, config.kv_v)
    if device.type != "cuda" or "auto" not in asked:
        return [kv_pair(spec, device, asked)]
    rungs = [rung for rung in LADDER if rung == LADDER[0] or not spec.head_dim % BLOCK]
    sides = [[rung[side] if asked[side] == "auto" else asked[side] for rung in rungs] for side in (0, 1)]
    return [kv_pair(spec, device, pair) for pair in dict.fromkeys(zip(*sides, strict=True))]


def _lighter_drafts(config: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
    draft = config.draft
    if draft is None or config.speculation is None:
        return
    if draft.quant != "q4_k" and draft.path.suffix != ".gguf":
        yield "--draft-quant q4_k", replace(config, draft=replace(draft, quant="q4_k"))
    yield "--no-draft", replace(config, draft=None)
