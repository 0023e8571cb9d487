"""Quality of KV cache formats and attention windows: the target's next-token distributions on given text.

    python -m workshop kv_quality [--model FILE] [--tokens 2048] [--device cpu] [TEXT ...]

The text runs through decoding steps of 32 rows after a prompt of 256 tokens, once with an exact KV cache and
once in each variant; the distributions after every token are compared. Prints a table and appends JSON lines
to --out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from bough.config import EngineConfig, SpecConfig
from bough.models.step import Step
from bough.session.loading import load_session
from bough.session.session import Session
from workshop.case import RESULTS, ROOT, TARGET, case
from workshop.report import Report
from workshop.steps import commit

TEXTS = [ROOT / "src/bough" / name for name in ("engine/engine.py", "cli/view.py")] + [
    ROOT / "docs/server.md"
]
PROMPT, ROWS = 256, 32
VARIANTS: list[tuple[str, str, int | None]] = [
    ("f16", "f16", None),
    ("q8_0", "q8_0", None),
    ("q8_0", "q5_0", None),
    ("q5_0", "q5_0", None),
    ("q8_0", "q4_0", None),
    ("q4_0", "q4_0", None),
    ("q8_0", "tq3_0", None),
    ("tq3_0", "tq3_0", None),
    ("auto", "auto", 512),
    ("auto", "auto", 256),
]


@case(out=RESULTS / "kv_quality.jsonl", device="cpu")
def main(
    report: Report,
    texts: Sequence[Path] = (),
    *,
    model: Path = TARGET,
    tokens: Annotated[int, "of each text"] = 2048,
) -> None:
    exact: list[Tensor] = []
    trees = SpecConfig(budget=ROWS - 1)  # only to allow that many rows; nothing is drafted
    for keys, values, window in [("auto", "auto", None), *VARIANTS]:
        config = EngineConfig(
            device=report.device, speculation=trees, kv_k=keys, kv_v=values, window=window, max_ctx=8192
        )
        session = load_session(model, config, graphs=False)
        found = [log_probabilities(session, text.read_text(), tokens) for text in texts or TEXTS]
        if not exact:
            exact = found
            print(f"{model.name}, {sum(map(len, exact))} tokens")
            print(f"{'variant':24} {'KL':>9} {'99%':>9} {'same top-1':>10}", flush=True)
            continue
        figures = compare(torch.cat(exact), torch.cat(found))
        variant = f"window {window}" if window else f"{keys} / {values}"
        numbers = f"{figures['kl']:9.2e} {figures['kl_99']:9.2e} {figures['same_top']:10.2%}"
        print(f"{variant:24} {numbers}", flush=True)
        line = {"model": model.stem, "kv_k": keys, "kv_v": values, "window": window, **figures}
        report.write(**line)


@torch.inference_mode()
def log_probabilities(session: Session, text: str, count: int) -> Tensor:
    """Return log-probabilities [tokens after the prompt, vocabulary], float32 on the host."""
    target, states = session.engine.target, session.engine.states
    ids = torch.tensor(session.tokenizer.encode(text)[:count], device=target.device)
    slot = states.open()
    slots, found = torch.tensor([slot], device=target.device), []
    try:
        states.reserve(slot, PROMPT)
        step = Step.chunk(slots, ids[None, :PROMPT], states.buffers.lengths[slots])
        target.forward(step, states.buffers)
        states.advance(step)
        for rows in ids[PROMPT:].split(ROWS):
            states.reserve(slot, len(rows))
            parents = torch.arange(-1, len(rows) - 1, device=target.device)[None]
            step = Step.tree(slots, rows[None], parents, states.buffers.lengths[slots])
            hidden = target.forward(step, states.buffers).hidden[0]
            found.append(target.logits(hidden).float().log_softmax(-1).cpu())
            commit(states, step, torch.tensor([len(rows) - 1], device=target.device))
    finally:
        states.close(slot)
    return torch.cat(found)


def compare(exact: Tensor, other: Tensor) -> dict[str, float]:
    divergence = (exact.exp() * (exact - other)).sum(-1)
    return {
        "tokens": len(exact),
        "kl": float(divergence.mean()),
        "kl_99": float(divergence.quantile(0.99)),
        "same_top": float((exact.argmax(-1) == other.argmax(-1)).float().mean()),
    }
