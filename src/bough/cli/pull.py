"""`bough pull`: fetches a target and its draft."""

from dataclasses import MISSING
from pathlib import Path

from bough.cli import view
from bough.cli.completion import pulled_names
from bough.cli.options import argument, grouped, option
from bough.cli.speculation import downloading
from bough.errors import DownloadFailed, ModelFileError, ModelNotFound, UsageError
from bough.hub import catalog
from bough.hub.cache import of_repo
from bough.hub.catalog import ModelCard
from bough.hub.download import fetch, fetch_encoder
from bough.hub.drafts import fetch_draft
from bough.hub.names import RepoName, is_draft_file
from bough.hub.resolve import Meaning, meaning
from bough.session.pairing import card_of, sees

AGAIN = "the same command"


@grouped
def pull(
    *,
    name: str = argument(
        "A short name (`bough list`) or USER/REPO[:QUANT].",
        "NAME",
        default=MISSING,
        autocompletion=pulled_names,
    ),
    quant: str | None = option("Which quantisation of the target: Q4_K_M.", "Q"),
    draft_only: bool = option("Fetch the draft alone.", default=False),
    target_only: bool = option("Fetch the target alone.", default=False),
) -> None:
    """Fetch a model and its draft into the Hugging Face cache, or bring them up to date.

    An interrupted download is resumed. Gated models need a token: HF_TOKEN, or `hf auth login`.

    bough pull qwen3.6-27b
    """
    if draft_only and target_only:
        raise UsageError("--draft-only and --target-only exclude each other")
    if draft_only and quant is not None:
        raise UsageError("--quant is of the target, --draft-only does not fetch it")
    meant = meaning(name)
    repo = _repo(name, meant, quant)
    screen = view.Screen()
    # A repository that is not named as a target may hold a draft alone.
    may_be_draft = not (quant or target_only or draft_only)
    if may_be_draft and (catalog.of_draft(repo.repo) or is_draft_file(repo.file or "")):
        return _draft(repo, screen)
    card = meant.card
    if draft_only:
        card = card or catalog.of_repo(repo.repo)
    else:
        repo_name = RepoName(repo.repo, quant) if quant else meant.fetched
        try:
            path = _target(repo_name or repo, screen)
        except DownloadFailed:
            raise
        except ModelNotFound as error:
            if may_be_draft and card is None and _is_draft(repo, screen):
                return
            raise error from None
        card = card or _card(path, repo)
    if not target_only:
        _fetch_draft_of(name, card, needed=draft_only, screen=screen)


def _repo(name: str, meant: Meaning, quant: str | None) -> RepoName:
    """Return the repository that a name means; refuse names of local files and of another quantisation."""
    if meant.repo is None:
        raise UsageError(f"{name} is on this machine already: {meant.path}", f"bough run {name}")
    if quant and (meant.repo.file or (meant.repo.quant or quant).upper() != quant.upper()):
        raise UsageError(f"{name} and --quant {quant} name different files, needed one of them")
    return meant.repo


def _fetch_draft_of(name: str, card: ModelCard | None, *, needed: bool, screen: view.Screen) -> None:
    if card is not None and card.draft is not None:
        _draft(card.draft, screen)
    elif needed:
        raise UsageError(f"no draft is listed for {name}", "bough list shows the models that have one")
    else:
        screen.note(f"No draft is listed for {name}: only prompt lookup will propose tokens.")


def _target(repo: RepoName, screen: view.Screen) -> Path:
    with downloading(screen, str(repo), again=AGAIN) as bar:
        path = fetch(repo, progress=bar)
    _done("target", repo, path)
    if sees(path):
        with downloading(screen, f"the image encoder of {repo.repo}", again=AGAIN) as bar:
            encoder = fetch_encoder(repo.repo, path, progress=bar)
        if encoder is not None:
            view.plain(f"images  {encoder.name}  {view.amount(encoder.stat().st_size)}")
    return path


def _draft(repo: RepoName, screen: view.Screen) -> None:
    with downloading(screen, f"the draft {repo}", again=AGAIN) as bar:
        path = fetch_draft(repo, progress=bar)
    _done("draft", repo, path)


def _is_draft(repo: RepoName, screen: view.Screen) -> bool:
    """Fetch a repository that has no target as a draft; return whether it is one."""
    try:
        _draft(repo, screen)
    except (ModelNotFound, ModelFileError):
        return False
    return True


def _card(path: Path, repo: RepoName) -> ModelCard | None:
    """Return the card of a file; None too if it cannot be run, which is no error here."""
    from bough.gguf.reader import GGUFFile

    try:
        with GGUFFile.open(path) as file:
            return card_of(file, repo.repo)
    except ModelFileError:
        return None


def _done(kind: str, repo: RepoName, path: Path) -> None:
    size = next((each.size for each in of_repo(repo.repo) if each.path == path), path.stat().st_size)
    view.plain(f"{kind:6}  {repo}  {view.amount(size)}")
