"""Weights of the labels, the loss in groups of blocks, and the statistics."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, pad

from bough.models.draft_spec import RefineSpec, SecondSpec
from bough.train import draft_loss
from bough.train.draft_loss import Head, Tally, block_loss, block_weights, selection
from bough.train.draft_model import Readout, TrainedMLP, TrainedSelector

PLAIN = Readout(torch.nn.Identity())


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def prefixes(lengths: list[int], positions: int) -> torch.Tensor:
    return torch.arange(positions) < torch.tensor(lengths)[:, None]


def test_dpace_weights_sum_the_tokens_that_depend_on_a_label():
    cost, lengths = rows(4, 5).abs(), [5, 3, 1, 0]
    weights = block_weights(cost, prefixes(lengths, 5), "dpace")
    for block, length in enumerate(lengths):
        chances = [0.5 * math.exp(-c) + 0.5 for c in cost[block].tolist()]
        for j in range(5):
            expected = sum(math.prod(chances[: m + 1]) for m in range(j, length)) if j < length else 0
            assert weights[block, j].item() == pytest.approx(expected, rel=1e-5)


def test_decay_weights_fall_with_depth():
    weights = block_weights(rows(2, 15).abs(), prefixes([15, 4], 15), "decay")
    assert weights[0].tolist() == pytest.approx([math.exp(-k / 7) for k in range(15)])
    assert torch.equal(weights[1, 4:], torch.zeros(11))


@pytest.mark.parametrize("kind", ["dpace", "decay"])
def test_groups_of_blocks_give_the_gradient_of_the_whole(monkeypatch, kind):
    head, labels = (
        rows(30, 8, seed=1),
        torch.randint(30, (2, 7, 5), generator=torch.Generator().manual_seed(2)),
    )
    valid = prefixes([5, 5, 2, 5, 1, 0, 5] * 2, 5).view(2, 7, 5)
    weight = rows(8, 8, seed=3).requires_grad_()
    inputs = rows(2, 7, 6, 8, seed=4)

    hidden = inputs @ weight
    cost = cross_entropy((hidden[:, :, 1:] @ head.T).flatten(0, 2), labels.flatten(), reduction="none")
    weights = block_weights(cost.view(14, 5), valid.view(14, 5), kind)
    (expected,) = torch.autograd.grad((cost * weights.flatten()).sum() / valid.sum() * 0.5, weight)

    mean = float((cost.detach() * valid.flatten()).sum() / valid.sum())
    for size in (1 << 28, 30 * 5 * 3):
        monkeypatch.setattr(draft_loss, "_LOGITS", size)
        weight.grad = None
        tally = block_loss(inputs @ weight, labels, valid, Head(head), kind=kind, scale=0.5, readout=PLAIN)
        assert torch.allclose(weight.grad, expected, rtol=1e-4, atol=1e-6)
        assert tally.mean_loss == pytest.approx(mean, rel=1e-5)


def test_acceptance_counts_complete_blocks_up_to_the_first_error():
    tally = Tally.zero(4, torch.device("cpu"))
    right = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 0]]).bool()
    valid = prefixes([4, 4, 4, 2], 4)
    tally.add(torch.ones(4, 4), right, valid, right)
    assert tally.acceptance == pytest.approx(1 + (2 + 4 + 0) / 3)
    assert tally.top1 == pytest.approx([3 / 4, 1, 2 / 3, 1])
    tally.merge(tally, keep=0.5)
    assert tally.acceptance == pytest.approx(3)
    assert tally.mean_loss == 1


def selector_of(vocabulary: int, width: int) -> TrainedSelector:
    selector = TrainedSelector(SecondSpec(kernel=2, group=4, rank=6, candidates=5), width, vocabulary)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in selector.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return selector


def selecting(selector: TrainedSelector) -> Readout:
    def logits(rows, normed, before, ids, marginals):
        return marginals[..., None, :] + selector(normed, before, ids)

    return Readout(torch.nn.Identity(), selector.candidates, logits)


def refining(embedding: torch.Tensor, head: torch.Tensor) -> tuple[Readout, list[torch.nn.Parameter]]:
    """An MLP with a norm of its own, and all that it learns."""
    norm, mlp = torch.nn.RMSNorm(8, 1e-6), TrainedMLP(RefineSpec(6, candidates=5), 8)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in (*norm.parameters(), *mlp.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def logits(rows, normed, before, ids, marginals):
        return norm(mlp(rows, normed, embedding[before])) @ head[ids].mT

    return Readout(norm, mlp.candidates, logits), [*norm.parameters(), *mlp.parameters()]


def test_the_selector_learns_which_candidate_follows_the_token_before():
    """Its loss by hand: gold among the candidates or in the place of the last one, after the true token."""
    vocabulary, width, torch_generator = 12, 8, torch.Generator().manual_seed(3)
    selector = selector_of(vocabulary, width)
    logits = torch.randn(2, 3, vocabulary, generator=torch_generator)
    hidden = torch.randn(2, 3, width, generator=torch_generator)
    labels, anchors = torch.tensor([[1, 5, 2], [7, 7, 0]]), torch.tensor([4, 9])
    # In the first block the third label is the least likely token: it is no candidate.
    logits[0, 2, 2] = -50
    with torch.no_grad():
        found = selection(selecting(selector), (hidden, hidden), logits, labels, anchors, Head(logits))
    for block in range(2):
        before = [int(anchors[block]), *labels[block].tolist()]
        for depth in range(3):
            gold = int(labels[block, depth])
            candidates = logits[block, depth].topk(selector.candidates).indices.tolist()
            missing = gold not in candidates
            if missing:
                candidates[-1] = gold
            gate = selector.hidden_projection(hidden[block, depth])
            pair = selector.predecessor_codebook[before[depth]] * gate
            scores = torch.stack(
                [
                    logits[block, depth, token] + pair @ selector.successor_codebook[token]
                    for token in candidates
                ]
            )
            cost = -scores.log_softmax(0)[candidates.index(gold)]
            assert float(found.cost[block, depth]) == pytest.approx(cost.item(), abs=1e-4)
            best = candidates[int(scores.argmax())]
            assert bool(found.right[block, depth]) == (best == gold and not missing)
            assert bool(found.recalled[block, depth]) == (not missing)
    assert not found.recalled[0, 2]


@pytest.mark.parametrize("kind", ["selector", "mlp"])
def test_groups_of_blocks_give_a_choice_the_gradient_of_the_whole(monkeypatch, kind):
    vocabulary, width, generator = 40, 8, torch.Generator().manual_seed(4)
    head, embedding = (torch.randn(vocabulary, width, generator=generator) for _ in range(2))
    hidden = torch.randn(2, 3, 5, width, generator=generator)
    labels = torch.randint(vocabulary, (2, 3, 4), generator=generator)
    anchors = torch.randint(vocabulary, (2, 3), generator=generator)
    valid = torch.ones_like(labels, dtype=torch.bool)
    gradients = []
    for size in (1 << 28, 1):
        monkeypatch.setattr(draft_loss, "_LOGITS", size)
        selector, rows = selector_of(vocabulary, width), hidden.clone().requires_grad_()
        readout, learnt = selecting(selector), list(selector.parameters())
        if kind == "mlp":
            readout, learnt = refining(embedding, head)
        block_loss(rows, labels, valid, Head(head), kind="dpace", readout=readout, anchors=anchors)
        gradients.append([rows.grad, *(each.grad for each in learnt)])
    for whole, parts in zip(*gradients, strict=True):
        assert whole is not None and whole.any() and torch.allclose(whole, parts, atol=1e-6)


def test_the_loss_of_an_mlp_is_that_of_the_marginals_and_of_its_choice():
    """By one plain forward pass: logits of all tokens, then those of the candidates after the true token."""
    vocabulary, generator = 40, torch.Generator().manual_seed(4)
    head, embedding = (torch.randn(vocabulary, 8, generator=generator) for _ in range(2))
    hidden = torch.randn(1, 3, 5, 8, generator=generator)
    labels = torch.randint(vocabulary, (1, 3, 4), generator=generator)
    anchors = torch.randint(vocabulary, (1, 3), generator=generator)
    readout, learnt = refining(embedding, head)
    rows = hidden.clone().requires_grad_()
    valid = torch.ones_like(labels, dtype=torch.bool)
    block_loss(rows, labels, valid, Head(head), kind="decay", readout=readout, anchors=anchors)
    plain = hidden.clone().requires_grad_()
    loss, weights = torch.zeros(()), torch.exp(-torch.arange(4) / (5 / 2.3))
    for block in range(3):
        before = [int(anchors[0, block]), *labels[0, block].tolist()]
        for depth in range(4):
            row, gold = plain[0, block, depth + 1], before[depth + 1]
            marginals = head @ readout.norm(row)
            ids = marginals.topk(5).indices.tolist()
            if gold not in ids:
                ids[-1] = gold
            token, chosen = torch.tensor([before[depth]]), torch.tensor(ids)
            scores = readout.logits(row, readout.norm(row), token, chosen, marginals[chosen])[0]
            cost = -marginals.log_softmax(0)[gold] - scores.log_softmax(0)[ids.index(gold)]
            loss = loss + weights[depth] * cost / 12
    expected = torch.autograd.grad(loss, [plain, *learnt])
    for ours, theirs in zip([rows.grad, *(each.grad for each in learnt)], expected, strict=True):
        assert theirs.any() and torch.allclose(ours, theirs, atol=1e-5)


def test_a_head_learns_alone_where_the_rows_need_no_gradient():
    vocabulary, generator = 40, torch.Generator().manual_seed(4)
    head, embedding = (torch.randn(vocabulary, 8, generator=generator) for _ in range(2))
    readout, (norm, *learnt) = refining(embedding, head)
    norm.requires_grad_(False)
    labels = torch.randint(vocabulary, (1, 3, 4), generator=generator)
    rows, valid = torch.randn(1, 3, 5, 8, generator=generator), torch.ones_like(labels, dtype=torch.bool)
    block_loss(rows, labels, valid, Head(head), kind="dpace", readout=readout, anchors=labels[..., 0])
    assert norm.grad is None and all(each.grad is not None and each.grad.any() for each in learnt)


def test_blocks_without_labels_count_nothing():
    hidden = rows(1, 2, 4, 8).requires_grad_()
    none = torch.zeros(1, 2, 3, dtype=torch.bool)
    labels = torch.zeros(1, 2, 3, dtype=torch.int64)
    tally = block_loss(hidden, labels, none, Head(rows(5, 8)), kind="dpace", readout=PLAIN)
    assert tally.mean_loss == 0 and tally.acceptance == 1
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


@pytest.mark.parametrize("selects", [False, True])
def test_a_part_of_the_head_compares_its_tokens_alone(selects):
    """As if there were no others, for the selector too; labels that count for nothing may be others."""
    vocabulary, width, generator = 40, 8, torch.Generator().manual_seed(4)
    head = torch.randn(vocabulary, width, generator=generator)
    tokens = torch.tensor([1, 2, 3, 5, 8, 13, 21, 34])
    hidden = torch.randn(2, 3, 5, width, generator=generator)
    labels = tokens[torch.randint(len(tokens), (2, 3, 4), generator=generator)]
    anchors = torch.randint(vocabulary, (2, 3), generator=generator)
    valid = torch.ones_like(labels, dtype=torch.bool)
    valid[1, 2], labels[1, 2] = False, 0
    masked = torch.full((vocabulary,), -1e4).index_fill(0, tokens, 0.0)
    found = []
    for part in (Head.of(head, tokens), Head(torch.cat([head, masked[:, None]], 1))):
        selector, rows = selector_of(vocabulary, width), hidden.clone().requires_grad_()
        own = rows if part.tokens is not None else torch.cat([rows, torch.ones(2, 3, 5, 1)], -1)
        if part.tokens is None:
            project = selector.hidden_projection
            project.weight = torch.nn.Parameter(pad(project.weight.detach(), (0, 1)))
        readout = selecting(selector) if selects else PLAIN
        tally = block_loss(own, labels, valid, part, kind="dpace", readout=readout, anchors=anchors)
        found.append((rows.grad, tally.mean_loss, tally.acceptance))
    (gradient, *facts), (expected, *others) = found
    assert facts == pytest.approx(others, rel=1e-5)
    assert torch.allclose(gradient, expected, atol=1e-6) and gradient.any()
