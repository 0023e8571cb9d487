"""Batched generation of training text: plain decoding steps over hundreds of sequence slots.

Prompts of equal length are prefilled together, and a finished sequence's slot goes to the next prompt.
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

# Sampling noise is keyed by position; each sequence gets its own range of positions.
_POSITIONS = 1 << 32


class _Sequence:
    def __init__(self, index: int, prompt: list[int]):
        self.index, self.prompt = index, prompt
        self.output: list[int] = []


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
    """Yield (prompt index, output tokens without the end token) as sequences finish, in no particular order.

    A sampled token depends on the seed, the prompt's index and the position, not on the rest of the batch.
    Penalties and logit biases are not supported.
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
        # Refill in batches: prefilling one prompt costs as much as prefilling many of the same length.
        while waiting and slots - len(active) >= max(1, min(slots // 8, len(waiting))):
            group = _take(waiting, slots - len(active))
            opened = {states.open(): sequence for sequence in group}
            _advance(target, states, opened, _prefill(target, states, opened), sampling)
            active |= opened
        ended = [
            slot
            for slot, sequence in active.items()
            if sequence.output[-1] in stop_ids or len(sequence.output) >= max_tokens
        ]
        for slot in ended:
            sequence = active.pop(slot)
            states.close(slot)
            done += 1
            output = sequence.output[:-1] if sequence.output[-1] in stop_ids else sequence.output
            yield sequence.index, output
        if progress is not None and ended:
            progress(done, len(prompts))
        if active:
            _advance(target, states, active, _step(target, states, active), sampling)


def _take(waiting: list[_Sequence], room: int) -> list[_Sequence]:
    """Remove and return up to `room` of the longest waiting prompts, all of one length."""
    length = len(waiting[-1].prompt)
    group: list[_Sequence] = []
    while waiting and len(group) < room and len(waiting[-1].prompt) == length:
        group.append(waiting.pop())
    return group


def _prefill(target: Decoder, states: SequenceStates, opened: dict[int, _Sequence]) -> torch.Tensor:
    """Prefill the sequences' prompts; return the hidden states [B, width] of their last tokens."""
    slots = torch.tensor(list(opened), device=target.device)
    tokens = torch.tensor([sequence.prompt for sequence in opened.values()], device=target.device)
    for slot in opened:
        states.reserve(slot, tokens.shape[1])
    step = Step.chunk(slots, tokens, states.buffers.lengths[slots])
    hidden = target.forward(step, states.buffers).hidden[:, -1]
    states.advance(step)
    return hidden


def _step(target: Decoder, states: SequenceStates, active: dict[int, _Sequence]) -> torch.Tensor:
    """Run one decoding step; return the hidden states [B, width] of the sequences' newest tokens."""
    slots = torch.tensor(list(active), device=target.device)
    tokens = torch.tensor([[sequence.output[-1]] for sequence in active.values()], device=target.device)
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
    """Sample the next token of every sequence."""
    keys = [sequence.index * _POSITIONS + states.lengths[slot] for slot, sequence in active.items()]
    positions = torch.tensor(keys, device=target.device)
    assert sampling.seed is not None
    tokens = sample(target.logits(hidden), positions, seed=sampling.seed, **sampling.filters)
    for sequence, token in zip(active.values(), tokens.tolist(), strict=True):
        sequence.output.append(token)
