"""Predicted times of a step on other cards, part by part, from what was measured on an H200.

There the kernels of an H100 and H200 ran as themselves, and those of all other cards too
(`BOUGH_PRETEND_CARD=sm_86`), with tensor cores slowed down to a GeForce's. Short kernels take as many clocks
on any card. A matmul takes the read of its bytes or its kernel's clocks: the longer of the two in the lower
time of a range, more where both are about equal in the higher one. Boost clocks are assumed.
"""

from dataclasses import dataclass
from math import hypot, inf
from pathlib import Path
from typing import Any

from bough.bench.cards import CARDS, CardFigures
from bough.config import EngineConfig
from bough.errors import UsageError
from bough.gguf.reader import GGUFFile
from bough.memory.estimate import estimate_memory
from bough.models.spec import ModelSpec

READABLE = 4347 / 4800  # of a data sheet's bandwidth: a plain sum on an H200
ROWS = (1, 8, 16, 24)
DRAFT_ROWS = 16  # a draft's block
LENGTHS = (4, 6, 8)  # acceptance lengths
CONTEXT = 256
MATRICES = 4  # of a layer: two of attention or the delta rule, two of the feed-forward network
HOST_MS = 0.26  # sampling, commit and the gap between steps (step.jsonl, 6372736)
# Rows of a tree choose as many experts as rows ** 0.82 rows that share none (moe.jsonl, 92630cb).
SHARED_CHOICE = 0.82
_H200 = CARDS["H200"]

ByRows = dict[int, float]


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """What kernels take on an H200, by rows, in microseconds; rates in TB/s, memory aside.

    From a 27B in Q4_K_M after 256 tokens, the experts' from a 35B-A3B.
    """

    ramp: float  # of a matrix: launch, first loads, last sums
    inputs: ByRows  # of a matrix: its rows of x, 5,120 wide
    share: float  # of the readable bandwidth, of weights
    rates: ByRows  # of a matmul's kernel alone
    slow_rates: ByRows  # with tensor cores as slow as a GeForce's
    norms: ByRows  # of a layer
    columns: ByRows  # of a layer's SiLU, for 10,000 columns
    attention: float  # of a layer
    queries: ByRows  # of a layer, for 4,096 columns of queries
    delta: ByRows  # of a layer
    value_head: float  # of a delta layer's
    routing: ByRows  # of a layer of experts: all but the read of their weights
    expert_rate: float
    rest: ByRows  # of a forward pass
    draft: float  # of a draft call: all but the read of its weights and the head


# step.jsonl, 6372736; moe.jsonl, 92630cb. Matmuls are bound by memory up to 24 rows.
HOPPER = KernelTimes(
    ramp=2.9,
    inputs={1: 0.0, 8: 0.0, 16: 1.9, 24: 3.6},
    share=0.886,
    rates=dict.fromkeys(ROWS, inf),
    slow_rates=dict.fromkeys(ROWS, inf),
    norms={1: 7.8, 8: 7.8, 16: 8.0, 24: 8.4},
    columns={1: 0.0, 8: 0.0, 16: 2.3, 24: 2.8},
    attention=11.0,
    queries={1: 0.5, 8: 4.0, 16: 11.5, 24: 11.0},
    delta={1: 3.7, 8: 6.1, 16: 8.4, 24: 11.0},
    value_head=0.147,
    routing={1: 16.8, 8: 16.8, 16: 17.0, 24: 17.5},
    expert_rate=2.2,
    rest={1: 110, 8: 120, 16: 140, 24: 160},
    draft=450,
)
# cards.jsonl: matmuls 7c9e965, the rest 0b89523; experts docs/cards/h200-as-sm_86.md.
OTHERS = KernelTimes(
    ramp=5.0,
    inputs=dict.fromkeys(ROWS, 0.0),
    share=1.0,
    rates={1: 2.93, 8: 2.93, 16: 2.27, 24: 1.90},
    slow_rates={1: 2.68, 8: 2.68, 16: 1.82, 24: 1.43},
    norms={1: 13.4, 8: 14.4, 16: 14.7, 24: 15.6},
    columns=dict.fromkeys(ROWS, 0.0),
    attention=14.0,
    queries={1: 18.6, 8: 18.8, 16: 25.3, 24: 37.7},
    delta={1: 3.5, 8: 6.4, 16: 10.7, 24: 14.3},
    value_head=0.147,
    routing={1: 20.0, 8: 20.5, 16: 21.5, 24: 22.5},
    expert_rate=1.06,
    rest={1: 140, 8: 150, 16: 170, 24: 180},
    draft=300,
)
FAST_MMA, SLOW_MMA = 1311, 256  # multiply-adds a clock and SM: an H200's mma.sync, and a GeForce's


