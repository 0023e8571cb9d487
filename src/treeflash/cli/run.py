"""`treeflash run`: one prompt in, one answer out."""

import contextlib
import sys
from typing import TYPE_CHECKING

import typer

from treeflash.cli import cache_flags, report, view
from treeflash.cli import run_flags as flags
from treeflash.cli.command import INTERRUPTED
from treeflash.cli.interrupt import Interrupt, held
from treeflash.cli.loading import costs_file, find, load
from treeflash.cli.options import bias, unescape
from treeflash.cli.speculation import Wishes, decide
from treeflash.config import EngineConfig, environment
from treeflash.errors import PromptTooLong, UsageError

if TYPE_CHECKING:
    from treeflash.session.session import Finished, Session, TextRequest

ENGINE = EngineConfig()


def run(
    model: flags.Model = None,
    text: flags.PromptArgument = None,
    prompt: flags.Prompt = None,
    system: flags.System = None,
    raw: flags.Raw = False,
    think: flags.Think = None,
    n_gen: flags.MaxTokens = 256,
    temperature: flags.Temperature = 0.0,
    top_p: flags.TopP = 1.0,
    top_k: flags.TopK = 0,
    min_p: flags.MinP = 0.0,
    repetition_penalty: flags.RepetitionPenalty = 1.0,
    presence_penalty: flags.PresencePenalty = 0.0,
    frequency_penalty: flags.FrequencyPenalty = 0.0,
    logit_bias: flags.LogitBias = None,
    seed: flags.Seed = None,
    stop: flags.Stop = None,
    draft: flags.Draft = None,
    draft_quant: flags.DraftQuantisation = flags.DraftQuant.auto,
    draft_ctx: flags.DraftContext = None,
    draft_causal: flags.DraftCausal = None,
    budget: flags.Budget = None,
    chain: flags.Chain = False,
    no_draft: flags.NoDraft = False,
    max_ctx: flags.MaxContext = None,
    prefix_cache_dir: flags.PrefixCacheDir = None,
    prefix_cache_dir_size: flags.PrefixCacheDirSize = ENGINE.prefix_cache_dir_size,
    kv: cache_flags.KV = cache_flags.KeyValues.auto,
    kv_k: cache_flags.Keys = None,
    kv_v: cache_flags.Values = None,
    window: cache_flags.Window = None,
    vram_limit: flags.VramLimit = None,
    device: flags.Where = "auto",
    offline: flags.Offline = False,
    as_json: flags.AsJson = False,
    logprobs: flags.Logprobs = None,
    quiet: flags.Quiet = False,
) -> None:
    """Answer one prompt.

    The answer goes to standard output and everything else to standard error, so that it can be piped.
    Whatever proposes tokens, the text is the same: `--no-draft` only makes it come slower.

    treeflash run qwen3.6-27b "Why is the sky blue?"

    git diff | treeflash run model.gguf -p "Write a commit message for this."
    """
    settings = environment()
    wishes = Wishes(
        draft=draft,
        no_draft=no_draft,
        chain=chain,
        budget=budget,
        quant=draft_quant,
        context=draft_ctx,
        causal=draft_causal,
        default_draft=settings.draft,
    )
    wishes.check()
    _check(text, prompt, system=system, raw=raw, think=think, top_p=top_p)
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs needs --json, which shows them")
    biases = bias(logit_bias or [])
    screen = view.Screen(quiet=quiet, notes=not as_json)
    asked = _prompt(text if text is not None else prompt, raw=raw, screen=screen)
    offline = offline or settings.offline
    target = find(
        model if model is not None else settings.target, think=think, offline=offline, screen=screen
    )
    speculation = decide(wishes, target, offline=offline, screen=screen)
    with screen.waiting("Starting PyTorch"), held():
        from treeflash.engine.sampler import SamplingParams
        from treeflash.memory.planner import format_names
        from treeflash.session.session import TextRequest
    messages = None
    if not raw:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": asked})
    interrupt = Interrupt()
    request = TextRequest(
        messages=messages,
        prompt=asked if raw else None,
        max_tokens=n_gen,
        sampling=SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=biases,
            logprobs=logprobs,
            seed=seed,
        ),
        stop=[unescape(each) for each in stop or ()],
        thinking=think,
        cancelled=lambda: interrupt.requested,
    )
    config = EngineConfig(
        device=device,
        max_ctx=max_ctx,
        vram_limit=vram_limit,
        speculation=speculation.config,
        draft=speculation.draft,
        costs=costs_file(),
        # Within one prompt nothing repeats.
        prefix_cache=None if prefix_cache_dir else 0,
        prefix_cache_dir=prefix_cache_dir,
        prefix_cache_dir_size=prefix_cache_dir_size,
        **cache_flags.cache(kv, kv_k, kv_v, window),
    )
    session = load(target.path, config, screen)
    if session.template.is_fallback and not raw:
        screen.note("There is no chat template in the file: plain ChatML is used. --raw leaves it out.")
    answer = view.Answer(shown=not as_json)
    with interrupt:
        finished = _generate(session, request, answer, screen)
    answer.end()
    if as_json:
        paths = {"model": target.path, "draft": speculation.draft.path if speculation.draft else None}
        kept = format_names(session.plan.kv)
        view.print_json(report.result(answer.text, finished, paths, session.tokenizer, kv=kept))
    else:
        screen.statistics(
            report.line(
                finished,
                plain=speculation.config is None,
                drafted=speculation.draft is not None,
                sampled=temperature > 0,
                interrupted=interrupt.requested,
            )
        )
        for note in finished.stats.notes if finished else ():
            screen.notice(note)
        if speculation.note:
            screen.note(speculation.note)
    if interrupt.requested:
        raise typer.Exit(INTERRUPTED)


