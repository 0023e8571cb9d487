"""The loop of a chat: reads messages and commands, streams replies, keeps the conversation."""

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bough.cli import view
from bough.cli.chat import conversation as saved
from bough.cli.chat import slash_commands
from bough.cli.chat.backend import Backend, ModelSource, ReplyEnd
from bough.cli.chat.conversation import ChatSettings, Conversation, Message
from bough.cli.chat.input import Keyboard, Lines, history_file, unechoed
from bough.cli.chat.screen import PlainReply, TerminalReply, on_terminal
from bough.cli.interrupt import Interrupt
from bough.cli.streams import OutputFailed
from bough.errors import BoughError, PromptTooLong, UsageError
from bough.images.opening import ImageFile
from bough.session.collected import GeneratedOutput

LEAVING = ("exit", "quit", "bye")  # alone in a line, as in other programs
# Sampling of /regen: as recommended, then, where that gives a text that was there, with more freedom. Of a
# 0.5B's 20 jokes 1 differs as its publisher recommends, 9 at temperature 1, 18 at 1.3.
WARMER: tuple[dict[str, float], ...] = ({}, *({"temperature": t, "top_p": 0.95} for t in (1.0, 1.3, 1.6)))
SHORT = 1000  # characters: a longer text that comes again is a copy of the prompt, and takes long


@dataclass(frozen=True, slots=True)
class LastReply:
    """The last reply and the seed and budget it was generated with."""

    text: str
    seed: int
    draft_budget: int | None
    tok_s: float
    earlier: tuple[str, ...] = ()  # replies to the same message
    warmth: int = 0  # of WARMER


