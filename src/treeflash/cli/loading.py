"""From a model's name to a loaded one, for every command that answers; knows no prompt and no protocol."""

from pathlib import Path
from typing import TYPE_CHECKING

from treeflash.cli import view
from treeflash.cli.footprint import BITS, footprint
from treeflash.cli.inventory import card_of
from treeflash.cli.speculation import Chosen, downloading
from treeflash.errors import UsageError
from treeflash.hub.catalog import Card
from treeflash.hub.resolve import Meaning, meaning, resolve

if TYPE_CHECKING:
    from treeflash.engine.session import Session

EMBEDDED = "treeflash-40m"  # the card of the pair inside the package


def find(name: str | None, *, think: bool | None, offline: bool, screen: view.Screen) -> Chosen:
    """The model's file, fetched where it is not here yet; no name: the pair inside the package."""
    if name is None:
        screen.notice(f"No model given: using {EMBEDDED}, the small one that comes with TreeFlash.")
    meant = meaning(EMBEDDED if name is None else name)
    with downloading(screen, str(meant.fetched), again="the same command") as bar:
        path = resolve(meant, offline=offline, progress=bar)
    return Chosen(path, _card(path, meant, think=think), fetched=bar.began)


def _card(path: Path, meant: Meaning, *, think: bool | None) -> Card | None:
    """Looks into the file before the weights are read, which may take minutes."""
    from treeflash.gguf.reader import GGUFFile
    from treeflash.text.template import ChatTemplate

    with GGUFFile.open(path) as file:
        if think is not None and not ChatTemplate.from_metadata(file.metadata).supports_thinking:
            raise UsageError(
                f"{path.name} has no switch for thinking in its chat template",
                "leave out --think and --no-think",
            )
        return meant.card or card_of(file, meant.repo.repo if meant.repo else None)


def warn_of_packed_weights(session: "Session", path: Path, screen: view.Screen) -> None:
    from treeflash.gguf.reader import GGUFFile
    from treeflash.models.spec import ModelSpec

    kind = session.engine.target.device.type
    with GGUFFile.open(path) as file:
        need = footprint(file, ModelSpec.from_gguf(file), BITS["cpu" if kind == "cpu" else "gpu"])
    draft = f" and its draft {view.amount(session.plan.draft)}" if session.plan.draft else ""
    screen.warning(
        f"the weights need {view.amount(need.weights)}{draft} expanded, with room for the context, and "
        f"{view.amount(session.plan.available)} are free on this {kind.upper()}: they stay packed, "
        "and answers come very slowly",
        f"close other programs, {'use --no-draft, ' if draft else ''}take a model with fewer parameters, "
        "or a machine with more memory; a smaller quantisation does not help",
    )


def tell_of_approximations(session: "Session", screen: view.Screen) -> None:
    if named := session.engine.states.approximate:
        screen.notice(f"Approximate, as asked for: {', '.join(named)}. docs/long-context.md has the cost.")


def costs_file() -> Path:
    """Where measured times of steps are kept from one run to the next."""
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("treeflash")) / "step-costs.json"
