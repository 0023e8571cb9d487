"""`treeflash serve` and `treeflash stop`: the server in the foreground or behind."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treeflash.cli import cache_flags, daemon, view
from treeflash.cli import run_flags as flags
from treeflash.cli import serve_flags as serving
from treeflash.cli.interrupt import held
from treeflash.cli.loading import LoadingBar, costs_file, find, tell
from treeflash.cli.speculation import Chosen, Speculation, Wishes, decide
from treeflash.config import EngineConfig, ServerConfig, environment
from treeflash.errors import UsageError
from treeflash.server.listen import bind, check

if TYPE_CHECKING:
    from treeflash.session.worker import Loader

DEFAULTS, ENGINE = ServerConfig(), EngineConfig()


def serve(
    model: flags.Model = None,
    host: serving.Host = DEFAULTS.host,
    port: serving.Port = DEFAULTS.port,
    api_key: serving.ApiKey = None,
    api_key_file: serving.ApiKeyFile = None,
    cors_origin: serving.CorsOrigin = None,
    max_queue: serving.MaxQueue = DEFAULTS.max_queue,
    max_body: serving.MaxBody = DEFAULTS.max_body,
    served_model_name: serving.ServedName = None,
    think: serving.Think = None,
    think_budget: serving.ThinkBudget = None,
    draft: flags.Draft = None,
    draft_quant: flags.DraftQuantisation = flags.DraftQuant.auto,
    draft_ctx: flags.DraftContext = None,
    draft_causal: flags.DraftCausal = None,
    budget: flags.Budget = None,
    chain: flags.Chain = False,
    no_draft: flags.NoDraft = False,
    max_ctx: flags.MaxContext = None,
    prefix_cache: flags.PrefixCache = None,
    prefix_cache_dir: flags.PrefixCacheDir = None,
    prefix_cache_dir_size: flags.PrefixCacheDirSize = ENGINE.prefix_cache_dir_size,
    kv: cache_flags.KV = cache_flags.KeyValues.auto,
    kv_k: cache_flags.Keys = None,
    kv_v: cache_flags.Values = None,
    window: cache_flags.Window = None,
    vram_limit: flags.VramLimit = None,
    device: flags.Where = "auto",
    offline: flags.Offline = False,
    in_background: serving.Daemon = False,
    log_file: serving.LogFile = None,
    print_config: serving.PrintConfig = False,
    quiet: flags.Quiet = False,
) -> None:
    """Answer requests of OpenAI's and Anthropic's protocols, and show a page for the browser.

    One request is answered at a time, in the order they came. docs/server.md has the routes and examples.

    treeflash serve qwen3.6-27b

    treeflash serve model.gguf --port 8080 --daemon
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
    if log_file is not None and not in_background:
        raise UsageError("--log-file needs --daemon", "in the foreground: 2> FILE")
    screen = view.Screen(quiet=quiet)
    name = model if model is not None else settings.target
    target = find(name, think=think, offline=offline or settings.offline, screen=screen)
    speculation = decide(wishes, target, offline=offline or settings.offline, screen=screen)
    config = ServerConfig(
        host=host,
        port=port,
        api_keys=_keys(api_key, api_key_file, settings.api_key),
        model_name=served_model_name or (target.card.name if target.card else target.path.stem),
        cors_origins=tuple(cors_origin or ()),
        max_queue=max_queue,
        max_body=max_body,
        thinking=think,
        thinking_budget=think_budget,
    )
    check(config)
    engine = EngineConfig(
        device=device,
        max_ctx=max_ctx,
        vram_limit=vram_limit,
        speculation=speculation.config,
        draft=speculation.draft,
        costs=costs_file(),
        **cache_flags.prefixes(prefix_cache, prefix_cache_dir, prefix_cache_dir_size),
        **cache_flags.cache(kv, kv_k, kv_v, window),
    )
    if print_config:
        return view.print_json(_shown(target, config, engine))
    if in_background:
        return daemon.start(config, log_file=log_file, screen=screen)
    _run(target, config, engine, speculation, screen, quiet=quiet)


def stop(
    port: Annotated[
        int | None,
        typer.Option("--port", help="Of the server; needed where several run.", show_default=False),
    ] = None,
) -> None:
    """End a server that runs in the background; requests it has begun get half a minute to end."""
    view.plain(daemon.stop(port))


def _keys(given: list[str] | None, file: Path | None, default: str | None) -> tuple[str, ...]:
    keys = [key.strip() for key in given or ()]
    if file is not None:
        try:
            keys += [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file {file} cannot be read: {error}") from error
        if not keys:
            raise UsageError(f"--api-key-file {file} has no key in it, needed one in a line")
    if "" in keys:
        raise UsageError("--api-key is empty, needed a key")
    return tuple(keys) or ((default,) if default else ())


def _shown(target: Chosen, config: ServerConfig, engine: EngineConfig) -> Mapping[str, Any]:
    server = dataclasses.asdict(config) | {"api_keys": len(config.api_keys)}
    known = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in dataclasses.asdict(engine).items()
    }
    if engine.draft is not None:
        known["draft"] = dataclasses.asdict(engine.draft) | {"path": str(engine.draft.path)}
    return {"model": str(target.path), "server": server, "engine": known}


def _run(
    target: Chosen,
    config: ServerConfig,
    engine: EngineConfig,
    speculation: Speculation,
    screen: view.Screen,
    *,
    quiet: bool,
) -> None:
    # Taken before minutes go into loading.
    listening = bind(config)
    with screen.waiting("Starting PyTorch"), held():
        from treeflash.server import run as server
    host, port = listening.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    logging.getLogger("treeflash").setLevel(logging.WARNING if quiet else logging.INFO)
    loaded: dict[str, Any] = {}
    bar = LoadingBar(target.path.name, screen)

    def ready() -> None:
        bar.stop()
        session = loaded["session"]
        tell(session, target.path, screen)
        if speculation.note:
            screen.note(speculation.note)
        if session.template.is_fallback:
            screen.note("There is no chat template in the file: plain ChatML is used.")
        screen.notice(f"{config.model_name} answers at {address}")
        screen.note(f"API {address}/v1 · page {address}/ · routes {address}/docs · Ctrl-C ends it")

    with bar:
        server.serve(
            _loader(target, engine, bar, loaded),
            config,
            listening,
            model_name=config.model_name or target.path.stem,
            facts=lambda: _facts(target, engine, loaded),
            ready=ready,
        )


def _loader(target: Chosen, engine: EngineConfig, bar: LoadingBar, loaded: dict[str, Any]) -> "Loader":
    from treeflash.session.loading import load_session

    def load(progress: Any) -> Any:
        def told(done: int, total: int) -> None:
            progress(done, total)
            bar.reading(done, total)

        loaded["session"] = load_session(target.path, engine, progress=told, warming=bar.warming)
        return loaded["session"]

    return load


def _facts(target: Chosen, engine: EngineConfig, loaded: Mapping[str, Any]) -> Mapping[str, Any]:
    """For /props, from what is loaded."""
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
        "window": session.engine.states.buffers.window,
        "approximate": session.engine.states.approximate,
        "draft": engine.draft.path.name if engine.draft else None,
        "budget": engine.speculation.budget if engine.speculation else 0,
        "prefix_cache": dataclasses.asdict(session.engine.prefixes.usage),
        "chain": bool(engine.speculation and engine.speculation.chain),
    }
