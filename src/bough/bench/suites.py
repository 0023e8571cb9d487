"""The prompts of every suite, in a fixed order, and how each is scored."""

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

from bough.bench import agent, scores
from bough.errors import DownloadFailed, UsageError

CHARACTERS = 3  # filler characters per token, roughly; the actual token count is measured
SWEEP_PROMPTS = ("code", "prose")


@dataclass(frozen=True, slots=True)
class SuitePrompt:
    suite: str
    name: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    thread: str = ""  # prompts of one thread run in order and share the prefix cache
    continues: bool = False  # the thread's earlier messages and outputs precede these messages
    context: int = 0  # requested tokens of filler
    item: Mapping[str, Any] = field(default_factory=dict)
    score: scores.Score | None = None


@dataclass(frozen=True, slots=True)
class SuiteSource:
    """The location of a public suite: the first existing file in a data folder, or a dataset on the hub."""

    files: tuple[str, ...]
    dataset: tuple[str, ...]  # repository and, if it has several, the configuration
    split: str = "test"


SOURCES = {
    "humaneval": SuiteSource(("humaneval/test",), ("openai/openai_humaneval",)),
    "gsm8k": SuiteSource(("gsm8k/test",), ("openai/gsm8k", "main")),
    "math500": SuiteSource(("math500/test",), ("HuggingFaceH4/MATH-500",)),
    "mbpp": SuiteSource(("mbpp/sanitized", "mbpp/all"), ("google-research-datasets/mbpp", "sanitized")),
    "mtbench": SuiteSource(
        ("mt_bench/question", "mtbench/question"), ("HuggingFaceH4/mt_bench_prompts",), "train"
    ),
}
SUITES = (*SOURCES, "builtin", "agent", "sweep")


def load(
    suite: str, count: int | None, *, data: Path | None, offline: bool = False, contexts: Sequence[int] = (0,)
) -> list[SuitePrompt]:
    """Return `count` evenly spaced prompts of the suite, at most all; None: its default number."""
    if suite == "builtin":
        return list(_builtin())[:count]  # already in mixed order
    if suite == "agent":
        return list(_agent())[:count]
    if suite == "sweep":
        return list(_sweep(count or 1, contexts))
    if suite not in SOURCES:
        raise UsageError(
            f"there is no suite {suite!r}",
            f"the suites are {', '.join(SUITES)}, step and compress",
        )
    source = SOURCES[suite]
    items = _from_folder(source, data, suite) if data is not None else _from_hub(source, suite, offline)
    make = {
        "humaneval": partial(
            _single,
            score=scores.humaneval,
            ask=lambda item: f"Complete this function:\n```python\n{item['prompt'].rstrip()}\n```",
        ),
        "gsm8k": partial(_single, score=scores.gsm8k, ask=lambda item: item["question"]),
        "math500": partial(_single, score=scores.math500, ask=lambda item: item["problem"]),
        "mbpp": partial(_single, score=scores.mbpp, ask=_mbpp),
        "mtbench": _mtbench,
    }[suite]
    if suite == "mbpp":
        # The test split: earlier items are few-shot examples, later ones training data.
        items = [item for item in items if 11 <= int(item["task_id"]) <= 510]
    indices = _spread(range(len(items)), count or 10)
    return [prompt for index in indices for prompt in make(suite, index, items[index])]


