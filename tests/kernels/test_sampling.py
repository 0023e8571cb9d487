"""The noise, the filters and the draw."""

import math

import pytest
import torch

from bough.kernels.sampling import (
    RowOwners,
    SampledRows,
    SamplingState,
    filtered,
    gumbel,
    penalised,
    philox,
    rank,
    rank_rows,
    sample,
    sample_rows,
)
from bough.kernels.sampling.reference import fixed_exp
from bough.kernels.sampling.state import NoiseCache

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def test_philox_known_answers() -> None:
    """Published for counter and key of zeros; the others from a scalar version below."""
    assert int(philox(0, torch.tensor(0), torch.tensor(0))) == 0x6627E8D5
    for seed, token, position in [(1, 2, 3), (2**64 - 1, 248_319, 262_143), (0xDEADBEEF12345678, 7, 2**31)]:
        assert int(philox(seed, torch.tensor(token), torch.tensor(position))) == scalar(seed, token, position)


def scalar(seed: int, token: int, position: int) -> int:
    counter, key = [token, position, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (b >> 32) ^ counter[1] ^ key[0],
            b & 0xFFFFFFFF,
            (a >> 32) ^ counter[3] ^ key[1],
            a & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter[0]


def test_gumbel_is_finite_and_has_the_right_mean_and_spread() -> None:
    noise = gumbel(3, torch.arange(200_000), torch.tensor(5)).double()
    assert bool(noise.isfinite().all())
    # Euler's constant and pi^2 / 6; five standard errors.
    assert abs(float(noise.mean()) - 0.5772) < 5 * 1.2825 / math.sqrt(200_000)
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.04


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    whole = gumbel(9, torch.arange(50)[None], torch.arange(4)[:, None])
    assert torch.equal(whole[2, 17], gumbel(9, torch.tensor(17), torch.tensor(2)))
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole, gumbel(10, torch.arange(50)[None], torch.arange(4)[:, None]))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_draws_follow_the_filtered_distribution(options: dict) -> None:
    """Chi-square over 40,000 positions at a fixed seed; the limits are 1e-4 quantiles by number of cells."""
    settings = {**PLAIN, **options}
    logits = torch.tensor([2.0, 1.5, 1.0, 0.3, 0.0, -0.5, -1.0, -3.0])
    expected = reference(logits, **settings)
    count = 40_000
    tokens = sample(logits.expand(count, -1), torch.arange(count), seed=1234, **settings)
    seen = torch.bincount(tokens, minlength=8).double()
    assert bool((seen[expected == 0] == 0).all())
    cells = expected > 0
    statistic = float(((seen - count * expected)[cells] ** 2 / (count * expected)[cells]).sum())
    limit = {2: 15.2, 3: 18.5, 4: 21.2, 5: 23.6, 6: 25.8, 7: 27.9, 8: 29.9}[int(cells.sum())]
    assert statistic < limit


def reference(
    logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """The distribution after all filters, one token at a time."""
    probability = (logits.double() / temperature).softmax(0)
    order = sorted(range(len(logits)), key=lambda token: -float(probability[token]))
    kept = order[: top_k or len(order)]
    mass = sum(float(probability[token]) for token in kept)
    best = float(probability[order[0]])
    chosen, total = [], 0.0
    for token in kept:
        share = float(probability[token])
        if chosen and (total / mass >= top_p or share < min_p * best):
            break
        chosen.append(token)
        total += share
    out = torch.zeros_like(probability)
    out[chosen] = probability[chosen] / total
    return out


def test_filters_keep_at_least_one_token() -> None:
    scores, ids = filtered(torch.tensor([[0.0, 5.0, 1.0]]), temperature=1.0, top_k=0, top_p=1e-9, min_p=1.0)
    assert ids[0, scores[0] > -torch.inf].tolist() == [1]


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.randn(5, 40)
    for options in ({}, {"top_k": 5}, {"top_p": 0.9}):
        settings = {**PLAIN, **options, "temperature": 1e-40}
        assert torch.equal(sample(logits, torch.arange(5), seed=1, **settings), logits.argmax(-1))


def test_temperature_zero_is_the_likeliest_token() -> None:
    logits = torch.randn(5, 40)
    settings = {**PLAIN, "temperature": 0.0}
    assert torch.equal(sample(logits, torch.arange(5), seed=1, **settings), logits.argmax(-1))


def test_a_negative_control_fails_the_same_chi_square() -> None:
    """Noise that ignores the position would give one token forever: the test above must be able to see it."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.3]).expand(1000, -1)
    tokens = sample(logits, torch.zeros(1000, dtype=torch.int64), seed=5, **PLAIN)
    assert len(tokens.unique()) == 1


def test_of_equal_logits_the_lower_ids_are_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 3.0, 1.0]])
    for options, kept in (({"top_k": 4}, [1, 4, 0, 2]), ({"top_p": 0.88}, [1, 4, 0, 2])):
        scores, ids = filtered(logits, **{**PLAIN, **options})
        assert ids[0, scores[0] > -torch.inf].tolist() == kept


def test_whole_number_weights_are_exponentials() -> None:
    scores = -torch.rand(10_000) * 12
    exact = scores.double().exp()
    assert float((fixed_exp(scores) * 2.0**-40 / exact - 1).abs().max()) < 3e-6
    assert fixed_exp(torch.tensor([0.0, -29.0, -torch.inf])).tolist() == [2**40, 0, 0]


def test_a_request_in_tensors_samples_as_one_in_numbers() -> None:
    torch.manual_seed(4)
    logits, positions = torch.randn(3, 50) * 2, torch.tensor([7, 8, 8])
    tokens, ancestors = torch.tensor([5, 6, 6]), torch.tensor([0b001, 0b011, 0b101])
    filters = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    penalties = {"repetition": 1.5, "presence": 0.5, "frequency": 0.25}
    bias = {"biased": torch.tensor([3, 4]), "bias": torch.tensor([4.0, -torch.inf])}
    state = SamplingState.empty(3, 50, "cpu")
    state.begin(**filters, **penalties, **bias, seed=2**64 - 3, prompt=torch.tensor([0, 1]))
    state.counts[0, 6] = 3
    visible = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]])
    seen = penalised(logits, state.prompt[0], state.counts[0], tokens, visible, **penalties)
    seen[:, 3] += 4
    seen[:, 4] = -torch.inf
    wanted = sample(seen, positions, seed=2**64 - 3, **filters)
    owners = RowOwners.one(0, len(logits), "cpu")
    rows = SampledRows(logits, positions, tokens, owners, ancestors)
    assert torch.equal(sample_rows(rows, state, NoiseCache()), wanted)
    # A draft's rows have the anchor alone above them.
    state.begin(**filters, seed=11)
    rows = SampledRows(logits, positions, tokens[:1], owners)
    ids, scores = rank_rows(rows, 30, state, NoiseCache())
    few, own = rank(logits, positions, count=30, seed=11, **filters)
    width = int((own > -torch.inf).sum(-1).min())
    assert torch.equal(ids[:, :width], few[:, :width]) and torch.equal(scores[:, :width], own[:, :width])
    assert ids.shape == (3, 30) and bool((ids[scores == -torch.inf] == 0).all())
