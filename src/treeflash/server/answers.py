"""One answer put together from the engine's events, and its numbers; knows no protocol."""

from dataclasses import dataclass, field
from typing import Any, Literal

from treeflash.engine.stats import RequestStats
from treeflash.session.requests import (
    Finished,
    Reasoning,
    SessionEvent,
    Text,
    TokenLogprob,
    ToolArguments,
    ToolCall,
    TreeStep,
)


@dataclass(slots=True)
class Part:
    """A stretch of reasoning, of text, or one call; `text` is a call's arguments."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    id: str = ""
    name: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    parts: list[Part] = field(default_factory=list)
    finished: Finished | None = None

    def add(self, event: SessionEvent) -> tuple[Part | None, bool]:
        """The part that it belongs to, and whether it begins with it."""
        match event:
            case Reasoning(text, logprobs):
                return self._grow("reasoning", text, logprobs)
            case Text(text, logprobs):
                return self._grow("text", text, logprobs)
            case ToolCall(_, id, name):
                self.parts.append(Part("call", id=id, name=name))
                return self.parts[-1], True
            case ToolArguments(index, text):
                part = [part for part in self.parts if part.kind == "call"][index]
                part.text += text
                return part, False
            case Finished():
                self.finished = event
        return None, False

    def _grow(
        self, kind: Literal["reasoning", "text"], text: str, logprobs: list[TokenLogprob] | None
    ) -> tuple[Part, bool]:
        fresh = not self.parts or self.parts[-1].kind != kind
        if fresh:
            self.parts.append(Part(kind))
        part = self.parts[-1]
        part.text += text
        part.logprobs += logprobs or []
        return part, fresh

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "text")

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if part.kind == "reasoning")

    @property
    def calls(self) -> list[Part]:
        return [part for part in self.parts if part.kind == "call"]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [each for part in self.parts if part.kind == "text" for each in part.logprobs]


def speculation(*answers: RequestStats) -> dict[str, Any]:
    """How proposals fared in all of them, for usage objects."""
    steps = sum(stats.steps for stats in answers)
    committed = sum(stats.step_tokens for stats in answers)
    return {
        "acceptance_length": round(committed / steps, 4) if steps else 0.0,
        "steps": steps,
        "drafted_tokens": sum(stats.verified_rows - stats.steps for stats in answers),
        "accepted_tokens": sum(sum(stats.accepted_by_position) for stats in answers),
    }


def approximate(*answers: RequestStats) -> dict[str, Any]:
    """What of how they were computed is approximate, for usage objects; nothing where all was exact."""
    named = dict.fromkeys(each for stats in answers for each in stats.approximate)
    return {"approximate": list(named)} if named else {}


def statistics(stats: RequestStats) -> dict[str, Any]:
    return stats.as_dict() | {"tok_s": stats.decode_tok_s}


def tree(step: TreeStep) -> dict[str, Any]:
    return {
        "tokens": step.tokens,
        "parents": step.parents,
        "accepted": step.accepted,
        "draft_ms": round(step.draft_ms, 3),
        "step_ms": round(step.step_ms, 3),
    }
