"""Prompts for a draft of any chat model: code, mathematics and conversation, none of a benchmark.

    python -m workshop training.prompts --benchmarks FOLDER -o prompts.jsonl.xz

From the gathered corpus and this folder's generators alone, so that the result depends on the corpus, the
count and the seed, not on the machine. Prompts that share 13 words with a benchmark item are dropped and
counted. Prints a JSON line: prompts by kind, what was dropped, bytes and SHA-256 of the file.
"""

import hashlib
import json
import lzma
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from workshop.case import case
from workshop.report import Report
from workshop.training import corpus as gathered
from workshop.training.documents import Dialogue, spells_special
from workshop.training.heads import head_dialogue
from workshop.training.instruct import request
from workshop.training.mathematics import mathematics_dialogue
from workshop.training.overlap import benchmark_runs, overlaps
from workshop.training.prepare import WORK
from workshop.training.talk import talk_dialogue
from workshop.training.task_documents import task_dialogue

Messages = list[dict[str, str]]
# Percent of the prompts: 47 code, 29 mathematics, 24 conversation.
SHARES = {
    "heads": 7, "code": 11, "completion": 11, "explanation": 1, "code_io": 8, "mbpp": 1, "coding": 8,
    "gsm8k": 16, "story": 3, "algebra": 2, "math": 8,
    "writing": 5, "roleplay": 2, "knowledge": 6, "planning": 3, "reading": 3,
    "topical": 1, "talk": 1, "chatter": 1, "wordnet": 0.5, "tldr": 1, "manual_dialogues": 0.5,
}  # fmt: skip
GENERATED = {
    head_dialogue: ("heads",),
    task_dialogue: ("code", "completion", "explanation"),
    mathematics_dialogue: ("story", "algebra"),
    talk_dialogue: ("talk",),
}
INSTRUCT = ("writing", "roleplay", "knowledge", "planning", "coding", "reading")
# Characters. A GPU reads prompts of up to 256 tokens beside the answers of others, longer ones by themselves.
LONGEST = 850
TURNS = 3  # of a long conversation: two of the user
TRIES = 40  # for every prompt that a generator is asked for


class Prompts:
    """Prompts by kind, each once, without those that a benchmark has."""

    def __init__(self, count: int, benchmarks: frozenset[str]):
        total = sum(SHARES.values())
        self.wanted = {kind: round(share / total * count) for kind, share in SHARES.items()}
        self.found: dict[str, dict[str, Messages]] = {kind: {} for kind in SHARES}
        self.dropped: Counter[str] = Counter(overlap=0)
        self._benchmarks = benchmarks

    def full(self, *kinds: str) -> bool:
        return all(len(self.found[kind]) >= self.wanted[kind] for kind in kinds)

    def add(self, kind: str, messages: Messages) -> None:
        if kind not in self.found:
            return
        asked = "\n".join(message["content"] for message in messages)
        if len(asked) > LONGEST or spells_special(asked):
            self.dropped["too long" if len(asked) > LONGEST else "special token"] += 1
        elif overlaps(asked, self._benchmarks):
            self.dropped["overlap"] += 1
        else:
            self.found[kind][json.dumps(messages)] = messages

    def chosen(self, rng: random.Random) -> Iterator[dict[str, object]]:
        """Return the prompts in the shares of their kinds, shuffled."""
        lines = []
        for kind, texts in self.found.items():
            some = rng.sample(sorted(texts), min(self.wanted[kind], len(texts)))
            lines += [{"kind": kind, "messages": texts[text]} for text in some]
        rng.shuffle(lines)
        yield from lines


def collect(records: list[tuple[str, dict]], prompts: Prompts, seed: int) -> None:
    """Add what the corpus and the generators have, until every kind has enough."""
    rng = random.Random(f"{seed}/corpus")
    novels = [record["t"] for part, record in records if part == "novels"]
    for part, record in rng.sample(records, len(records)):
        kind = "manual_dialogues" if part == "manual" else part
        if kind in SHARES and not prompts.full(kind):
            for item in gathered.items(part, record, rng):
                if isinstance(item, Dialogue):
                    prompts.add(item.kind, item.prompt()[:TURNS])
    for generate, kinds in GENERATED.items():
        rng = random.Random(f"{seed}/{kinds[0]}")
        for _ in range(TRIES * max(prompts.wanted[kind] for kind in kinds)):
            if prompts.full(*kinds):
                break
            item = generate(rng)
            prompts.add(item.kind, item.prompt())
    rng = random.Random(f"{seed}/instruct")
    for _ in range(TRIES * sum(prompts.wanted[kind] for kind in INSTRUCT)):
        if prompts.full(*INSTRUCT):
            break
        kind, text = request(rng, novels or ["It was a quiet day. Nothing happened."])
        prompts.add(kind, [{"role": "user", "content": text}])


@case()
def main(
    report: Report,
    *,
    corpus: Annotated[Path, "the gathered text"] = WORK / "text.jsonl.xz",
    benchmarks: Path,
    count: int = 24_000,
    seed: int = 0,
    output: Annotated[Path, "JSONL, packed if it ends in .xz"],
) -> None:
    prompts = Prompts(count, benchmark_runs(benchmarks))
    collect(gathered.label(gathered.read_records(corpus)), prompts, seed)
    lines = list(prompts.chosen(random.Random(f"{seed}/order")))
    packed = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    data = lzma.compress(packed, preset=9) if output.suffix == ".xz" else packed
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(data)
    facts = {
        "prompts": len(lines),
        "kinds": dict(Counter(str(line["kind"]) for line in lines)),
        "dropped": dict(prompts.dropped),
        "bytes": len(data),
        "sha256": hashlib.sha256(packed).hexdigest(),
    }
    report.line(**facts)
