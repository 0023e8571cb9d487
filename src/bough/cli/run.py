"""`bough run`: one prompt in, one answer out; on a terminal without a prompt, a chat."""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bough.cli import report, speculation, view
from bough.cli.chat.command import ConversationOptions, converse, local_models
from bough.cli.command import INTERRUPTED
from bough.cli.interrupt import Interrupt, held
from bough.cli.loading import Choice, choose, load
from bough.cli.options import (
    COMPRESS,
    HARDWARE,
    IMAGES,
    KV_CACHE,
    REASONING,
    AsJson,
    EngineOptions,
    Model,
    Only,
    Quiet,
    SpeculationOptions,
    System,
    Think,
    argument,
    grouped,
    panel,
)
from bough.cli.sampling import SamplingOptions
from bough.errors import UsageError
from bough.images.opening import ImageFile, ImageLimits, image_size, is_image
from bough.session.collected import GeneratedOutput
from bough.session.events import Finished

if TYPE_CHECKING:
    from bough.session.session import Session, TextRequest

BEGINNING = 64 << 10  # bytes of a file, by which a text is told from other files
CHAT_HINT = "bough chat MODEL, or a terminal, starts a conversation"
_prompt, _output = panel("Prompt"), panel("Output")


@dataclass(frozen=True)
class PromptOptions:
    words: list[str] | None = argument("The same as --prompt.", "PROMPT", show_default=False)
    prompt: str | None = _prompt(
        "What to answer. Standard input, unless it is a terminal, is added to it: "
        "in a loop that reads a file, write `</dev/null` after the command.",
        "-p",
    )
    file: list[Path] | None = _prompt(
        "A text file that follows the prompt, or is all of it; or a picture, which comes before it. "
        "May be given several times.",
        "-f PATH",
    )
    system: System = None
    raw: bool = _prompt("Continue the prompt as it is, without the chat template.", default=False)
    think: Think = None

    def check(self) -> None:
        if self.raw and (self.system is not None or self.think is not None):
            flag = "--system" if self.system is not None else "--think and --no-think"
            raise UsageError(
                f"{flag} and --raw exclude each other: without a chat template there are no roles"
            )
        if self.raw and self.images:
            raise UsageError("a picture and --raw exclude each other: its place is in the chat template")
        if self.words and self.prompt is not None:
            raise UsageError("a prompt was given both after the model and with --prompt, needed once")

    @cached_property
    def files(self) -> list[str | ImageFile]:
        return [_content(path) for path in self.file or ()]

    @property
    def images(self) -> list[ImageFile]:
        return [file for file in self.files if isinstance(file, ImageFile)]

    @property
    def text(self) -> str | None:
        return " ".join(self.words) if self.words else self.prompt

    def apart_from(self, model: str | None) -> "tuple[str | None, PromptOptions]":
        """Return the model and the prompt; a sentence where the model belongs is the prompt."""
        alone = not self.words and self.prompt is None
        if model is None or not alone or not _is_sentence(model):
            return model, self
        return None, replace(self, words=[model])


def _is_sentence(name: str) -> bool:
    """Return whether a text has several words and is no file."""
    if len(name.split()) < 2 or name.lower().endswith(".gguf"):
        return False
    try:
        return not Path(name).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return True


@dataclass(frozen=True, slots=True)
class OutputOptions:
    as_json: AsJson = False
    logprobs: int | None = _output(
        "With --json: each token's log probability and those of the N likeliest.", "N 0..100"
    )
    show_kept: bool = _output(
        "With --compress auto: show the prompt on standard error, with what is left out in grey, "
        "or as [-...-] without colours.",
        default=False,
    )
    quiet: Quiet = False

    def check(self, engine: EngineOptions) -> None:
        if self.logprobs is not None and not self.as_json:
            raise UsageError("--logprobs needs --json, which shows them")
        if self.show_kept and engine.compress == "off":
            raise UsageError("--show-kept needs --compress auto, which leaves something out")


