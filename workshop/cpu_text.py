"""Text of native CPU code against the float32 reference: every greedy token, near-ties shown.

    python -m workshop cpu_text --data DATA [--model M.gguf] [--prompts 50] [--n-gen 128]
        [--activations int16] [--kv-cache f32] [--out FILE]

DATA holds humaneval/test.jsonl.gz and gsm8k/test.jsonl.gz; half of the prompts come from each. Native code
decodes plainly; PyTorch then computes the logits of all positions of that text in float32. A token is the
reference's if its logit is the largest there; the first one of a text that is not is where texts diverge, and
the line says by how much the reference prefers its own.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import torch

from bough.config import EngineConfig
from bough.engine.engine import Request, Tokens
from bough.models.step import Step
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.session.session import Session
from bough.state.sequences import SequenceStates
from workshop.case import TARGET, case
from workshop.report import Report


@case()
def main(
    report: Report,
    *,
    data: Path,
    model: Path = TARGET,
    prompts: int = 50,
    n_gen: int = 128,
    activations: str = "int16",
    kv_cache: str = "f32",
) -> None:
    common = {"device": "cpu", "max_ctx": 4096, "speculation": None, "prefix_cache": 0}
    formats = {"cpu_activations": activations, "kv_k": kv_cache, "kv_v": kv_cache}
    native = load_session(model, EngineConfig(**common, **formats, cpu_backend="native"))
    reference = load_session(model, EngineConfig(**common, cpu_backend="torch"))
    figures = compare(native, reference, texts(data, prompts), n_gen)
    report.write(**report.head(), what="cpu_text", **figures)


def compare(native: Session, reference: Session, prompts: list[str], n_gen: int) -> dict[str, Any]:
    found, tokens, equal = [], 0, 0
    for index, text in enumerate(prompts):
        prompt = native.encode(TextRequest(messages=[{"role": "user", "content": text}]))
        output = decode(native, prompt, n_gen)
        logits = reference_logits(reference, prompt, output)
        own = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        margins = (logits.max(-1).values - own).tolist()
        other = [at for at, margin in enumerate(margins) if margin > 0]
        tokens, equal = tokens + len(output), equal + len(output) - len(other)
        for place, at in enumerate(other):
            best = int(logits[at].argmax())
            item = {"prompt": index, "token": at, "native": output[at], "reference": best}
            found.append(item | {"margin": margins[at], "first": not place})
            print(json.dumps(found[-1]), flush=True)
    diverging = sum(item["first"] for item in found)
    print(f"{len(prompts) - diverging} of {len(prompts)} texts equal, {equal} of {tokens} tokens")
    return {
        "texts": len(prompts),
        "equal_texts": len(prompts) - diverging,
        "tokens": tokens,
        "equal_tokens": equal,
        "near_ties": found,
    }


def texts(data: Path, total: int) -> list[str]:
    prompts = []
    for name, key, count in (
        ("humaneval", "prompt", total - total // 2),
        ("gsm8k", "question", total // 2),
    ):
        with gzip.open(data / name / "test.jsonl.gz", "rt") as file:
            lines = [json.loads(line)[key] for line in file]
        prompts += lines[:: max(1, len(lines) // count)][:count] if count else []
    return prompts


def decode(session: Session, prompt: list[int], count: int) -> list[int]:
    request = Request(prompt=prompt, max_tokens=count)
    return [
        token
        for event in session.engine.generate(request)
        if isinstance(event, Tokens)
        for token in event.ids
    ]


@torch.inference_mode()
def reference_logits(session: Session, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Return the logits [n, vocabulary] that decide the output's tokens."""
    target, text = session.engine.target, [*prompt, *output[:-1]]
    states = SequenceStates(target.spec, max_ctx=len(text), max_rows=1)
    slot = states.open()
    states.reserve(slot, len(text))
    slots = torch.tensor([slot])
    step = Step.chunk(slots, torch.tensor([text]), states.buffers.lengths[slots])
    hidden = target.forward(step, states.buffers).hidden[0]
    return target.logits(hidden[len(prompt) - 1 :])
