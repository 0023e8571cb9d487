"""The sampling kernels against their references, in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bough.kernels.sampling import RowOwners, SamplingState, filtered, launch, rank_rows, sample_rows
from bough.kernels.sampling.filters import OPEN as _OPEN
from bough.kernels.sampling.state import NoiseCache, adjusted
from tests.kernels.sampling_memory import above_threshold, owners, poisoned

torch.set_num_threads(1)
OPEN = _OPEN.value
ROWS = 3
OPTIONS = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "top-k": {"temperature": 1.3, "top_k": 7},
    "min-p": {"temperature": 1.5, "min_p": 0.05},
    "everything": {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.7,
        "min_p": 0.02,
        "repetition": 1.2,
        "presence": 0.3,
        "frequency": 0.1,
    },
}
POSITIONS = torch.tensor([5, 2**33 + 1, 7])
ANCESTORS = torch.tensor([0b001, 0b011, 0b101])


def make_logits(kind: str, vocabulary: int) -> Tensor:
    noise = torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(3)) * 3
    match kind:
        case "ties":
            return (noise * 2).round() / 2
        case "equal":
            return torch.full_like(noise, -2.5)
        case "holes":
            return noise.masked_fill(noise < 0, -torch.inf)
        case _:
            return noise


def asked(options: dict, logits: Tensor, *, masked: bool = False) -> tuple[SamplingState, Tensor]:
    """A request with everything that its options take into account, and a tree's tokens."""
    state = SamplingState.empty(ROWS, logits.shape[1], "cpu")
    tokens = torch.tensor([int(logits[0].argmax()), 8, 9])
    more = {}
    if "repetition" in options:
        bias = torch.tensor([2.0, -torch.inf])
        more = {"prompt": torch.tensor([1, 2, 3]), "biased": torch.tensor([5, 9]), "bias": bias}
    state.begin(**options, **more, seed=2**63 + 77, masked=masked)
    state.counts[0, torch.tensor([3, 4])] = 2.0
    return state, tokens


def workspace(vocabulary: int, capacity: int = 8192, shortlist: int = 64) -> launch.Workspace:
    return poisoned(launch.Workspace(ROWS, vocabulary, "cpu", capacity=capacity, shortlist=shortlist))


def kept(work: launch.Workspace, logits: Tensor, settings: dict) -> list[set[int]]:
    """The tokens from the threshold up, as far as noise can lift them."""
    near = (logits - logits.amax(-1, keepdim=True)) / settings["temperature"] > -28.4
    return [set(row.nonzero()[:, 0].tolist()) for row in above_threshold(work, logits) & near]


@pytest.mark.parametrize(
    ("name", "kind", "vocabulary", "capacity", "shortlist"),
    [
        *((name, "normal", 5000, 8192, 256) for name in OPTIONS),
        # The short list is too short for all but the smallest sets.
        *((name, "normal", 2500, 8192, 4) for name in ("top-p", "top-k", "everything")),
        # No room for what is in a bin: the search reads the whole row.
        *((name, "ties", 600, 16, 2) for name in ("top-p", "top-k", "everything")),
        *((name, "equal", 300, 16, 64) for name in ("greedy", "top-p", "top-k")),
        ("top-p", "ties", 600, 16, 256),
        ("everything", "holes", 300, 64, 256),
    ],
)
def test_sample(name: str, kind: str, vocabulary: int, capacity: int, shortlist: int) -> None:
    logits = make_logits(kind, vocabulary)
    state, tokens = asked(OPTIONS[name], logits)
    work = workspace(vocabulary, capacity, shortlist)
    found = launch.sample_rows(logits, POSITIONS, tokens, ANCESTORS, owners(logits), state, work)
    assert torch.equal(
        found, sample_rows(logits, POSITIONS, tokens, ANCESTORS, owners(logits), state, NoiseCache())
    )
    assert not work.arrived.any()
    settings = state.settings(0)
    if settings["temperature"] > 0 and (settings["top_k"] or settings["top_p"] < 1):
        seen = adjusted(logits, tokens, ANCESTORS, state, 0, masks=state.allowed[: len(logits)])
        filters = {key: settings[key] for key in ("temperature", "top_k", "top_p")}
        scores, ids = filtered(seen, **filters, min_p=0.0)
        wanted = [set(row[score > -28.4].tolist()) for row, score in zip(ids, scores, strict=True)]
        assert kept(work, seen, settings) == wanted
        if shortlist == 256:
            assert not work.record[:, OPEN].any()


