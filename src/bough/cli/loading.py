"""From a model's name to a loaded session, for every command that generates text."""

import gc
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from bough.cli import view
from bough.cli.flags import with_flags
from bough.cli.footprint import on_cpu
from bough.cli.interrupt import held
from bough.cli.listing import suggestion
from bough.cli.options import EngineOptions, SpeculationOptions
from bough.cli.speculation import Chosen, decide, downloading
from bough.config import EngineConfig, environment
from bough.errors import UsageError
from bough.hub.catalog import EMBEDDED
from bough.hub.download import fetch_encoder
from bough.hub.resolve import Meaning, meaning, resolve
from bough.session.folders import costs_file
from bough.session.pairing import base_card, card_of, sees

if TYPE_CHECKING:
    from bough.session.session import Session


@dataclass(frozen=True, slots=True)
class Choice:
    """A model of the command line: how it was named, what it is, and how it is loaded."""

    given: str | None
    target: Chosen
    engine: EngineConfig
    note: str  # shown at the end of a run


def choose(
    name: str | None,
    options: SpeculationOptions,
    engine: EngineOptions,
    screen: view.Screen,
    *,
    think: bool | None = None,
    costs: bool = True,
) -> Choice:
    """Return the model to load, named or from the environment; what is not here is fetched.

    costs: step costs of earlier runs are used, and kept for the next.
    """
    from bough.gguf.read_ahead import read_ahead

    config, settings = engine.config(), environment()
    offline = engine.offline or settings.offline
    sees = not engine.no_images and engine.mmproj is None  # by the encoder of its repository
    name = settings.target if name is None else name
    target = find(name, think=think, offline=offline, screen=screen, encoder=sees)
    read_ahead(target.path)
    speculation, draft, note = decide(options, target, offline=offline, screen=screen)
    config = replace(config, speculation=speculation, draft=draft)
    if engine.compress_scorer != "words":
        scorer = find(engine.compress_scorer, think=None, offline=offline, screen=screen, encoder=False).path
        config = replace(config, compress=replace(config.compress, scorer=scorer))
    return Choice(name, target, replace(config, costs=costs_file()) if costs else config, note)


def find(
    name: str | None, *, think: bool | None, offline: bool, screen: view.Screen, encoder: bool
) -> Chosen:
    """Return the model's file, fetched if it is not here yet; no name: the pair inside the package.

    encoder: fetched with it, if its repository has one.
    """
    if name is None:
        better = suggestion()
        hint = f" For real work on this machine: bough run {better}" if better else ""
        toy = f"{EMBEDDED}, a demonstration of 41M parameters for short Python and sums"
        screen.notice(f"No model given: using {toy}.{hint}")
    meant = meaning(EMBEDDED if name is None else name)
    with downloading(screen, str(meant.fetched), again="the same command") as bar:
        path = resolve(meant, offline=offline, progress=bar)
        if bar.began and encoder and meant.repo is not None and sees(path):
            fetch_encoder(meant.repo.repo, path, progress=bar)
    return _inspected(path, meant, think=think, fetched=bar.began)


def _inspected(path: Path, meant: Meaning, *, think: bool | None, fetched: bool) -> Chosen:
    """Return what the model's file and its name say.

    Checks `think` before the weights are loaded, which may take minutes.
    """
    from bough.gguf.reader import GGUFFile
    from bough.models.spec import ModelSpec, has_mtp
    from bough.text.template import ChatTemplate

    with GGUFFile.open(path) as file:
        if think is not None and not ChatTemplate.from_metadata(file.metadata).supports_thinking:
            raise UsageError(
                f"{path.name} has no switch for thinking in its chat template",
                "leave out --think and --no-think",
            )
        repo = meant.repo.repo if meant.repo else None
        card, mtp = meant.card or card_of(file, repo), has_mtp(file, ModelSpec.from_gguf(file))
        tuned = meant.card is None and base_card(file, repo) is not None
        return Chosen(path, card, fetched=fetched, mtp=mtp, tuned=tuned)


