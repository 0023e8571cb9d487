"""Places for the experts of a step or of a prompt, in Triton: see reference.resolve and reference.rounds.

Nothing is read back: how many experts are missing stays on the device, and grids have a fixed size.
Those with OVERLAP use programmatic dependent launch, see runtime/triton_pdl.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bough.kernels.experts.cache import ROUNDS, ExpertCache, staged_at_once
from bough.kernels.experts.stack import Copies, Round, Routing
from bough.kernels.runtime.triton_pdl import launch_options, wait_for_inputs

_PIECE = 32  # chunks or places that are compared at a time
_WORDS = 2048  # of 8 bytes, that a program copies at a time: four reads of 16 bytes by each of 256 threads
_COPIERS = 128  # programs of a copy: more reads in flight than a bus has, and SMs to spare


@triton.jit
def _resolve_kernel(
    chunks, count, places, owners, stamps, uses, totals, mirror, copies, copied,
    EXPERTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr, SLOT_BLOCK: tl.constexpr,
    PIECE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program: write the place of each chunk, and what to copy into places that others give up."""
    expert, slot = tl.arange(0, BLOCK), tl.arange(0, SLOT_BLOCK)
    wait_for_inputs(OVERLAP)
    number = tl.load(count)
    now = tl.load(totals) + 1
    users = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, number, PIECE):
        chunk = first + tl.arange(0, PIECE)
        theirs = tl.load(chunks + chunk * 4, mask=chunk < number, other=-1, cache_modifier=".cg")
        users += tl.sum((theirs[None, :] == expert[:, None]).to(tl.int32), 1)
    used = users > 0
    place = tl.load(places + expert, mask=expert < EXPERTS, other=-1, cache_modifier=".cg")
    hit, miss = used & (place >= 0), used & (place < 0)
    tl.store(stamps + place, now + tl.zeros_like(place), mask=hit)
    tl.debug_barrier()  # the other threads' stamps are read from memory
    stamp = tl.load(stamps + slot, mask=slot < SLOTS, other=0, cache_modifier=".cg")
    rank = tl.zeros((SLOT_BLOCK,), tl.int32)
    for first in range(0, SLOTS, PIECE):
        other = first + tl.arange(0, PIECE)
        theirs = tl.load(stamps + other, mask=other < SLOTS, other=0, cache_modifier=".cg")
        before = theirs[None, :] < stamp[:, None]
        before |= (theirs[None, :] == stamp[:, None]) & (other[None, :] < slot[:, None])
        rank += tl.sum((before & (other < SLOTS)[None, :]).to(tl.int32), 1)
    free = tl.sum(((slot < SLOTS) & (stamp < now)).to(tl.int32), 0)
    misses = tl.sum(miss.to(tl.int32), 0)
    filled = tl.minimum(misses, free)
    order = tl.cumsum(miss.to(tl.int32), 0) - 1
    gets, gives = miss & (order < filled), (slot < SLOTS) & (rank < filled)
    victim = tl.load(owners + slot, mask=gives, other=-1, cache_modifier=".cg")
    tl.store(copies + 2 * order, expert, mask=gets)
    tl.store(copies + 2 * rank + 1, slot, mask=gives)
    tl.store(copied, filled)
    tl.store(places + victim, tl.zeros_like(victim) - 1, mask=gives & (victim >= 0))
    tl.debug_barrier()
    target = tl.load(copies + 2 * order + 1, mask=gets, other=0, cache_modifier=".cg")
    tl.store(places + expert, target, mask=gets)
    tl.store(owners + target, expert, mask=gets)
    tl.store(stamps + target, now + tl.zeros_like(target), mask=gets)
    inside = expert < EXPERTS
    tl.store(uses + expert, tl.load(uses + expert, mask=inside, other=0) + used.to(tl.int64), mask=inside)
    hits = tl.load(totals + 1) + tl.sum(hit.to(tl.int32), 0)
    missed = tl.load(totals + 2) + misses
    tl.debug_barrier()  # the totals were read by all threads
    tl.store(totals, now)
    tl.store(totals + 1, hits)
    tl.store(totals + 2, missed)
    tl.store(mirror, now)
    tl.store(mirror + 1, hits)
    tl.store(mirror + 2, missed)
    for first in range(0, number, PIECE):
        chunk = first + tl.arange(0, PIECE)
        owner = tl.load(chunks + chunk * 4, mask=chunk < number, other=0, cache_modifier=".cg")
        found = tl.load(places + owner, mask=chunk < number, other=0, cache_modifier=".cg")
        tl.store(chunks + chunk * 4 + 3, tl.where(found < 0, -1 - owner, found), mask=chunk < number)


