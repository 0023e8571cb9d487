"""`bough launch`: starts a coding agent with the settings that make it use our server."""

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from enum import StrEnum

from bough.cli import view
from bough.cli.options import argument, grouped, option
from bough.config import child_environment, environment
from bough.errors import BoughError

SERVER = "http://127.0.0.1:8000"
NO_KEY = "none"  # agents refuse to start without a key; a server without keys ignores it
HEALTH_S = 5.0
LOADING = 503
NAME = "bough"  # of the provider, and of the model if the server does not run


Client = StrEnum("Client", "claude codex opencode aider")


INSTALL: Mapping[Client, str] = {
    Client.claude: "npm install -g @anthropic-ai/claude-code",
    Client.codex: "npm install -g @openai/codex",
    Client.opencode: "npm install -g opencode-ai",
    Client.aider: "uv tool install aider-chat",
}


@dataclass(frozen=True, slots=True)
class Start:
    command: list[str]
    variables: dict[str, str]
    without: list[str] = field(default_factory=list)  # variables that must be unset


@dataclass(frozen=True, slots=True)
class Server:
    base: str  # its address, without /v1
    model: str = NAME
    context: int | None = None  # tokens
    sees: bool = False  # images


class NotThere(BoughError):
    """The server does not run or the agent is not installed."""


@grouped
def launch(
    *,
    client: Client = argument("claude, codex, opencode or aider.", None, default=MISSING),
    arguments: list[str] | None = argument("Passed on to it.", "-- ARGUMENTS", show_default=False),
    url: str = option("Where the server is.", "URL", default=SERVER),
    api_key: str | None = option("Of the server; else BOUGH_API_KEY.", "KEY"),
    only_print: bool = option("Print the lines for a shell and start nothing.", "--print", default=False),
) -> None:
    """Start a coding agent that uses our server.

    The server must run already: `bough serve MODEL` starts one. Nothing is written to the agent's own
    settings: all is passed in its environment and its arguments.

    bough launch claude --print
    """
    from bough.session.remote import address

    key = api_key or environment().api_key
    base = address(url).removesuffix("/v1")
    server = _server(base, key, needed=not only_print)
    start = plan(client, server, key or NO_KEY, arguments or [])
    if only_print:
        for line in shell_lines(start):
            view.plain(line)
        return
    program = shutil.which(start.command[0])
    if program is None:
        raise NotThere(f"{start.command[0]} is not installed", INSTALL[client])
    view.flush()
    os.execve(program, start.command, child_environment(start.variables, without=start.without))


def plan(client: Client, server: Server, key: str, arguments: list[str]) -> Start:
    base, model = server.base, server.model
    match client:
        case Client.claude:
            sizes = ("MODEL", *(f"DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
            models = {f"ANTHROPIC_{size}": model for size in sizes}
            variables = {
                "ANTHROPIC_BASE_URL": base,
                "ANTHROPIC_AUTH_TOKEN": key,
                **models,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            }
            # It would be sent instead of the token.
            return Start(["claude", *arguments], variables, ["ANTHROPIC_API_KEY"])
        case Client.codex:
            provider = f"model_providers.{NAME}"
            settings = {
                "model": model,
                "model_provider": NAME,
                f"{provider}.name": "Bough",
                f"{provider}.base_url": f"{base}/v1",
                f"{provider}.wire_api": "responses",
                f"{provider}.env_key": "BOUGH_API_KEY",
                **({"model_context_window": server.context} if server.context else {}),
            }
            # The values are TOML, in which a JSON text is a text.
            flags = [
                part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")
            ]
            return Start(["codex", *flags, *arguments], {"BOUGH_API_KEY": key})
        case Client.opencode:
            room = server.context
            limits = {"limit": {"context": room, "output": room // 2}} if room else {}
            inputs = {"input": ["text", "image"], "output": ["text"]}
            images = {"modalities": inputs} if server.sees else {}
            provider = {
                "npm": "@ai-sdk/openai-compatible",
                "name": "Bough",
                "options": {"baseURL": f"{base}/v1", "apiKey": key},
                "models": {model: {"name": model} | limits | images},
            }
            named = f"{NAME}/{model}"
            settings = {"provider": {NAME: provider}, "model": named, "small_model": named}
            return Start(["opencode", *arguments], {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})
        case Client.aider:
            variables = {"OPENAI_API_BASE": f"{base}/v1", "OPENAI_API_KEY": key}
            return Start(["aider", "--model", f"openai/{model}", *arguments], variables)


def shell_lines(start: Start) -> list[str]:
    return [
        *(f"unset {name}" for name in start.without),
        *(f"export {name}={shlex.quote(value)}" for name, value in start.variables.items()),
        shlex.join(start.command),
    ]


def _server(base: str, key: str | None, *, needed: bool) -> Server:
    """Return the server's model and context; if they are not `needed`, defaults where it does not run."""
    from bough.session.remote import RemoteSession, ServerFailed, Unreachable, client, failures

    try:
        with client(base, key) as http, failures(base):
            health = http.get(f"{base}/health", timeout=HEALTH_S)
        if health.status_code == LOADING:
            raise ServerFailed(f"the server at {base} is still loading its model", "try again in a while")
        session = RemoteSession.connect(base, key=key, model=None)
        return Server(base, session.name, session.context, bool(session.sees))
    except ServerFailed as error:
        if not needed:
            return Server(base)
        if not isinstance(error, Unreachable):
            raise
        port = base.rpartition(":")[2]
        flag = f" --port {port}" if port.isdigit() and port != "8000" else ""
        raise NotThere(error.message, f"bough serve MODEL{flag}") from None
