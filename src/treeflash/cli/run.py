"""`treeflash run`: one prompt in, one answer out."""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treeflash.cli import report, speculation, view
from treeflash.cli.command import INTERRUPTED
from treeflash.cli.interrupt import Interrupt, held
from treeflash.cli.loading import choose, engine_config, load
from treeflash.cli.options import (
    HARDWARE,
    AsJson,
    EngineOptions,
    KVCacheOptions,
    Model,
    Only,
    Quiet,
    Seed,
    SpeculationOptions,
    System,
    Think,
    grouped,
    panel,
)
from treeflash.cli.speculation import Chosen, Speculation
from treeflash.cli.values import bias, unescape
from treeflash.errors import UsageError

if TYPE_CHECKING:
    from treeflash.session.session import Finished, Session, TextRequest

_prompt, _sampling, _output = panel("Prompt"), panel("Sampling"), panel("Output")

# Options that are fields of SamplingParams under the same name.
FILTERS_AND_PENALTIES = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


@dataclass(frozen=True, slots=True)
class PromptOptions:
    text: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The same as --prompt.", show_default=False)
    ] = None
    prompt: Annotated[
        str | None,
        _prompt(
            "--prompt",
            "-p",
            help="What to answer. Standard input, unless it is a terminal, is added to it: "
            "in a loop that reads a file, write `</dev/null` after the command.",
        ),
    ] = None
    system: System = None
    raw: Annotated[
        bool, _prompt("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False
    think: Think = None

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if self.raw and (self.system is not None or self.think is not None):
            flag = "--system" if self.system is not None else "--think and --no-think"
            raise UsageError(
                f"{flag} and --raw exclude each other: without a chat template there are no roles"
            )
        if self.text is not None and self.prompt is not None:
            raise UsageError("a prompt was given both after the model and with --prompt, needed once")


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Values that are not given are those recommended for the model, with `greedy` SamplingParams's own."""

    n_gen: Annotated[
        int | None,
        _sampling(
            "--n-gen",
            "-n",
            min=1,
            metavar="N",
            help="Most tokens to write, reasoning included. Default: what fits in the context.",
        ),
    ] = None
    greedy: Annotated[
        bool,
        _sampling(
            "--greedy",
            help="Take the likeliest token each time: temperature 0 and no penalties. "
            "Default: the sampling recommended for the model (`treeflash show`).",
        ),
    ] = False
    temperature: Annotated[
        float | None,
        _sampling(
            "--temperature",
            "-t",
            min=0,
            max=100,
            metavar="X",
            help="0 takes the likeliest token each time. Default, here and below: as recommended.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        _sampling(
            "--top-p", min=0, max=1, metavar="X", help="Sample from the likeliest tokens that add up to this."
        ),
    ] = None
    top_k: Annotated[
        int | None, _sampling("--top-k", min=0, metavar="N", help="Sample from this many tokens; 0: all.")
    ] = None
    min_p: Annotated[
        float | None,
        _sampling(
            "--min-p", min=0, max=1, metavar="X", help="Leave out tokens below this share of the likeliest."
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _sampling(
            "--repetition-penalty",
            min=0.01,
            max=100,
            metavar="X",
            help="Above 1: tokens of the prompt and the answer become less likely.",
        ),
    ] = None
    presence_penalty: Annotated[
        float | None,
        _sampling(
            "--presence-penalty",
            min=-100,
            max=100,
            metavar="X",
            help="Subtracted from the logits of the answer's tokens.",
        ),
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _sampling(
            "--frequency-penalty",
            min=-100,
            max=100,
            metavar="X",
            help="The same for each time that they occur in it.",
        ),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        _sampling(
            "--logit-bias",
            metavar="ID=VALUE",
            help="Added to a token's logit, -inf bans it; may be given several times.",
        ),
    ] = None
    seed: Seed = None
    stop: Annotated[
        list[str] | None,
        _sampling("--stop", help=r"End before this text; may be given several times; \n is a new line."),
    ] = None

    def check(self) -> None:
        """Refuse values that typer cannot refuse."""
        if self.top_p == 0:
            raise UsageError(
                "--top-p is 0, needed above 0 and at most 1", "--temperature 0 takes the likeliest token"
            )
        bias(self.logit_bias or [])

    def given(self) -> dict[str, Any]:
        """Return the sampling parameters that were given, by name."""
        values = {name: getattr(self, name) for name in FILTERS_AND_PENALTIES}
        values |= {"seed": self.seed, "logit_bias": bias(self.logit_bias or []) or None}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class OutputOptions:
    as_json: AsJson = False
    logprobs: Annotated[
        int | None,
        _output(
            "--logprobs",
            min=0,
            max=100,
            metavar="N",
            help="With --json: each token's log probability and those of the N likeliest.",
        ),
    ] = None
    quiet: Quiet = False

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if self.logprobs is not None and not self.as_json:
            raise UsageError("--logprobs needs --json, which shows them")


# Within one prompt nothing repeats, so the prefix cache needs no memory unless there is a folder.
RunEngineOptions = Annotated[
    EngineOptions,
    Only(("max_ctx", "prefix_cache_dir", "prefix_cache_dir_size", *HARDWARE)),
]


@grouped
def run(
    *,
    model: Model = None,
    prompt: PromptOptions,
    sampling: SamplingOptions,
    speculating: SpeculationOptions,
    engine: RunEngineOptions,
    cache: KVCacheOptions,
    output: OutputOptions,
) -> None:
    """Answer one prompt.

    The answer goes to standard output and everything else to standard error, so that it can be piped;
    reasoning is shown on a terminal only. The text is that of `--no-draft`, to the bit.

    treeflash run qwen3.6-27b "Why is the sky blue?"

    git diff | treeflash run model.gguf -p "Write a commit message for this."
    """
    speculation.check(speculating)
    for options in (sampling, prompt, output):
        options.check()
    screen = view.Screen(quiet=output.quiet, notes=not output.as_json)
    text = _read_prompt(prompt, screen)
    target, proposing = choose(model, speculating, think=prompt.think, offline=engine.offline, screen=screen)
    _check_sampling(sampling, screen)
    engine = replace(engine, prefix_cache=None if engine.prefix_cache_dir else 0)
    session = load(target.path, engine_config(engine.config(cache), proposing), screen)
    if session.template.is_fallback and not prompt.raw:
        screen.note("There is no chat template in the file: plain ChatML is used. --raw leaves it out.")
    answer = view.Answer(shown=not output.as_json)
    interrupt = Interrupt()
    request = _request(
        session, text, prompt, sampling, logprobs=output.logprobs, cancelled=lambda: interrupt.requested
    )
    with interrupt:
        finished = _generate(session, request, answer, screen)
    answer.end()
    if output.as_json:
        _print_json(answer, finished, session, target, proposing)
    else:
        line = report.line(
            finished,
            plain=proposing.config is None,
            drafted=proposing.draft is not None,
            sampled=request.sampling.temperature > 0,
            interrupted=interrupt.requested,
        )
        spent = report.spent_on_reasoning(
            finished,
            answer.text,
            limit=sampling.n_gen,
            switch=session.template.supports_thinking,
            raisable=session.engine.max_ctx_raisable,
        )
        _print_statistics(line, finished, proposing, screen, spent=spent)
    if interrupt.requested:
        raise typer.Exit(INTERRUPTED)


def _read_prompt(options: PromptOptions, screen: view.Screen) -> str:
    """Return the prompt from the command line, from standard input, or the one followed by the other."""
    given = options.text if options.text is not None else options.prompt
    piped = ""
    if sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty():
        with screen.waiting("Reading standard input"):
            try:
                piped = sys.stdin.buffer.read().decode(errors="replace")
            except OSError as error:
                raise UsageError(
                    f"standard input cannot be read: {error.strerror}", "</dev/null gives it nothing"
                ) from error
    if not options.raw:
        piped = piped.strip("\n")
    texts = [text for text in (given, piped) if text]
    if not any(text.strip() for text in texts):
        raise UsageError(
            "there is no prompt" if given is None else "the prompt is empty",
            "treeflash run MODEL TEXT, or --prompt TEXT, or text on standard input",
        )
    return "\n\n".join(texts)


def _check_sampling(sampling: SamplingOptions, screen: view.Screen) -> None:
    """Refuse values before the model is loaded, which may take minutes; imports torch."""
    with screen.waiting("Starting PyTorch"), held():
        from treeflash.engine.sampler import SamplingParams
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
    from treeflash.engine.sampler import SamplingParams
    from treeflash.session.session import TextRequest

    base = SamplingParams() if sampling.greedy else session.sampling_for(prompt.think)
    system = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    return TextRequest(
        messages=None if prompt.raw else [*system, {"role": "user", "content": text}],
        prompt=text if prompt.raw else None,
        max_tokens=sampling.n_gen,
        sampling=replace(base, **sampling.given(), logprobs=logprobs),
        stop=[unescape(each) for each in sampling.stop or ()],
        thinking=prompt.think,
        cancelled=cancelled,
    )


def _generate(
    session: "Session", request: "TextRequest", answer: view.Answer, screen: view.Screen
) -> "Finished | None":
    """Stream the answer; return None where it had to be stopped by force."""
    from treeflash.session.requests import Finished, Progress, Reasoning, Text

    finished = None
    with screen.reading("Reading the prompt") as bar, contextlib.suppress(KeyboardInterrupt):
        for event in session.generate(request):
            match event:
                case Progress(done, total):
                    bar.update(done, total)
                case Reasoning(piece):
                    bar.stop()
                    answer.think(piece)
                case Text(piece):
                    bar.stop()
                    answer.write(piece)
                case Finished():
                    finished = event
    return finished


def _print_json(
    answer: view.Answer,
    finished: "Finished | None",
    session: "Session",
    target: Chosen,
    proposing: Speculation,
) -> None:
    from treeflash.memory.planner import format_names

    paths = {"model": target.path, "draft": proposing.draft.path if proposing.draft else None}
    formats = format_names(session.plan.kv)
    texts = {"text": answer.text, "reasoning": answer.reasoning}
    view.print_json(report.result(texts, finished, paths, session.tokenizer, kv=formats))


def _print_statistics(
    line: str, finished: "Finished | None", proposing: Speculation, screen: view.Screen, *, spent: str
) -> None:
    screen.statistics(line)
    if spent:
        screen.notice(spent[0].upper() + spent[1:])
    for note in finished.stats.notes if finished else ():
        screen.notice(note)
    if proposing.note:
        screen.note(proposing.note)
