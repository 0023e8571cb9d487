"""Token streams of the work folder in device memory, and random rows of them."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Part:
    """A stream of token ids; `mask` selects the labels, None: all."""

    name: str
    tokens: np.ndarray
    weight: float
    mask: np.ndarray | None = None


def token_ids(work: Path) -> dict[str, int]:
    """Return every token's id, added tokens included."""
    tokenizer = json.loads((work / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    return {**tokenizer["model"]["vocab"], **added}


def document_end(work: Path) -> int:
    return token_ids(work)["<|endoftext|>"]


def read_parts(work: Path) -> list[Part]:
    """Return the parts listed in prepare.json, with their weights in the mix."""
    parts = json.loads((work / "prepare.json").read_text(encoding="utf-8"))["parts"]
    return [Part(name, _ids(work / part["file"]), float(part["weight"])) for name, part in parts.items()]


def read_instructions(work: Path) -> Part:
    tokens, mask = _ids(work / "instruct.bin"), np.fromfile(work / "instruct.mask", np.uint8)
    if len(tokens) != len(mask):
        raise SystemExit(f"{work}: instruct.bin has {len(tokens)} tokens, instruct.mask {len(mask)} entries")
    return Part("instruct", tokens, 1.0, mask)


def held_out_windows(work: Path, *, seq: int, limit: int) -> Tensor:
    """Return up to `limit` rows [N, seq + 1] evenly spaced over the held-out text."""
    tokens = _ids(work / "heldout.bin")
    count = (len(tokens) - 1) // seq
    if count < 1:
        raise SystemExit(f"{work / 'heldout.bin'} has {len(tokens)} tokens, needed: more than {seq}")
    chosen = np.unique(np.linspace(0, count - 1, min(count, limit)).astype(np.int64))
    rows = tokens[chosen[:, None] * seq + np.arange(seq + 1)]
    return torch.from_numpy(rows.astype(np.int64))


class Streams:
    """Several concatenated parts, sampled by weight."""

    def __init__(self, parts: list[Part], *, seq: int, document_end: int, device: torch.device):
        for part in parts:
            if len(part.tokens) <= seq:
                raise SystemExit(f"part {part.name} has {len(part.tokens)} tokens, needed: more than {seq}")
        self._parts, self._seq = parts, seq
        lengths = np.array([len(part.tokens) for part in parts])
        begins = np.cumsum(lengths) - lengths
        # Document starts, part by part; a row that starts there must end inside the part.
        starts = [
            np.concatenate(
                [[0], np.flatnonzero(part.tokens[: len(part.tokens) - seq - 1] == document_end) + 1]
            )
            for part in parts
        ]
        counts = np.array([len(part) for part in starts])

        def stored(values: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.from_numpy(values).to(dtype).to(device)

        self._tokens = stored(np.concatenate([part.tokens for part in parts]).astype(np.int32), torch.int32)
        masks = [part.mask for part in parts if part.mask is not None]
        assert len(masks) in (0, len(parts)), "either all parts have a mask or none"
        self._mask = stored(np.concatenate(masks), torch.uint8) if masks else None
        self._begins, self._spans = stored(begins), stored(lengths - seq)
        self._starts = stored(
            np.concatenate([begin + rows for begin, rows in zip(begins, starts, strict=True)])
        )
        self._first_start, self._start_counts = stored(np.cumsum(counts) - counts), stored(counts)
        weights = np.array([part.weight for part in parts])
        self._weights = stored(weights / weights.sum(), torch.float32)
        self._window = torch.arange(seq + 1, device=device)

    def sample(self, rows: int, generator: torch.Generator, *, aligned: float) -> tuple[Tensor, Tensor]:
        """Return tokens [rows, seq + 1] and the mask [rows, seq] of the labels.

        aligned: the share of rows that start at a document's start; the others start anywhere.
        """
        device = self._tokens.device
        part = torch.multinomial(self._weights, rows, replacement=True, generator=generator)
        draw = torch.rand(3, rows, generator=generator, device=device, dtype=torch.float64)
        anywhere = self._begins[part] + (draw[0] * self._spans[part]).long()
        at_start = self._starts[self._first_start[part] + (draw[1] * self._start_counts[part]).long()]
        first = torch.where(draw[2] < aligned, at_start, anywhere)
        index = first[:, None] + self._window
        tokens = self._tokens[index].long()
        if self._mask is None:
            return tokens, torch.ones(rows, self._seq, device=device)
        return tokens, self._mask[index[:, 1:]].float()

    def epochs(self, tokens: float) -> dict[str, float]:
        """Return each part's number of epochs within that many tokens."""
        total = sum(part.weight for part in self._parts)
        return {part.name: round(tokens * part.weight / total / len(part.tokens), 2) for part in self._parts}


def _ids(path: Path) -> np.ndarray:
    return np.fromfile(path, np.uint16)
