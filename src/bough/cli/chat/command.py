"""`bough chat`: connects to a server or loads a model, and holds a conversation."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bough.cli import speculation, view
from bough.cli.loading import Choice, choose
from bough.cli.loading import load as load_session
from bough.cli.options import (
    MODEL_HELP,
    EngineOptions,
    ModelName,
    Only,
    Quiet,
    SpeculationOptions,
    System,
    Think,
    check_remote,
    grouped,
    panel,
)
from bough.cli.sampling import SamplingOptions
from bough.config import SAMPLING, environment
from bough.errors import UsageError

if TYPE_CHECKING:
    from bough.cli.chat.backend import Backend, ModelSource
    from bough.cli.chat.conversation import ChatSettings, Conversation

_server, _prompt, _sampling = panel("Server"), panel("Prompt"), panel("Sampling")

ChatModel = Annotated[
    str | None,
    ModelName(help=f"{MODEL_HELP}; else BOUGH_MODEL. With --url: the name of a model on the server."),
]


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    url: str | None = _server(
        "Talk to an OpenAI-compatible server instead of loading a model: http://127.0.0.1:8000", "URL"
    )
    api_key: str | None = _server("For --url; else BOUGH_API_KEY.", "KEY")


@dataclass(frozen=True, slots=True)
class ConversationOptions:
    system: System = None
    load: Path | None = _prompt("Go on with a conversation that /save wrote.", "PATH")
    think: Think = None
    settings: list[str] | None = _sampling(
        "What /set sets, by its name there; may be given several times.", "--set NAME=VALUE"
    )


# What a conversation has a setting for.
_SETTINGS = ("n_gen", "greedy", *SAMPLING, "seed", "stop")
ChatSamplingOptions = Annotated[SamplingOptions, Only(_SETTINGS)]


@grouped
def chat(
    *,
    model: ChatModel = None,
    remote: RemoteOptions,
    beginning: ConversationOptions,
    sampling: ChatSamplingOptions,
    speculating: SpeculationOptions,
    engine: EngineOptions,
    quiet: Quiet = False,
) -> None:
    """Talk with a model.

    `/help` inside lists the commands; docs/chat.md describes them. Without a terminal each line of
    standard input is a message or a command.

    bough chat qwen3.6-27b

    bough chat --url http://127.0.0.1:8000
    """
    screen = view.Screen(quiet=quiet)
    speculation.check(speculating)
    sampling.check(screen, system=beginning.system)
    engine.config()  # refuses what contradicts itself, before anything is fetched
    models: ModelSource
    if remote.url is not None:
        check_remote(engine)
        speculation.check_remote(speculating)
        models = remote_models(remote.url, remote.api_key or environment().api_key, screen)
    else:
        models = local_models(speculating, engine, think=beginning.think, screen=screen)
    converse(models, model or None, beginning, sampling, screen=screen)


def converse(
    models: "ModelSource",
    model: str | None,
    beginning: ConversationOptions,
    sampling: SamplingOptions,
    *,
    screen: view.Screen,
) -> None:
    """Load a model and hold a conversation with it."""
    from bough.cli.chat.loop import Chat

    conversation, settings = _begin(beginning, sampling)
    load = models(model)
    backend = load()
    backend.check(settings)
    chat = Chat(backend, conversation, settings, screen=screen, path=beginning.load)
    chat.models, chat.reload = models, load
    if code := chat.run():
        raise typer.Exit(code)


def _begin(options: ConversationOptions, sampling: SamplingOptions) -> "tuple[Conversation, ChatSettings]":
    """Return a new or loaded conversation and its settings, changed by what the command line says."""
    from bough.cli.chat.conversation import ChatSettings, Conversation
    from bough.cli.chat.conversation import load as read

    conversation, settings = (Conversation(), ChatSettings()) if options.load is None else read(options.load)
    conversation.system = options.system if options.system is not None else conversation.system
    settings.thinking = options.think if options.think is not None else settings.thinking
    settings.values |= sampling.given()
    settings.stop += sampling.stops
    if sampling.limit is not None:
        settings.values["max_tokens"] = sampling.limit
    for setting in options.settings or ():
        name, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set is {setting!r}; needs NAME=VALUE, as in top_p=0.9")
        settings.set(name, value)
    return conversation, settings


def remote_models(url: str, key: str | None, screen: view.Screen) -> "ModelSource":
    def connect(name: str | None) -> "Backend":
        from bough.cli.chat.remote import RemoteBackend
        from bough.session.remote import RemoteSession

        with screen.waiting(f"Connecting to {url}"):
            return RemoteBackend(RemoteSession.connect(url, key=key, model=name))

    return lambda name: partial(connect, name)


def local_models(
    options: SpeculationOptions,
    engine: EngineOptions,
    *,
    think: bool | None,
    screen: view.Screen,
) -> "ModelSource":
    """Return models that are loaded here, all with the same options; one that is not here is fetched."""

    def find(name: str | None) -> "Callable[[], Backend]":
        return partial(load, choose(name, options, engine, screen, think=think))

    def load(choice: Choice) -> "Backend":
        from bough.cli.chat.backend import LocalBackend

        session = load_session(choice.target.path, choice.engine, screen)
        if choice.note:
            screen.note(choice.note)
        card = choice.target.card
        return LocalBackend(session, choice.engine, name=card.title if card else choice.target.path.stem)

    return find
