"""Settings as flags: below the command line errors name a setting, here they name the flag that sets it."""

import re
from collections.abc import Mapping
from functools import cache

_SETTING = re.compile(r"`([a-z][a-z0-9_]*)(?:=([^`\s]+))?`")
# Settings that are no flag's name with underscores, or have a shorter flag that is used more.
_OTHERS = {
    "output": "-o",
    "max_tokens": "--n-gen",
    "model_name": "--served-model-name",
    "api_keys": "--api-key",
    "cors_origins": "--cors-origin",
    "mix": "--type",
    "checkpoint_minutes": "--save-every",
}


def with_flags(text: str) -> str:
    """Return a message with its settings as flags: `max_ctx` as --max-ctx, `kv=f16` as --kv f16.

    Other text in backquotes, a command for example, stays as it is.
    """

    def flag(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in _flags():
            return match[0]
        return _flags()[name] if value in (None, "True") else f"{_flags()[name]} {value}"

    return _SETTING.sub(flag, text)


@cache
def _flags() -> Mapping[str, str]:
    """Return the flag of every setting, from the options of all commands."""
    import typer.main

    from bough.cli.program import app

    group: typer.main.TyperGroup = typer.main.get_command(app)  # ty: ignore[invalid-assignment]
    options = [option for command in group.commands.values() for option in command.params]
    names = [name for option in options for name in (*option.opts, *option.secondary_opts)]
    return {name[2:].replace("-", "_"): name for name in names if name.startswith("--")} | _OTHERS
