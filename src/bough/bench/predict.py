"""Predicted times of a step on other cards, from their bandwidth and what was measured on an H200.

Two models bracket a time. In the lower one the matmuls reach the same share of the card's read bandwidth as
on the H200, and all the rest takes as long for a layer as there. In the higher one the whole step reaches the
H200's share, where that is slower. A card with slow tensor cores may be slower still with many rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.bench.cards import CARDS
from bough.config import EngineConfig
from bough.errors import UsageError
from bough.gguf.reader import GGUFFile
from bough.memory.estimate import MemoryEstimate, estimate_memory
from bough.models.spec import ModelSpec

READABLE = 4347 / 4800
# 27B in Q4_K_M after 256 tokens on an H200 (benchmarks/results/step.jsonl, commit 96f52f0): the share of the
# read bandwidth that a forward pass reaches, by rows, and that of its matmuls alone; 16 rows interpolated.
SHARES = {1: 0.603, 8: 0.592, 16: 0.507, 24: 0.451, 32: 0.398}
MATMUL_SHARES = {1: 0.80, 8: 0.80, 16: 0.70, 24: 0.64, 32: 0.61}
MEASURED_SPEED = 4347e9
# The draft of that run took 1.18 ms for 2.87 GB: its weights and the target's head.
DRAFT_SHARE = 0.56
LENGTHS = (4, 6, 8)  # acceptance lengths
CONTEXT = 256


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """Forward passes on an H200 by rows: gigabytes that they read, the share of bandwidth they reached."""

    layers: int
    gigabytes: Mapping[int, float]
    shares: Mapping[int, float]


DENSE = MeasuredModel(64, dict.fromkeys(SHARES, 16.754), SHARES)
# 35B-A3B in Q4_K_M (benchmarks/results/moe.jsonl, commit 92630cb): routing and grouping take most of a step.
EXPERTS = MeasuredModel(40, {1: 2.204, 8: 4.935, 24: 8.424}, {1: 0.189, 8: 0.283, 24: 0.309})


@dataclass(frozen=True, slots=True)
class Range:
    """Milliseconds, by the two models."""

    low: float
    high: float

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.high + other.high)

    def tokens_per_second(self, tokens: float) -> tuple[float, float]:
        return 1000 * tokens / self.high, 1000 * tokens / self.low


def card_named(name: str) -> str:
    """Return the card that is meant: `3090`, `rtx-3090` and `RTX 3090` are one."""
    plain = _plain(name)
    cards = [card for card in CARDS if plain and _plain(card).endswith(plain)]
    cards = [card for card in cards if _plain(card) == plain] or cards
    if len(cards) != 1:
        raise UsageError(f"`predict` is {name!r}, needed: one of {', '.join(CARDS)}", param="predict")
    return cards[0]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("nvidia")


def step_ms(moved: float, rows: int, bandwidth: float, *, layers: int, like: MeasuredModel = DENSE) -> Range:
    """Return the time of a forward pass that reads `moved` bytes at a card's `bandwidth`, bytes a second."""
    whole, matmuls = like.shares[rows], MATMUL_SHARES[rows]
    measured = 1e12 * like.gigabytes[rows] / MEASURED_SPEED
    rest = measured * (1 / whole - 1 / matmuls) * layers / like.layers
    floor = 1000 * moved / bandwidth
    low = floor / matmuls + rest
    return Range(low, max(low, floor / whole))


def predict(path: Path, config: EngineConfig, card: str) -> dict[str, Any]:
    """Return predicted steps of a model and its draft on a card; only headers of files are read."""
    name = card_named(card)
    bandwidth = CARDS[name] * 1e9 * READABLE
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file)
        estimate = estimate_memory(file, spec, config, "cuda", context=CONTEXT)
        head = file.tensors["token_embd.weight" if spec.tied_head else "output.weight"].nbytes
    draft = Range(0.0, 0.0)
    if "draft" in estimate.parts:
        time = 1000 * (estimate.parts["draft"] + head) / (bandwidth * DRAFT_SHARE)
        draft = Range(time, time)
    like = DENSE if spec.experts is None else EXPERTS
    sizes = [_size(estimate, rows, bandwidth, draft, like) for rows in like.shares]
    return {
        "what": "prediction",
        "model": path.name,
        "card": name,
        "bandwidth_gb_s": CARDS[name],
        "weights_gb": estimate.parts["weights"] / 1e9,
        "draft_ms": draft.low,
        "sizes": sizes,
    }


def _size(
    estimate: MemoryEstimate, rows: int, bandwidth: float, draft: Range, like: MeasuredModel
) -> dict[str, Any]:
    moved = estimate.read_bytes(rows) + 2 * estimate.parts["recurrent states"]
    forward = step_ms(moved, rows, bandwidth, layers=len(estimate.spec.layers), like=like)
    lengths = LENGTHS if rows > 1 else (1,)
    whole = forward + draft if rows > 1 else forward
    speeds = {length: whole.tokens_per_second(length) for length in lengths if length <= rows}
    return {"rows": rows, "bytes": moved, "forward_ms": [forward.low, forward.high], "tok_s": speeds}


def lines(result: dict[str, Any]) -> list[list[str]]:
    """Return the prediction as a table, its header first."""
    table = [["rows", "GB read", "forward ms", *(f"tok/s at {length}" for length in (1, *LENGTHS))]]
    for row in result["sizes"]:
        speeds = (row["tok_s"].get(length) for length in (1, *LENGTHS))
        cells = ["" if each is None else _span(*each, digits=0) for each in speeds]
        forward = _span(*row["forward_ms"], digits=1)
        table.append([str(row["rows"]), f"{row['bytes'] / 1e9:.2f}", forward, *cells])
    return table


def _span(low: float, high: float, *, digits: int) -> str:
    texts = dict.fromkeys(f"{value:.{digits}f}" for value in (low, high))
    return " to ".join(texts)
