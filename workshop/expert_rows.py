"""Counts the distinct experts that a step's rows choose in a layer: in real trees, and in routings made up.

    python -m workshop expert_rows [--model MOE.gguf --draft PATH --prompts FILE --save routing.npz]

Without a model the made-up routings alone: independent rows, and rows that share experts with the row before.
With one, the trees of its texts: the first n rows of a step are the best tree of n rows. --save keeps the
routing for replays [steps, layers, rows, used]. Prints a JSON line for each routing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Request
from bough.engine.sampler import SamplingParams
from bough.kernels.experts import reference
from bough.models.decoder import Decoder
from bough.session.loading import load_session
from workshop.case import RESULTS, case
from workshop.report import Report

# Of the experts of the row before: none; as measured by others for texts of Qwen3-30B-A3B (45%), and less.
SHARES = {"independent": 0.0, "shares 25%": 0.25, "shares 45%": 0.45}


def made_up(share: float, rows: int, *, experts: int, used: int, seed: int) -> np.ndarray:
    """Return the experts [rows, used] of rows that keep a share of the row before; the others are random."""
    random = np.random.default_rng(seed)
    chosen = [random.choice(experts, used, replace=False)]
    for _ in range(rows - 1):
        before = random.permutation(chosen[-1])
        kept = before[: random.binomial(used, share)]
        others = np.setdiff1d(np.arange(experts), before)
        chosen.append(np.concatenate([kept, random.choice(others, used - len(kept), replace=False)]))
    return np.stack(chosen)


def distinct(chosen: np.ndarray, rows: int) -> int:
    """Return how many experts the first rows of [at least `rows`, used] choose together."""
    return len(np.unique(chosen[:rows]))


def independent(rows: int, *, experts: int, used: int) -> float:
    """Return the mean of `distinct` for rows that choose at random."""
    return experts * (1 - (1 - used / experts) ** rows)


@dataclass
class Recorder:
    """The experts of every layer of each step over a tree, in order of the tree's rows."""

    steps: list[np.ndarray] = field(default_factory=list)  # [layers, rows, used]
    _layers: list[np.ndarray] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what the specification of the experts routes while a target verifies."""
        route, verify = reference.route, Decoder.verify

        def routed(logits: Tensor, used: int) -> tuple[Tensor, Tensor]:
            weights, ids = route(logits, used)
            self._layers.append(ids.numpy().astype(np.int16))
            return weights, ids

        def verified(*args: Any, **options: Any) -> Any:
            self._layers = []
            result = verify(*args, **options)
            self.steps.append(np.stack(self._layers))
            return result

        with patch.object(reference, "route", routed), patch.object(Decoder, "verify", verified):
            yield

    def saved(self, path: Path) -> None:
        """Write the steps, filled up to the largest with -1."""
        most = max(step.shape[1] for step in self.steps)
        padded = [
            np.pad(step, ((0, 0), (0, most - step.shape[1]), (0, 0)), constant_values=-1)
            for step in self.steps
        ]
        np.savez_compressed(path, chosen=np.stack(padded))


def counts(steps: Sequence[np.ndarray], sizes: Sequence[int]) -> dict[str, float | None]:
    """Return the mean of distinct experts in a layer, of the steps that have so many rows, by rows."""
    means: dict[str, float | None] = {}
    for rows in sizes:
        each = [distinct(layer, rows) for step in steps if step.shape[1] >= rows for layer in step]
        means[str(rows)] = round(float(np.mean(each)), 2) if each else None
    return means


def recorded(model: Path, draft: Path | None, prompts: Sequence[str], tokens: int, budget: int) -> Recorder:
    config = EngineConfig(
        "cpu",
        draft=None if draft is None else DraftConfig(draft),
        speculation=SpecConfig(budget=budget, adaptive=False),
        prefix_cache=0,
    )
    session, recorder = load_session(model, config), Recorder()
    with recorder.watching(), torch.inference_mode():
        for prompt in prompts:
            ids = session.tokenizer.encode(prompt)
            for _ in session.engine.generate(Request(ids, tokens, SamplingParams())):
                pass
    return recorder


@case(out=RESULTS / "expert_rows.jsonl")
def main(
    report: Report,
    *,
    model: Path | None = None,
    draft: Path | None = None,
    prompts: Annotated[Path | None, "texts to continue, one a line"] = None,
    save: Annotated[Path | None, "the routing, as numpy keeps it"] = None,
    tokens: Annotated[int, "of each text"] = 128,
    budget: int = 63,
    sizes: Sequence[int] = (1, 4, 8, 16, 24, 32, 64),
    experts: Annotated[int, "of a layer, where they are made up"] = 256,
    used: int = 8,
    trials: int = 200,
) -> None:
    rows = {str(size): round(independent(size, experts=experts, used=used), 2) for size in sizes}
    report.line(routing="independent, by the formula", experts=experts, used=used, distinct=rows)
    for name, share in SHARES.items():
        steps = [
            made_up(share, max(sizes), experts=experts, used=used, seed=seed)[None] for seed in range(trials)
        ]
        report.line(routing=name, experts=experts, used=used, distinct=counts(steps, sizes))
    if model is not None:
        texts = prompts.read_text().splitlines() if prompts is not None else ["The answer is"]
        recorder = recorded(model, draft, texts, tokens, budget)
        facts = {"model": model.name, "draft": draft.name if draft else None, "steps": len(recorder.steps)}
        report.line(routing="trees", **facts, distinct=counts(recorder.steps, sizes))
        if save is not None:
            recorder.saved(save)
