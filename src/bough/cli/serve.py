"""`bough serve` and `bough stop`: the server, in the foreground or the background."""

import contextlib
import dataclasses
import importlib.util
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bough.cli import daemon, speculation, view
from bough.cli.flags import with_flags
from bough.cli.interrupt import held
from bough.cli.loading import Choice, LoadingBar, choose, describe, summary
from bough.cli.options import (
    EngineOptions,
    Models,
    Only,
    Parallel,
    Quiet,
    SpeculationOptions,
    grouped,
    option,
    panel,
    shared,
)
from bough.cli.sampling import SamplingOptions
from bough.cli.values import byte_count, size
from bough.config import SAMPLING, Replicas, ServerConfig, environment, set_ray_environment
from bough.errors import UsageError
from bough.server.listen import bind, check

if TYPE_CHECKING:
    from bough.models.weights import Progress as LoadProgress
    from bough.server.models import ServedModel
    from bough.session.session import Session

DEFAULTS = ServerConfig()

_server, _answers, _background = panel("Server"), panel("Answers"), panel("Start")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    host: str = _server(
        "Where to listen; beyond this machine a key is needed.", "ADDRESS", default=DEFAULTS.host
    )
    port: int = _server("0 takes any that is free.", "0..65535", default=DEFAULTS.port)
    api_key: list[str] | None = _server(
        "Needed for every route but /health; may be given several times; else BOUGH_API_KEY. "
        "Other users of this machine can see command lines: prefer a file.",
        "KEY",
    )
    api_key_file: Path | None = _server("A file with a key in each line.", "PATH")
    cors_origin: list[str] | None = _server(
        "Pages of this origin may use the server, beside those of this machine: "
        "https://example.org; may be given several times; * means all.",
        "ORIGIN",
    )
    models_max: int = _server(
        "Most models in memory at once; a request for another one unloads the least recently used.",
        "N 1..64",
        default=DEFAULTS.models_max,
    )
    strict_model: bool = _server(
        "Answer 404 to requests that name another model; else the one used last answers them.", default=False
    )
    parallel: Parallel = None
    max_queue: int = _server(
        "Most requests that wait; more get 429.", "N 1..10000", default=DEFAULTS.max_queue
    )
    max_body: int = _server(
        "Largest request: 33554432, 32m.", "BYTES", default=DEFAULTS.max_body, parser=byte_count
    )
    image_urls: bool = _server(
        "Fetch images that requests name by URL, from addresses of the public internet; else they send the "
        "images themselves.",
        default=False,
    )
    served_model_name: str | None = _server(
        "What the model is called, if it is one. Default: its short name or file.", "NAME"
    )
    replicas: str | None = _server(
        "Copies of the model, each on a GPU of its own or with its share of the CPU: 2, or the "
        "least and the most: 1-4. Needs Ray: pip install 'bough[ray]'.",
        "N",
    )
    ray_address: str | None = _server(
        "With --replicas: a Ray cluster that runs already, host:port or auto. Default: start one.", "ADDRESS"
    )
    think: bool | None = _answers(
        "Reason before answering, for requests that do not say; else as the model's template decides.",
        "--think/--no-think",
        show_default=False,
    )
    think_budget: int | None = _answers(
        "Most tokens of reasoning, for requests that do not say: 2048, 2k. Default: no limit.",
        "TOKENS",
        parser=size,
    )

    def config(self, model_name: str, sampling: SamplingOptions) -> ServerConfig:
        return ServerConfig(
            **shared(self, ServerConfig),
            api_keys=self._keys(),
            model_name=model_name,
            cors_origins=tuple(self.cors_origin or ()),
            thinking=self.think,
            thinking_budget=self.think_budget,
            sampling=sampling.given(),
            max_tokens=sampling.limit,
        )

    def _keys(self) -> tuple[str, ...]:
        keys = [key.strip() for key in self.api_key or ()]
        if (file := self.api_key_file) is not None:
            try:
                keys += [
                    line.strip()
                    for line in file.read_text(encoding="utf-8").splitlines()
                    if line.strip() and not line.startswith("#")
                ]
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"--api-key-file {file} cannot be read: {error}") from error
            if not keys:
                raise UsageError(f"--api-key-file {file} has no key in it, needed one in a line")
        if "" in keys:
            raise UsageError("--api-key is empty, needed a key")
        default = environment().api_key
        return tuple(keys) or ((default,) if default else ())


