"""Memory bandwidths of GPUs, and about how fast a model decodes with one. Imports no torch."""

import time

# GB/s of the data sheets. An H200's 4,800 are 4,347 for a plain sum.
CARDS = {
    "RTX 3080": 760,
    "RTX 3090 Ti": 1008,
    "RTX 3090": 936,
    "RTX 4080": 717,
    "RTX 4090": 1008,
    "RTX 5070 Ti": 896,
    "RTX 5080": 960,
    "RTX 5090": 1792,
    "RTX PRO 6000": 1792,
    "RTX A6000": 768,
    "L40S": 864,
    "L4": 300,
    "GB10": 273,
    "A100 40GB": 1555,
    "A100 80GB": 2039,
    "H100": 3352,
    "H200": 4800,
}
# GiB that cards of consumers report, for a list of those of one size.
MEMORY = {"RTX 3090": 23.69, "RTX 3090 Ti": 23.69, "RTX 4090": 23.64, "L4": 22.03}
MEMORY |= {"RTX 3080": 9.64, "RTX 4080": 15.6, "RTX 5070 Ti": 15.5, "RTX 5080": 15.5, "RTX 5090": 31.4}
# Of the data sheet's bandwidth that a step of one row reaches on an H200 with a 27B in Q4_K_M.
ROW_SHARE = 0.603 * 4347 / 4800
CPU_SHARE = 0.7  # of a copy's bandwidth, in native code
# What a step with a tree of 24 rows and its draft takes, in steps of one row: measured on an H200.
TREE_STEP = 1.6
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
    plain = ROW_SHARE * CARDS[card] * 1e9 / (size * active)
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
