"""`treeflash chat`: finds what answers and begins the conversation, which itself is elsewhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treeflash.cli import cache_flags, view
from treeflash.cli import run_flags as flags
from treeflash.cli.loading import costs_file, find
from treeflash.cli.loading import load as load_session
from treeflash.cli.speculation import Wishes, decide
from treeflash.config import EngineConfig, environment
from treeflash.errors import UsageError

if TYPE_CHECKING:
    from treeflash.cli.chat_backend import Backend

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help=f"{flags.MODEL_HELP}; else DFLASH_TARGET. With --url: a name that the server knows.",
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        rich_help_panel="Server",
        help="Talk to an OpenAI-compatible server instead of loading a model: http://127.0.0.1:8000",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", metavar="KEY", rich_help_panel="Server", help="For --url; else TREEFLASH_API_KEY."
    ),
]
Load = Annotated[
    Path | None,
    typer.Option(
        "--load", metavar="PATH", rich_help_panel="Prompt", help="Go on with a conversation that /save wrote."
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--n-gen",
        "-n",
        min=1,
        metavar="N",
        rich_help_panel="Sampling",
        help="Most tokens of a reply. Default: what fits.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        "-t",
        min=0,
        max=100,
        metavar="X",
        rich_help_panel="Sampling",
        help="0 takes the likeliest token each time. Default: as recommended for the model.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        rich_help_panel="Sampling",
        help="What /set sets: top_p, top_k, min_p, penalties, stop; may be given several times.",
    ),
]

ENGINE = EngineConfig()


def chat(
    model: Model = None,
    url: Url = None,
    api_key: ApiKey = None,
    system: flags.System = None,
    load: Load = None,
    think: flags.Think = None,
    n_gen: MaxTokens = None,
    temperature: Temperature = None,
    seed: flags.Seed = None,
    settings: Set = None,
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
    quiet: flags.Quiet = False,
) -> None:
    """Talk with a model.

    `/help` inside shows what can be done there; docs/chat.md tells more. Without a terminal each line of
    standard input is a message or a command.

    treeflash chat qwen3.6-27b

    treeflash chat --url http://127.0.0.1:8000
    """
    from treeflash.cli.chat_loop import Chat
    from treeflash.cli.chat_state import Conversation, Settings
    from treeflash.cli.chat_state import load as read

    known = environment()
    wishes = Wishes(
        draft=draft,
        no_draft=no_draft,
        chain=chain,
        budget=budget,
        quant=draft_quant,
        context=draft_ctx,
        causal=draft_causal,
        default_draft=known.draft,
    )
    wishes.check()
    conversation, made = (Conversation(), Settings()) if load is None else read(load)
    conversation.system = system if system is not None else conversation.system
    made.thinking = think if think is not None else made.thinking
    for name, value in (("max_tokens", n_gen), ("temperature", temperature), ("seed", seed)):
        if value is not None:
            made.values[name] = value
    for each in settings or ():
        name, equals, value = each.partition("=")
        if not equals:
            raise UsageError(f"--set is {each!r}; needs NAME=VALUE, as in top_p=0.9")
        made.set(name, value)
    screen = view.Screen(quiet=quiet)
    cache = cache_flags.cache(kv, kv_k, kv_v, window)
    cache |= cache_flags.prefixes(prefix_cache, prefix_cache_dir, prefix_cache_dir_size)
    place = Place(max_ctx, vram_limit, device, offline or known.offline, cache)
    if url is not None:
        cache_flags.check_remote(EngineConfig(device=device, max_ctx=max_ctx, vram_limit=vram_limit, **cache))
        backend = _server(url, api_key or known.api_key, model, wishes, screen)
    else:
        backend = _local(model or known.target, wishes, place, think=think, screen=screen)
    backend.check(made)
    code = Chat(backend, conversation, made, screen=screen, quiet=quiet, path=load).run()
    if code:
        raise typer.Exit(code)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model is loaded."""

    max_ctx: int | None
    vram_limit: int | None
    device: str
    offline: bool
    cache: dict[str, Any]


def _server(url: str, key: str | None, model: str | None, wishes: Wishes, screen: view.Screen) -> "Backend":
    from treeflash.cli.chat_remote import RemoteBackend

    given = [wishes.draft is not None, wishes.no_draft, wishes.chain, wishes.budget is not None]
    if any(given) or wishes.draft_flags():
        raise UsageError("--url and flags of the draft exclude each other: the server has its own")
    with screen.waiting(f"Asking {url}"):
        return RemoteBackend.connect(url, key=key, model=model)


def _local(
    model: str | None, wishes: Wishes, place: Place, *, think: bool | None, screen: view.Screen
) -> "Backend":
    from treeflash.cli.chat_backend import LocalBackend

    target = find(model, think=think, offline=place.offline, screen=screen)
    speculation = decide(wishes, target, offline=place.offline, screen=screen)
    config = EngineConfig(
        device=place.device,
        max_ctx=place.max_ctx,
        vram_limit=place.vram_limit,
        speculation=speculation.config,
        draft=speculation.draft,
        costs=costs_file(),
        **place.cache,
    )
    session = load_session(target.path, config, screen)
    if speculation.note:
        screen.note(speculation.note)
    return LocalBackend(
        session,
        name=target.card.title if target.card else target.path.stem,
        speculating=speculation.config is not None,
        drafted=speculation.draft is not None,
    )
