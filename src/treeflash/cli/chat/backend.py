"""What answers in a chat: a session of our own. The protocol leaves room for others; knows no screen."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from treeflash.cli import report
from treeflash.cli.chat.conversation import OPTIONS, Settings
from treeflash.errors import UsageError

if TYPE_CHECKING:
    from treeflash.session.requests import Finished
    from treeflash.session.session import Session


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens of the prompt."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class Piece:
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    line: str  # of statistics
    details: Mapping[str, Any]  # the same and more, for those who ask
    tok_s: float = 0.0
    notes: Sequence[str] = field(default_factory=tuple)


Event = Reading | Thought | Piece | Ended


class Backend(Protocol):
    @property
    def name(self) -> str:
        """Of the model."""
        ...

    @property
    def breakable(self) -> bool:
        """Whether it may be left at any moment, without being asked to come to an end."""
        ...

    def check(self, settings: Settings) -> None:
        """Refuses settings that it cannot honour."""
        ...

    def defaults(self, settings: Settings) -> Mapping[str, float]:
        """What it takes for settings that are not set, as far as it is known."""
        ...

    def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Settings,
        *,
        seed: int,
        cancelled: Callable[[], bool],
    ) -> Generator[Event]: ...


class LocalBackend:
    breakable = False

    def __init__(self, session: "Session", *, name: str, speculating: bool, drafted: bool):
        """speculating: tokens are proposed unless a request wants none; drafted: a draft does it."""
        self.name = name
        self._session = session
        self._speculating = speculating
        self._drafted = drafted

    def check(self, settings: Settings) -> None:
        if settings.thinking is not None and not self._session.template.supports_thinking:
            raise UsageError(f"{self.name} has no switch for thinking in its chat template")
        if settings.draft_budget and not self._speculating:
            raise UsageError("the model was loaded without a draft", "start the chat without --no-draft")

    def defaults(self, settings: Settings) -> Mapping[str, float]:
        sampling = self._session.sampling_for(settings.thinking)
        known = {name: getattr(sampling, name, None) for name in OPTIONS}
        return {name: value for name, value in known.items() if value is not None}

    def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: Settings,
        *,
        seed: int,
        cancelled: Callable[[], bool],
    ) -> Generator[Event]:
        from treeflash.session.requests import Finished, Progress, Reasoning, Text, TextRequest

        values = {name: value for name, value in settings.values.items() if name != "max_tokens"}
        limit = settings.values.get("max_tokens")
        sampling = replace(self._session.sampling_for(settings.thinking), **(values | {"seed": seed}))
        request = TextRequest(
            messages=messages,
            max_tokens=None if limit is None else int(limit),
            sampling=sampling,
            stop=settings.stop,
            thinking=settings.thinking,
            thinking_budget=settings.thinking_budget,
            draft_budget=settings.draft_budget,
            cancelled=cancelled,
        )
        for event in self._session.generate(request):
            match event:
                case Progress():
                    yield Reading(event.done, event.total)
                case Reasoning():
                    yield Thought(event.text)
                case Text():
                    yield Piece(event.text)
                case Finished():
                    plain = not self._speculating or settings.draft_budget == 0
                    yield self._ended(event, plain=plain, sampled=sampling.temperature > 0)

    def _ended(self, finished: "Finished", *, plain: bool, sampled: bool) -> Ended:
        interrupted = finished.reason == "cancelled"
        line = report.line(
            finished, plain=plain, drafted=self._drafted, sampled=sampled, interrupted=interrupted
        )
        details = {"model": self.name, "finish_reason": finished.reason} | report.statistics(finished.stats)
        return Ended(line, details, finished.stats.decode_tok_s, finished.stats.notes)
