"""The figures of README and docs/memory.md for cards that are sold are those of planner and predictor."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bough.bench.cards import MEMORY
from bough.bench.predict import predict
from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.convert.header import write_draft, write_target
from bough.gguf.reader import GGUFFile
from bough.hub.catalog import ModelCard, cards, named
from bough.memory.device import CUDA_CONTEXT, WINDOWS_RESERVE, MemoryBudget, reserve
from bough.memory.planner import MemoryPlan, MemoryPlanner
from bough.models.decoder import check_tensors
from bough.models.spec import ModelSpec

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
DESKTOP = GIB  # what its windows and a browser are assumed to take
MEMORY_DOC = (ROOT / "docs" / "memory.md").read_text()
README = (ROOT / "README.md").read_text()


def budget(card: str, desktop: int, windows: bool = False) -> MemoryBudget:
    total = int(MEMORY[card] * GIB)
    spare = WINDOWS_RESERVE if windows else reserve(total, desktop)
    return MemoryBudget(total - spare, CUDA_CONTEXT + desktop)


@contextmanager
def planned(name: str, folder: Path, *, draft: bool) -> Iterator[tuple[GGUFFile, EngineConfig, float]]:
    """Give the header of a catalogue name's target, its settings, and the gigabytes to be downloaded."""
    found = named(name)
    assert found is not None and found[0].shape is not None
    card, shape = found[0], found[0].shape
    target = write_target(card, shape, folder / f"{name}.gguf")
    path = write_draft(card, shape, folder) if draft else None
    config = EngineConfig(
        "cuda", speculation=SpecConfig(budget=card.budget), draft=DraftConfig(path) if path else None
    )
    size = target.stat().st_size + (path.stat().st_size if path else 0)
    with GGUFFile.open(target) as file:
        yield file, config, size / 1e9


def planner(file: GGUFFile, config: EngineConfig, budget: MemoryBudget) -> MemoryPlanner:
    return MemoryPlanner.create(file, ModelSpec.from_gguf(file), config, torch.device("cuda"), budget)


@pytest.mark.parametrize("card", ["RTX 3090", "RTX 4090"])
@pytest.mark.parametrize(
    ("machine", "desktop", "windows"),
    [("nothing else on it", 0, False), ("a desktop", DESKTOP, False), ("Windows", DESKTOP, True)],
)
def test_contexts_of_24_gb_cards(
    tmp_path: Path, card: str, machine: str, desktop: int, windows: bool
) -> None:
    room = budget(card, desktop, windows)
    with planned("qwen3.6-27b", tmp_path, draft=True) as (file, config, _):
        made = planner(file, config, room)
        plan, longest = made.plan(), [option.max_ctx for option in made.options()[:5]]
    with planned("qwen3.6-27b", tmp_path, draft=False) as (file, config, _):
        alone = planner(file, config, room).plan()
    cells = [card, f"{MEMORY[card]}", machine, *(f"{n:,}" for n in (plan.max_ctx, *longest, alone.max_ctx))]
    assert format_of(plan) == format_of(alone) == "q8_0"
    assert f"| {' | '.join(cells)} |" in MEMORY_DOC, " | ".join(cells)


def format_of(plan: MemoryPlan) -> str:
    return "/".join(dict.fromkeys(format.name for format in plan.kv))


ROWS = [  # card, model, whether the draft pays there, quantisation
    ("RTX 5090", "qwen3.6-27b", True),
    ("RTX 4090", "qwen3.6-27b", True),
    ("RTX 3090", "qwen3.6-27b", True),
    ("RTX 3090", "qwen3.6-35b-a3b", False),
    ("RTX 4080", "qwen3.5-9b", True),
    ("RTX 3080", "qwen3.5-4b", True),
]


@pytest.mark.parametrize(("card", "name", "draft"), ROWS)
def test_the_first_table_of_the_readme(tmp_path: Path, card: str, name: str, draft: bool) -> None:
    with planned(name, tmp_path, draft=draft) as (file, config, size):
        contexts = [planner(file, config, budget(card, desktop)).plan() for desktop in (0, DESKTOP)]
        speeds = {row["rows"]: row["tok_s"] for row in predict(file.path, config, card)["sizes"]}
    lengths = " / ".join(f"{plan.max_ctx:,}" for plan in contexts)
    formats = " / ".join(dict.fromkeys(format_of(plan) for plan in contexts))
    plain = span(speeds[1][1])
    tree = f"{span(speeds[24][4])} | {span(speeds[24][6])}" if draft else "| "
    cells = [f"{lengths}, {formats}", f"{size:.1f} GB", plain, tree]
    assert f"| {' | '.join(cells)} |" in README, " | ".join(cells)


def span(speeds: tuple[float, float]) -> str:
    return " to ".join(dict.fromkeys(f"{speed:.0f}" for speed in speeds))


@pytest.mark.parametrize("card", [card for card in cards() if card.shape], ids=lambda card: card.name)
def test_every_name_has_a_header_and_a_draft_that_fit(card: ModelCard, tmp_path: Path) -> None:
    assert card.shape is not None and (card.shape.draft is None) == (card.draft is None)
    with GGUFFile.open(write_target(card, card.shape, tmp_path / "target.gguf")) as file:
        spec = check_tensors_of(file)
    assert (spec.architecture, spec.width, len(spec.layers)) == (
        card.match.architecture,
        card.match.width,
        card.match.layers,
    )
    if card.draft is not None:
        write_draft(card, card.shape, tmp_path)


def check_tensors_of(file: GGUFFile) -> ModelSpec:
    """Return the spec of a file that has all tensors of its architecture, and no others."""
    spec = ModelSpec.from_gguf(file)
    check_tensors(file, spec)
    return spec
