"""Every prompt of a run with every budget, one line each, written as it comes. Knows no models, no screen."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from treeflash.bench.measure import Answerer
from treeflash.bench.suites import Prompt
from treeflash.errors import PromptTooLong, UsageError

Line = dict[str, Any]
Key = tuple[str, int | None, float]
PLAIN = 0


@dataclass(frozen=True, slots=True)
class Cell:
    """Prompts of one thread, to be answered in one way."""

    prompts: tuple[Prompt, ...]
    budget: int | None  # PLAIN: nothing is proposed; None: as the server does
    temperature: float

    @property
    def keys(self) -> list[Key]:
        return [(prompt.name, self.budget, self.temperature) for prompt in self.prompts]


def cells(
    prompts: Sequence[Prompt], budgets: Sequence[int | None], temperatures: Sequence[float]
) -> list[Cell]:
    """In the order in which they are measured: every other thread begins with the other end of the budgets.

    A machine that warms up or is disturbed for a while thus favours neither side.
    """
    found = []
    threads = groupby(prompts, key=lambda prompt: prompt.thread or prompt.name)
    for index, (_, thread) in enumerate(threads):
        members = tuple(thread)
        order = list(budgets) if index % 2 == 0 else list(reversed(budgets))
        found += [Cell(members, budget, heat) for heat in temperatures for budget in order]
    return found


def measure(answerer: Answerer, planned: Sequence[Cell], known: Mapping[Key, Line]) -> Iterator[Line]:
    """The lines that are not known yet; ends early when an answer was cancelled."""
    for cell in planned:
        if all(key in known for key in cell.keys):
            continue
        answerer.forget()
        messages: list[Mapping[str, Any]] = []
        for prompt in cell.prompts:
            messages = [*messages, *prompt.messages] if prompt.continues else list(prompt.messages)
            line: Line = {
                "suite": prompt.suite,
                "prompt": prompt.name,
                "budget": cell.budget,
                "temperature": cell.temperature,
                "context": prompt.context,
            }
            try:
                answer = answerer.answer(prompt, messages, budget=cell.budget, temperature=cell.temperature)
            except PromptTooLong as error:
                yield line | {"skipped": error.message}
                continue
            if answer.finish == "cancelled":
                return
            right = prompt.score(prompt.item, answer.text) if prompt.score else None
            yield line | asdict(answer) | {"right": right}
            messages.append({"role": "assistant", "content": answer.text})


class LineFile:
    """Lines of one run after another; nothing that was written is ever changed."""

    def __init__(self, path: Path):
        self.path = path

    def runs(self) -> list[tuple[Line, list[Line]]]:
        """Every run's head and its lines."""
        found: list[tuple[Line, list[Line]]] = []
        if not self.path.exists():
            return found
        texts = self.path.read_text(encoding="utf-8").splitlines()
        for number, text in enumerate(texts, 1):
            try:
                line = json.loads(text)
            except ValueError as error:
                if number == len(texts) or not text:
                    continue  # a run was ended by force in the middle of a line
                raise UsageError(f"{self.path}, line {number}, is not JSON: {text[:60]!r}") from error
            if "run" in line:
                found.append((line["run"], []))
            elif found and "prompt" in line:
                found[-1][1].append(line)
        return found

    def resume(self, settings: Mapping[str, Any]) -> dict[Key, Line]:
        """What the last run with these very settings has measured."""
        for head, lines in reversed(self.runs()):
            if head["settings"] == settings:
                return {key_of(line): line for line in lines}
        return {}

    def begin(self, head: Line) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        self._write(("\n" if torn and self.path.stat().st_size else "") + json.dumps({"run": head}))

    def add(self, line: Line) -> None:
        self._write(json.dumps(line, ensure_ascii=False))

    def _write(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def key_of(line: Line) -> Key:
    return line["prompt"], line["budget"], line["temperature"]


def record(
    file: LineFile,
    head: Line,
    found: dict[Key, Line],
    lines: Iterator[Line],
    told: Callable[[Line], None] = lambda line: None,
) -> None:
    """Writes the run's head, what was found before, and each line as it comes; it goes into `found` too."""
    file.begin(head)
    for line in found.values():
        file.add(line)
    for line in lines:
        file.add(line)
        found[key_of(line)] = line
        told(line)
