"""A page about a machine, ready for an issue: steps by rows, bandwidth, settings and a check of the text."""

import json
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bough.bench import machine, step
from bough.bench.report import markdown_table
from bough.engine.sampler import SamplingParams
from bough.session.events import Finished
from bough.session.requests import TextRequest
from bough.session.session import Session

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is 17 times 23? Think step by step.",
    "Tell a short story about a lighthouse.",
)
TOKENS = 48
_SAMPLINGS = {"greedy": SamplingParams(seed=1), "T 0.8": SamplingParams(temperature=0.8, seed=5)}


def measure(session: Session, *, repeats: int = 15, tokens: int = TOKENS) -> dict[str, Any]:
    """Return everything that says how a model runs on this machine."""
    target = session.engine.target
    steps = step.measure_steps(session, repeats=repeats)
    head = machine.head({}, "bough share")
    return {
        **{key: head[key] for key in ("bough", "commit", "cpus", "load")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        **card(target.device),
        **steps,
        "what": "share",
        "texts": texts(session, tokens),
        "weights_bytes": session.plan.estimate.parts["weights"],
        "max_ctx": session.max_ctx,
    }


def card(device: torch.device) -> dict[str, Any]:
    """Return a GPU's properties and its tuned settings; for a CPU only that there is no GPU."""
    if device.type != "cuda":
        return {"card": None}
    from bough.kernels.quant_matmul.tuned import TunedFile
    from bough.kernels.runtime.device import card_of, kind_of

    kind = kind_of(device)
    tuned = TunedFile.default().load(kind)
    return {
        "card": kind,
        **{key: value for key, value in asdict(card_of(device)).items() if key != "virtual"},
        "cuda": torch.version.cuda,
        "tuned": {str(rows): asdict(tiling) for rows, tiling in tuned.items()},
    }


def texts(session: Session, tokens: int) -> list[dict[str, Any]]:
    """Return, for each prompt and sampling, whether the text with trees is that of plain decoding."""
    answers = []
    for name, sampling in _SAMPLINGS.items():
        for prompt in PROMPTS:
            runs = [_generate(session, prompt, sampling, budget, tokens) for budget in (0, None)]
            stats = runs[1].stats
            answers.append(
                {
                    "sampling": name,
                    "same": runs[0].tokens == runs[1].tokens,
                    "tokens": len(runs[1].tokens),
                    "acceptance": round(stats.acceptance_length, 2),
                    "plain_tok_s": round(runs[0].stats.decode_tok_s, 1),
                    "tree_tok_s": round(stats.decode_tok_s, 1),
                }
            )
    return answers


def _generate(
    session: Session, prompt: str, sampling: SamplingParams, budget: int | None, tokens: int
) -> Finished:
    messages = [{"role": "user", "content": prompt}]
    request = TextRequest(messages=messages, max_tokens=tokens, sampling=sampling, draft_budget=budget)
    *_, last = session.generate(request)
    assert isinstance(last, Finished)
    return last


def page(result: dict[str, Any]) -> str:
    """Return the result as Markdown: tables for people, then one line of JSON."""
    name = result["card"] or f"{result['device']} (no GPU was found or chosen)"
    facts = [
        ("model", f"{result['model']}, {result['weights_bytes'] / 1e9:.2f} GB of weights"),
        ("device", name),
        ("read bandwidth", f"{result['read_gb_s']:.0f} GB/s"),
        ("CUDA graphs", "yes" if result["graphs"] else "no"),
        ("tuned", _tuned(result)),
        ("versions", f"Bough {result['bough']} ({result['commit']}), torch {result['torch']}"),
        ("system", f"{result['system']}, {result['cpus']} CPUs, load {result['load']}"),
        ("date", result["date"]),
    ]
    same = sum(each["same"] for each in result["texts"])
    text_rows = [list(each.values()) for each in result["texts"]]
    columns, *steps = step.lines(result)
    parts = [
        f"# Bough on {name}",
        markdown_table(["", ""], facts),
        "## Steps",
        markdown_table(columns, steps),
        f"## Texts: {same} of {len(result['texts'])} with trees are identical to plain decoding",
        markdown_table(list(result["texts"][0]), text_rows),
        f"```json\n{json.dumps(result)}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _tuned(result: dict[str, Any]) -> str:
    if result["card"] is None:
        return "no GPU"
    rows = ", ".join(result["tuned"])
    return f"for {rows} rows" if rows else "no: `bough tune` measures this card's best settings first"


def save(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(result), encoding="utf-8")