class LoadingBar:
    """Progress while a session is loaded: bytes read, then kernels compiled, then CUDA graphs captured."""

    def __init__(self, name: str, screen: view.Screen):
        self._screen = screen
        self._bar = screen.loading(f"Loading {name}")
        self._counted = ""  # what the bar counts

    def __enter__(self) -> Self:
        self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def reading(self, done: int, total: int) -> None:
        self._bar.update(done, total)

    def compiling(self, done: int, total: int) -> None:
        self._count("Compiling kernels", done, total)

    def warming(self, done: int, total: int) -> None:
        self._count("Capturing CUDA graphs", done, total)

    def _count(self, label: str, done: int, total: int) -> None:
        if self._counted != label:
            self._counted = label
            self._bar.stop()
            self._bar = self._screen.counting(label).__enter__()
        self._bar.update(done, total)

    def stop(self) -> None:
        """Remove the bar; may be called more than once."""
        self._bar.stop()


class _Warnings(logging.Handler):
    def __init__(self, screen: view.Screen):
        super().__init__(logging.WARNING)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.warning(with_flags(record.getMessage()), "")


def show_warnings(screen: view.Screen) -> None:
    """Show what is logged below the command line from now on, warnings and errors alone."""
    logging.getLogger("bough").handlers = [_Warnings(screen)]


def load(path: Path, config: EngineConfig, screen: view.Screen) -> "Session":
    with screen.waiting("Starting PyTorch"), held():
        from bough.session.loading import load_session
    show_warnings(screen)
    with LoadingBar(path.name, screen) as bar:
        session = load_session(
            path, config, progress=bar.reading, compiling=bar.compiling, warming=bar.warming
        )
    describe(session, path, screen)
    gc.freeze()  # what stays is not looked through again: 0.7 ms for each collection during an answer
    return session


def describe(session: "Session", path: Path, screen: view.Screen) -> None:
    """Show how a session was loaded, as far as users should notice."""
    plan = session.plan
    if not plan.expanded:
        _warn_of_packed_weights(session, path, screen)
    for note in plan.notes():
        screen.notice(note[0].upper() + note[1:])
    approximate = session.engine.approximate
    if approximate:
        screen.notice(f"Approximate: {', '.join(approximate)}. docs/long-context.md has the cost.")
    if session.compresses:
        screen.note("Long prompts are compressed, approximately: docs/compression.md says what is lost.")
    if approximate or session.engine.target.device.type == "cuda":
        screen.note(plan.line())
    if session.engine.target.device.type == "cuda":
        screen.note(loaded_line(session.load_seconds))
    if note := plan.backend_note():
        screen.notice(with_flags(note))


def loaded_line(seconds: Mapping[str, float]) -> str:
    phases = ", ".join(f"{name} {each:.1f}" for name, each in seconds.items() if each >= 0.05)
    return f"Loaded in {sum(seconds.values()):.1f} s: {phases}"


def summary(session: "Session", config: EngineConfig) -> str:
    """Return a session's context, device and what proposes tokens, for the line at the start."""
    from bough.memory.device import device_name

    target = session.engine.target
    threads = f"CPU, {target.threads} thread{'s' * (target.threads != 1)}"
    device = device_name(target.device) if target.device.type == "cuda" else threads
    if session.vector_spec is not None:
        return f"context {session.max_ctx:,} tokens · {device} · {session.vector_spec.kind}"
    drafted = "without a draft" if config.draft is None else "with a draft"
    means = "plain decoding" if config.speculation is None else drafted
    return f"context {session.max_ctx:,} tokens · {device} · {means}"


def _warn_of_packed_weights(session: "Session", path: Path, screen: view.Screen) -> None:
    from bough.gguf.reader import GGUFFile
    from bough.models.spec import ModelSpec

    with GGUFFile.open(path) as file:
        need = on_cpu(file, ModelSpec.from_gguf(file))
    draft = f" and its draft {view.amount(session.plan.draft)}" if session.plan.draft else ""
    screen.warning(
        f"the weights need {view.amount(need.weights)}{draft} expanded, with room for the context, and "
        f"{view.amount(session.plan.budget.free)} are free on this CPU: they stay packed, "
        "and answers come very slowly",
        f"close other programs, {'use --no-draft, ' if draft else ''}take a model with fewer parameters, "
        "or a machine with more memory; a smaller quantisation does not help",
    )