@dataclass(frozen=True, slots=True)
class StartOptions:
    in_background: bool = _background(
        "Go on in the background once the model is loaded; `bough stop`.", "--daemon", default=False
    )
    log_file: Path | None = _background("With --daemon: where the log goes. Default: shown.", "PATH")
    print_config: bool = _background("Print what the server would be started with, as JSON.", default=False)


# For requests that do not say.
ServedSamplingOptions = Annotated[SamplingOptions, Only(("n_gen", "greedy", *SAMPLING))]


@grouped
def serve(
    *,
    model: Models = None,
    server: ServerOptions,
    sampling: ServedSamplingOptions,
    speculating: SpeculationOptions,
    engine: EngineOptions,
    start: StartOptions,
    quiet: Quiet = False,
) -> None:
    """Answer requests of OpenAI's and Anthropic's protocols, and show a page for the browser.

    Several requests are answered at once, as many as fit; others wait in the order they came. Of several
    models the first is loaded at once, another one when a request names it. docs/server.md has the routes.

    bough serve qwen3.6-27b

    bough serve model.gguf --port 8080 --daemon

    bough serve qwen3.6-27b model.gguf --models-max 2
    """
    speculation.check(speculating)
    if start.log_file is not None and not start.in_background:
        raise UsageError("--log-file needs --daemon", "in the foreground: 2> FILE")
    replicas = _replicas(server)
    screen = view.Screen(quiet=quiet)
    sampling.check(screen)
    _check_several(model, server, speculating)
    choices: dict[str, Choice] = {}  # by what requests call them
    for argument in model or [None]:
        choice = choose(argument, speculating, engine, screen, think=server.think)
        settings = dataclasses.replace(choice.engine, parallel=server.parallel)
        name = server.served_model_name or _name(choice, choices)
        choices[name] = dataclasses.replace(choice, engine=settings)
    first, *_ = choices.values()
    config = server.config(next(iter(choices)), sampling)
    check(config)
    _warn_of_readable_keys(server.api_key_file, screen)
    if start.print_config:
        return view.print_json(_as_json(choices, config, replicas))
    if replicas is not None and importlib.util.find_spec("ray") is None:
        raise UsageError("--replicas needs Ray, which is not installed", "pip install 'bough[ray]'")
    if start.in_background:
        return daemon.start(config, log_file=start.log_file, screen=screen)
    logging.getLogger("bough").setLevel(logging.WARNING if quiet else logging.INFO)
    if replicas is not None:
        return _run_replicas(first, config, replicas, server.ray_address, screen)
    _run(choices, config, screen)


@grouped
def stop(
    *, port: int | None = option("Of the server; needed where several run.", show_default=False)
) -> None:
    """Stop a server that runs in the background; requests in progress get half a minute to finish."""
    view.plain(daemon.stop(port))


def _replicas(server: ServerOptions) -> Replicas | None:
    if server.replicas is None and server.ray_address is not None:
        raise UsageError("--ray-address needs --replicas", "--replicas 2")
    return None if server.replicas is None else Replicas.parse(server.replicas)


def _warn_of_readable_keys(file: Path | None, screen: view.Screen) -> None:
    # Other systems than POSIX have no such bits.
    if file is not None and os.name == "posix" and file.stat().st_mode & stat.S_IROTH:
        screen.warning(f"every user of this machine can read the keys in {file}", f"chmod 600 {file}")


def _check_several(models: list[str] | None, server: ServerOptions, speculating: SpeculationOptions) -> None:
    """Refuse what is of one model where several are given."""
    if len(models or ()) < 2:
        return
    if server.served_model_name is not None:
        raise UsageError("--served-model-name is for one model, there are several")
    if server.replicas is not None:
        raise UsageError("--replicas is for one model, there are several", "one server for each")
    draft = speculating.draft or environment().draft
    if draft not in (None, *speculation.NO_NAMES):
        raise UsageError(
            f"--draft {draft} is for one model, there are several",
            "put each draft beside its model, as draft.gguf",
        )


def _name(choice: Choice, others: Mapping[str, Choice]) -> str:
    """Return what requests call a model: its short name, else its file, else what was given."""
    target = choice.target
    if target.path in [other.target.path for other in others.values()]:
        raise UsageError(f"{choice.given} is given twice, needed different models")
    names = [target.card.name if target.card else None, target.path.stem, choice.given]
    return next(name for name in names if name and name not in others)


