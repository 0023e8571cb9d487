"""Sampling and ranking kernels against the references, over vocabularies of real size."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from bough.kernels.sampling import RowOwners, SampledRows, SamplingState, filtered, gumbel, launch
from bough.kernels.sampling import state as plain
from bough.kernels.sampling.triton_kernels import OPEN
from tests.gpu.inputs import DEVICE, INTERPRETED
from tests.gpu.numerics import captured
from tests.gpu.sampling_inputs import FILTERS, KINDS, VOCABULARY, random_logits, random_tree, set_request
from tests.kernels.sampling_memory import above_threshold, owners, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

# Vocabulary, rows, candidates of the shortlist: with 8 nearly every row needs the search for the threshold.
SHAPES = ((VOCABULARY, 64, 1024), (VOCABULARY, 5, 1024), (32_003, 24, 1024), (VOCABULARY, 24, 8))
# And the tokens of a bin that there is room for: without room the search reads the whole row.
CASES = [(*shape, 8192, kind, name) for shape in SHAPES for kind in KINDS for name in FILTERS]
RANKED = [(VOCABULARY, 1024, kind, name) for kind in KINDS for name in FILTERS]
if INTERPRETED:
    CUT = ("top-p", "top-k", "everything")
    CASES = [
        *((5000, 3, 256, 8192, "normal", name) for name in FILTERS),
        *((2500, 3, 4, 8192, "normal", name) for name in CUT),
        *((600, 3, 2, 16, "ties", name) for name in CUT),
        *((300, 3, 64, 16, "equal", name) for name in ("greedy", "top-p", "top-k")),
        *((600, 3, 256, 16, "ties", "top-p"), (300, 3, 256, 64, "holes", "everything")),
    ]
    RANKED = [*((2500, 64, "normal", name) for name in FILTERS), (2500, 512, "normal", "temperature")]
ROWS, WORDS, LISTED = (4, 300, 64) if INTERPRETED else (64, VOCABULARY, 1024)
every_filter = pytest.mark.parametrize("filters", FILTERS)


def workspace(rows: int, vocabulary: int, shortlist: int = LISTED, capacity: int = 8192) -> launch.Workspace:
    return poisoned(launch.Workspace(rows, vocabulary, DEVICE, capacity=capacity, shortlist=shortlist))


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a tree over some logits, and the request that samples there."""

    logits: Tensor
    positions: Tensor
    tokens: Tensor
    ancestors: Tensor
    state: SamplingState

    @classmethod
    def random(cls, kind: str, filters: str, rows: int, vocabulary: int, seed: int = 1) -> "Rows":
        generator = torch.Generator(DEVICE).manual_seed(seed)
        random.seed(seed)
        state = SamplingState.empty(rows, vocabulary, DEVICE)
        # A view of a wider tensor: rows begin at any alignment.
        logits = random_logits(kind, rows, vocabulary + 16, generator)[:, :vocabulary]
        tree = random_tree(rows, vocabulary, generator)
        positions = torch.randint(2**40, (rows,), device=DEVICE, generator=generator)
        set_request(state, FILTERS[filters], generator)
        return cls(logits, positions, *tree, state)

    @property
    def inputs(self) -> tuple:
        rows = SampledRows(self.logits, self.positions, self.tokens, owners(self.logits), self.ancestors)
        return rows, self.state

    def ranked(self, count: int) -> tuple:
        """Return what `rank_rows` takes of these rows as a draft's, after the first's token."""
        rows = SampledRows(self.logits, self.positions, self.tokens[:1], owners(self.logits))
        return rows, count, self.state

    def sample(self, work: launch.Workspace) -> Tensor:
        return launch.sample_rows(*self.inputs, work).clone()

    def assert_sampled(self, found: Tensor) -> Tensor:
        """Compare with the reference; return the logits as the request wants them."""
        masks, settings = self.state.allowed[: len(found)], self.state.settings(0)
        adjusted = plain.adjusted(self.logits, self.tokens, self.ancestors, self.state, 0, masks=masks)
        assert_same_tokens(adjusted, self.positions, found, plain.sample_rows(*self.inputs), settings)
        return adjusted