@triton.jit
def _rounds_kernel(
    chunks, count, places, parts, counts, copies, copied,
    MOST: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, ALIGNED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The chunks of a round, a program each: of experts that have a place, the first; else in order."""
    part, chunk = tl.program_id(0), tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    inside = chunk < tl.load(count)
    expert = tl.load(chunks + chunk * 4, mask=inside, other=0, cache_modifier=".cg")
    before = tl.load(chunks + chunk * 4 - 4, mask=inside & (chunk > 0), other=-1, cache_modifier=".cg")
    place = tl.load(places + expert, mask=inside, other=0, cache_modifier=".cg")
    cold = inside & (place < 0)
    first = cold & (expert != before)
    missing = tl.cumsum(first.to(tl.int32), 0) - 1
    staged = missing % AT_ONCE
    mine = inside & (tl.where(cold, missing // AT_ONCE, 0) == part)
    at = parts + (part * MOST + tl.cumsum(mine.to(tl.int32), 0) - 1) * 4
    for field in tl.static_range(1, 3):
        value = tl.load(chunks + chunk * 4 + field, mask=mine, other=0, cache_modifier=".cg")
        tl.store(at + field, value, mask=mine)
    tl.store(at, expert, mask=mine)
    tl.store(at + 3, tl.where(cold, -1 - staged, place), mask=mine)
    tl.store(counts + part * ALIGNED, tl.sum(mine.to(tl.int32), 0))
    target = copies + (part * AT_ONCE + staged) * 2
    tl.store(target, expert, mask=mine & first)
    tl.store(target + 1, staged, mask=mine & first)
    tl.store(copied + part * ALIGNED, tl.sum((mine & first).to(tl.int32), 0))


@triton.jit
def _copy_kernel(source, target, copies, copied, words, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Copy matrices of `words` words each; how many is read from memory."""
    wait_for_inputs(OVERLAP)
    pieces = tl.cdiv(words, BLOCK)
    for item in range(tl.program_id(0), tl.load(copied) * pieces, tl.num_programs(0)):
        pair = copies + item // pieces * 2
        at = (item % pieces).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(pair, cache_modifier=".cg").to(tl.int64)
        place = tl.load(pair + 1, cache_modifier=".cg").to(tl.int64)
        value = tl.load(source + expert * words + at, mask=at < words, other=0)
        tl.store(target + place * words + at, value, mask=at < words)


def resolve(routing: Routing, cache: ExpertCache) -> None:
    """Find the places of a step's experts; `cache.copies` says what has to be copied there."""
    experts, slots = len(cache.places), len(cache.owners)
    _resolve_kernel[(1,)](
        routing.chunks, routing.count, cache.places, cache.owners, cache.stamps, cache.uses, cache.totals,
        cache.mirror, cache.copies.pairs, cache.copies.count,
        EXPERTS=experts, SLOTS=slots, BLOCK=max(16, triton.next_power_of_2(experts)),
        SLOT_BLOCK=max(16, triton.next_power_of_2(slots)), PIECE=_PIECE, num_warps=8,
        **launch_options(cache.places.device),
    )  # fmt: skip


def rounds(routing: Routing, cache: ExpertCache) -> tuple[Round, ...]:
    """Return the rounds of a prompt, whose experts get no places."""
    most = len(routing.chunks)
    chunks, counts, pairs, copied = cache.round_buffers(most)
    _rounds_kernel[(ROUNDS,)](
        routing.chunks, routing.count, cache.places, chunks, counts, pairs, copied,
        MOST=most, BLOCK=triton.next_power_of_2(most), AT_ONCE=staged_at_once(len(cache.places)),
        ALIGNED=counts.shape[1], num_warps=8, **launch_options(chunks.device),
    )  # fmt: skip
    parts = zip(chunks, counts, pairs, copied, strict=True)
    return tuple(Round(own, count, Copies(*copies), cache.stage) for own, count, *copies in parts)


def copy(source: Tensor, target: Tensor, copies: Copies) -> None:
    """Copy the matrices of experts [n, ...] to places of `target` [n, ...]; the source may be host memory."""
    words = source[0].numel() // 8
    _copy_kernel[(_COPIERS,)](
        source.view(torch.int64), target.view(torch.int64), copies.pairs, copies.count, words,
        BLOCK=_WORDS, num_warps=8, **launch_options(target.device),
    )  # fmt: skip
