"""How a run proposes tokens, and with which draft: by flags, else the environment, else the model's card."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from bough.cli import view
from bough.cli.options import DraftQuant, SpeculationOptions
from bough.config import DraftConfig, SpecConfig, environment
from bough.errors import ModelFileError, ModelNotFound, ResourceError, UsageError
from bough.hub.catalog import ModelCard
from bough.hub.drafts import fetch_draft
from bough.hub.local import drafts_beside
from bough.hub.resolve import resolve_draft
from bough.session.folders import first_time
from bough.session.pairing import AUTO, LOOKUP, MTP, NONE, NamedDraft, plan_draft

# Values of --draft that are no names.
NO_NAMES = (AUTO, NONE, MTP, LOOKUP)
OWN_BLOCK = "No draft: the MTP block in the model's own file proposes tokens."
NO_DRAFT = (
    "No draft is known for this model: prompt lookup proposes tokens. "
    "--draft names one, `bough train` makes one."
)


@dataclass(frozen=True, slots=True)
class Chosen:
    path: Path
    card: ModelCard | None
    fetched: bool = False  # just now, so that its draft is wanted too
    mtp: bool = False  # its file has a multi-token-prediction block
    tuned: bool = False  # the card is that of the model it is made from


Proposing = tuple[
    SpecConfig | None, DraftConfig | None, str
]  # None: plain decoding; what the end of a run says


def check(options: SpeculationOptions) -> None:
    if options.draft is not None and not options.draft.strip():
        raise UsageError("the name of the draft is empty", "--draft PATH|REPO, or --no-draft")
    if options.no_draft and options.draft not in (None, NONE):
        raise UsageError(f"--draft {options.draft} and --no-draft exclude each other")
    if not _is_plain(options):
        return
    cause = "--no-draft" if options.no_draft else "--draft none" if options.draft else "BOUGH_DRAFT=none"
    trees = {"--chain": options.chain, "--budget": options.budget is not None}
    for flag in [*(flag for flag, is_given in trees.items() if is_given), *_draft_flags(options)]:
        raise UsageError(f"{flag} and {cause} exclude each other: nothing is proposed")


def check_remote(options: SpeculationOptions) -> None:
    if options != SpeculationOptions():
        raise UsageError("--url and flags of the draft exclude each other: the server has its own")


def decide(options: SpeculationOptions, target: Chosen, *, offline: bool, screen: view.Screen) -> Proposing:
    """Return how tokens are proposed for the target; its draft, or the named one, may be fetched."""
    if _is_plain(options):
        return None, None, ""
    card, named = target.card, _named(options, target)
    if named.mtp == "on":
        _check_block(target, f"{named.name},{MTP}")
    if named.name in (MTP, LOOKUP):
        _check_without_draft(options, target, named.name)

    def fetched(name: str) -> Path:
        with downloading(screen, f"the draft {name}", again="the same command") as bar:
            return resolve_draft(name, offline=offline, progress=bar)

    plan = plan_draft(named, target.path, card, resolve=fetched, budget=options.budget, chain=options.chain)
    path, is_listed = plan.path, card is not None and (card.draft is not None or card.pair is not None)
    if path is None and named.name == AUTO:
        if card is None or not is_listed:
            for flag in _draft_flags(options):
                raise UsageError(
                    f"{flag} needs a draft, and none is listed for {card.name if card else target.path.name}",
                    "--draft PATH|REPO names one",
                )
            return plan.config, None, _without_draft(target, screen)
        path = _fetched_draft(card, fetch=target.fetched and not offline, screen=screen)
    if path is None:
        if named.mtp != "off" and target.mtp:
            screen.note(OWN_BLOCK)
        return plan.config, None, ""
    _warn_of_base(target, screen, named=named.name != AUTO)
    return plan.config, DraftConfig(path, options.draft_quant.value, head=options.draft_head), ""


def _warn_of_base(target: Chosen, screen: view.Screen, *, named: bool) -> None:
    if target.tuned and target.card is not None and not named:
        screen.warning(
            f"{target.path.name} is made from {target.card.title} and has its draft: fewer of the draft's"
            " tokens may be accepted",
            f"bough train {target.path.name} makes one for it",
        )


def _named(options: SpeculationOptions, target: Chosen) -> NamedDraft:
    """Return what `--draft` or the environment names."""
    named = NamedDraft.read(options.draft or environment().draft or AUTO)
    if named == NamedDraft(AUTO, "auto") and target.tuned and target.mtp:
        return NamedDraft(MTP, "auto")  # fits it better than the draft of the model it is made from
    return named


def _check_block(target: Chosen, named: str) -> None:
    if not target.mtp:
        raise UsageError(
            f"--draft {named}: {target.path.name} has no MTP block", "--draft auto takes what there is"
        )


def _check_without_draft(options: SpeculationOptions, target: Chosen, name: str) -> None:
    if name == MTP:
        _check_block(target, name)
    for flag in _draft_flags(options):
        raise UsageError(f"{flag} and --draft {name} exclude each other: no draft is loaded")


def _without_draft(target: Chosen, screen: view.Screen) -> str:
    """Say at the start what proposes tokens where no draft is known; return what is said at the end."""
    if target.mtp:
        screen.note(OWN_BLOCK)
        return ""
    for beside in drafts_beside(target.path):
        return f"A draft lies beside the model, only prompt lookup proposed tokens: --draft {beside}"
    shown = screen.takes_notes and first_time(f"no draft of {target.path.name}")
    return NO_DRAFT if shown else ""


def _is_plain(options: SpeculationOptions) -> bool:
    return options.no_draft or (options.draft or environment().draft) == NONE


def _draft_flags(options: SpeculationOptions) -> list[str]:
    given = {
        "--draft-quant": options.draft_quant is not DraftQuant.auto,
        "--draft-head": options.draft_head is not None,
    }
    return [flag for flag, is_given in given.items() if is_given]


def _fetched_draft(card: ModelCard, *, fetch: bool, screen: view.Screen) -> Path | None:
    """Return the draft that is listed for the target; None, with a warning, where it cannot be had."""
    command = f"bough pull {card.name} --draft-only"
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
