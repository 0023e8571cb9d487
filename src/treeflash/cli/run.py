"""`treeflash run`: one prompt in, one answer out."""

import contextlib
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treeflash.cli import view
from treeflash.cli.command import INTERRUPTED
from treeflash.cli.default_model import NOTICE, default_model
from treeflash.cli.interrupt import Interrupt
from treeflash.cli.options import size, unescape
from treeflash.config import EngineConfig, environment
from treeflash.errors import UsageError
from treeflash.hub.resolve import resolve

if TYPE_CHECKING:
    from treeflash.engine.session import Finished, Session, TextRequest

PROMPT, SAMPLING, ENGINE, OUTPUT = "Prompt", "Sampling", "Engine", "Output"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def run(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A .gguf file, a folder that holds one, or USER/REPO[:QUANT]; else DFLASH_TARGET.",
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The same as --prompt.", show_default=False)
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            help="What to answer. Standard input, if piped in, is added to it.",
            rich_help_panel=PROMPT,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            "--system", "-s", help="Instructions that come before the prompt.", rich_help_panel=PROMPT
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Continue the prompt as it is, without the chat template.", rich_help_panel=PROMPT
        ),
    ] = False,
    think: Annotated[
        bool | None,
        typer.Option(
            "--think/--no-think",
            help="Reason before answering; else as the model's template decides.",
            show_default=False,
            rich_help_panel=PROMPT,
        ),
    ] = None,
    n_gen: Annotated[
        int,
        typer.Option(
            "--n-gen", "-n", min=1, metavar="N", help="Most tokens to write.", rich_help_panel=SAMPLING
        ),
    ] = 256,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            "-t",
            min=0,
            max=100,
            metavar="X",
            help="0 takes the likeliest token each time.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="X",
            help="Draw from the likeliest tokens that add up to this.",
            rich_help_panel=SAMPLING,
        ),
    ] = 1.0,
    top_k: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Draw from this many tokens; 0: all.", rich_help_panel=SAMPLING
        ),
    ] = 0,
    min_p: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="X",
            help="Leave out tokens below this share of the likeliest.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, help="Same seed, same text. Random and shown when absent.", rich_help_panel=SAMPLING
        ),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help=r"End before this text; may be given several times; \n is a new line.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    max_ctx: Annotated[
        int | None,
        typer.Option(
            parser=size,
            metavar="TOKENS",
            help="Prompt and answer together: 8192, 8k, 1m. Default: as memory allows.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    device: Annotated[Device, typer.Option(help="Where to compute.", rich_help_panel=ENGINE)] = Device.auto,
    offline: Annotated[
        bool, typer.Option("--offline", help="Use only what is on this machine.", rich_help_panel=ENGINE)
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, for errors too.", rich_help_panel=OUTPUT)
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="No progress, notices or statistics.", rich_help_panel=OUTPUT),
    ] = False,
) -> None:
    """Answer one prompt.

    The answer goes to standard output and everything else to standard error, so that it can be piped.

    treeflash run USER/REPO:Q4_K_M "Why is the sky blue?"

    git diff | treeflash run model.gguf -p "Write a commit message for this."
    """
    if top_p == 0:
        raise UsageError(
            "--top-p is 0, needed above 0 and at most 1", "--temperature 0 takes the likeliest token"
        )
    if raw and (system is not None or think is not None):
        flag = "--system" if system is not None else "--think and --no-think"
        raise UsageError(f"{flag} and --raw exclude each other: without a chat template there are no roles")
    if text is not None and prompt is not None:
        raise UsageError("a prompt was given both behind the model and with --prompt, needed once")
    screen = view.Screen(quiet=quiet)
    asked = _prompt(text if text is not None else prompt, raw=raw, screen=screen)
    path = _find(model, offline=offline, screen=screen)
    if think is not None:
        _check_thinking(path)
    with screen.waiting("Starting PyTorch"):
        from treeflash.engine.sampler import SamplingParams
        from treeflash.engine.session import Session, TextRequest
    messages = None
    if not raw:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": asked})
    interrupt = Interrupt()
    request = TextRequest(
        messages=messages,
        prompt=asked if raw else None,
        max_tokens=n_gen,
        sampling=SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
        stop=[unescape(each) for each in stop or ()],
        thinking=think,
        cancelled=lambda: interrupt.requested,
    )
    with screen.loading(f"Loading {path.name}") as bar:
        session = Session.load(path, EngineConfig(device=device.value, max_ctx=max_ctx), progress=bar.update)
    answer = view.Answer(shown=not as_json)
    with interrupt:
        finished = _generate(session, request, answer, screen)
    answer.end()
    if as_json:
        _print_result(answer.text, finished, path)
    else:
        screen.statistics(_statistics(finished, sampled=temperature > 0, interrupted=interrupt.requested))
    if interrupt.requested:
        raise typer.Exit(INTERRUPTED)


