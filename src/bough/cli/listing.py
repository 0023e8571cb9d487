"""`bough list`: models and drafts on this machine, and names that can be pulled."""

import re
from typing import Any

from bough.bench.cards import about_tok_s
from bough.cli import view
from bough.cli.completion import pulled_names
from bough.cli.inventory import CachedTarget, Inventory, inventory, proposers
from bough.cli.options import argument, grouped, option
from bough.errors import UsageError
from bough.hub import catalog
from bough.hub.cache import Cached
from bough.hub.download import cache_folder, offered
from bough.hub.names import readable
from bough.hub.resolve import meaning
from bough.memory.host import nvidia_smi, physical_memory

BYTES_PER_WEIGHT = 0.61  # of Q4_K_M, which the cards name
# A model needs about this much more than its file: draft, buffers, a context of some thousand tokens.
OVERHEAD, RUNNING = 1.1, 1 << 30
CPU = "CPU"
SLOW = 5e9  # bytes that are read for each token: at the 25 GB/s of a usual CPU five tokens a second


@grouped
def list_models(
    *,
    name: str | None = argument(
        "A short name or USER/REPO on huggingface.co: list its quantisations.",
        "NAME",
        autocompletion=pulled_names,
    ),
    as_json: bool = option("Print one JSON object.", "--json", default=False),
) -> None:
    """List the models that are here, in the package and the Hugging Face cache, and names to pull."""
    if name is not None:
        return _quantisations(name, as_json=as_json)
    with view.Screen(quiet=as_json).waiting("Reading the cache"):
        models = inventory()
    device, memory = _memory()
    facts = {
        "cache": str(cache_folder()),
        "device": device,
        "memory_bytes": memory,
        "built_in": _built_in(),
        "models": [_model(target, models) for target in models.targets],
        "drafts": [_draft(draft) for draft in models.drafts],
        "others": models.others,
        "available": _available(models),
    }
    _add_small_models(facts["models"], models)
    for row in (*facts["built_in"], *facts["models"], *facts["available"]):
        row["fits"] = _does_fit(row["size_bytes"], memory)
        row["tok_s"] = _speed(row, device)
    if as_json:
        view.print_json(facts)
    else:
        _print(facts)


def _speed(row: dict[str, Any], device: str) -> list[float | None] | None:
    """Return about how many tokens a second, and with the draft; None: the device is not known."""
    share = read_share(f"{row['name']} {row.get('card') or ''}")
    speeds = about_tok_s(max(1, row["size_bytes"]), share, device, draft=bool(row.get("draft")))
    return None if speeds is None or not row["fits"] else list(speeds)


def _does_fit(size: int, memory: int) -> bool:
    return OVERHEAD * size + RUNNING <= memory


def read_share(name: str) -> float:
    """Return the share of a model's weights that one token reads, from its name: 35B-A3B."""
    active = re.search(r"([0-9.]+)b-a([0-9.]+)b", name.lower())
    return float(active[2]) / float(active[1]) if active else 1.0


def suggestion() -> str | None:
    """Return the short name of the largest model that fits on this machine and is not slow here."""
    device, memory = _memory()
    room = memory // 2 if device == CPU else memory  # other programs use a CPU's memory, too
    sizes = {card.name: _about(card) for card in catalog.cards() if card.target}
    fitting = {
        name: size
        for name, size in sizes.items()
        if _does_fit(size, room) and not (device == CPU and size * read_share(name) > SLOW)
    }
    # Of one size the newest: its name sorts last.
    return max(fitting, key=lambda name: (round(fitting[name] / 1e9), name)) if fitting else None


def _quantisations(name: str, *, as_json: bool) -> None:
    """Show what can be pulled from the repository that a name means."""
    repo = meaning(name).repo
    if repo is None:
        raise UsageError(f"{name} is here already, needed a name on huggingface.co", f"bough show {name}")
    with view.Screen(quiet=as_json).waiting(f"Asking for {repo.repo}"):
        files = offered(repo.repo)
    device, memory = _memory()
    rows: list[dict[str, Any]] = [
        {"name": f"{repo.repo}:{each.label}", "size_bytes": each.size, "fits": _does_fit(each.size, memory)}
        for each in files
    ]
    for row in rows:
        row["tok_s"] = _speed(row, device)
    if as_json:
        return view.print_json({"repo": repo.repo, "device": device, "memory_bytes": memory, "models": rows})
    shown = [[row["name"], readable(row["size_bytes"]), _fits(row), _tok_s(row)] for row in rows]
    view.table(f"{repo.repo} (bough pull NAME)", ["model", "size", "fits", "tok/s"], shown)
    _explain(device, memory)