@dataclass(frozen=True, slots=True)
class Range:
    low: float
    high: float

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.high + other.high)


@dataclass(frozen=True, slots=True)
class Reads:
    """A model's shapes, and the bytes that a forward pass reads."""

    spec: ModelSpec
    matrices: int
    head: int
    routed: int  # of all routed experts
    draft: int = 0

    def experts(self, rows: int) -> Range:
        """Return the gigabytes of the experts that a step's rows choose: as a tree's rows, and at random."""
        if self.spec.experts is None:
            return Range(0.0, 0.0)
        unused = 1 - self.spec.experts.used / self.spec.experts.count
        shares = (1 - unused**count for count in (rows**SHARED_CHOICE, rows))
        return Range(*(self.routed * share / 1e9 for share in shares))


class StepModel:
    """Predicts the parts of a step on one card."""

    def __init__(self, figures: CardFigures) -> None:
        self._times = HOPPER if figures.hopper else OTHERS
        self._clock = _H200.clock / figures.clock
        self._spread = figures.processors / _H200.processors
        self._read = figures.bandwidth * READABLE / 1000
        cost = (FAST_MMA / figures.mma - 1) / (FAST_MMA / SLOW_MMA - 1)
        self._slow = min(1.0, max(0.0, cost))

    def parts(self, reads: Reads, rows: int) -> dict[str, Range]:
        spec, times = reads.spec, self._times
        count, width = len(spec.layers), spec.width / 5120
        chosen = reads.experts(rows)
        delta = 0.0
        if spec.delta is not None:
            rounds = max(1.0, 1 / self._spread) if rows >= 8 else 1.0
            delta = rounds * (times.delta[rows] + times.value_head * spec.delta.value_heads)
        columns = times.columns[rows] * spec.feed_forward / 10_000
        queries = times.queries[rows] * min(1.5, spec.heads * spec.head_dim / 4096)
        parts = {
            "matmuls": self._matmuls(MATRICES * count, reads.matrices, rows, width),
            "head": self._matmuls(1, reads.head, rows, width),
            "norms": self._short(count * (times.norms[rows] + columns)),
            "attention": self._short(spec.attention_layers * (times.attention + queries)),
            "delta rule": self._short(spec.delta_layers * delta),
            "rest": self._short(times.rest[rows]),
        }
        if spec.experts is not None:
            rate = min(self._read, times.expert_rate * self._spread / self._clock)
            read = Range(chosen.low / rate, chosen.high / rate)
            parts["experts"] = self._short(count * times.routing[rows]) + read
        return parts

    def draft(self, reads: Reads) -> Range:
        return self._short(self._times.draft) + self._weights(reads.draft + reads.head, DRAFT_ROWS)

    def bound(self, rows: int) -> str:
        return "memory" if self._kernel_rate(rows) >= self._read else "the kernel"

    def _matmuls(self, count: int, moved: int, rows: int, width: float) -> Range:
        ramp = self._times.ramp + self._times.inputs[rows] * width
        return self._short(count * ramp) + self._weights(moved, rows)

    def _weights(self, moved: int, rows: int) -> Range:
        read = moved / 1e9 / (self._read * self._times.share)
        kernel = moved / 1e9 / self._kernel_rate(rows)
        return Range(max(read, kernel), hypot(read, kernel))

    def _kernel_rate(self, rows: int) -> float:
        """Return TB/s: a mma's clocks add to those of the rest of the kernel."""
        fast, slow = 1 / self._times.rates[rows], 1 / self._times.slow_rates[rows]
        clocks = fast + self._slow * (slow - fast)
        return self._spread / self._clock / clocks if clocks else inf

    def _short(self, microseconds: float) -> Range:
        return Range(*[self._clock * microseconds / 1000] * 2)


