"""Sampling and ranking kernels against the references, over vocabularies of real size."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bough.kernels.sampling import (
    SamplingState,
    filtered,
    gumbel,
    launch,
    rank_rows,
    sample_rows,
)
from bough.kernels.sampling import state as plain
from bough.kernels.sampling.filters import OPEN
from tests.gpu.inputs import DEVICE
from tests.gpu.sampling_inputs import FILTERS, KINDS, VOCABULARY, random_logits, random_tree, set_request
from tests.kernels.sampling_memory import above_threshold, owners, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("inference_mode")]

# Vocabulary, rows, candidates of the shortlist: with 8 nearly every row needs the search for the threshold.
SHAPES = ((VOCABULARY, 64, 1024), (VOCABULARY, 5, 1024), (32_003, 24, 1024), (VOCABULARY, 24, 8))
every_kind = pytest.mark.parametrize("kind", KINDS)
every_filter = pytest.mark.parametrize("filters", FILTERS)


def poisoned_workspace(rows: int, vocabulary: int, shortlist: int = 1024) -> launch.Workspace:
    return poisoned(launch.Workspace(rows, vocabulary, DEVICE, shortlist=shortlist))


def assert_same_tokens(
    logits: Tensor, positions: Tensor, found: Tensor, expected: Tensor, settings: dict
) -> None:
    """Let sampled rows differ only between tokens whose perturbed scores are equal to the last digits."""
    different = (found != expected).nonzero()[:, 0].tolist()
    if settings["temperature"] == 0:
        assert not different, f"greedy rows {different}"
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


@pytest.mark.parametrize(("vocabulary", "rows", "shortlist"), SHAPES)
@every_kind
@every_filter
def test_sampled_tokens_match_the_reference(
    vocabulary: int, rows: int, shortlist: int, kind: str, filters: str
) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    random.seed(1)
    state = SamplingState.empty(rows, vocabulary, DEVICE)
    # A view of a wider tensor: rows begin at any alignment.
    logits = random_logits(kind, rows, vocabulary + 16, generator)[:, :vocabulary]
    tokens, ancestors = random_tree(rows, vocabulary, generator)
    positions = torch.randint(2**40, (rows,), device=DEVICE, generator=generator)
    set_request(state, FILTERS[filters], generator)
    work = poisoned_workspace(rows, vocabulary, shortlist)
    found = sample_rows(logits, positions, tokens, ancestors, owners(logits), state, work).clone()
    expected = plain.sample_rows(logits, positions, tokens, ancestors, owners(logits), state)
    settings = state.settings(0)
    adjusted = plain.adjusted(logits, tokens, ancestors, state, 0, masks=state.allowed[: len(logits)])
    assert_same_tokens(adjusted, positions, found, expected, settings)
    if settings["temperature"] > 0 and (settings["top_k"] or settings["top_p"] < 1):
        assert_same_candidates(work, adjusted, settings)
        if shortlist == 8 and kind == "flat" and filters == "top-p":
            assert int(work.record[:, OPEN.value].sum()) > 0, "no row was searched"


@every_filter
def test_a_row_alone_gives_the_token_of_the_row_among_others(filters: str) -> None:
    """Nor does it depend on how often it is sampled."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    random.seed(2)
    state, work = SamplingState.empty(64, VOCABULARY, DEVICE), poisoned_workspace(64, VOCABULARY)
    logits = random_logits("normal", 64, VOCABULARY, generator)
    tokens, ancestors = random_tree(64, VOCABULARY, generator)
    positions = torch.arange(64, device=DEVICE)
    set_request(state, FILTERS[filters], generator)
    whole = sample_rows(logits, positions, tokens, ancestors, owners(logits), state, work).clone()
    for rows in (slice(0, 1), slice(3, 11), slice(40, 64), *[slice(0, 64)] * 20):
        # A grammar's masks belong to the rows of the call.
        own = replace(state, allowed=state.allowed[rows])
        found = sample_rows(
            logits[rows], positions[rows], tokens, ancestors[rows], owners(logits[rows]), own, work
        )
        assert torch.equal(found, whole[rows]), f"rows {rows.start} to {rows.stop}"


def test_one_graph_serves_every_request() -> None:
    """Sampling parameters are in the static buffers: no setting needs another capture."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    random.seed(7)
    state, work = SamplingState.empty(24, VOCABULARY, DEVICE), poisoned_workspace(24, VOCABULARY)
    logits = random_logits("normal", 24, VOCABULARY, generator)
    tokens, ancestors = random_tree(24, VOCABULARY, generator)
    positions, rows = torch.arange(24, device=DEVICE), owners(logits)
    sample_rows(logits, positions, tokens, ancestors, rows, state, work)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample_rows(logits, positions, tokens, ancestors, rows, state, work)
    for filters in FILTERS.values():
        set_request(state, filters, generator)
        positions += 100
        graph.replay()
        expected = plain.sample_rows(logits, positions, tokens, ancestors, rows, state)
        adjusted = plain.adjusted(logits, tokens, ancestors, state, 0, masks=state.allowed[: len(logits)])
        assert_same_tokens(adjusted, positions, out, expected, state.settings(0))


@every_kind
@every_filter
def test_ranked_candidates_match_the_reference(kind: str, filters: str) -> None:
    generator = torch.Generator(DEVICE).manual_seed(4)
    state = SamplingState.empty(15, VOCABULARY, DEVICE)
    logits = random_logits(kind, 15, VOCABULARY, generator)
    set_request(state, FILTERS[filters], generator)
    positions, anchor = torch.arange(100, 115, device=DEVICE), torch.tensor([7], device=DEVICE)
    work = poisoned_workspace(15, VOCABULARY)
    ids, scores = rank_rows(logits, positions, anchor, owners(logits), 16, state, work)
    expected_ids, expected = plain.rank_rows(logits, positions, anchor, owners(logits), 16, state)
    live = expected > -torch.inf
    # The kernel drops candidates that are 28 or more below the best.
    dropped = live & (scores == -torch.inf)
    assert bool((expected[dropped] < -25).all()) and bool((scores[~live] == -torch.inf).all())
    live &= ~dropped
    assert float((scores - expected)[live].abs().max()) < 1e-4
    # Candidates of equal scores may be swapped.
    close = torch.zeros_like(live)
    neighbours = (expected[:, 1:] - expected[:, :-1]).abs() < 3e-5
    close[:, 1:] |= neighbours
    close[:, :-1] |= neighbours
    close[:, -1] = True
    assert not bool((live & (ids != expected_ids) & ~close).any())
