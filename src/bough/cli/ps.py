"""`bough ps`: the servers of this machine, their models, and what they are doing."""

from typing import Any

from bough.cli import daemon, view
from bough.cli.flags import with_flags
from bough.cli.options import grouped, option
from bough.config import ServerConfig, environment

ANSWER_S = 5.0
TEXTS = ("state", "requests")


@grouped
def ps(
    *,
    url: str | None = option("Of one; else those in the background, and port 8000.", "URL"),
    api_key: str | None = option("Of the server; else BOUGH_API_KEY.", "KEY"),
    as_json: bool = option("Print one JSON object.", "--json", default=False),
) -> None:
    """Show the models that servers have in memory, their requests and addresses.

    bough ps --url http://192.168.1.5:8000
    """
    from bough.session.remote import ServerFailed, Unreachable, address

    key = api_key or environment().api_key
    default = daemon.address("127.0.0.1", ServerConfig().port)
    if url is not None:
        bases = [address(url).removesuffix("/v1")]
    else:
        ports = [port for port, _ in daemon.running()]
        bases = list(dict.fromkeys([*(daemon.address("127.0.0.1", port) for port in sorted(ports)), default]))
    models: list[dict[str, Any]] = []
    for base in bases:
        try:
            models += _models(base, key)
        except ServerFailed as error:
            if url is not None:
                raise
            if not isinstance(error, Unreachable):
                view.Screen().warning(error.message, error.hint)
    if as_json:
        view.print_json({"models": models})
    elif not models:
        view.plain(
            f"No server answers at {default} and none runs in the background."
            " --url names another one, bough serve starts one."
        )
    else:
        _show(models)


def _show(models: list[dict[str, Any]]) -> None:
    for base in dict.fromkeys(model["address"] for model in models):
        rows = [_row(model) for model in models if model["address"] == base]
        view.table(base, ["model", "state", "requests", "memory", "context"], rows, texts=TEXTS)
    for model in models:
        if (experts := model["experts"]) is not None:
            view.plain(f"{model['name']}: {experts['hit_rate']:.1%} of the experts of steps were on the card")
        for warning in model["warnings"]:
            view.plain(f"{model['name']}: {with_flags(warning)}")


def _models(base: str, key: str | None) -> list[dict[str, Any]]:
    """Return the models in a server's memory; raise ServerFailed where it is not one of ours."""
    from bough.session.remote import ServerFailed, client, failures, raise_for_status

    with client(base, key) as http, failures(base):
        answer = http.get(f"{base}/api/ps", timeout=ANSWER_S)
        raise_for_status(answer, base)
    try:
        return [
            {
                "name": each["name"],
                "status": each["status"],
                "progress": each["progress"],
                "running": each["running"],
                "waiting": each["waiting"],
                "memory_bytes": each["size"],
                "context": each["context_length"],
                "device": each["device"],
                "warnings": each.get("warnings", []),
                "experts": each.get("experts"),
                "address": base,
            }
            for each in answer.json()["models"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ServerFailed(f"{base} is no server of Bough", "--url says where it is") from error


def _row(model: dict[str, Any]) -> list[str]:
    loading = f"loading {model['progress']:.0%}"
    waiting = f", {model['waiting']} waiting" if model["waiting"] else ""
    memory = view.amount(model["memory_bytes"]) if model["memory_bytes"] else "–"
    return [
        model["name"],
        {"ok": "ready", "loading": loading}.get(model["status"], model["status"]),
        f"{model['running']} running{waiting}",
        f"{memory} {model['device']}".strip(),
        f"{model['context']:,}" if model["context"] else "–",
    ]