# Within one prompt nothing repeats, so the prefix cache needs no memory unless there is a folder.
_PROMPT_CACHE = ("prefix_cache_dir", "prefix_cache_dir_size")
RunEngineOptions = Annotated[
    EngineOptions,
    Only(("max_ctx", *_PROMPT_CACHE, *IMAGES, *HARDWARE, *REASONING, *COMPRESS, *KV_CACHE)),
]


@grouped
def run(
    *,
    model: Model = None,
    prompt: PromptOptions,
    sampling: SamplingOptions,
    speculating: SpeculationOptions,
    engine: RunEngineOptions,
    output: OutputOptions,
) -> None:
    """Answer one prompt; on a terminal without a prompt, chat.

    The answer goes to standard output and everything else to standard error, so that it can be piped;
    reasoning is shown on a terminal only. The text is that of `--no-draft`, to the bit.

    bough run qwen3.6-27b "Why is the sky blue?"

    git diff | bough run model.gguf -p "Write a commit message for this."
    """
    screen = view.Screen(quiet=output.quiet, notes=not output.as_json)
    speculation.check(speculating)
    sampling.check(screen, system=prompt.system)
    prompt.check()
    output.check(engine)
    model, prompt = prompt.apart_from(model)
    text = _read_prompt(prompt, screen)
    if text is None and _on_terminal() and output == OutputOptions(quiet=output.quiet) and not prompt.raw:
        loader = local_models(speculating, engine, think=prompt.think, screen=screen)
        if sampling.logit_bias:
            raise UsageError("--logit-bias needs a prompt: a chat has no such setting")
        beginning = ConversationOptions(prompt.system, think=prompt.think)
        return converse(loader, model, beginning, sampling, screen=screen)
    if text is None:
        raise UsageError("there is no prompt", f"bough run MODEL TEXT; {CHAT_HINT}")
    engine = replace(engine, prefix_cache=None if engine.prefix_cache_dir else 0)
    choice = choose(model, speculating, engine, screen, think=prompt.think)
    _check_sampling(sampling, screen)
    session = load(choice.target.path, choice.engine, screen)
    if session.template.is_fallback and not prompt.raw:
        screen.note("There is no chat template in the file: plain ChatML is used. --raw leaves it out.")
    interrupt = Interrupt()
    request = _request(
        session, text, prompt, sampling, logprobs=output.logprobs, cancelled=lambda: interrupt.requested
    )
    with interrupt:
        if output.show_kept:
            request = session.prepare(request)
            _show_kept(request)
        answer = _generate(session, request, screen, shown=not output.as_json)
    finished = answer.finished
    if output.as_json:
        _print_json(answer, session, choice)
    else:
        line = report.line(
            finished,
            plain=choice.engine.speculation is None,
            sampled=request.sampling.temperature > 0,
            interrupted=interrupt.requested,
            width=report.WIDTH if sys.stderr.isatty() else None,
        )
        spent = report.spent_on_reasoning(
            finished,
            answer.text,
            limit=sampling.limit,
            switch=session.template.supports_thinking,
            raisable=session.limits.raisable,
        )
        _print_statistics(line, finished, screen, spent=spent, note=choice.note)
    if interrupt.requested:
        raise typer.Exit(INTERRUPTED)


def _show_kept(request: "TextRequest") -> None:
    compressed = request.encoded.compressed if request.encoded is not None else None
    messages = request.messages or [{"role": "prompt", "content": request.prompt}]
    for index, message in enumerate(messages):
        view.kept([(True, f"{message['role']}:")])
        document = compressed.documents.get((index, None)) if compressed is not None else None
        view.kept(document.runs() if document is not None else [(True, str(message["content"]))])