def _as_json(
    choices: Mapping[str, Choice], config: ServerConfig, replicas: Replicas | None
) -> Mapping[str, Any]:
    server = dataclasses.asdict(config) | {"api_keys": len(config.api_keys)}
    first, *_ = choices.values()
    target, engine = first.target, first.engine
    models = {name: str(choice.target.path) for name, choice in choices.items()}
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in dataclasses.asdict(engine).items()
    }
    scorer = engine.compress.scorer
    settings["compress"] = dataclasses.asdict(engine.compress) | {
        "scorer": str(scorer) if scorer else "words"
    }
    if engine.draft is not None:
        paths = {"path": str(engine.draft.path), "head": engine.draft.head and str(engine.draft.head)}
        settings["draft"] = dataclasses.asdict(engine.draft) | paths
    number = {} if replicas is None else {"replicas": dataclasses.asdict(replicas)}
    return {"model": str(target.path), "models": models, "server": server, "engine": settings, **number}


class LogFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return with_flags(super().format(record))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _run(choices: Mapping[str, Choice], config: ServerConfig, screen: view.Screen) -> None:
    # The port is taken before loading, which may take minutes.
    listening = bind(config)
    with screen.waiting("Starting PyTorch"), held():
        from bough.server import run as server
    host, port = listening.getsockname()[:2]
    address = daemon.address(host, port)
    _log_to_stderr()
    first, *_ = choices.values()
    bar = LoadingBar(first.target.path.name, screen)

    def ready(session: "Session") -> None:
        bar.stop()
        describe(session, first.target.path, screen)
        if first.note and session.vector_spec is None:
            screen.note(first.note)
        if session.template.is_fallback:
            screen.note("There is no chat template in the file: plain ChatML is used.")
        screen.note(summary(session, first.engine))
        screen.notice(f"{config.model_name} answers at {address}")
        if len(choices) > 1:
            screen.note(f"when a request names it: {', '.join(list(choices)[1:])}")
        screen.note(f"API {address}/v1 · page {address}/ · routes {address}/docs · Ctrl-C ends it")

    with bar:
        served = [_served(name, choice, bar if choice is first else None) for name, choice in choices.items()]
        server.serve(served, config, listening, ready=ready)


def _run_replicas(
    choice: Choice,
    config: ServerConfig,
    replicas: Replicas,
    ray_address: str | None,
    screen: view.Screen,
) -> None:
    if ray_address is None:
        set_ray_environment()
    with screen.waiting("Starting PyTorch"), held():
        from bough.deploy.cluster import run
        from bough.deploy.settings import settings_for
        from bough.deploy.worker import ReplicaWorker
    settings = settings_for(choice.target.path, choice.engine, config, replicas)
    listening = bind(config)
    address = daemon.address(*listening.getsockname()[:2])
    _log_to_stderr()
    waiting = contextlib.ExitStack()

    def ready(worker: ReplicaWorker) -> None:
        waiting.close()
        device = "a GPU" if settings.gpu else f"{settings.engine.threads} CPU threads"
        screen.note(f"context {worker.session.max_ctx:,} tokens · replicas with {device} each, on Ray")
        screen.notice(f"{config.model_name} answers at {address}")
        screen.note(f"API {address}/v1 · page {address}/ · routes {address}/docs · Ctrl-C ends it")

    with waiting:
        waiting.enter_context(screen.waiting("Starting Ray and the first replica"))
        run(settings, listening, address=ray_address, ready=ready)


def _served(name: str, choice: Choice, bar: LoadingBar | None = None) -> "ServedModel":
    """Return a model for the server; `bar` shows its loading the first time."""
    from bough.server.facts import model_facts
    from bough.server.models import ServedModel
    from bough.session.loading import load_session

    path = choice.target.path

    def load(progress: "LoadProgress") -> "Session":
        def reading(done: int, total: int) -> None:
            progress(done, total)
            if bar is not None:
                bar.reading(done, total)

        compiling, warming = (bar.compiling, bar.warming) if bar is not None else (None, None)
        return load_session(path, choice.engine, progress=reading, compiling=compiling, warming=warming)

    return ServedModel(
        name,
        load,
        lambda session: model_facts(session, path, choice.engine),
        frozenset(filter(None, (choice.given, path.name, path.stem))),
        path.stat().st_size,
        path,
    )
