"""Memory bandwidths of GPUs, and about how fast a model decodes with one. Imports no torch."""

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CardFigures:
    """Of a card's data sheet: GB/s, SMs, GHz (boost), multiply-adds a clock and SM in fp16 with fp32 sums."""

    bandwidth: int
    processors: int
    clock: float
    mma: int
    hopper: bool = False


# An H200's 4,800 GB/s are 4,347 for a plain sum; its mma.sync was measured. A GB10's tensor cores: assumed.
CARDS = {
    "RTX 3080": CardFigures(760, 68, 1.71, 256),
    "RTX 3090 Ti": CardFigures(1008, 84, 1.86, 256),
    "RTX 3090": CardFigures(936, 82, 1.70, 256),
    "RTX 4080": CardFigures(717, 76, 2.51, 256),
    "RTX 4090": CardFigures(1008, 128, 2.52, 256),
    "RTX 5070 Ti": CardFigures(896, 70, 2.45, 256),
    "RTX 5080": CardFigures(960, 84, 2.62, 256),
    "RTX 5090": CardFigures(1792, 170, 2.41, 256),
    "RTX PRO 6000": CardFigures(1792, 188, 2.62, 512),
    "RTX A6000": CardFigures(768, 84, 1.80, 512),
    "L40S": CardFigures(864, 142, 2.52, 512),
    "L4": CardFigures(300, 58, 2.04, 512),
    "GB10": CardFigures(273, 48, 2.40, 256),
    "A100 40GB": CardFigures(1555, 108, 1.41, 1024),
    "A100 80GB": CardFigures(2039, 108, 1.41, 1024),
    "H100": CardFigures(3352, 132, 1.98, 1311, hopper=True),
    "H200": CardFigures(4800, 132, 1.98, 1311, hopper=True),
}
# GiB that cards of consumers report, for a list of those of one size.
MEMORY = {"RTX 3090": 23.69, "RTX 3090 Ti": 23.69, "RTX 4090": 23.64, "L4": 22.03}
MEMORY |= {"RTX 3080": 9.64, "RTX 4080": 15.6, "RTX 5070 Ti": 15.5, "RTX 5080": 15.5, "RTX 5090": 31.4}
# About what bench/predict.py says: the share of the data sheet's bandwidth that a plain step of a 27B reaches
# on an H100 or H200 and on other cards, and what a step of 24 rows with its draft takes in steps of one row.
HOPPER_SHARE, ROW_SHARE, TREE_STEP = 0.55, 0.70, 1.4
SPARSE_MS = 3  # of a plain step of a sparse model, beside reading
CPU_SHARE = 0.7  # of a copy's bandwidth, in native code
TREE_TOKENS = 4  # accepted in a step: DFlash drafts have 4 to 8 on code and sums, 2 to 3 on prose


def card_of_device(name: str) -> str | None:
    """Return the card of a device's name, such as NVIDIA GeForce RTX 4090; None: it is not in the list."""
    plain = "".join(name.lower().split())
    cards = [card for card in CARDS if "".join(card.lower().split()) in plain.replace("-", "")]
    return max(cards, key=len, default=None)


def about_tok_s(size: int, active: float, device: str, *, draft: bool) -> tuple[float, float | None] | None:
    """Return about how many tokens a second a model of `size` bytes decodes on a device, and with a draft.

    active: the share of the weights that a token reads. Predicted, not measured; None: nothing is known.
    """
    if device == "CPU":
        plain = CPU_SHARE * copied_bytes_s() / (size * active)
        return plain, None  # what a tree costs depends on the cores
    card = card_of_device(device)
    if card is None:
        return None
    figures = CARDS[card]
    share = HOPPER_SHARE if figures.hopper else ROW_SHARE
    seconds = size * active / (share * figures.bandwidth * 1e9) + (SPARSE_MS / 1000 if active < 1 else 0)
    plain = 1 / seconds
    # The rows of a tree choose other experts: a sparse model's steps read more.
    return plain, plain * TREE_TOKENS / TREE_STEP if draft and active == 1.0 else None


def copied_bytes_s() -> float:
    """Return the bytes a second that a core of this machine reads and writes, in about 30 ms."""
    source, target, best = bytearray(32 << 20), bytearray(32 << 20), 0.0
    for _ in range(6):
        start = time.perf_counter()
        target[:] = source
        best = max(best, 2 * len(source) / (time.perf_counter() - start))
    return best