def _on_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _read_prompt(options: PromptOptions, screen: view.Screen) -> str | None:
    """Return the texts of the command line, of a file and of standard input, joined; None: there are none."""
    words, files = options.text, [file for file in options.files if isinstance(file, str)]
    if words is not None and not words.strip() and not options.file:
        raise UsageError("the prompt is empty", "bough run MODEL TEXT")
    piped = _piped(screen)
    if not options.raw:
        piped = piped.strip("\n")
    texts = [text for text in (words, *files, piped) if text]
    return "\n\n".join(texts) if options.images or any(text.strip() for text in texts) else None


def _piped(screen: view.Screen) -> str:
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return ""
    with screen.waiting("Reading standard input"):
        try:
            return sys.stdin.buffer.read().decode(errors="replace")
        except OSError as error:
            raise UsageError(
                f"standard input cannot be read: {error.strerror}", "</dev/null gives it nothing"
            ) from error


def _content(file: Path) -> str | ImageFile:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"--file {file} cannot be read: {error.strerror}") from error
    if is_image(content):
        image_size(content, ImageLimits(), where=f"--file {file}")  # before a model is loaded
        return ImageFile(content, where=f"--file {file}")
    if b"\0" in content[:BEGINNING]:
        raise UsageError(
            f"--file {file} is neither a text nor a picture: there are zero bytes at its beginning"
        )
    return content.decode(errors="replace").replace("\r\n", "\n").strip("\n")


def _check_sampling(sampling: SamplingOptions, screen: view.Screen) -> None:
    """Refuse values before the model is loaded, which may take minutes; imports torch."""
    with screen.waiting("Starting PyTorch"), held():
        from bough.engine.sampler import SamplingParams
    SamplingParams(**sampling.given())


def _request(
    session: "Session",
    text: str,
    prompt: PromptOptions,
    sampling: SamplingOptions,
    *,
    logprobs: int | None,
    cancelled: Callable[[], bool],
) -> "TextRequest":
    from bough.session.requests import CompressOptions as Compressing
    from bough.session.session import TextRequest

    # What is on the command line is asked of the file and of what was piped.
    words = prompt.text
    query = words if words and words != text and session.compresses else ""
    system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    images = [{"type": "image", "image": each} for each in prompt.images]
    content = [*images, {"type": "text", "text": text}] if images else text
    return TextRequest(
        messages=None if prompt.raw else [*system, {"role": "user", "content": content}],
        prompt=text if prompt.raw else None,
        max_tokens=sampling.limit,
        sampling=session.sampling_for(prompt.think, raw=prompt.raw).changed(
            sampling.given() | {"logprobs": logprobs}
        ),
        stop=sampling.stops,
        thinking=prompt.think,
        compress=Compressing(mode="auto", query=query) if query else None,
        cancelled=cancelled,
    )


def _generate(
    session: "Session", request: "TextRequest", screen: view.Screen, *, shown: bool
) -> GeneratedOutput:
    """Stream the answer; it has no end where it had to be stopped by force."""
    output = GeneratedOutput()
    with screen.reading("Reading the prompt") as bar:
        answer = view.ShownAnswer(shown=shown, bar=bar)
        with contextlib.suppress(KeyboardInterrupt):
            for event in session.generate(request):
                output.add(event)
                view.show(event, answer)
    answer.end()
    return output


def _print_json(answer: GeneratedOutput, session: "Session", choice: Choice) -> None:
    from bough.memory.planner import format_names

    draft = choice.engine.draft
    paths = {"model": choice.target.path, "draft": None if draft is None else draft.path}
    formats = format_names(session.plan.kv)
    texts = {"text": answer.text, "reasoning": answer.reasoning}
    view.print_json(report.result(texts, answer.finished, paths, session.tokenizer, kv=formats))


def _print_statistics(
    line: str, finished: Finished | None, screen: view.Screen, *, spent: str, note: str
) -> None:
    screen.statistics(line)
    if spent:
        screen.notice(spent[0].upper() + spent[1:])
    for text in finished.stats.notes if finished else ():
        screen.notice(text)
    if note:
        screen.note(note)
