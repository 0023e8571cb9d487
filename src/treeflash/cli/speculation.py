"""How a run proposes tokens, and with which draft: by flags, else the environment, else the model's card."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from treeflash.cli import view
from treeflash.cli.inventory import draft_here
from treeflash.cli.run_flags import DraftQuant
from treeflash.config import DraftConfig, SpecConfig
from treeflash.errors import ModelFileError, ModelNotFound, ResourceError, UsageError
from treeflash.hub.catalog import Card
from treeflash.hub.drafts import fetch_draft
from treeflash.hub.resolve import resolve_draft

NONE = "none"
NO_DRAFT = "No draft is known for this model, only copies from the text were proposed: --draft names one."


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line says about speculation, and the draft that the environment names."""

    draft: str | None
    no_draft: bool
    chain: bool
    budget: int | None
    quant: DraftQuant
    context: int | None
    causal: bool | None
    default_draft: str | None

    @property
    def plain(self) -> bool:
        """Whether nothing is to be proposed."""
        return self.no_draft or (self.draft or self.default_draft) == NONE

    def check(self) -> None:
        """Refuses what contradicts itself, before any work."""
        if self.draft is not None and not self.draft.strip():
            raise UsageError("the name of the draft is empty", "--draft PATH|REPO, or --no-draft")
        if self.no_draft and self.draft not in (None, NONE):
            raise UsageError(f"--draft {self.draft} and --no-draft exclude each other")
        if self.plain:
            cause = "--no-draft" if self.no_draft else "--draft none" if self.draft else "DFLASH_DRAFT=none"
            for flag in [*(["--chain"] if self.chain else []), *self._budget_flag(), *self.draft_flags()]:
                raise UsageError(f"{flag} and {cause} exclude each other: nothing is proposed")

    def draft_flags(self) -> list[str]:
        """Flags that say something about a draft."""
        causal = "--draft-causal" if self.causal else "--draft-bidirectional"
        given = {
            "--draft-quant": self.quant is not DraftQuant.auto,
            "--draft-ctx": self.context is not None,
            causal: self.causal is not None,
        }
        return [flag for flag, set_ in given.items() if set_]

    def _budget_flag(self) -> list[str]:
        return [] if self.budget is None else ["--budget"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """A model about to be loaded."""

    path: Path
    card: Card | None
    fetched: bool = False  # just now, so that its draft is wanted too
    known: bool = True  # False: the tiny random one, of which no draft is expected


@dataclass(frozen=True, slots=True)
class Speculation:
    config: SpecConfig | None  # None: plain decoding
    draft: DraftConfig | None = None
    note: str = ""  # for the end of a run, where nobody minds it


def decide(wishes: Wishes, target: Chosen, *, offline: bool, screen: view.Screen) -> Speculation:
    if wishes.plain:
        return Speculation(None)
    card, asked = target.card, wishes.draft or wishes.default_draft
    recommended = card.budget if card else SpecConfig().budget
    config = SpecConfig(budget=wishes.budget or recommended, chain=wishes.chain)
    if asked is not None:
        with downloading(screen, f"the draft {asked}", again="the same command") as bar:
            path: Path | None = resolve_draft(asked, offline=offline, progress=bar)
    elif card is None or (card.draft is None and card.pair is None):
        for flag in wishes.draft_flags():
            raise UsageError(
                f"{flag} needs a draft, and none is known for {card.name if card else target.path.name}",
                "--draft PATH|REPO names one",
            )
        return Speculation(config, note=NO_DRAFT if target.known else "")
    else:
        path = _card_draft(card, fetch=target.fetched and not offline, screen=screen)
    if path is None:
        return Speculation(config)
    return Speculation(config, DraftConfig(path, wishes.quant.value, wishes.context, wishes.causal))


def _card_draft(card: Card, *, fetch: bool, screen: view.Screen) -> Path | None:
    """The draft that belongs to the target; None with a warning where it cannot be had."""
    if (path := draft_here(card)) is not None:
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
    """A download of `what` that can be gone on with; `again` is what does it."""
    with screen.downloading(what) as bar:
        try:
            yield bar
        except KeyboardInterrupt:
            if bar.began:
                bar.notice(f"Interrupted. What was downloaded is kept: {again} goes on from there.")
            raise