def assert_same_tokens(
    logits: Tensor, positions: Tensor, found: Tensor, expected: Tensor, settings: dict
) -> None:
    """Let sampled rows differ only between tokens whose perturbed scores are equal to the last digits."""
    different = (found != expected).nonzero()[:, 0].tolist()
    if settings["temperature"] == 0 or INTERPRETED:
        assert not different, f"rows {different}"
    for row in different:
        pair = torch.stack([found[row], expected[row]])
        noise = gumbel(settings["seed"], pair, positions[row]).double()
        scores = logits[row, pair].double() / settings["temperature"] + noise
        assert abs(float(scores[0] - scores[1])) < 2e-5, f"row {row}: {scores.tolist()}"


def assert_same_candidates(work: launch.Workspace, adjusted: Tensor, settings: dict) -> None:
    """The tokens from the threshold up are those that the reference's filters keep."""
    filters = {key: settings[key] for key in ("temperature", "top_k", "top_p")}
    scores, ids = filtered(adjusted, **filters, min_p=0.0)
    expected = torch.zeros_like(adjusted, dtype=torch.bool)
    expected.scatter_(1, ids, scores > -torch.inf)
    top = adjusted.amax(-1, keepdim=True)
    temperature = torch.full((), settings["temperature"], device=DEVICE)
    near = (adjusted - top) / temperature * -(1.4426950408889634 * 2**20) < 41 << 20
    assert torch.equal(expected, above_threshold(work, adjusted) & near)


@pytest.mark.interpreted
@pytest.mark.parametrize(("vocabulary", "rows", "shortlist", "capacity", "kind", "filters"), CASES)
def test_sampled_tokens_match_the_reference(
    vocabulary: int, rows: int, shortlist: int, capacity: int, kind: str, filters: str
) -> None:
    sampled, work = (
        Rows.random(kind, filters, rows, vocabulary),
        workspace(rows, vocabulary, shortlist, capacity),
    )
    adjusted, settings = sampled.assert_sampled(sampled.sample(work)), sampled.state.settings(0)
    assert not bool(work.arrived.any())
    if settings["temperature"] > 0 and (settings["top_k"] or settings["top_p"] < 1):
        assert_same_candidates(work, adjusted, settings)
        searched = int(work.record[:rows, OPEN.value].sum())
        assert searched or (shortlist, kind, filters) != (8, "flat", "top-p"), "no row was searched"
        few = INTERPRETED and kind == "normal" and 0 < settings["top_k"] < shortlist // 4
        assert not (searched and few), "the short list was enough"


