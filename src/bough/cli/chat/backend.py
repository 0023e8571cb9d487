"""What generates the replies of a chat: a session that is loaded here; remote.py has a server."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

from bough.cli import report
from bough.cli.chat.conversation import OPTIONS, ChatSettings
from bough.cli.loading import summary
from bough.config import EngineConfig
from bough.errors import UsageError
from bough.session.events import Finished, Progress, Reasoning, Text

if TYPE_CHECKING:
    from bough.cli.chat.remote import RemoteBackend
    from bough.session.session import Session


@dataclass(frozen=True, slots=True)
class ReplyEnd:
    line: str  # of statistics
    details: Mapping[str, Any]  # for /stats
    tok_s: float = 0.0
    notes: Sequence[str] = field(default_factory=tuple)


Event = Progress | Reasoning | Text | ReplyEnd


class LocalBackend:
    breakable = False  # whether a reply may be abandoned at any moment, without a request to stop

    def __init__(self, session: "Session", config: EngineConfig, *, name: str):
        self.name, self._session, self._config = name, session, config
        self._speculating = config.speculation is not None

    @property
    def about(self) -> str:
        return summary(self._session, self._config)

    @property
    def sees(self) -> bool:
        return self._session.images is not None

    def check(self, settings: ChatSettings) -> None:
        """Raise UsageError for settings that cannot be honoured."""
        if settings.thinking is not None and not self._session.template.supports_thinking:
            raise UsageError(f"{self.name} has no switch for thinking in its chat template")
        if settings.draft_budget and not self._speculating:
            raise UsageError("the model was loaded without a draft", "start the chat without --no-draft")

    def defaults(self, settings: ChatSettings) -> Mapping[str, float]:
        """Return the values of settings that are not set, as far as they are known."""
        sampling = self._session.sampling_for(settings.thinking)
        values = {name: getattr(sampling, name, None) for name in OPTIONS}
        return {name: value for name, value in values.items() if value is not None}

    def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        settings: ChatSettings,
        *,
        seed: int,
        cancelled: Callable[[], bool],
    ) -> Generator[Event]:
        from bough.session.requests import TextRequest

        values = {name: value for name, value in settings.values.items() if name != "max_tokens"}
        limit = settings.values.get("max_tokens")
        sampling = self._session.sampling_for(settings.thinking).changed(values | {"seed": seed})
        request = TextRequest(
            messages=messages,
            max_tokens=None if limit is None else int(limit),
            sampling=sampling,
            stop=settings.stop,
            thinking=settings.thinking,
            thinking_budget=settings.thinking_budget,
            effort=settings.effort,
            draft_budget=settings.draft_budget,
            cancelled=cancelled,
        )
        for event in self._session.generate(request):
            if isinstance(event, Finished):
                plain = not self._speculating or settings.draft_budget == 0
                yield self._ended(event, plain=plain, sampled=sampling.temperature > 0)
            elif isinstance(event, Progress | Reasoning | Text):
                yield event

    def _ended(self, finished: Finished, *, plain: bool, sampled: bool) -> ReplyEnd:
        interrupted = finished.reason == "cancelled"
        line = report.line(finished, plain=plain, sampled=sampled, interrupted=interrupted)
        details = {"model": self.name, "finish_reason": finished.reason} | report.statistics(finished.stats)
        return ReplyEnd(line, details, finished.stats.decode_tok_s, finished.stats.notes)


Backend = Union[LocalBackend, "RemoteBackend"]
# Finds a model and returns what loads it; raises if there is none of this name.
ModelSource = Callable[[str | None], Callable[[], Backend]]
