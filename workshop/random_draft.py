"""The overhead of a useless draft: the pair's target with a shuffled draft against plain decoding.

    python -m workshop random_draft [--rounds 5] [--n-gen 200] [--target T.gguf --draft RANDOM.gguf]

Rounds of plain and speculative decoding alternate in one process, greedy, on the same prompts. Prints one
line with the median ratio of their throughputs and appends it to benchmarks/results/random_draft.jsonl.
"""

import platform
import statistics
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Done, Engine, Request, Tokens
from bough.gguf import GGUFFile, GGUFWriter, ValueType
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from workshop.case import DRAFT, RESULTS, TARGET, case
from workshop.report import Report

PROMPTS = [
    "def fibonacci(n):",
    "Tell me about the sea.",
    "A baker sells 12 cakes a day at $15. How much is that?",
]


def shuffled(draft: Path, output: Path) -> None:
    """Write the draft with the rows of its matrices in random order."""
    rng = np.random.default_rng(0)
    with GGUFFile.open(draft) as file, GGUFWriter(output, file.architecture) as writer:
        for key, value in file.metadata.items():
            if key != "general.architecture":
                kind = ValueType.INT32 if key.endswith("target_layers") else None
                writer.add(key, value, kind)
        for tensor in file.tensors.values():
            writer.add_tensor(tensor.name, tensor.shape, tensor.type)
        writer.write_header()
        for tensor in file.tensors.values():
            rows = np.frombuffer(file.raw(tensor.name), np.uint8)
            if len(tensor.shape) > 1:
                rows = rows.reshape(-1, tensor.type.row_bytes(tensor.shape[-1]))
                rows = rows[rng.permutation(len(rows))]
            writer.write_tensor(tensor.name, rows.tobytes())


def speed(engine: Engine, prompt: list[int], count: int) -> tuple[float, float, list[int]]:
    """Return decode tokens per second, the acceptance length, and the output's tokens."""
    text: list[int] = []
    for event in engine.generate(Request(prompt=prompt, max_tokens=count, may_stop=False)):
        if isinstance(event, Tokens):
            text += event.ids
        if isinstance(event, Done):
            return event.stats.decode_tok_s, event.stats.acceptance_length, text
    raise AssertionError("no end")


@case(out=RESULTS / "random_draft.jsonl", device="auto")
def main(
    report: Report,
    *,
    rounds: int = 5,
    n_gen: int = 200,
    target: Annotated[Path, "another needs an untrained --draft"] = TARGET,
    draft: Path | None = None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if draft is None:
            draft = Path(folder) / "draft.gguf"
            shuffled(DRAFT, draft)
        # Without prompt lookup, whose gain would hide the draft's cost.
        tree = EngineConfig(
            report.device, 1024, speculation=SpecConfig(lookup=False), draft=DraftConfig(draft)
        )
        controlled = load_session(target, tree)
        plain = load_session(target, EngineConfig(report.device, 1024, speculation=None))
    ratios, accepted, speeds, same = [], [], [], 0
    for number in range(rounds):
        for prompt in PROMPTS:
            ids = plain.encode(TextRequest(messages=[{"role": "user", "content": prompt}]))
            with_draft, length, text = speed(controlled.engine, ids, n_gen)
            without, _, wanted = speed(plain.engine, ids, n_gen)
            if number:  # the first round warms up
                ratios.append(with_draft / without)
                accepted.append(length)
                speeds.append(without)
                same += text == wanted
    line = {
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "plain_tok_s": round(statistics.median(speeds), 1),
        "same_text": f"{same} of {len(ratios)}",
        "target": target.name,
        "acceptance_length": round(statistics.mean(accepted), 3),
        "device": torch.cuda.get_device_name()
        if plain.engine.target.device.type == "cuda"
        else platform.machine(),
        "torch": torch.__version__,
        **report.head("commit", "date"),
    }
    report.line(**line)
