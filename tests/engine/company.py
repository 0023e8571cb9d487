"""Sequences stepped by a runner alone and in company, for tests that a row's bits do not depend on it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bough.engine.inputs import Verify, tree_rows
from bough.engine.runner import Accepted, StepRunner, StepTimes
from bough.engine.sampler import SamplingParams
from bough.models.decoder import Target
from bough.models.step import Step
from bough.spec.drafter import Drafter, NoDrafter
from bough.spec.tree import Tree
from bough.state.sequences import CacheConfig, SequenceStates

ROWS = 64
SAMPLINGS = (
    SamplingParams(seed=1),
    SamplingParams(temperature=0.8, top_p=0.95, seed=2),
    SamplingParams(repetition_penalty=1.2, presence_penalty=0.3, logit_bias={5: 1.0}, seed=3),
    SamplingParams(temperature=1.1, top_k=40, min_p=0.02, frequency_penalty=0.2, seed=2**63 + 4),
)


@dataclass
class Text:
    """A request: its prompt, and what plain decoding answers."""

    prompt: list[int]
    sampling: SamplingParams
    masked: bool = False
    answer: list[int] = field(default_factory=list)


def make_texts(count: int, vocabulary: int, *, seed: int = 0) -> list[Text]:
    """Prompts of 3 to 200 tokens; every fifth text has a mask, which forbids every third token."""
    choose = random.Random(seed)
    return [
        Text(
            [choose.randrange(vocabulary) for _ in range(choose.choice((3, 17, 63, 64, 130, 200)))],
            SAMPLINGS[index % len(SAMPLINGS)],
            masked=index % 5 == 4,
        )
        for index in range(count)
    ]


@dataclass
class Stepped:
    """What one sequence's steps gave."""

    logits: list[Tensor] = field(default_factory=list)
    accepted: list[Accepted] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class Machine:
    """A target with the states and the runner of some slots."""

    def __init__(
        self,
        target: Target,
        *,
        slots: int,
        runner: type[StepRunner] = StepRunner,
        cache: CacheConfig | None = None,
        drafter: Drafter | None = None,
        rows: int = ROWS,
    ):
        """`rows`: of a tree, at most."""
        self.target, self.drafter = target, drafter or NoDrafter()
        self.states = SequenceStates(
            target.spec,
            max_ctx=1024,
            slots=slots,
            max_rows=runner.most_rows(rows),
            device=target.device,
            cache=cache,
            input_dtype=target.dtype,
            static=runner.asynchronous,
        )
        self.times = StepTimes(0, 0, 0, 0)  # of the last step
        self.runner = runner(target, self.states, self.drafter, max_rows=rows)  # ty: ignore[unknown-argument]

    def begin(self, text: Text) -> tuple[int, int]:
        """Process a text's prompt; return its slot and its first token."""
        slot, device = self.states.open(), self.target.device
        self.drafter.open(slot)
        self.runner.begin(slot, [])
        self.runner.sampler.begin(slot, text.sampling, text.prompt, masked=text.masked)
        self.states.reserve(slot, len(text.prompt))
        slots = torch.tensor([slot], device=device)
        tokens = torch.tensor([text.prompt], device=device)
        step = Step.chunk(slots, tokens, self.states.buffers.lengths[slots])
        output = self.target.forward(step, self.states.buffers, taps=self.drafter.features.taps)
        self.states.advance(step)
        self.drafter.prefill(slot, text.prompt, output.features[0])
        logits = self.target.logits(output.hidden[0, -1:])
        self.runner.sampler.set_masks(0, self._masks(text, 1))
        return slot, int(self.runner.sampler.sample_first(logits, slot, len(text.prompt)))

    def step(self, parts: Sequence[tuple[int, Text, Tree]]) -> list[tuple[Tensor, Accepted]]:
        """Verify one tree of each sequence; return logits and what was accepted."""
        for slot, _, tree in parts:
            self.states.reserve(slot, self.runner.step_rows(tree.size))
        forward = self.runner.verify([Verify(slot, tree, ROWS) for slot, _, tree in parts])
        self.runner.accept(forward, [self._masks(text, tree.size) for _, text, tree in parts])
        accepted, self.times = self.runner.read_back()
        for (slot, _, _), each in zip(parts, accepted, strict=True):
            self.states.lengths[slot] += len(each.path)
        return [(forward.logits_of(i).clone(), each) for i, each in enumerate(accepted)]

    def _masks(self, text: Text, rows: int) -> list[np.ndarray]:
        if not text.masked:
            return []
        words = -(-self.target.spec.vocab_size // 32)
        bits = np.array([index % 3 != 0 for index in range(32 * words)])
        return [np.packbits(bits, bitorder="little").view(np.int32)] * rows


def read(machine: Machine, text: Text, pieces: Sequence[int], beside: Sequence[Text] = ()) -> Tensor:
    """Read a prompt in pieces by decode steps, beside trees of other texts; return all its logits."""
    states, others = machine.states, [(machine.begin(other), other) for other in beside]
    slot = states.open()
    machine.drafter.open(slot)
    machine.runner.begin(slot)
    machine.runner.sampler.begin(slot, text.sampling, [], masked=False)
    done, found, at = 0, [], {own: 1 for (own, _), _ in others}
    for number, size in enumerate(pieces):
        tokens, done = text.prompt[done : done + size], done + size
        states.reserve(slot, machine.runner.step_rows(size))
        if not others:
            found.append(machine.runner.read(slot, tokens).logits_of(0)[: len(tokens)].clone())
            continue
        parts = []
        for (own, _), other in others:
            tree = make_tree(other, at[own], 3, machine.target.spec.vocab_size, (number, own))
            states.reserve(own, machine.runner.step_rows(tree.size))
            parts.append(Verify(own, tree, ROWS))
        chain = Verify(slot, Tree.chain(tokens), len(tokens), given=True)
        forward = machine.runner.verify([*parts, chain])
        machine.runner.accept(forward)
        accepted, _ = machine.runner.read_back()
        for part, each in zip([*parts, chain], accepted, strict=True):
            states.lengths[part.slot] += len(each.path)
            at[part.slot] = at.get(part.slot, 0) + len(each.path)
        assert accepted[-1].path == list(range(len(tokens)))
        found.append(forward.logits_of(len(parts)).clone())
    assert done == len(text.prompt) == states.lengths[slot] == int(states.buffers.lengths[slot])
    for own in [slot, *(own for (own, _), _ in others)]:
        states.close(own)
    return torch.cat(found)


def answer(machine: Machine, text: Text, count: int) -> None:
    """Decode the text plainly."""
    slot, token = machine.begin(text)
    _, text.answer = answered(machine, slot, token, text, count)
    machine.states.close(slot)


def answered(
    machine: Machine, slot: int, token: int, text: Text, count: int
) -> tuple[list[Tensor], list[int]]:
    """Return the logits and the tokens of plain decoding after the first token."""
    tokens, found = [token], []
    while len(tokens) < count:
        [(logits, accepted)] = machine.step([(slot, text, Tree.root(tokens[-1]))])
        found.append(logits)
        tokens += accepted.tokens
    return found, tokens


def make_tree(text: Text, done: int, size: int, vocabulary: int, seed: object) -> Tree:
    """Return a random tree after `done` tokens of the answer; most rows hold the true token."""
    choose, future = random.Random(repr(seed)), text.answer[done:]
    tokens, parents, depths = [text.answer[done - 1]], [-1], [0]
    for row in range(1, size):
        parent = row - 1 if choose.random() < 0.6 else choose.randrange(row)
        depth = depths[parent]
        taken = {tokens[other] for other in range(1, row) if parents[other] == parent}
        token = choose.randrange(vocabulary)
        if depth < len(future) and choose.random() < 0.8:
            token = future[depth]
        while token in taken:
            token = choose.randrange(vocabulary)
        tokens.append(token)
        parents.append(parent)
        depths.append(depth + 1)
    return Tree.of(tokens, parents)


def shared_rows(sequences: int, total: int, seed: object) -> list[int]:
    """Return how many of at most `total` rows each sequence gets, one at least."""
    choose, sizes, most = random.Random(repr(seed)), [1] * sequences, tree_rows(sequences)
    for _ in range(choose.randint(0, total - sequences)):
        sizes[choose.randrange(sequences)] += 1
    return [min(size, most) for size in sizes]


def run(
    machine: Machine, texts: Sequence[Text], *, steps: int, total: int, alone: int | None = None
) -> list[Stepped]:
    """Step all texts together, or only text `alone` with the same trees."""
    vocabulary = machine.target.spec.vocab_size
    chosen = list(range(len(texts))) if alone is None else [alone]
    slots, found = {}, {index: Stepped() for index in chosen}
    for index in random.Random(len(texts)).sample(chosen, len(chosen)):
        slots[index], token = machine.begin(texts[index])
        found[index].tokens.append(token)
        assert token == texts[index].answer[0]
    for number in range(steps):
        sizes, parts = shared_rows(len(texts), total, (number, len(texts))), []
        for index in chosen:
            done, seed = len(found[index].tokens), (number, index)
            tree = make_tree(texts[index], done, sizes[index], vocabulary, seed)
            parts.append((slots[index], texts[index], tree))
        for index, (logits, accepted) in zip(chosen, machine.step(parts), strict=True):
            found[index].logits.append(logits)
            found[index].accepted.append(accepted)
            found[index].tokens += accepted.tokens
    for slot in slots.values():
        machine.states.close(slot)
    return [found[index] for index in chosen]
