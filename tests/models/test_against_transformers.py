"""Our forward pass against Hugging Face transformers, for prompts, single tokens and trees."""

import random
from dataclasses import replace

import pytest
import torch

from bough.gguf.reader import GGUFFile
from bough.kernels.kv_cache.format import FORMATS
from bough.models.decoder import Decoder
from bough.models.step import Step
from bough.state.sequences import CacheConfig, SequenceStates
from tests.models.conftest import Pair
from workshop.steps import commit

TOLERANCE = 1e-4
PROMPT = 150


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to the largest reference value."""
    return float((ours.cpu() - theirs).abs().max() / theirs.abs().max())


def ids_of(pair: Pair, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, pair.ours.spec.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)
    )


def states_of(pair: Pair, **options) -> SequenceStates:
    return SequenceStates(pair.ours.spec, max_ctx=512, device=pair.device, **options)


def feed(pair: Pair, states: SequenceStates, slot: int, ids: torch.Tensor, **options):
    """A prompt chunk."""
    slots = torch.tensor([slot], device=pair.device)
    states.reserve(slot, len(ids))
    step = Step.chunk(slots, ids[None].to(pair.device), states.buffers.lengths[slots])
    output = pair.ours.forward(step, states.buffers, **options)
    states.advance(step)
    return output


def stage(pair: Pair, states: SequenceStates, slots: list[int], tokens: torch.Tensor, parents: torch.Tensor):
    """A tree step, not yet committed."""
    for slot in slots:
        states.reserve(slot, tokens.shape[1])
    index = torch.tensor(slots, device=pair.device)
    lengths = states.buffers.lengths[index]
    step = Step.tree(index, tokens.to(pair.device), parents.to(pair.device), lengths)
    return step, pair.ours.verify(step, states.buffers)[1]


def random_parents(rows: int, seed: int) -> list[int]:
    """Bushy and deep parts both; siblings and cousins of equal depth."""
    choose = random.Random(seed)
    return [-1] + [
        choose.randrange(row) if choose.random() < 0.5 else max(0, row - 1 - choose.randrange(3))
        for row in range(1, rows)
    ]


def path_to(parents: list[int], row: int) -> list[int]:
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def test_whole_prompt_and_hidden_states(pair: Pair) -> None:
    ids, states = ids_of(pair, PROMPT), states_of(pair)
    taps = [0, len(pair.ours.spec.layers) - 2]
    output = feed(pair, states, states.open(), ids, taps=taps)
    assert error(pair.ours.logits(output.hidden[0]), pair.logits(ids)) <= TOLERANCE
    with torch.no_grad():
        hidden = pair.hf(ids[None], output_hidden_states=True, use_cache=False).hidden_states
    width = pair.ours.spec.width
    for item, tap in enumerate(taps):
        # transformers counts the embeddings as entry 0: entry i + 1 is the output of layer i.
        ours = output.features[0, :, item * width : (item + 1) * width]
        assert error(ours, hidden[tap + 1][0]) <= TOLERANCE


@pytest.mark.parametrize("sizes", [(1, 63, 7, 65, 14), (2, 3, 64, 81), (149, 1)])
def test_chunked_prompt(pair: Pair, sizes: tuple[int, ...]) -> None:
    ids, states = ids_of(pair, PROMPT, seed=1), states_of(pair)
    slot = states.open()
    hidden = [feed(pair, states, slot, part).hidden[0] for part in ids.split(list(sizes))]
    assert error(pair.ours.logits(torch.cat(hidden)), pair.logits(ids)) <= TOLERANCE


def test_token_by_token(pair: Pair) -> None:
    ids, states = ids_of(pair, 100, seed=2), states_of(pair)
    slot, rows = states.open(), []
    for token in ids:
        step, logits = stage(pair, states, [slot], token.view(1, 1), torch.tensor([[-1]]))
        commit(states, step, torch.tensor([0], device=pair.device))
        rows.append(logits[0, 0])
    assert states.lengths[slot] == 100
    assert error(torch.stack(rows), pair.logits(ids)) <= TOLERANCE


@pytest.mark.parametrize("rows", [2, 23, 64])
def test_every_row_of_a_tree_is_a_plain_forward_of_its_path(pair: Pair, rows: int) -> None:
    """Two trees in a row, so that the second one starts from a commit, and prompt text after it."""
    states, choose = states_of(pair, max_rows=64), random.Random(rows)
    slot, text = states.open(), ids_of(pair, 61, seed=3)
    feed(pair, states, slot, text)
    for turn in range(2):
        parents = random_parents(rows, seed=10 * rows + turn)
        tokens = ids_of(pair, rows, seed=20 * rows + turn)
        step, logits = stage(pair, states, [slot], tokens[None], torch.tensor([parents]))
        for row in range(0, rows, 1 if rows < 64 else 5):
            path = torch.cat([text, tokens[path_to(parents, row)]])
            assert error(logits[0, row], pair.logits(path)[-1]) <= TOLERANCE, (turn, row)
        last = choose.randrange(rows)
        commit(states, step, torch.tensor([last], device=pair.device))
        text = torch.cat([text, tokens[path_to(parents, last)]])
        assert states.lengths[slot] == len(text)
    tail = ids_of(pair, 9, seed=4)
    ours = pair.ours.logits(feed(pair, states, slot, tail).hidden[0])
    assert error(ours, pair.logits(torch.cat([text, tail]))[-9:]) <= TOLERANCE


def test_a_discarded_tree_leaves_no_trace(pair: Pair) -> None:
    states = states_of(pair, max_rows=8)
    slot, text, tail = states.open(), ids_of(pair, 30, seed=5), ids_of(pair, 6, seed=6)
    feed(pair, states, slot, text)
    step, _ = stage(pair, states, [slot], ids_of(pair, 8, seed=7)[None], torch.tensor([random_parents(8, 0)]))
    commit(states, step, torch.tensor([-1], device=pair.device))
    assert states.lengths[slot] == 30
    ours = pair.ours.logits(feed(pair, states, slot, tail).hidden[0])
    assert error(ours, pair.logits(torch.cat([text, tail]))[-6:]) <= TOLERANCE


def test_many_sequences_in_one_step(pair: Pair) -> None:
    """Slots of different lengths, interleaved pages, different trees and commits."""
    states = states_of(pair, slots=4, max_rows=12)
    slots = [states.open() for _ in range(4)]
    texts = [ids_of(pair, length, seed=30 + length) for length in (5, 70, 129, 64)]
    for slot, text in zip(slots, texts, strict=True):
        for part in text.split(40):
            feed(pair, states, slot, part)
    order = [2, 0, 3]
    for turn in range(3):
        parents = [random_parents(12, seed=40 + turn * 4 + slot) for slot in order]
        tokens = torch.stack([ids_of(pair, 12, seed=60 + turn * 4 + slot) for slot in order])
        step, logits = stage(pair, states, order, tokens, torch.tensor(parents))
        last = [11, -1 if turn == 1 else 4, 7]
        for item, slot in enumerate(order):
            for row in (0, 5, 11):
                path = torch.cat([texts[slot], tokens[item, path_to(parents[item], row)]])
                assert error(logits[item, row], pair.logits(path)[-1]) <= TOLERANCE, (turn, slot, row)
            if last[item] >= 0:
                texts[slot] = torch.cat([texts[slot], tokens[item, path_to(parents[item], last[item])]])
        commit(states, step, torch.tensor(last, device=pair.device))
    assert [states.lengths[slot] for slot in slots] == [len(text) for text in texts]


def test_packed_weights_compute_the_same(pair: Pair) -> None:
    ids, states = ids_of(pair, 20, seed=8), states_of(pair)
    with GGUFFile.open(pair.path) as file:
        packed = Decoder.load(file, device=pair.device, expand=False)
    output = feed(replace(pair, ours=packed), states, states.open(), ids)
    assert error(packed.logits(output.hidden[0]), pair.logits(ids)) <= TOLERANCE


def test_sixteen_bit_states_hold_what_they_are_given(pair: Pair) -> None:
    """A GPU keeps keys, values and convolution inputs in 16 bits: everything still fits together, roughly."""
    states = states_of(
        pair, max_rows=8, cache=CacheConfig(FORMATS["f16"], FORMATS["f16"]), input_dtype=torch.bfloat16
    )
    slot, text, rows = states.open(), ids_of(pair, 40, seed=9), ids_of(pair, 8, seed=10)
    feed(pair, states, slot, text)
    parents = random_parents(8, seed=11)
    step, logits = stage(pair, states, [slot], rows[None], torch.tensor([parents]))
    commit(states, step, torch.tensor([7], device=pair.device))
    path = torch.cat([text, rows[path_to(parents, 7)]])
    assert error(logits[0, 7], pair.logits(path)[-1]) < 0.1
    assert states.lengths[slot] == len(path)
