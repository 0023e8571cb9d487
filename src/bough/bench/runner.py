"""Running the cases of a benchmark and recording their results: one JSON line per prompt and budget."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from bough.bench import scores
from bough.bench.measure import Endpoint
from bough.bench.suites import SuitePrompt
from bough.errors import PromptTooLong, UsageError

Result = dict[str, Any]
Key = tuple[str, int | None, float]
PLAIN = 0


@dataclass(frozen=True, slots=True)
class BenchCase:
    """The prompts of one thread with one budget and temperature."""

    prompts: tuple[SuitePrompt, ...]
    budget: int | None  # PLAIN: plain decoding; None: the server's default
    temperature: float

    @property
    def keys(self) -> list[Key]:
        return [(prompt.name, self.budget, self.temperature) for prompt in self.prompts]


def cases(
    prompts: Sequence[SuitePrompt], budgets: Sequence[int | None], temperatures: Sequence[float]
) -> list[BenchCase]:
    """Return the cases in order of measurement; the order of the budgets alternates between threads.

    A machine that warms up or is busy for a while then favours neither side.
    """
    ordered = []
    threads = groupby(prompts, key=lambda prompt: prompt.thread or prompt.name)
    for index, (_, thread) in enumerate(threads):
        members = tuple(thread)
        order = list(budgets) if index % 2 == 0 else list(reversed(budgets))
        ordered += [BenchCase(members, budget, heat) for heat in temperatures for budget in order]
    return ordered


def measure(
    endpoint: Endpoint, planned: Sequence[BenchCase], measured: Mapping[Key, Result]
) -> Iterator[Result]:
    """Yield the results of the cases that are not in `measured`; stop at the first cancelled generation."""
    for case in planned:
        if all(key in measured for key in case.keys):
            continue
        endpoint.clear_cache()
        messages: list[Mapping[str, Any]] = []
        for prompt in case.prompts:
            messages = [*messages, *prompt.messages] if prompt.continues else list(prompt.messages)
            result: Result = {
                "suite": prompt.suite,
                "prompt": prompt.name,
                "budget": case.budget,
                "temperature": case.temperature,
                "context": prompt.context,
            }
            try:
                output = endpoint.generate(prompt, messages, budget=case.budget, temperature=case.temperature)
            except PromptTooLong as error:
                yield result | {"skipped": error.message}
                continue
            if output.finish == "cancelled":
                return
            right = scores.score(prompt.score, prompt.item, output.text)
            yield result | asdict(output) | {"right": right}
            messages.append({"role": "assistant", "content": output.text})


class ResultFile:
    """An append-only JSONL file of runs: a header line each, then a line per result."""

    def __init__(self, path: Path):
        self.path = path

    def runs(self) -> list[tuple[Result, list[Result]]]:
        runs: list[tuple[Result, list[Result]]] = []
        if not self.path.exists():
            return runs
        texts = self.path.read_text(encoding="utf-8").splitlines()
        for number, text in enumerate(texts, 1):
            try:
                line = json.loads(text)
            except ValueError as error:
                if number == len(texts) or not text:
                    continue  # a killed run left an incomplete line
                raise UsageError(f"{self.path}, line {number}, is not JSON: {text[:60]!r}") from error
            if "run" in line:
                runs.append((line["run"], []))
            elif runs and "prompt" in line:
                runs[-1][1].append(line)
        return runs

    def resume(self, settings: Mapping[str, Any]) -> dict[Key, Result]:
        """Return the results of the last run with exactly these settings."""
        for head, lines in reversed(self.runs()):
            if head["settings"] == settings:
                return {key_of(line): line for line in lines}
        return {}

    def begin(self, head: Result) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self._drop_incomplete_line()
        self._write(json.dumps({"run": head}))

    def add(self, line: Result) -> None:
        self._write(json.dumps(line, ensure_ascii=False))

    def _drop_incomplete_line(self) -> None:
        """Remove what a killed run left of its last line; a whole one without its end is completed."""
        content = self.path.read_bytes()
        whole, last = content[: content.rfind(b"\n") + 1], content[content.rfind(b"\n") + 1 :]
        if not last:
            return
        try:
            json.loads(last)
        except ValueError:
            self.path.write_bytes(whole)
        else:
            self._write("")

    def _write(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def key_of(line: Result) -> Key:
    return line["prompt"], line["budget"], line["temperature"]


def record(
    file: ResultFile,
    head: Result,
    results: dict[Key, Result],
    lines: Iterator[Result],
    notify: Callable[[Result], None] = lambda line: None,
) -> None:
    """Write the run's header, the earlier results in `found` and each new result; add those to `found`."""
    file.begin(head)
    for line in results.values():
        file.add(line)
    for line in lines:
        file.add(line)
        results[key_of(line)] = line
        notify(line)