@pytest.mark.interpreted
@every_filter
def test_a_row_alone_gives_the_token_of_the_row_among_others(filters: str) -> None:
    """Nor does it depend on how often it is sampled."""
    rows, work = Rows.random("normal", filters, ROWS, WORDS, seed=2), workspace(ROWS, WORDS)
    whole = rows.sample(work)
    parts = [slice(0, 1), slice(1, ROWS - 1), slice(ROWS // 2, ROWS)]
    for part in [*parts, *[slice(0, ROWS)] * (0 if INTERPRETED else 20)]:
        # A grammar's masks belong to the rows of the call.
        own = replace(rows.state, allowed=rows.state.allowed[part])
        some = Rows(rows.logits[part], rows.positions[part], rows.tokens, rows.ancestors[part], own)
        assert torch.equal(some.sample(work), whole[part]), f"rows {part.start} to {part.stop}"


@pytest.mark.interpreted
@pytest.mark.parametrize("filters", ["greedy", "top-p"])
def test_masks_of_a_grammar_are_the_rows_own(filters: str) -> None:
    """A draft's rows are not the tree's, whose masks these are."""
    rows = Rows.random("normal", filters, 3, 300)
    rows.state.begin(**FILTERS[filters], seed=7, masked=True)
    rows.state.allowed.random_(-(2**31), 2**31 - 1)
    rows.state.allowed[1] = 0
    rows.state.allowed[1, 2] = 1 << 5
    found = rows.sample(workspace(3, 300))
    rows.assert_sampled(found)
    assert int(found[1]) == 69
    at = rows.ranked(4)
    assert torch.equal(launch.rank_rows(*at, workspace(3, 300))[0], plain.rank_rows(*at)[0])


@pytest.mark.interpreted
def test_requests_side_by_side() -> None:
    """Each row is sampled and ranked as its own request says; padding rows of NaN are left alone."""
    names = ["everything", "greedy", "top-p"]
    alone = [Rows.random("normal", name, 1, 300, seed=seed) for seed, name in enumerate(names)]
    both = SamplingState.empty(4, 300, DEVICE, slots=3)
    slots, starts = torch.tensor([[2, 0, 1, -1], [0, 1, 2, 3]], device=DEVICE)
    for one, slot in zip(alone, slots.tolist(), strict=False):
        one.state.use_masks(0, False)
        for part in ("numbers", "integers", "prompt", "counts", "bias"):
            getattr(both, part)[slot] = getattr(one.state, part)[0]
        both.argmax[slot] = one.state.argmax[0]
    padding = (
        torch.full((1, 300), torch.nan, device=DEVICE),
        *torch.ones(2, 1, dtype=torch.int64, device=DEVICE),
    )
    parts = zip(*((one.logits, one.positions, one.tokens) for one in alone), padding, strict=True)
    rows, work, of_rows = [torch.cat(part) for part in parts], workspace(4, 300), RowOwners(slots, starts)
    sampled = SampledRows(*rows, of_rows, torch.ones_like(rows[2]))
    found = launch.sample_rows(sampled, both, work).clone()
    expected = plain.sample_rows(sampled, both)
    ids, scores = launch.rank_rows(sampled, 5, both, work)
    for row, one in enumerate(alone):
        assert found[row] == expected[row] == plain.sample_rows(*one.inputs)[0], names[row]
        wanted_ids, wanted_scores = plain.rank_rows(*one.ranked(5))
        assert torch.equal(ids[row : row + 1], wanted_ids), names[row]
        assert torch.allclose(scores[row : row + 1], wanted_scores, atol=1e-4), names[row]


def test_one_graph_serves_every_request() -> None:
    """Sampling parameters are in the static buffers: no setting needs another capture."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    rows, work = Rows.random("normal", "greedy", 24, VOCABULARY, seed=7), workspace(24, VOCABULARY)
    inputs = rows.inputs
    graph, out = captured(lambda: launch.sample_rows(*inputs, work))
    for filters in FILTERS.values():
        set_request(rows.state, filters, generator)
        rows.positions.add_(100)
        graph.replay()
        rows.assert_sampled(out)


@pytest.mark.interpreted
@pytest.mark.parametrize(("vocabulary", "shortlist", "kind", "filters"), RANKED)
def test_ranked_candidates_match_the_reference(
    vocabulary: int, shortlist: int, kind: str, filters: str
) -> None:
    count = 3 if INTERPRETED else 15
    rows, work = (
        Rows.random(kind, filters, count, vocabulary, seed=4),
        workspace(count, vocabulary, shortlist),
    )
    at = rows.ranked(16)
    (ids, scores), (expected_ids, expected) = launch.rank_rows(*at, work), plain.rank_rows(*at)
    live = expected > -torch.inf
    # The kernel drops candidates that are 28 or more below the best.
    dropped = live & (scores == -torch.inf)
    assert bool((expected[dropped] < -25).all()) and bool((scores[~live] == -torch.inf).all())
    live &= ~dropped
    assert float((scores - expected)[live].abs().max()) < (2e-5 if INTERPRETED else 1e-4)
    # Candidates of equal scores may be swapped.
    close = torch.zeros_like(live)
    neighbours = (expected[:, 1:] - expected[:, :-1]).abs() < 3e-5
    close[:, 1:] |= neighbours
    close[:, :-1] |= neighbours
    close[:, -1] = True
    assert not bool((live & (ids != expected_ids) & ~close).any())
    if INTERPRETED and (shortlist == 512 or filters == "temperature"):
        assert work.record[:, OPEN.value].tolist() == [int(shortlist == 64)] * count
