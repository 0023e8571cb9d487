"""Penalties along a tree's paths, log probabilities, and how a draft is ranked for a request."""

import math
from collections import Counter

import pytest
import torch

from bough.engine.sampler import Sampler, SamplingParams, token_logprobs
from bough.errors import UsageError
from bough.kernels.sampling import gumbel
from bough.models.step import Step, visibility

V = 40
CPU = torch.device("cpu")
PARENTS = [-1, 0, 0, 1, 3, 2]
TOKENS = [5, 7, 9, 5, 11, 7]
PROMPT, GENERATED = [1, 2, 2, 3], [3, 7, 7, 30]


def sampler(**options) -> Sampler:
    made = Sampler(1, 64, V, CPU)
    made.begin(0, SamplingParams(**{"seed": 3, **options}), PROMPT, masked=False)
    for token in GENERATED:
        made.counts[0, token] += 1
    return made


def step_of(positions: torch.Tensor, tokens: torch.Tensor, ancestors: torch.Tensor) -> Step:
    """Rows of slot 0, after which tokens are sampled for the positions [R]."""
    rows = (part[None] for part in (tokens, positions - 1, torch.full_like(tokens, -1), ancestors))
    return Step(torch.tensor([0]), *rows)


def bits_of(visible: torch.Tensor) -> torch.Tensor:
    """Ancestor bits [R] of visible [R, T]."""
    return (visible.long() << torch.arange(visible.shape[1])).sum(1)


def by_hand(row: torch.Tensor, path: list[int], params: SamplingParams) -> torch.Tensor:
    """Penalties token by token: repetition on prompt and answer, the others on the answer; then the bias."""
    answer = GENERATED + path
    out = row.clone()
    for token in set(PROMPT + answer):
        out[token] = (
            out[token] / params.repetition_penalty
            if out[token] > 0
            else out[token] * params.repetition_penalty
        )
    for token in set(answer):
        out[token] -= params.presence_penalty + params.frequency_penalty * answer.count(token)
    for token, bias in params.logit_bias.items():
        out[token] += bias
    return out


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.1},
        {"frequency_penalty": 0.7},
        {"logit_bias": {4: 9.0, 5: -100.0, 6: -math.inf}},
        {
            "repetition_penalty": 0.8,
            "presence_penalty": -0.5,
            "frequency_penalty": 0.3,
            "logit_bias": {7: 1.0},
        },
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_row_is_penalised_for_its_own_path(options: dict, temperature: float) -> None:
    """The tokens of the tree have nearly the largest logits: which of them is sampled depends on the path."""
    visible = visibility(torch.tensor([PARENTS]))[0]
    positions = torch.arange(100, 100 + len(TOKENS))
    made, params = sampler(temperature=temperature, **options), SamplingParams(**options)
    paths = [[TOKENS[i] for i in row.nonzero()[:, 0].tolist()] for row in visible]
    noise = [gumbel(3, torch.arange(V), position) if temperature else 0.0 for position in positions]
    differ = Counter[str]()
    for seed in range(30):
        logits = torch.randn(len(TOKENS), V, generator=torch.Generator().manual_seed(seed)) / 2
        logits[:, sorted({*TOKENS, *PROMPT, 20, 21})] += 2
        if temperature:  # the noise must not decide
            logits -= temperature * torch.stack(noise)
        sampled = made.sample(logits, step_of(positions, torch.tensor(TOKENS), bits_of(visible))).tolist()
        for row, path in enumerate(paths):
            others = {"no row": [], "the row alone": [TOKENS[row]], "all rows": TOKENS, "its path": path}
            best = {
                name: int((by_hand(logits[row], each, params) / (temperature or 1) + noise[row]).argmax())
                for name, each in others.items()
            }
            assert sampled[row] == best["its path"]
            differ.update(name for name in best if best[name] != sampled[row])
    if options.keys() != {"logit_bias"}:
        assert min(differ[name] for name in others if name != "its path") > 5, differ


def test_logprobs_are_of_the_targets_own_distribution() -> None:
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(4))
    found = token_logprobs(logits, [4, 9, 9], 3)
    for row, entry in enumerate(found):
        table = logits[row].log_softmax(0)
        assert entry.logprob == pytest.approx(float(table[entry.token]))
        best = table.sort(descending=True)
        assert [token for token, _ in entry.top] == best.indices[:3].tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values[:3].tolist())


def test_rank_puts_the_sampled_token_first() -> None:
    """A draft whose logits are the target's own ranks first, at every depth, the sampled token."""
    logits = 2 * torch.randn(8, V, generator=torch.Generator().manual_seed(5))
    positions, anchor = torch.arange(50, 58), torch.tensor([12])
    for options in ({}, {"temperature": 1.0}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05}):
        made = sampler(presence_penalty=0.5, **options)
        ids, scores = made.rank(logits[None], positions[None], anchor, torch.tensor([0]), 6)
        ids, scores = ids[0], scores[0]
        step = step_of(positions, anchor.expand(8), torch.ones(8, dtype=torch.int64))
        assert torch.equal(ids[:, 0], made.sample(logits, step))
        assert bool((scores[:, :-1] >= scores[:, 1:]).all()) and bool((scores <= 0).all())


def test_noise_of_a_position_is_the_same_in_every_step() -> None:
    made = sampler(temperature=1.0)
    logits = torch.randn(4, V)
    none = torch.zeros(2, 4, dtype=torch.int64)
    made.sample(logits, step_of(torch.tensor([7, 8, 8, 9]), *none))
    for positions in ([8, 9, 9, 10], [9, 30, 31, 9], [9, 9, 9, 9]):
        step = step_of(torch.tensor(positions), *none)
        fresh = sampler(temperature=1.0)
        assert torch.equal(made.sample(logits, step), fresh.sample(logits, step))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan"),
        ({"frequency_penalty": 1e9}, "frequency_penalty is"),
        ({"logit_bias": {3: math.inf}}, "logit_bias is"),
        ({"logprobs": 101}, "logprobs is 101, needed between 0 and 100"),
        ({"logit_bias": {V: 1.0}}, f"logit_bias has token {V}, the vocabulary has ids 0 to {V - 1}"),
    ],
)
def test_bad_values_are_named(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sampler(**options)


@pytest.mark.parametrize("options", [{}, {"top_k": 9}, {"top_p": 0.8}])
def test_every_row_of_a_large_tree_has_the_same_noise_as_alone(options: dict) -> None:
    rows = 63
    logits = torch.randn(rows, V, generator=torch.Generator().manual_seed(1))
    tokens, positions, alone = torch.arange(rows) % V, torch.arange(200, 200 + rows), torch.tensor([1])
    many = sampler(temperature=1.2, **options)
    together = many.sample(logits, step_of(positions, tokens, 1 << torch.arange(rows))).tolist()
    one = sampler(temperature=1.2, **options)
    each = [
        one.sample(logits[row, None], step_of(positions[row, None], tokens[row, None], alone)).item()
        for row in range(rows)
    ]
    assert together == each and len(set(each)) > 10