def _prompt(given: str | None, *, raw: bool, screen: view.Screen) -> str:
    """The prompt from the command line, from standard input, or the one followed by the other."""
    piped = ""
    if sys.stdin is not None and not sys.stdin.isatty():
        with screen.waiting("Reading standard input"):
            piped = sys.stdin.buffer.read().decode(errors="replace")
    if not raw:
        piped = piped.strip("\n")
    parts = [part for part in (given, piped) if part]
    if not any(part.strip() for part in parts):
        raise UsageError(
            "there is no prompt" if given is None else "the prompt is empty",
            "treeflash run MODEL TEXT, or --prompt TEXT, or text on standard input",
        )
    return "\n\n".join(parts)


def _find(model: str | None, *, offline: bool, screen: view.Screen) -> Path:
    settings = environment()
    name = model or settings.target
    if name is None:
        screen.notice(NOTICE)
        with screen.waiting("Making the model"):
            return default_model()
    with screen.downloading() as bar:
        try:
            return resolve(name, offline=offline or settings.offline, progress=bar)
        except KeyboardInterrupt:
            if bar.began:
                screen.notice(
                    "Interrupted. What was downloaded is kept: the same command goes on from there."
                )
            raise


def _check_thinking(path: Path) -> None:
    """Before the weights are read, which may take minutes."""
    from treeflash.gguf.reader import GGUFFile
    from treeflash.text.template import ChatTemplate

    with GGUFFile.open(path) as file:
        if not ChatTemplate.from_metadata(file.metadata).supports_thinking:
            raise UsageError(
                f"{path.name} has no switch for thinking in its chat template",
                "leave out --think and --no-think",
            )


def _generate(
    session: "Session", request: "TextRequest", answer: view.Answer, screen: view.Screen
) -> "Finished | None":
    """Shows the answer as it comes; None where it had to be stopped by force."""
    from treeflash.engine.engine import Progress
    from treeflash.engine.session import Finished, Text

    finished = None
    with screen.reading("Reading the prompt") as bar, contextlib.suppress(KeyboardInterrupt):
        for event in session.generate(request):
            match event:
                case Progress(done, total):
                    bar.update(done, total)
                case Text(piece):
                    bar.stop()
                    answer.write(piece)
                case Finished():
                    finished = event
    return finished


def _print_result(text: str, finished: "Finished | None", path: Path) -> None:
    view.print_json(
        {
            "text": text,
            "tokens": finished.tokens if finished else None,
            "finish_reason": finished.reason if finished else "cancelled",
            "model": str(path),
            "stats": finished.stats.as_dict() if finished else None,
        }
    )


def _statistics(finished: "Finished | None", *, sampled: bool, interrupted: bool) -> str:
    """The one line below an answer."""
    parts = []
    if finished is not None:
        stats = finished.stats
        parts = [
            f"{stats.generated_tokens} tok",
            f"{stats.decode_tok_s:.1f} tok/s" if stats.decode_tok_s else "",
            f"TTFT {stats.ttft_s:.2f} s" if stats.ttft_s else "",
            f"prompt {stats.prompt_tokens}"
            + (f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""),
            f"accept {stats.acceptance_length:.2f}/step" if stats.steps else "",
            f"seed {stats.seed}" if sampled else "",
            "length limit" if finished.reason == "length" else "",
        ]
    parts.append("interrupted" if interrupted else "")
    return " · ".join(filter(None, parts))
