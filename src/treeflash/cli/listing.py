"""`treeflash list`: models and drafts in the cache, and names that can be pulled."""

from typing import Annotated, Any

import typer

from treeflash.cli import view
from treeflash.cli.inventory import Inventory, Target, inventory
from treeflash.hub import catalog
from treeflash.hub.cache import Cached
from treeflash.hub.download import cache_folder


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models in the Hugging Face cache that can be run, their drafts, and names to pull."""
    with view.Screen(quiet=as_json).waiting("Reading the cache"):
        found = inventory()
    facts = {
        "cache": str(cache_folder()),
        "models": [_model(target, found) for target in found.targets],
        "drafts": [_draft(draft) for draft in found.drafts],
        "others": found.others,
        "available": _available(found),
    }
    if as_json:
        view.print_json(facts)
    else:
        _print(facts)


def _model(target: Target, found: Inventory) -> dict[str, Any]:
    card, draft = target.card, None
    if card is not None and card.draft is not None:
        draft = {"repo": card.draft.repo, "present": found.draft_of(card) is not None}
    return {
        "name": str(target.files),
        "card": card.name if card else None,
        "quant": target.files.quant,
        "architecture": target.architecture,
        "size_bytes": target.files.size,
        "path": str(target.files.path),
        "draft": draft,
    }


def _draft(draft: Cached) -> dict[str, Any]:
    return {
        "name": str(draft),
        "cards": [card.name for card in catalog.of_draft(draft.repo)],
        "size_bytes": draft.size,
        "path": str(draft.path),
    }


def _available(found: Inventory) -> list[dict[str, Any]]:
    """Return the cards that have no target in the cache."""
    here = {target.card.name for target in found.targets if target.card is not None}
    return [
        {"name": card.name, "target": str(card.target), "draft": card.draft and card.draft.repo}
        for card in catalog.cards()
        if card.target is not None and card.name not in here
    ]


def _print(facts: dict[str, Any]) -> None:
    if facts["models"]:
        rows = [
            [row["name"], row["card"] or "–", row["quant"], view.amount(row["size_bytes"]), _state(row)]
            for row in facts["models"]
        ]
        columns = ["model", "short name", "quant", "size", "draft"]
        view.table(f"Models in {facts['cache']}", columns, rows, texts=("short name", "quant", "draft"))
    else:
        view.plain(f"There are no models in {facts['cache']} yet.")
    if facts["drafts"]:
        rows = [
            [row["name"], ", ".join(row["cards"]) or "–", view.amount(row["size_bytes"])]
            for row in facts["drafts"]
        ]
        view.table("Drafts", ["draft", "of", "size"], rows, texts=("of",))
    if facts["available"]:
        rows = [[row["name"], row["target"], row["draft"] or "none"] for row in facts["available"]]
        columns = ["short name", "target", "draft"]
        heading = "Not here yet (treeflash pull NAME)"
        view.table(heading, columns, rows, texts=("target", "draft"), dim=True)
    if facts["others"]:
        view.plain(f"\n{facts['others']} other GGUF files there cannot be run.")


def _state(row: dict[str, Any]) -> str:
    if row["draft"] is None:
        return "none"
    if row["draft"]["present"]:
        return row["draft"]["repo"]
    return f"missing: treeflash pull {row['card']} --draft-only"
