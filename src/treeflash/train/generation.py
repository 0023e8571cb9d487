"""Many answers at once: root-only steps over hundreds of sequence slots, for making training text.

Prompts of equal length are read together, and a slot that ends is given to the next prompt. Knows no text.
"""

from collections.abc import Callable, Iterator

import torch

from treeflash.engine.sampler import SamplingParams
from treeflash.errors import UsageError
from treeflash.kernels.sampling import sample
from treeflash.memory.device import kv_formats
from treeflash.models.decoder import Decoder
from treeflash.models.step import Step
from treeflash.state.sequences import PAGE, CacheConfig, SequenceStates

# Noise is keyed by position; sequences are kept apart by giving each a range of positions of its own.
_POSITIONS = 1 << 32


class _Sequence:
    def __init__(self, index: int, prompt: list[int]):
        self.index, self.prompt = index, prompt
        self.answer: list[int] = []


def generate_batch(
    target: Decoder,
    prompts: list[list[int]],
    *,
    max_tokens: int,
    sampling: SamplingParams,
    stop_ids: frozenset[int],
    slots: int = 256,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Yields (prompt's number, answer without its end token) as answers end, in no particular order.

    A draw depends on the seed, the prompt's number and the position, not on what else is there. Penalties
    and biases are not offered here.
    """
    if any(not prompt for prompt in prompts):
        raise UsageError("a prompt has no tokens")
    return _run(target, prompts, max_tokens, sampling.seeded(), stop_ids, slots, progress)


@torch.inference_mode()
def _run(
    target: Decoder,
    prompts: list[list[int]],
    max_tokens: int,
    sampling: SamplingParams,
    stop_ids: frozenset[int],
    slots: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[int, list[int]]]:
    longest = max(map(len, prompts), default=0)
    states = SequenceStates(
        target.spec,
        max_ctx=longest + max_tokens,
        slots=slots,
        device=target.device,
        cache=CacheConfig(*kv_formats(target.spec, target.device)),
        input_dtype=target.dtype,
    )
    waiting = [_Sequence(index, prompt) for index, prompt in enumerate(prompts)]
    waiting.sort(key=lambda sequence: len(sequence.prompt))
    active: dict[int, _Sequence] = {}
    done = 0
    while waiting or active:
        # Refill in batches: reading one prompt costs as much as reading many of the same length.
        while waiting and slots - len(active) >= max(1, min(slots // 8, len(waiting))):
            group = _take(waiting, slots - len(active))
            opened = {states.open(): sequence for sequence in group}
            _advance(target, states, opened, _prefill(target, states, opened), sampling)
            active |= opened
        ended = [
            slot
            for slot, sequence in active.items()
            if sequence.answer[-1] in stop_ids or len(sequence.answer) >= max_tokens
        ]
        for slot in ended:
            sequence = active.pop(slot)
            states.close(slot)
            done += 1
            answer = sequence.answer[:-1] if sequence.answer[-1] in stop_ids else sequence.answer
            yield sequence.index, answer
        if progress is not None and ended:
            progress(done, len(prompts))
        if active:
            _advance(target, states, active, _step(target, states, active), sampling)


def _take(waiting: list[_Sequence], room: int) -> list[_Sequence]:
    """The longest prompts that wait and are of one length."""
    length = len(waiting[-1].prompt)
    group: list[_Sequence] = []
    while waiting and len(group) < room and len(waiting[-1].prompt) == length:
        group.append(waiting.pop())
    return group


def _prefill(target: Decoder, states: SequenceStates, opened: dict[int, _Sequence]) -> torch.Tensor:
    """Hidden states [B, width] of the last rows."""
    slots = torch.tensor(list(opened), device=target.device)
    tokens = torch.tensor([sequence.prompt for sequence in opened.values()], device=target.device)
    for slot in opened:
        states.reserve(slot, tokens.shape[1])
    step = Step.chunk(slots, tokens, states.buffers.lengths[slots])
    hidden = target.forward(step, states.buffers).hidden[:, -1]
    states.advance(step)
    return hidden


def _step(target: Decoder, states: SequenceStates, active: dict[int, _Sequence]) -> torch.Tensor:
    """The same behind every sequence's newest token."""
    slots = torch.tensor(list(active), device=target.device)
    tokens = torch.tensor([[sequence.answer[-1]] for sequence in active.values()], device=target.device)
    for slot in active:
        if states.lengths[slot] % PAGE == 0:
            states.reserve(slot, 1)
    step = Step.tree(slots, tokens, torch.full_like(tokens, -1), states.buffers.lengths[slots])
    hidden = target.forward(step, states.buffers).hidden[:, 0]
    states.commit(step, torch.zeros_like(slots))
    return hidden


def _advance(
    target: Decoder,
    states: SequenceStates,
    active: dict[int, _Sequence],
    hidden: torch.Tensor,
    sampling: SamplingParams,
) -> None:
    """Draws the next token of every sequence."""
    places = [sequence.index * _POSITIONS + states.lengths[slot] for slot, sequence in active.items()]
    positions = torch.tensor(places, device=target.device)
    assert sampling.seed is not None
    tokens = sample(target.logits(hidden), positions, seed=sampling.seed, **sampling.filters)
    for sequence, token in zip(active.values(), tokens.tolist(), strict=True):
        sequence.answer.append(token)
