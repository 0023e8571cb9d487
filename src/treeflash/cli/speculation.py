"""How a run proposes tokens, and with which draft: flags first, then the environment, then the model's card."""

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
class Target:
    """A model about to be loaded."""

    path: Path
    card: Card | None
    fetched: bool = False  # just now, so that its draft is wanted too
    known: bool = True  # False: the tiny random one, of which no draft is expected


def decide(
    wishes: Wishes, target: Target, *, offline: bool, screen: view.Screen
) -> tuple[SpecConfig | None, DraftConfig | None]:
    if wishes.plain:
        return None, None
    asked = wishes.draft or wishes.default_draft
    if asked is not None:
        with downloading(screen, "the same command") as bar:
            path: Path | None = resolve_draft(asked, offline=offline, progress=bar)
    else:
        path = _known_draft(wishes, target, offline=offline, screen=screen)
    defaults = SpecConfig()
    recommended = target.card.budget if target.card else defaults.budget
    config = SpecConfig(budget=wishes.budget or recommended, chain=wishes.chain)
    if path is None:
        return config, None
    return config, DraftConfig(path, wishes.quant.value, wishes.context, wishes.causal)


def _known_draft(wishes: Wishes, target: Target, *, offline: bool, screen: view.Screen) -> Path | None:
    """The draft that belongs to the target, with a word to the user where there is none."""
    card = target.card
    if card is None or (card.draft is None and card.pair is None):
        for flag in wishes.draft_flags():
            raise UsageError(
                f"{flag} needs a draft, and none is known for {card.name if card else target.path.name}",
                "--draft PATH|REPO names one",
            )
        if target.known:
            screen.note("No draft is known for this model: only copies from the text are proposed (--draft).")
        return None
    if (path := draft_here(card)) is not None:
        return path
    command = f"treeflash pull {card.name} --draft-only"
    if target.fetched and not offline and card.draft is not None:
        screen.note(f"Fetching its draft {card.draft}")
        try:
            with downloading(screen, command) as bar:
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
def downloading(screen: view.Screen, again: str) -> Generator[view.DownloadBar]:
    """A download that can be gone on with; `again` is what does it."""
    with screen.downloading() as bar:
        try:
            yield bar
        except KeyboardInterrupt:
            if bar.began:
                screen.notice(f"Interrupted. What was downloaded is kept: {again} goes on from there.")
            raise
