"""Warmup: what an engine does between requests, so that the first request does nothing for the first time."""

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import torch

from bough.engine.paging import Paging, Parts
from bough.engine.prompts import PromptReader
from bough.engine.runner import StepTimes
from bough.kernels.tree import MAX_ROWS
from bough.models.step import Step

# At a model's start costs of steps are measured for so long, or as long as so many plain steps take.
_MEASURING_S, _MEASURING_STEPS = 0.2, 10


class Warmup:
    def __init__(self, parts: Parts, prompts: PromptReader, paging: Paging, *, chunk: int):
        """`chunk`: tokens of a whole chunk of a prompt."""
        self._target, self._states, self._runner = parts.target, parts.states, parts.runner
        self._drafter, self._max_rows = parts.drafter, parts.max_rows
        self._prompts, self._paging, self._chunk = prompts, paging, chunk

    @torch.inference_mode()
    def capture(self, progress: Callable[[int, int], None] | None = None) -> bool:
        """Capture the steps as CUDA graphs; return whether that was possible."""
        with self._fresh_slot() as slot:
            captured = self._runner.capture(progress, slot=slot)
            if not captured:
                self._prompts.short = 0  # steps that are not captured take as long as chunks
            # Whole chunks: their memory is taken now, and not by the first long prompt.
            self._rehearse(slot, [min(self._chunk, self._states.max_ctx)])
            self._runner.rehearse(slot)
            return captured

    @torch.inference_mode()
    def measure_steps(self) -> dict[int, StepTimes]:
        """Return the times of steps of one sequence by rows: as padded, once captured.

        Without captured steps of the root, the largest tree, and then others while there is time; each twice.
        """
        times: dict[int, StepTimes] = {}
        with self._fresh_slot() as slot:
            for size in self._runner.tree_sizes:
                times[min(size, self._max_rows)] = self._runner.measured(slot, size, draft=True)
            start, order = time.perf_counter(), (1, 8, self._max_rows, 4, 2, 16, 12, 6)
            for size in () if times else dict.fromkeys(size for size in order if size <= self._max_rows):
                tries = [self._runner.measured(slot, size) for _ in range(2)]
                times[size] = min(tries, key=lambda step: step.verify_cost)
                if time.perf_counter() - start > max(_MEASURING_S, _MEASURING_STEPS * times[1].verify_cost):
                    break
        return times

    @torch.inference_mode()
    def measure_draft(self) -> float:
        """Return the seconds of a forward pass of a draft call, at best of two."""
        with self._fresh_slot() as slot:
            runs = (self._runner.measured(slot, 1, draft=True) for _ in range(2))
            return min(run.draft_cost / self._drafter.passes for run in runs)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Run every kind of work once, in a dry run, which finds the kernels of all of it."""
        chunks = sorted({min(rows, self._states.max_ctx) for rows in (2 * MAX_ROWS, self._chunk)})
        with self._fresh_slot() as slot:
            self._rehearse(slot, chunks)
            self._runner.rehearse(slot, batched=len(self._states.lengths) > 1)

    @contextmanager
    def _fresh_slot(self) -> Generator[int]:
        """Give a slot for steps between requests.

        It has pages of its own: those that the slot had before may hold a cached prefix.
        """
        slot = self._states.open()
        self._drafter.open(slot)
        try:
            most = self._states.max_ctx + self._runner.step_rows(self._max_rows)
            self._paging.reserve(slot, min(3 * MAX_ROWS, most))
            yield slot
        finally:
            self._states.close(slot)

    def _rehearse(self, slot: int, chunks: Iterable[int]) -> None:
        """Process chunks of these sizes and a short prompt in a fresh slot, and discard them.

        A request does nothing for the first time then: its statistics are those of any other.
        """
        for rows in chunks:
            self._restart(slot)
            self._states.reserve(slot, rows)
            slots = torch.tensor([slot], device=self._target.device)
            tokens = torch.zeros_like(slots).expand(1, rows)
            step = Step.chunk(slots, tokens, self._states.buffers.lengths[slots])
            output = self._target.forward(step, self._states.buffers, taps=self._drafter.features.taps)
            self._drafter.prefill(slot, [0] * rows, output.features.flatten(0, -2))
            logits = self._target.logits(output.hidden.flatten(0, -2)[-1:].clone())
            self._runner.sampler.sample_first(logits, slot, rows)
        self._restart(slot)
        if self._prompts.short:
            rows = min(self._runner.read_rows, self._states.max_ctx)
            self._states.reserve(slot, self._runner.step_rows(rows))
            self._prompts.read_piece(slot, [0] * rows)
            self._restart(slot)

    def _restart(self, slot: int) -> None:
        """Make a slot's sequence empty again; its pages stay."""
        self._states.lengths[slot] = 0
        self._states.buffers.lengths[slot] = 0
        self._states.buffers.pending.count[slot] = 0
        self._drafter.open(slot)
