"""The output of one request, collected from its events: for Python, the server's protocols and benchmarks."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from bough.session.events import Finished, Reasoning, SessionEvent, Text, ToolArguments, ToolCall

if TYPE_CHECKING:
    from bough.engine.sampler import TokenLogprob


@dataclass(slots=True)
class OutputBlock:
    """A run of reasoning or text, or one tool call; `text` of a call is its arguments."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    id: str = ""
    name: str = ""
    logprobs: list["TokenLogprob"] = field(default_factory=list)


@dataclass(slots=True)
class GeneratedOutput:
    blocks: list[OutputBlock] = field(default_factory=list)
    finished: Finished | None = None

    def add(self, event: SessionEvent) -> tuple[OutputBlock | None, bool]:
        """Return the block that the event belongs to and whether the event starts it."""
        match event:
            case Reasoning(text, logprobs):
                return self._append("reasoning", text, logprobs)
            case Text(text, logprobs):
                return self._append("text", text, logprobs)
            case ToolCall(_, id, name):
                self.blocks.append(OutputBlock("call", id=id, name=name))
                return self.blocks[-1], True
            case ToolArguments(index, text):
                block = [block for block in self.blocks if block.kind == "call"][index]
                block.text += text
                return block, False
            case Finished():
                self.finished = event
        return None, False

    def _append(
        self, kind: Literal["reasoning", "text"], text: str, logprobs: list["TokenLogprob"] | None
    ) -> tuple[OutputBlock, bool]:
        fresh = not self.blocks or self.blocks[-1].kind != kind
        if fresh:
            self.blocks.append(OutputBlock(kind))
        block = self.blocks[-1]
        block.text += text
        block.logprobs += logprobs or []
        return block, fresh

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks if block.kind == "text")

    @property
    def reasoning(self) -> str:
        return "".join(block.text for block in self.blocks if block.kind == "reasoning")

    @property
    def calls(self) -> list[OutputBlock]:
        return [block for block in self.blocks if block.kind == "call"]

    @property
    def logprobs(self) -> list["TokenLogprob"]:
        return [each for block in self.blocks if block.kind == "text" for each in block.logprobs]
