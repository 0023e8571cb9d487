"""`treeflash serve` and `treeflash stop`: the server, in the foreground or the background."""

import dataclasses
import logging
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treeflash.cli import daemon, speculation, view
from treeflash.cli.flags import with_flags
from treeflash.cli.interrupt import held
from treeflash.cli.loading import LoadingBar, choose, describe, engine_config, summary, with_scorer
from treeflash.cli.options import (
    EngineOptions,
    KVCacheOptions,
    Model,
    Only,
    Parallel,
    Quiet,
    SpeculationOptions,
    grouped,
    panel,
)
from treeflash.cli.sampling import FILTERS_AND_PENALTIES, SamplingOptions
from treeflash.cli.speculation import Chosen, Speculation
from treeflash.cli.values import byte_count, size
from treeflash.config import EngineConfig, ServerConfig, environment
from treeflash.errors import UsageError
from treeflash.server.listen import bind, check

if TYPE_CHECKING:
    from treeflash.session.session import Session
    from treeflash.session.worker import Loader

DEFAULTS = ServerConfig()

_server, _answers, _background = panel("Server"), panel("Answers"), panel("Start")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    host: Annotated[
        str,
        _server("--host", metavar="ADDRESS", help="Where to listen; beyond this machine a key is needed."),
    ] = DEFAULTS.host
    port: Annotated[int, _server("--port", min=0, max=65535, help="0 takes any that is free.")] = (
        DEFAULTS.port
    )
    api_key: Annotated[
        list[str] | None,
        _server(
            "--api-key",
            metavar="KEY",
            help="Needed for every route but /health; may be given several times; else TREEFLASH_API_KEY. "
            "Other users of this machine can see command lines: prefer a file.",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None, _server("--api-key-file", metavar="PATH", help="A file with a key in each line.")
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        _server(
            "--cors-origin",
            metavar="ORIGIN",
            help="Pages of this origin may use the server, beside those of this machine: "
            "https://example.org; may be given several times; * means all.",
        ),
    ] = None
    parallel: Parallel = None
    max_queue: Annotated[
        int,
        _server("--max-queue", min=1, max=10000, metavar="N", help="Most requests that wait; more get 429."),
    ] = DEFAULTS.max_queue
    max_body: Annotated[
        int, _server("--max-body", parser=byte_count, metavar="BYTES", help="Largest request: 33554432, 32m.")
    ] = DEFAULTS.max_body
    served_model_name: Annotated[
        str | None,
        _server(
            "--served-model-name",
            metavar="NAME",
            help="What the model is called; requests may use any name. Default: its short name or file.",
        ),
    ] = None
    think: Annotated[
        bool | None,
        _answers(
            "--think/--no-think",
            help="Reason before answering, for requests that do not say; "
            "else as the model's template decides.",
            show_default=False,
        ),
    ] = None
    think_budget: Annotated[
        int | None,
        _answers(
            "--think-budget",
            parser=size,
            metavar="TOKENS",
            help="Most tokens of reasoning, for requests that do not say: 2048, 2k. Default: no limit.",
        ),
    ] = None

    def config(self, target: Chosen, sampling: SamplingOptions) -> ServerConfig:
        """Return the server's settings."""
        return ServerConfig(
            host=self.host,
            port=self.port,
            api_keys=self._keys(),
            model_name=self.served_model_name or (target.card.name if target.card else target.path.stem),
            cors_origins=tuple(self.cors_origin or ()),
            max_queue=self.max_queue,
            max_body=self.max_body,
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
                    line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()
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
    """How the server is started."""

    in_background: Annotated[
        bool,
        _background("--daemon", help="Go on in the background once the model is loaded; `treeflash stop`."),
    ] = False
    log_file: Annotated[
        Path | None,
        _background("--log-file", metavar="PATH", help="With --daemon: where the log goes. Default: shown."),
    ] = None
    print_config: Annotated[
        bool, _background("--print-config", help="Print what the server would be started with, as JSON.")
    ] = False


# For requests that do not say.
ServedSamplingOptions = Annotated[SamplingOptions, Only(("n_gen", *FILTERS_AND_PENALTIES))]


@grouped
def serve(
    *,
    model: Model = None,
    server: ServerOptions,
    sampling: ServedSamplingOptions,
    speculating: SpeculationOptions,
    engine: EngineOptions,
    cache: KVCacheOptions,
    start: StartOptions,
    quiet: Quiet = False,
) -> None:
    """Answer requests of OpenAI's and Anthropic's protocols, and show a page for the browser.

    Several requests are answered at once, as many as fit; others wait in the order they came. docs/server.md
    has the routes and examples.

    treeflash serve qwen3.6-27b

    treeflash serve model.gguf --port 8080 --daemon
    """
    speculation.check(speculating)
    if start.log_file is not None and not start.in_background:
        raise UsageError("--log-file needs --daemon", "in the foreground: 2> FILE")
    screen = view.Screen(quiet=quiet)
    sampling.check(screen)
    target, proposing = choose(model, speculating, think=server.think, offline=engine.offline, screen=screen)
    config = server.config(target, sampling)
    check(config)
    _warn_of_readable_keys(server.api_key_file, screen)
    settings = with_scorer(engine_config(engine.config(cache), proposing), engine, screen)
    settings = dataclasses.replace(settings, parallel=server.parallel)
    if start.print_config:
        return view.print_json(_as_json(target, config, settings))
    if start.in_background:
        return daemon.start(config, log_file=start.log_file, screen=screen)
    logging.getLogger("treeflash").setLevel(logging.WARNING if quiet else logging.INFO)
    _run(target, config, settings, proposing, screen)


def stop(
    port: Annotated[
        int | None,
        typer.Option("--port", help="Of the server; needed where several run.", show_default=False),
    ] = None,
) -> None:
    """Stop a server that runs in the background; requests in progress get half a minute to finish."""
    view.plain(daemon.stop(port))


def _warn_of_readable_keys(file: Path | None, screen: view.Screen) -> None:
    # Other systems than POSIX have no such bits.
    if file is not None and os.name == "posix" and file.stat().st_mode & stat.S_IROTH:
        screen.warning(f"every user of this machine can read the keys in {file}", f"chmod 600 {file}")


def _as_json(target: Chosen, config: ServerConfig, engine: EngineConfig) -> Mapping[str, Any]:
    server = dataclasses.asdict(config) | {"api_keys": len(config.api_keys)}
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in dataclasses.asdict(engine).items()
    }
    scorer = engine.compress.scorer
    settings["compress"] = dataclasses.asdict(engine.compress) | {
        "scorer": str(scorer) if scorer else "words"
    }
    if engine.draft is not None:
        settings["draft"] = dataclasses.asdict(engine.draft) | {"path": str(engine.draft.path)}
    return {"model": str(target.path), "server": server, "engine": settings}


class LogFormatter(logging.Formatter):
    """Shows the settings in a log line as flags."""

    def format(self, record: logging.LogRecord) -> str:
        return with_flags(super().format(record))


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _run(
    target: Chosen,
    config: ServerConfig,
    engine: EngineConfig,
    proposing: Speculation,
    screen: view.Screen,
) -> None:
    # The port is taken before loading, which may take minutes.
    listening = bind(config)
    with screen.waiting("Starting PyTorch"), held():
        from treeflash.server import run as server
        from treeflash.session.loading import load_session
    host, port = listening.getsockname()[:2]
    address = daemon.address(host, port)
    _log_to_stderr()
    loaded: dict[str, Any] = {}
    bar = LoadingBar(target.path.name, screen)

    def ready() -> None:
        bar.stop()
        session = loaded["session"]
        describe(session, target.path, screen)
        if proposing.note:
            screen.note(proposing.note)
        if session.template.is_fallback:
            screen.note("There is no chat template in the file: plain ChatML is used.")
        drafted, speculating = engine.draft is not None, engine.speculation is not None
        screen.note(summary(session, drafted=drafted, speculating=speculating))
        screen.notice(f"{config.model_name} answers at {address}")
        screen.note(f"API {address}/v1 · page {address}/ · routes {address}/docs · Ctrl-C ends it")

    with bar:
        server.serve(
            _loader(load_session, target, engine, bar, loaded),
            config,
            listening,
            model_name=config.model_name or target.path.stem,
            facts=lambda: _facts(target, engine, loaded),
            ready=ready,
        )


def _loader(
    load_session: Callable[..., "Session"],
    target: Chosen,
    engine: EngineConfig,
    bar: LoadingBar,
    loaded: dict[str, Any],
) -> "Loader":
    def load(progress: Any) -> Any:
        def reading(done: int, total: int) -> None:
            progress(done, total)
            bar.reading(done, total)

        loaded["session"] = load_session(target.path, engine, progress=reading, warming=bar.warming)
        return loaded["session"]

    return load


def _facts(target: Chosen, engine: EngineConfig, loaded: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what /props shows of the loaded model."""
    from treeflash.memory.planner import format_names

    session = loaded["session"]
    model = session.engine.target
    return {
        "file": target.path.name,
        "architecture": model.spec.architecture,
        "context_length": model.spec.context_length,
        "device": str(model.device),
        "weights_bytes": session.plan.weights,
        "kv": format_names(session.plan.kv),
        "parallel": session.parallel,
        "shared_tokens": session.plan.kv_tokens,
        "window": session.engine.states.buffers.window,
        "approximate": session.engine.approximate,
        "draft": engine.draft.path.name if engine.draft else None,
        "budget": engine.speculation.budget if engine.speculation else 0,
        "prefix_cache": dataclasses.asdict(session.engine.prefixes.usage),
        "compress": engine.compress.mode,
        "chain": bool(engine.speculation and engine.speculation.chain),
    }
