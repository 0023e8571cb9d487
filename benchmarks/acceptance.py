"""Acceptance length of a pair on prompts it was never trained on, counted until an answer starts to loop.

    python benchmarks/acceptance.py --data FOLDER --model FILE --draft FOLDER [--temperature 0.8]

FOLDER holds humaneval/test.jsonl.gz, gsm8k/test.jsonl.gz and math500/test.jsonl.gz. Appends a line a suite to
benchmarks/results/acceptance.jsonl. A loop accepts everything and proves nothing: tokens count up to the
first run of twelve that appears for the third time.
"""

import argparse
import ast
import gzip
import json
import platform
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from treeflash.config import DraftConfig, EngineConfig, SpecConfig
from treeflash.engine.engine import Done, Engine, Request, Tokens
from treeflash.engine.sampler import SamplingParams
from treeflash.engine.session import Session, TextRequest
from treeflash.spec.draft import Outcome

SUITES = {
    "humaneval": lambda item: "Complete this function:\n```python\n" + item["prompt"].rstrip() + "\n```",
    "gsm8k": lambda item: item["question"],
    "math500": lambda item: item["problem"],
}
RUN, TIMES = 12, 3


def read(path: Path, count: int) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for _, line in zip(range(count), file, strict=False)]


def loop_start(tokens: list[int]) -> int | None:
    """Index behind the run that appears for the third time."""
    seen: Counter[tuple[int, ...]] = Counter()
    for end in range(RUN, len(tokens) + 1):
        run = tuple(tokens[end - RUN : end])
        seen[run] += 1
        if seen[run] == TIMES:
            return end
    return None


def parses(text: str) -> bool:
    """Whether the answer's code, fenced or bare, is Python."""
    fenced = re.search(r"```(?:python)?\n(.*?)(?:```|$)", text, re.DOTALL)
    try:
        ast.parse(fenced[1] if fenced else text)
    except (SyntaxError, ValueError):
        return False
    return True


class Recorder:
    """Notes what every step committed, on its way to the drafter."""

    def __init__(self, engine: Engine):
        self.committed: list[int] = []
        self._learn = engine._drafter.learn
        engine._drafter.learn = self._note  # ty: ignore[invalid-assignment]

    def _note(self, outcome: Outcome) -> None:
        self.committed.append(len(outcome.tokens))
        self._learn(outcome)


def answer(session: Session, recorder: Recorder, prompt: str, options: argparse.Namespace) -> dict[str, Any]:
    sampling = SamplingParams(temperature=options.temperature, seed=options.seed)
    ids = session.encode(TextRequest(messages=[{"role": "user", "content": prompt}]))
    recorder.committed.clear()
    tokens: list[int] = []
    request = Request(
        prompt=ids, max_tokens=options.n_gen, sampling=sampling, stop_ids=session.tokenizer.stop_ids
    )
    for event in session.engine.generate(request):
        if isinstance(event, Tokens):
            tokens += event.ids
        elif isinstance(event, Done):
            stats = event.stats
    loop = loop_start(tokens)
    # Steps as long as the text does not loop; the first token came from prefill.
    steps = counted = 0
    for committed in recorder.committed:
        if loop is not None and 1 + counted >= loop:
            break
        steps, counted = steps + 1, counted + committed
    return {
        "text": session.tokenizer.decode(tokens),
        "tokens": len(tokens),
        "steps": steps,
        "committed": counted,
        "loops": loop is not None,
        "tok_s": stats.decode_tok_s,
    }


def suites(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    for name in options.suites.split(","):
        prompt = SUITES[name]
        items = read(options.data / name / "test.jsonl.gz", options.prompts)
        yield name, [prompt(item) for item in items]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--suites", default=",".join(SUITES), help="some of them, with commas between")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--n-gen", type=int, default=256)
    parser.add_argument("--budget", type=int, default=22)
    parser.add_argument("--adaptive", action="store_true", help="rows chosen by the controller")
    parser.add_argument("--plain", action="store_true", help="no speculation, for comparison")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--show", type=int, default=0, help="answers to print from each suite")
    options = parser.parse_args()
    speculation = SpecConfig(budget=options.budget, adaptive=options.adaptive)
    config = EngineConfig(
        device=options.device,
        max_ctx=2048,
        speculation=None if options.plain else speculation,
        draft=DraftConfig(options.draft) if options.draft and not options.plain else None,
    )
    session = Session.load(options.model, config)
    recorder = Recorder(session.engine)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    for name, prompts in suites(options):
        start = time.perf_counter()
        answers = [answer(session, recorder, prompt, options) for prompt in prompts]
        for shown in answers[: options.show]:
            print("-" * 80, shown["text"], sep="\n", flush=True)
        steps = sum(a["steps"] for a in answers)
        line = {
            "suite": name,
            "prompts": len(answers),
            "temperature": options.temperature,
            "budget": 0 if options.plain else options.budget,
            "adaptive": options.adaptive,
            "acceptance_length": round(sum(a["committed"] for a in answers) / max(1, steps), 3),
            "mean_over_prompts": round(
                sum(a["committed"] / max(1, a["steps"]) for a in answers) / len(answers), 3
            ),
            "looping": sum(a["loops"] for a in answers) / len(answers),
            "parse_as_python": sum(parses(a["text"]) for a in answers) / len(answers),
            "tokens": sum(a["tokens"] for a in answers),
            "tok_s": round(sum(a["tok_s"] for a in answers) / len(answers), 1),
            "seconds": round(time.perf_counter() - start, 1),
            "model": options.model.name,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "torch": torch.__version__,
            "commit": commit,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        print(json.dumps(line), flush=True)
        results = Path(__file__).parent / "results" / "acceptance.jsonl"
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
