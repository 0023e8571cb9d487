"""`treeflash chat`: connects to a server or loads a model, and starts the conversation."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treeflash.cli import speculation, view
from treeflash.cli.loading import choose, engine_config
from treeflash.cli.loading import load as load_session
from treeflash.cli.options import (
    MODEL_HELP,
    EngineOptions,
    KVCacheOptions,
    Quiet,
    Seed,
    SpeculationOptions,
    System,
    Think,
    check_remote,
    grouped,
    panel,
)
from treeflash.config import EngineConfig, environment
from treeflash.errors import UsageError

if TYPE_CHECKING:
    from treeflash.cli.chat.backend import Backend
    from treeflash.cli.chat.conversation import Conversation, Settings

_server, _prompt, _sampling = panel("Server"), panel("Prompt"), panel("Sampling")

ChatModel = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"{MODEL_HELP}; else DFLASH_TARGET. With --url: the name of a model on the server.",
    ),
]


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    url: Annotated[
        str | None,
        _server(
            "--url",
            metavar="URL",
            help="Talk to an OpenAI-compatible server instead of loading a model: http://127.0.0.1:8000",
        ),
    ] = None
    api_key: Annotated[
        str | None, _server("--api-key", metavar="KEY", help="For --url; else TREEFLASH_API_KEY.")
    ] = None


@dataclass(frozen=True, slots=True)
class ConversationOptions:
    system: System = None
    load: Annotated[
        Path | None, _prompt("--load", metavar="PATH", help="Go on with a conversation that /save wrote.")
    ] = None
    think: Think = None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    n_gen: Annotated[
        int | None,
        _sampling("--n-gen", "-n", min=1, metavar="N", help="Most tokens of a reply. Default: what fits."),
    ] = None
    temperature: Annotated[
        float | None,
        _sampling(
            "--temperature",
            "-t",
            min=0,
            max=100,
            metavar="X",
            help="0 takes the likeliest token each time. Default: as recommended for the model.",
        ),
    ] = None
    seed: Seed = None
    settings: Annotated[
        list[str] | None,
        _sampling(
            "--set",
            metavar="NAME=VALUE",
            help="What /set sets: top_p, top_k, min_p, penalties, stop; may be given several times.",
        ),
    ] = None


@grouped
def chat(
    *,
    model: ChatModel = None,
    remote: RemoteOptions,
    beginning: ConversationOptions,
    sampling: SamplingOptions,
    speculating: SpeculationOptions,
    engine: EngineOptions,
    cache: KVCacheOptions,
    quiet: Quiet = False,
) -> None:
    """Talk with a model.

    `/help` inside lists the commands; docs/chat.md describes them. Without a terminal each line of
    standard input is a message or a command.

    treeflash chat qwen3.6-27b

    treeflash chat --url http://127.0.0.1:8000
    """
    from treeflash.cli.chat.loop import Chat

    speculation.check(speculating)
    conversation, settings = _begin(beginning, sampling)
    screen = view.Screen(quiet=quiet)
    config = engine.config(cache)
    if remote.url is not None:
        check_remote(engine, cache)
        speculation.check_remote(speculating)
        backend = _server_backend(remote.url, remote.api_key, model, screen)
    else:
        backend = _local_backend(
            model or None, speculating, config, think=beginning.think, offline=engine.offline, screen=screen
        )
    backend.check(settings)
    code = Chat(backend, conversation, settings, screen=screen, quiet=quiet, path=beginning.load).run()
    if code:
        raise typer.Exit(code)


def _begin(options: ConversationOptions, sampling: SamplingOptions) -> "tuple[Conversation, Settings]":
    """Return a new or loaded conversation and its settings, changed by what the command line says."""
    from treeflash.cli.chat.conversation import Conversation, Settings
    from treeflash.cli.chat.conversation import load as read

    conversation, settings = (Conversation(), Settings()) if options.load is None else read(options.load)
    conversation.system = options.system if options.system is not None else conversation.system
    settings.thinking = options.think if options.think is not None else settings.thinking
    given = {"max_tokens": sampling.n_gen, "temperature": sampling.temperature, "seed": sampling.seed}
    settings.values |= {name: value for name, value in given.items() if value is not None}
    for each in sampling.settings or ():
        name, equals, value = each.partition("=")
        if not equals:
            raise UsageError(f"--set is {each!r}; needs NAME=VALUE, as in top_p=0.9")
        settings.set(name, value)
    return conversation, settings


def _server_backend(url: str, key: str | None, model: str | None, screen: view.Screen) -> "Backend":
    from treeflash.cli.chat.remote import RemoteBackend

    with screen.waiting(f"Connecting to {url}"):
        return RemoteBackend.connect(url, key=key or environment().api_key, model=model)


def _local_backend(
    model: str | None,
    options: SpeculationOptions,
    config: EngineConfig,
    *,
    think: bool | None,
    offline: bool,
    screen: view.Screen,
) -> "Backend":
    from treeflash.cli.chat.backend import LocalBackend

    target, proposing = choose(model, options, think=think, offline=offline, screen=screen)
    session = load_session(target.path, engine_config(config, proposing), screen)
    if proposing.note:
        screen.note(proposing.note)
    return LocalBackend(
        session,
        name=target.card.title if target.card else target.path.stem,
        speculating=proposing.config is not None,
        drafted=proposing.draft is not None,
    )