def card_named(name: str) -> str:
    """Return the card that is meant: `3090`, `rtx-3090` and `RTX 3090` are one."""
    plain = _plain(name)
    cards = [card for card in CARDS if plain and _plain(card).endswith(plain)]
    cards = [card for card in cards if _plain(card) == plain] or cards
    if len(cards) != 1:
        raise UsageError(f"`predict` is {name!r}, needed: one of {', '.join(CARDS)}")
    return cards[0]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("nvidia")


def reads_of(file: GGUFFile, config: EngineConfig) -> Reads:
    """Return what steps of a file's model read; only the header is."""
    spec = ModelSpec.from_gguf(file)
    estimate = estimate_memory(file, spec, config, "cuda", context=CONTEXT)
    if estimate.widened or not estimate.expanded:
        raise UsageError(f"{file.path.name} has types whose matmuls were not measured: no prediction")
    head = file.tensors["token_embd.weight" if spec.tied_head else "output.weight"].nbytes
    matrices = estimate.dense - (0 if spec.tied_head else head)
    return Reads(spec, matrices, head, estimate.routed, estimate.parts.get("draft", 0))


def predict(path: Path, config: EngineConfig, card: str) -> dict[str, Any]:
    """Return predicted steps of a model and its draft on a card; only headers of files are read."""
    name = card_named(card)
    with GGUFFile.open(path) as file:
        reads = reads_of(file, config)
    model = StepModel(CARDS[name])
    draft = model.draft(reads) if reads.draft else Range(0.0, 0.0)
    return {
        "what": "prediction",
        "model": path.name,
        "card": name,
        "bandwidth_gb_s": CARDS[name].bandwidth,
        "draft_ms": [draft.low, draft.high],
        "sizes": [_size(model, reads, rows, draft) for rows in ROWS],
    }


def _size(model: StepModel, reads: Reads, rows: int, draft: Range) -> dict[str, Any]:
    parts = model.parts(reads, rows)
    forward = sum(parts.values(), Range(0.0, 0.0))
    whole = forward + Range(HOST_MS, HOST_MS) + (draft if rows > 1 else Range(0.0, 0.0))
    lengths = LENGTHS if rows > 1 else (1,)
    return {
        "rows": rows,
        "forward_ms": [forward.low, forward.high],
        "parts_ms": {part: [time.low, time.high] for part, time in parts.items()},
        "matmuls_bound_by": model.bound(rows),
        "tok_s": {
            length: (1000 * length / whole.high, 1000 * length / whole.low)
            for length in lengths
            if length <= rows
        },
    }


def lines(result: dict[str, Any]) -> list[list[str]]:
    table = [["rows", "forward ms", "of it matmuls", "bound by", *(f"tok/s at {n}" for n in (1, *LENGTHS))]]
    for row in result["sizes"]:
        speeds = (row["tok_s"].get(length) for length in (1, *LENGTHS))
        cells = ["" if speed is None else _span(*speed, digits=0) for speed in speeds]
        times = (_span(*row["forward_ms"], digits=1), _span(*row["parts_ms"]["matmuls"], digits=1))
        table.append([str(row["rows"]), *times, row["matmuls_bound_by"], *cells])
    return table


def _span(low: float, high: float, *, digits: int) -> str:
    texts = dict.fromkeys(f"{value:.{digits}f}" for value in (low, high))
    return " to ".join(texts)