def _memory() -> tuple[str, int]:
    """Return name and bytes of the largest GPU, without one of the host's memory. Imports no torch."""
    cards = nvidia_smi(["memory.total", "name"])
    sizes = [(int(size.split()[0]) << 20, name) for size, name in cards if size[:1].isdigit()]
    if sizes:
        size, name = max(sizes)
        return name, size
    return CPU, physical_memory()


def _built_in() -> list[dict[str, Any]]:
    """Return the pairs inside the package, in the form of `_model`."""
    return [
        {
            "name": card.name,
            "card": card.name,
            "quant": "",
            "architecture": card.match.architecture,
            "size_bytes": card.pair.target.stat().st_size,
            "path": str(card.pair.target),
            "draft": {"repo": "comes with it", "present": True},
        }
        for card in catalog.cards()
        if card.pair is not None
    ]


def _about(card: catalog.ModelCard) -> int:
    """Return about how many bytes the target of a card takes, by the parameters in its name."""
    match = re.search(r"([0-9.]+)b\b", card.name)
    return int(float(match[1]) * 1e9 * BYTES_PER_WEIGHT) if match else 0


def _model(target: CachedTarget, models: Inventory) -> dict[str, Any]:
    card, draft = target.card, None
    if card is not None and card.draft is not None:
        draft = {"repo": card.draft.repo, "present": models.draft_of(card) is not None}
    return {
        "name": str(target.files),
        "card": card.name if card else None,
        "quant": target.files.quant,
        "architecture": target.architecture,
        "size_bytes": target.files.size,
        "path": str(target.files.path),
        "draft": draft,
    }


def _add_small_models(rows: list[dict[str, Any]], models: Inventory) -> None:
    """Name the models that can propose tokens for those without a draft, which would be better."""
    here = proposers((str(target.files), target.files.path) for target in models.targets)
    by_name = {each.name: each for each in here}
    for row in rows:
        suits = row["draft"] is None and row["name"] in by_name
        row["small_models"] = by_name[row["name"]].small_models(here) if suits else []


def _draft(draft: Cached) -> dict[str, Any]:
    return {
        "name": str(draft),
        "cards": [card.name for card in catalog.of_draft(draft.repo)],
        "size_bytes": draft.size,
        "path": str(draft.path),
    }


def _available(models: Inventory) -> list[dict[str, Any]]:
    here = {target.card.name for target in models.targets if target.card is not None}
    return [
        {
            "name": card.name,
            "target": str(card.target),
            "draft": card.draft and card.draft.repo,
            "size_bytes": _about(card),
        }
        for card in catalog.cards()
        if card.target is not None and card.name not in here
    ]


def _print(facts: dict[str, Any]) -> None:
    rows = [
        [
            row["name"],
            row["card"] or "–",
            view.amount(row["size_bytes"]),
            _fits(row),
            _tok_s(row),
            _state(row),
        ]
        for row in (*facts["built_in"], *facts["models"])
    ]
    columns = ["model", "short name", "size", "fits", "tok/s", "draft"]
    view.table(f"Models here and in {facts['cache']}", columns, rows, texts=("short name", "draft"))
    if facts["drafts"]:
        rows = [
            [row["name"], ", ".join(row["cards"]) or "–", view.amount(row["size_bytes"])]
            for row in facts["drafts"]
        ]
        view.table("Drafts", ["draft", "of", "size"], rows, texts=("of",))
    if facts["available"]:
        rows = [
            [
                row["name"],
                f"{row['size_bytes'] / 1e9:.1f} GB",
                _fits(row),
                _tok_s(row),
                row["target"],
                row["draft"] or "none: plain decoding",
            ]
            for row in facts["available"]
        ]
        columns = ["short name", "about", "fits", "tok/s", "target", "draft"]
        heading = "Not here yet (bough pull NAME; bough show NAME --fit)"
        view.table(heading, columns, rows, texts=("target", "draft"), dim=True)
    _explain(facts["device"], facts["memory_bytes"])
    if facts["others"]:
        view.plain(f"\n{facts['others']} other GGUF files there cannot be run.")


def _explain(device: str, memory: int) -> None:
    view.plain(f"\nfits: with a short context on {device}, {view.amount(memory)}")
    view.plain("tok/s: about, from the memory's bandwidth; then with the draft, at 4 tokens a step.")


def _fits(row: dict[str, Any]) -> str:
    return "yes" if row["fits"] else "no"


def _tok_s(row: dict[str, Any]) -> str:
    if row["tok_s"] is None:
        return "–"
    return ", ".join(f"{speed:.{int(speed < 10)}f}" for speed in row["tok_s"] if speed is not None)


def _state(row: dict[str, Any]) -> str:
    if row["draft"] is None:
        small = row["small_models"]
        return f"none; on a CPU --draft {small[0]}" if small else "none"
    if row["draft"]["present"]:
        return row["draft"]["repo"]
    return f"missing: bough pull {row['card']} --draft-only"
