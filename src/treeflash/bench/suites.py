"""The prompts of every suite, in a fixed order, and how each is scored. Knows no models."""

import gzip
import json
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from treeflash.bench import agent, scores
from treeflash.errors import DownloadFailed, UsageError

CHARACTERS = 3  # of filler for a token, about; what it came to is measured
SWEEP_PROMPTS = ("code", "prose")


@dataclass(frozen=True, slots=True)
class Prompt:
    suite: str
    name: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    thread: str = ""  # prompts of one thread follow each other and share what was read
    continues: bool = False  # the thread's prompt before it and its answer stand before these messages
    context: int = 0  # tokens of filler that were asked for
    item: Mapping[str, Any] = field(default_factory=dict)
    score: scores.Score | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where a public suite lies: in a data folder the first of the files that is there, else on the hub."""

    files: tuple[str, ...]
    dataset: tuple[str, ...]  # repository and, where it has several, the configuration
    split: str = "test"


SOURCES = {
    "humaneval": Source(("humaneval/test",), ("openai/openai_humaneval",)),
    "gsm8k": Source(("gsm8k/test",), ("openai/gsm8k", "main")),
    "math500": Source(("math500/test",), ("HuggingFaceH4/MATH-500",)),
    "mbpp": Source(("mbpp/sanitized", "mbpp/all"), ("google-research-datasets/mbpp", "sanitized")),
    "mtbench": Source(
        ("mt_bench/question", "mtbench/question"), ("HuggingFaceH4/mt_bench_prompts",), "train"
    ),
}
SUITES = (*SOURCES, "builtin", "agent", "sweep")


def load(
    suite: str, count: int | None, *, data: Path | None, offline: bool = False, contexts: Sequence[int] = (0,)
) -> list[Prompt]:
    """`count` prompts spread evenly over the suite, or as many as it has; None: its default."""
    if suite == "builtin":
        return list(_builtin())[:count]  # its order mixes its kinds
    if suite == "agent":
        return list(_agent())[:count]
    if suite == "sweep":
        return list(_sweep(count or 1, contexts))
    if suite not in SOURCES:
        raise UsageError(f"there is no suite {suite!r}", f"the suites are {', '.join(SUITES)} and step")
    source = SOURCES[suite]
    items = _from_folder(source, data, suite) if data is not None else _from_hub(source, suite, offline)
    make = {
        "humaneval": partial(_asked, score=scores.humaneval, ask=_humaneval),
        "gsm8k": partial(_asked, score=scores.gsm8k, ask=lambda item: item["question"]),
        "math500": partial(_asked, score=scores.math500, ask=lambda item: item["problem"]),
        "mbpp": partial(_asked, score=scores.mbpp, ask=_mbpp),
        "mtbench": _mtbench,
    }[suite]
    if suite == "mbpp":
        # The public split: what comes before shows how to ask, what comes behind is for training.
        items = [item for item in items if 11 <= int(item["task_id"]) <= 510]
    chosen = _spread(range(len(items)), count or 10)
    return [prompt for index in chosen for prompt in make(suite, index, items[index])]


def _spread(indices: Sequence[int], count: int) -> list[int]:
    count = min(count, len(indices))
    return [indices[place * len(indices) // count] for place in range(count)]


def _from_folder(source: Source, data: Path, suite: str) -> list[dict[str, Any]]:
    for name in source.files:
        for path in (data / f"{name}.jsonl.gz", data / f"{name}.jsonl"):
            if not path.exists():
                continue
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            return [json.loads(line) for line in raw.decode().split("\n") if line.strip()]
    raise UsageError(
        f"{data} has no {source.files[0]}.jsonl or .jsonl.gz, which {suite} needs",
        "leave out --data to fetch it from the hub, or take the suite builtin",
    )


def _from_hub(source: Source, suite: str, offline: bool) -> list[dict[str, Any]]:
    hint = "--data FOLDER takes files that are here; the suite builtin needs none"
    if offline:
        raise UsageError(f"{suite} has to be fetched from the hub, which --offline forbids", hint)
    try:
        load_dataset = import_module("datasets").load_dataset
    except ImportError as error:
        raise UsageError(
            f"{suite} is fetched from the hub with the package datasets, which is not installed",
            f"pip install 'treeflash[bench]'; {hint}",
        ) from error
    try:
        return [dict(item) for item in load_dataset(*source.dataset, split=source.split)]
    except Exception as error:  # the package has no common class for what can go wrong on the way
        raise DownloadFailed(f"{source.dataset[0]} could not be fetched: {error}", hint) from error


def _asked(suite: str, index: int, item: Mapping[str, Any], *, score: scores.Score, ask: Any) -> list[Prompt]:
    messages = [{"role": "user", "content": ask(item)}]
    return [Prompt(suite, f"{suite}/{index}", messages, item=item, score=score)]


def _humaneval(item: Mapping[str, Any]) -> str:
    return "Complete this function:\n```python\n" + item["prompt"].rstrip() + "\n```"


def _mbpp(item: Mapping[str, Any]) -> str:
    return f"{item.get('prompt') or item['text']}\nYour code should pass: {item['test_list'][0]}"


def _mtbench(suite: str, index: int, item: Mapping[str, Any]) -> list[Prompt]:
    thread = f"{suite}/{index}"
    return [
        Prompt(
            suite,
            f"{thread}.{turn}",
            [{"role": "user", "content": text}],
            thread=thread,
            continues=turn > 1,
        )
        for turn, text in enumerate(item.get("turns") or item["prompt"], 1)
    ]


def _builtin() -> Iterator[Prompt]:
    kinds = {
        "code": scores.own_tests,
        "edit": scores.own_tests,
        "arithmetic": scores.gsm8k,
        "json": scores.json_keys,
        "prose": None,
    }
    text = files("treeflash.bench").joinpath("builtin.toml").read_text(encoding="utf-8")
    for index, item in enumerate(tomllib.loads(text)["prompt"]):
        messages = [{"role": "user", "content": item["text"].strip()}]
        name = f"builtin/{index}-{item['kind']}"
        yield Prompt("builtin", name, messages, item=item, score=kinds[item["kind"]])


def _agent() -> Iterator[Prompt]:
    for index, messages in enumerate(agent.turns()):
        yield Prompt("agent", f"agent/{index}", messages, tools=agent.tools(), thread="agent")


def _sweep(count: int, contexts: Sequence[int]) -> Iterator[Prompt]:
    """Code and prose behind filler of each length; `count` of each."""
    kinds = {kind: [p for p in _builtin() if p.item["kind"] == kind][:count] for kind in SWEEP_PROMPTS}
    for context in contexts:
        for prompt in (each for kind in SWEEP_PROMPTS for each in kinds[kind]):
            text = f"{filler(context)}{prompt.messages[0]['content']}"
            name = f"sweep/{prompt.name.removeprefix('builtin/')}@{context}"
            yield Prompt("sweep", name, [{"role": "user", "content": text}], context=context)


def filler(tokens: int) -> str:
    """Records that have nothing to do with the question and never repeat; about so many tokens."""
    if tokens == 0:
        return ""
    draw = random.Random(tokens)
    things = ("lamp", "ladder", "kettle", "violin", "carpet", "mirror", "basket", "anchor", "clock", "saddle")
    places = ("attic", "cellar", "garden shed", "north wing", "library", "kitchen", "boat house", "chapel")
    lines, length = ["Here is an inventory, which you can ignore."], 0
    while length < tokens * CHARACTERS:
        line = (
            f"No. {draw.randrange(10**6)}: the {draw.choice(things)} in the {draw.choice(places)} weighs "
            f"{draw.randrange(10**4)} grams and was bought for {draw.randrange(10**3)} crowns."
        )
        lines.append(line)
        length += len(line)
    return "\n".join(lines) + "\n\nNow to something else.\n\n"