@pytest.mark.parametrize(
    ("name", "shortlist"),
    [*((name, 64) for name in OPTIONS), ("temperature", 512)],
)
def test_rank(name: str, shortlist: int) -> None:
    logits = make_logits("normal", 2500)
    state, tokens = asked(OPTIONS[name], logits)
    work = workspace(2500, shortlist=shortlist)
    ids, scores = launch.rank_rows(logits, POSITIONS, tokens[:1], owners(logits), 16, state, work)
    wanted_ids, wanted = rank_rows(logits, POSITIONS, tokens[:1], owners(logits), 16, state, NoiseCache())
    live = wanted > -torch.inf
    assert torch.equal(scores > -torch.inf, live)
    assert torch.equal(ids, wanted_ids)
    assert torch.allclose(scores[live], wanted[live], atol=2e-5)
    if shortlist == 512 or name == "temperature":
        assert work.record[:, OPEN].tolist() == [int(shortlist == 64)] * ROWS


@pytest.mark.parametrize("name", ["greedy", "top-p"])
def test_masks(name: str) -> None:
    logits = make_logits("normal", 300)
    state, tokens = asked(OPTIONS[name], logits, masked=True)
    state.allowed.random_(-(2**31), 2**31 - 1, generator=torch.Generator().manual_seed(1))
    state.allowed[1] = 0
    state.allowed[1, 2] = 1 << 5
    found = launch.sample_rows(logits, POSITIONS, tokens, ANCESTORS, owners(logits), state, workspace(300))
    assert torch.equal(
        found, sample_rows(logits, POSITIONS, tokens, ANCESTORS, owners(logits), state, NoiseCache())
    )
    assert int(found[1]) == 69
    # A draft's rows are not the tree's, whose masks these are.
    ids, _ = launch.rank_rows(logits, POSITIONS, tokens[:1], owners(logits), 4, state, workspace(300))
    assert torch.equal(
        ids, rank_rows(logits, POSITIONS, tokens[:1], owners(logits), 4, state, NoiseCache())[0]
    )


def test_a_row_alone_is_the_row_among_others() -> None:
    logits = make_logits("normal", 300)
    state, tokens = asked(OPTIONS["everything"], logits, masked=True)
    state.allowed.random_(-(2**31), 2**31 - 1, generator=torch.Generator().manual_seed(1))
    work = workspace(300)
    whole = launch.sample_rows(logits, POSITIONS, tokens, ANCESTORS, owners(logits), state, work).clone()
    for part in (slice(1, 2), slice(1, 3)):
        # A grammar's masks belong to the rows of the call.
        own = replace(state, allowed=state.allowed[part])
        found = launch.sample_rows(
            logits[part], POSITIONS[part], tokens, ANCESTORS[part], owners(logits[part]), own, work
        )
        assert torch.equal(found, whole[part])


def test_requests_side_by_side() -> None:
    """Each row is sampled and ranked as its own request says; padding rows of NaN are left alone."""
    names = ["everything", "greedy", "top-p"]
    logits = torch.cat([make_logits("normal", 300), torch.full((1, 300), torch.nan)])
    both = SamplingState.empty(4, 300, "cpu", slots=3)
    tokens, slots = torch.tensor([7, 8, 9, 0]), torch.tensor([2, 0, 1, -1])
    starts = torch.tensor([0, 1, 2, 3])
    for row, name in enumerate(names):
        alone, _ = asked(OPTIONS[name], logits[:ROWS])
        slot = int(slots[row])
        for part in ("numbers", "integers", "prompt", "counts", "bias"):
            getattr(both, part)[slot] = getattr(alone, part)[0]
        both.argmax[slot] = alone.argmax[0]
    rows, work = (logits, POSITIONS[[0, 1, 2, 2]], tokens), launch.Workspace(4, 300, "cpu")
    of_rows = RowOwners(slots, starts)
    found = launch.sample_rows(*rows, torch.ones_like(tokens), of_rows, both, work).clone()
    plain = sample_rows(*rows, torch.ones_like(tokens), of_rows, both, NoiseCache())
    ids, scores = launch.rank_rows(*rows, of_rows, 5, both, work)
    for row, name in enumerate(names):
        alone, _ = asked(OPTIONS[name], logits[:ROWS])
        part = slice(row, row + 1)
        one = (logits[part], rows[1][part], tokens[part])
        wanted = sample_rows(*one, torch.tensor([1]), owners(logits[part]), alone, NoiseCache())
        assert found[row] == plain[row] == wanted[0], name
        wanted_ids, wanted_scores = rank_rows(*one, owners(logits[part]), 5, alone, NoiseCache())
        assert torch.equal(ids[part], wanted_ids), name
        assert torch.allclose(scores[part], wanted_scores, atol=1e-4), name


def test_rows_of_a_wider_tensor() -> None:
    logits = make_logits("normal", 320)[:, :301]
    state, tokens = asked(OPTIONS["top-p"], logits)
    found = launch.sample_rows(logits, POSITIONS, tokens, ANCESTORS, owners(logits), state, workspace(301))
    assert torch.equal(
        found, sample_rows(logits, POSITIONS, tokens, ANCESTORS, owners(logits), state, NoiseCache())
    )
