"""`bough rm`: removes a target, a draft or both from the hub's cache."""

from dataclasses import MISSING
from pathlib import Path

import typer

from bough.cli import view
from bough.cli.inventory import inventory
from bough.cli.options import argument, grouped, option
from bough.errors import ModelNotFound, UsageError
from bough.hub.cache import Cached, encoders_of, of_repo, removal, unfinished
from bough.hub.catalog import ModelCard
from bough.hub.names import GGUFSet, RepoName, choose
from bough.hub.resolve import Meaning, meaning

DECLINED = 1


@grouped
def remove(
    *,
    name: str = argument(
        "A short name: the target and its draft. USER/REPO[:QUANT]: that one alone.", "NAME", default=MISSING
    ),
    yes: bool = option("Do not ask.", "--yes -y", default=False),
) -> None:
    """Remove a model from the Hugging Face cache.

    Other files of the same repository stay, its image encoder as long as a model does, and so does a draft
    that another model here uses.

    bough rm qwen3.6-27b
    """
    meant = meaning(name)
    if meant.repo is None:
        if meant.card is not None and meant.card.pair is not None:
            raise UsageError(f"{name} is a part of bough, which uses it where no model is named")
        raise UsageError(f"{name} is not in the Hugging Face cache: {meant.path}", "remove it by hand")
    files, staying = _files(meant)
    leftovers = [] if files else _leftovers(meant)
    if not files and not leftovers:
        raise ModelNotFound(f"{name} is not in the Hugging Face cache", "bough list shows what is")
    encoders = encoders_of(files)
    plan = removal([*files, *encoders]) if files else None
    size = plan.size if plan else sum(path.stat().st_size for path in leftovers)
    rows = [(str(each), view.amount(each.size)) for each in files]
    rows += [("image encoder", f"{view.amount(each.size)}  {each.path.name}") for each in encoders]
    rows += [("unfinished download", f"{view.amount(path.stat().st_size)}  {path}") for path in leftovers]
    rows += [("kept", text) for text in staying]
    view.sections(f"Remove {name}", {f"Frees {view.amount(size)}": rows})
    if not yes and not view.confirm("Remove?"):
        view.plain("Nothing was removed.")
        raise typer.Exit(DECLINED)
    if plan is not None:
        plan.execute()
    for path in leftovers:
        path.unlink(missing_ok=True)
    view.plain(f"Removed, {view.amount(size)} freed.")


def _files(meant: Meaning) -> tuple[list[Cached], list[str]]:
    """Return the files to remove, and what is kept although it belongs to the model."""
    assert meant.repo is not None
    cached = of_repo(meant.repo.repo)
    drafts = [each for each in cached if not each.quant]
    targets = [each for each in cached if each.quant]
    if drafts and not meant.repo.quant and not meant.repo.file and meant.card is None:
        return drafts, []
    files = _choose(targets, meant) if targets else []
    if meant.card is None or meant.card.draft is None:
        return files, []
    return _with_draft(files, meant.card, meant.card.draft)


def _choose(targets: list[Cached], meant: Meaning) -> list[Cached]:
    assert meant.repo is not None
    by_files = {target.files: target for target in targets}
    sets = [GGUFSet(target.files, target.size) for target in targets]
    repo = meant.repo
    if meant.card is not None and repo.quant is None and len(sets) > 1:
        repo = meant.fetched or repo
    return [by_files[choose(sets, repo).files]]


def _with_draft(files: list[Cached], card: ModelCard, draft: RepoName) -> tuple[list[Cached], list[str]]:
    drafts = [each for each in of_repo(draft.repo) if not each.quant]
    if not drafts:
        return files, []
    users = [str(user.files) for user in inventory().users(draft.repo) if user.files not in files]
    if users:
        return files, [f"{draft}: {', '.join(users)} uses it"]
    return [*files, *drafts], []


def _leftovers(meant: Meaning) -> list[Path]:
    assert meant.repo is not None
    repos = [meant.repo.repo]
    if meant.card is not None and meant.card.draft is not None:
        repos.append(meant.card.draft.repo)
    return [path for repo in repos for path in unfinished(repo)]
