"""How a run proposes tokens, and with which draft: by flags, else the environment, else the model's card."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from treeflash.cli import view
from treeflash.cli.inventory import local_draft
from treeflash.cli.options import DraftQuant, SpeculationOptions
from treeflash.config import DraftConfig, SpecConfig, environment
from treeflash.errors import ModelFileError, ModelNotFound, ResourceError, UsageError
from treeflash.hub.catalog import Card
from treeflash.hub.drafts import fetch_draft
from treeflash.hub.resolve import resolve_draft

NONE = "none"
NO_DRAFT = "No draft is listed for this model, only prompt lookup proposed tokens: --draft names one."


@dataclass(frozen=True, slots=True)
class Chosen:
    """A model about to be loaded."""

    path: Path
    card: Card | None
    fetched: bool = False  # just now, so that its draft is wanted too


@dataclass(frozen=True, slots=True)
class Speculation:
    config: SpecConfig | None  # None: plain decoding
    draft: DraftConfig | None = None
    note: str = ""  # shown at the end of a run


def check(options: SpeculationOptions) -> None:
    """Refuse options that contradict each other, before any work."""
    if options.draft is not None and not options.draft.strip():
        raise UsageError("the name of the draft is empty", "--draft PATH|REPO, or --no-draft")
    if options.no_draft and options.draft not in (None, NONE):
        raise UsageError(f"--draft {options.draft} and --no-draft exclude each other")
    if not _is_plain(options):
        return
    cause = "--no-draft" if options.no_draft else "--draft none" if options.draft else "DFLASH_DRAFT=none"
    for flag in [*_tree_flags(options), *_draft_flags(options)]:
        raise UsageError(f"{flag} and {cause} exclude each other: nothing is proposed")


def check_remote(options: SpeculationOptions) -> None:
    """Refuse any of the options together with --url, which loads no draft here."""
    if options != SpeculationOptions():
        raise UsageError("--url and flags of the draft exclude each other: the server has its own")


def decide(options: SpeculationOptions, target: Chosen, *, offline: bool, screen: view.Screen) -> Speculation:
    """Return how tokens are proposed for the target; its draft, or the named one, may be fetched."""
    if _is_plain(options):
        return Speculation(None)
    card, name = target.card, options.draft or environment().draft
    recommended = card.budget if card else SpecConfig().budget
    config = SpecConfig(budget=options.budget or recommended, chain=options.chain)
    if name is not None:
        with downloading(screen, f"the draft {name}", again="the same command") as bar:
            path: Path | None = resolve_draft(name, offline=offline, progress=bar)
    elif card is None or (card.draft is None and card.pair is None):
        for flag in _draft_flags(options):
            raise UsageError(
                f"{flag} needs a draft, and none is listed for {card.name if card else target.path.name}",
                "--draft PATH|REPO names one",
            )
        return Speculation(config, note=NO_DRAFT)
    else:
        path = _card_draft(card, fetch=target.fetched and not offline, screen=screen)
    if path is None:
        return Speculation(config)
    draft = DraftConfig(path, options.draft_quant.value, options.draft_ctx, options.draft_causal)
    return Speculation(config, draft)


def _is_plain(options: SpeculationOptions) -> bool:
    return options.no_draft or (options.draft or environment().draft) == NONE


def _tree_flags(options: SpeculationOptions) -> list[str]:
    given = {"--chain": options.chain, "--budget": options.budget is not None}
    return [flag for flag, is_given in given.items() if is_given]


def _draft_flags(options: SpeculationOptions) -> list[str]:
    """Return the given flags that need a draft."""
    causal = "--draft-causal" if options.draft_causal else "--draft-bidirectional"
    given = {
        "--draft-quant": options.draft_quant is not DraftQuant.auto,
        "--draft-ctx": options.draft_ctx is not None,
        causal: options.draft_causal is not None,
    }
    return [flag for flag, is_given in given.items() if is_given]


def _card_draft(card: Card, *, fetch: bool, screen: view.Screen) -> Path | None:
    """Return the draft that belongs to the target; None, with a warning, where it cannot be had."""
    if (path := local_draft(card)) is not None:
        return path
    command = f"treeflash pull {card.name} --draft-only"
    if fetch and card.draft is not None:
        try:
            with downloading(screen, f"its draft {card.draft}", again=command) as bar:
                return fetch_draft(card.draft, progress=bar)
        except (ModelNotFound, ModelFileError, ResourceError) as error:
            hint = f"{error.hint}; then: {command}" if error.hint else command
            screen.warning(f"the draft was not fetched, answers come slower: {error.message}", hint)
            return None
    screen.warning(
        f"the draft of {card.title} is not on this machine, answers come slower without it", command
    )
    return None


@contextlib.contextmanager
def downloading(screen: view.Screen, what: str, *, again: str) -> Generator[view.DownloadBar]:
    """Show a download of `what`; after Ctrl-C say that `again` resumes it."""
    with screen.downloading(what) as bar:
        try:
            yield bar
        except KeyboardInterrupt:
            if bar.began:
                bar.notice(f"Interrupted. What was downloaded is kept: {again} resumes it.")
            raise