class Chat:
    def __init__(
        self,
        backend: Backend,
        conversation: Conversation,
        settings: ChatSettings,
        *,
        screen: view.Screen,
        path: Path | None = None,
    ):
        """Hold a conversation; path: the file it was loaded from."""
        self.backend = backend
        self.conversation = conversation
        self.settings = settings
        self.screen = screen
        self.attachments: list[tuple[str, str]] = []  # names and texts, for the next message
        self.images: list[ImageFile] = []  # for the next message, too
        self.path = path  # where it was last saved or loaded
        self.ended: ReplyEnd | None = None
        self._last: LastReply | None = None
        self._terminal = on_terminal()
        self._exit_code = 0
        self.models: ModelSource | None = None  # for /model
        self.reload: Callable[[], Backend] | None = None  # loads the present one again

    @property
    def answered(self) -> bool:
        return bool(self.conversation.messages) and self.conversation.messages[-1].role == "assistant"

    def run(self) -> int:
        source: Lines | Keyboard = Lines()
        if self._terminal:
            source = Keyboard(history_file(), slash_commands.complete)
            self.screen.note(f"{self.backend.name} · {self.backend.about}")
            self.screen.note("/help shows commands, Ctrl-D leaves")
        if self.path is not None:
            self._loaded(self.path)
        while True:
            try:
                self._turn(source)
            except EOFError:
                return self._exit_code

    def _turn(self, source: Lines | Keyboard) -> None:
        """Read one line and handle it; show errors that do not end the chat."""
        try:
            if self._terminal:
                view.plain("")
                view.flush()
            line = source.ask()
            if line.strip():
                self._handle(line)
        except KeyboardInterrupt:
            if not self._terminal:
                raise
        except OutputFailed:
            raise
        except BoughError as error:
            view.failure(error, as_json=False)
            # Without a terminal nobody reads the error: the exit code reports it.
            self._exit_code = self._exit_code or (0 if self._terminal else error.exit_code)

    def change(self, settings: ChatSettings) -> None:
        self.backend.check(settings)
        self.settings = settings

    def switch(self, name: str) -> None:
        """Go on with another model; if it cannot be loaded, with the present one."""
        if self.models is None or self.reload is None:
            raise UsageError("this chat cannot change its model")
        load = self.models(name)
        del self.backend  # both may not fit in memory
        try:
            self.backend = load()
        except (BoughError, RuntimeError, MemoryError):
            self.backend = self.reload()
            raise
        self.reload, self._last = load, None
        try:
            self.backend.check(self.settings)
        except UsageError as error:
            plain = {"thinking": None, "thinking_budget": None, "effort": None, "draft_budget": None}
            self.settings = replace(self.settings, **plain)
            self.screen.notice(f"{error.message[0].upper()}{error.message[1:]}: set back to default.")

    def load(self, path: Path) -> None:
        conversation, settings = saved.load(path)
        self.change(settings)
        self.conversation, self.path, self._last = conversation, path, None
        self._loaded(path)

    def regenerate(self) -> None:
        """Answer the last message again, with another seed, or the same to compare speculation's speed."""
        if not self.conversation.messages:
            raise UsageError("there is no message to answer again")
        before = self.conversation.take_reply()
        last = self._last if before is not None and self._last and self._last.text == before.content else None
        earlier = () if before is None else ((last.earlier if last else ()) + (before.content,))
        try:
            if last is not None and last.draft_budget != self.settings.draft_budget:
                self._compare(last)
            else:
                self._answer_unlike(earlier, self._other_seed(last), again=bool(last and last.warmth))
        finally:
            if before is not None and not self.answered:
                self.conversation.messages.append(before)

    def _compare(self, last: LastReply) -> None:
        """Repeat the last reply with another draft budget, and show both speeds."""
        self._answer(last.seed, last.warmth)
        now = self._last
        if now is not None and self.answered:
            self._last = replace(now, earlier=last.earlier, warmth=last.warmth)
            same = "the same text" if now.text == last.text else "another text"
            self.screen.note(f"{same} · {now.tok_s:.1f} tok/s now, {last.tok_s:.1f} tok/s before")

    def _answer_unlike(self, earlier: tuple[str, ...], seed: int, *, again: bool) -> None:
        """Answer; where a short text comes again by the recommended sampling, once more with a freer one.

        again: the recommended one has given a text again before, and is not tried once more.
        """
        fixed = self._temperature == 0 or self.settings.values.keys() & {"temperature", "top_p"}
        for warmth in [0] if fixed else range(again, len(WARMER)):
            if warmth:
                temperature = f"temperature {WARMER[warmth]['temperature']:g}, top-p 0.95"
                self.screen.notice(f"With {temperature}, as the recommended sampling gave the same text:")
            self.conversation.take_reply()
            self._answer(seed, warmth)
            now = self._last
            if now is None or not self.answered:
                return
            self._last = replace(now, earlier=earlier, warmth=warmth)
            if now.text not in earlier:
                return
            reply = self.conversation.messages[-1]
            if len(reply.content) + len(reply.reasoning) > SHORT:
                break
            seed = self._other_seed(now)
        greedy = "the temperature is 0. `/set temperature 0.7` samples."
        certain = "by another seed, too, the model is that sure. `/set temperature 1.3` gives others."
        self.screen.notice(f"The same text: {greedy if self._temperature == 0 else certain}")

    @property
    def _temperature(self) -> float | None:
        """The temperature of replies; None: a server does not say."""
        return self.settings.values.get(name := "temperature", self.backend.defaults(self.settings).get(name))

    def _handle(self, line: str) -> None:
        if line.strip().lower() in LEAVING:
            raise EOFError
        if slash_commands.run(self, line):
            return
        message = Message("user", self._with_files(line), images=tuple(self.images))
        self.conversation.messages.append(message)
        try:
            self._answer(self._seed())
        finally:
            if self.answered:
                self.attachments.clear()
                self.images.clear()
            else:
                self.conversation.undo()

    def _with_files(self, line: str) -> str:
        parts = []
        for name, text in self.attachments:
            fence = "```"
            while fence in text:
                fence += "`"
            parts.append(f"{name}:\n{fence}\n{text.rstrip()}\n{fence}\n\n")
        return "".join(parts) + line

    def _seed(self) -> int:
        return int(self.settings.values.get("seed", secrets.randbits(32)))

    def _other_seed(self, last: LastReply | None) -> int:
        return (last.seed + 1) % 2**64 if last and "seed" in self.settings.values else self._seed()

    def _answer(self, seed: int, warmth: int = 0) -> None:
        settings = replace(self.settings, values={**self.settings.values, **WARMER[warmth]})
        reply = TerminalReply() if self._terminal else PlainReply(quiet=self.screen.quiet)
        stop = Interrupt(patience_s=0 if self.backend.breakable else None)
        received, ended = GeneratedOutput(), None
        failure: BoughError | None = None
        events = self.backend.reply(
            self.conversation.request(), settings, seed=seed, cancelled=lambda: stop.requested
        )
        unseen = unechoed() if self._terminal else contextlib.nullcontext()
        try:
            with unseen, reply, stop, contextlib.suppress(KeyboardInterrupt), contextlib.closing(events):
                for event in events:
                    if isinstance(event, ReplyEnd):
                        ended = event
                    else:
                        received.add(event)
                        view.show(event, reply)
        except (OutputFailed, BrokenPipeError):
            raise
        except (BoughError, RuntimeError, MemoryError) as error:
            failure = _as_ours(error)
        whole = ended is not None and not stop.requested and failure is None
        self._keep(received, ended, seed, whole=whole)
        self._report(ended, stopped=stop.requested, written=bool(received.text.strip()))
        if failure is not None:
            raise failure
        if stop.requested and not self._terminal:
            raise KeyboardInterrupt

    def _keep(self, received: GeneratedOutput, ended: ReplyEnd | None, seed: int, *, whole: bool) -> None:
        if not whole and not received.text.strip():
            return
        message = Message("assistant", received.text, received.reasoning, stopped=not whole)
        self.conversation.messages.append(message)
        self.ended = ended or self.ended
        speed = ended.tok_s if ended else 0.0
        self._last = LastReply(received.text, seed, self.settings.draft_budget, speed)

    def _report(self, ended: ReplyEnd | None, *, stopped: bool, written: bool) -> None:
        line = ended.line if ended else "interrupted" if stopped else ""
        if stopped and not written:
            line += ": nothing was written, the message is removed"
        if line:
            self.screen.note(line)
        for note in ended.notes if ended else ():
            self.screen.notice(note)

    def _loaded(self, path: Path) -> None:
        count = len(self.conversation.messages)
        self.screen.note(f"{count} message{'s' * (count != 1)} from {path}.")
        model = self.conversation.model
        if model and model != self.backend.name:
            self.screen.notice(f"They were written with {model}; {self.backend.name} goes on with them.")
        for message in self.conversation.messages[-2:] if self._terminal else ():
            with TerminalReply() as reply:
                if message.role == "user":
                    reply.thought(f"› {message.content}")
                else:
                    reply.write(message.content)


def _as_ours(error: Exception) -> BoughError:
    """Return an error with a hint that fits a chat."""
    if isinstance(error, PromptTooLong):
        hint = "/undo, /clear, or a larger --max-ctx" if error.raisable else "/undo or /clear"
        return PromptTooLong(
            error.tokens, error.limit, hint, raisable=error.raisable, at_least=error.at_least
        )
    if isinstance(error, BoughError):
        return error
    return BoughError(f"the model failed: {error}", "/save keeps the conversation")