def _check(
    text: str | None,
    prompt: str | None,
    *,
    system: str | None,
    raw: bool,
    think: bool | None,
    top_p: float,
) -> None:
    if top_p == 0:
        raise UsageError(
            "--top-p is 0, needed above 0 and at most 1", "--temperature 0 takes the likeliest token"
        )
    if raw and (system is not None or think is not None):
        flag = "--system" if system is not None else "--think and --no-think"
        raise UsageError(f"{flag} and --raw exclude each other: without a chat template there are no roles")
    if text is not None and prompt is not None:
        raise UsageError("a prompt was given both behind the model and with --prompt, needed once")


def _prompt(given: str | None, *, raw: bool, screen: view.Screen) -> str:
    """The prompt from the command line, from standard input, or the one followed by the other."""
    piped = ""
    if sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty():
        with screen.waiting("Reading standard input"):
            try:
                piped = sys.stdin.buffer.read().decode(errors="replace")
            except OSError as error:
                raise UsageError(
                    f"standard input cannot be read: {error.strerror}", "</dev/null gives it nothing"
                ) from error
    if not raw:
        piped = piped.strip("\n")
    parts = [part for part in (given, piped) if part]
    if not any(part.strip() for part in parts):
        raise UsageError(
            "there is no prompt" if given is None else "the prompt is empty",
            "treeflash run MODEL TEXT, or --prompt TEXT, or text on standard input",
        )
    return "\n\n".join(parts)


def _generate(
    session: "Session", request: "TextRequest", answer: view.Answer, screen: view.Screen
) -> "Finished | None":
    """Shows the answer as it comes; None where it had to be stopped by force."""
    from treeflash.session.requests import Finished, Progress, Reasoning, Text

    finished, thinking = None, False
    try:
        with screen.reading("Reading the prompt") as bar, contextlib.suppress(KeyboardInterrupt):
            for event in session.generate(request):
                match event:
                    case Progress(done, total):
                        bar.update(done, total)
                    case Reasoning(piece):
                        bar.stop()
                        answer.write(piece)
                        thinking = True
                    case Text(piece):
                        bar.stop()
                        answer.write(f"\n\n{piece}" if thinking else piece)
                        thinking = False
                    case Finished():
                        finished = event
    except PromptTooLong as error:
        if error.limit < session.engine.target.spec.context_length:
            raise
        raise PromptTooLong(
            error.tokens, error.limit, "shorten the prompt: the model was made for no more tokens"
        ) from None
    return finished