def _spread(indices: Sequence[int], count: int) -> list[int]:
    count = min(count, len(indices))
    return [indices[number * len(indices) // count] for number in range(count)]


def _from_folder(source: SuiteSource, data: Path, suite: str) -> list[dict[str, Any]]:
    for name in source.files:
        for path in (data / f"{name}.jsonl.gz", data / f"{name}.jsonl"):
            if not path.exists():
                continue
            raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            return [json.loads(line) for line in raw.decode().split("\n") if line.strip()]
    raise UsageError(
        f"{data} has no {source.files[0]}.jsonl or .jsonl.gz, which {suite} needs",
        "omit `data` to download it from the hub, or use the suite builtin",
    )


def _from_hub(source: SuiteSource, suite: str, offline: bool) -> list[dict[str, Any]]:
    hint = "set `data` to a folder with local files; the suite builtin needs none"
    if offline:
        raise UsageError(f"{suite} has to be downloaded from the hub, which `offline` forbids", hint)
    try:
        load_dataset = import_module("datasets").load_dataset
    except ImportError as error:
        raise UsageError(
            f"{suite} is downloaded with the package datasets, which is not installed",
            f"pip install datasets; {hint}",
        ) from error
    try:
        return [dict(item) for item in load_dataset(*source.dataset, split=source.split)]
    except Exception as error:  # the package has no common base class for its errors
        raise DownloadFailed(f"{source.dataset[0]} could not be downloaded: {error}", hint) from error


def _single(
    suite: str, index: int, item: Mapping[str, Any], *, score: scores.Score, ask: Any
) -> list[SuitePrompt]:
    messages = [{"role": "user", "content": ask(item)}]
    return [SuitePrompt(suite, f"{suite}/{index}", messages, item=item, score=score)]


def _mbpp(item: Mapping[str, Any]) -> str:
    return f"{item.get('prompt') or item['text']}\nYour code should pass: {item['test_list'][0]}"


def _mtbench(suite: str, index: int, item: Mapping[str, Any]) -> list[SuitePrompt]:
    thread = f"{suite}/{index}"
    return [
        SuitePrompt(
            suite,
            f"{thread}.{turn}",
            [{"role": "user", "content": text}],
            thread=thread,
            continues=turn > 1,
        )
        for turn, text in enumerate(item.get("turns") or item["prompt"], 1)
    ]


def _builtin() -> Iterator[SuitePrompt]:
    kinds = {
        "code": scores.own_tests,
        "edit": scores.own_tests,
        "arithmetic": scores.gsm8k,
        "json": scores.json_keys,
        "prose": None,
    }
    text = files("bough.bench").joinpath("builtin.toml").read_text(encoding="utf-8")
    for index, item in enumerate(tomllib.loads(text)["prompt"]):
        messages = [{"role": "user", "content": item["text"].strip()}]
        name = f"builtin/{index}-{item['kind']}"
        yield SuitePrompt("builtin", name, messages, item=item, score=kinds[item["kind"]])


def _agent() -> Iterator[SuitePrompt]:
    for index, messages in enumerate(agent.turns()):
        yield SuitePrompt("agent", f"agent/{index}", messages, tools=agent.tools(), thread="agent")


def _sweep(count: int, contexts: Sequence[int]) -> Iterator[SuitePrompt]:
    """Yield code and prose prompts after filler of each length; `count` of each."""
    kinds = {kind: [p for p in _builtin() if p.item["kind"] == kind][:count] for kind in SWEEP_PROMPTS}
    for context in contexts:
        for prompt in (each for kind in SWEEP_PROMPTS for each in kinds[kind]):
            text = f"{filler(context)}{prompt.messages[0]['content']}"
            name = f"sweep/{prompt.name.removeprefix('builtin/')}@{context}"
            yield SuitePrompt("sweep", name, [{"role": "user", "content": text}], context=context)


def filler(tokens: int) -> str:
    """Return about `tokens` tokens of unrelated records that never repeat."""
    if tokens == 0:
        return ""
    generator = random.Random(tokens)
    things = ("lamp", "ladder", "kettle", "violin", "carpet", "mirror", "basket", "anchor", "clock", "saddle")
    rooms = ("attic", "cellar", "garden shed", "north wing", "library", "kitchen", "boat house", "chapel")
    lines, length = ["Here is an inventory, which you can ignore."], 0
    while length < tokens * CHARACTERS:
        line = (
            f"No. {generator.randrange(10**6)}: the {generator.choice(things)} in the "
            f"{generator.choice(rooms)} weighs {generator.randrange(10**4)} grams and was bought for "
            f"{generator.randrange(10**3)} crowns."
        )
        lines.append(line)
        length += len(line)
    return "\n".join(lines) + "\n\nNow to something else.\n\n"
