"""Two models in one process: each writes the text that it writes alone, and unloading frees its memory."""

import asyncio
import gc
from dataclasses import replace

import pytest
import torch

from bough.config import DraftConfig, EngineConfig
from bough.engine.sampler import SamplingParams
from bough.hub.catalog import EMBEDDED, named
from bough.session.events import Finished, Text
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.session.worker import EngineWorker, Job, Turns

pytestmark = pytest.mark.gpu

PROMPTS = ("Write a bubble sort in Python.", "Why is the sky blue?", "def fibonacci(n):")


def pair() -> tuple:
    found = named(EMBEDDED)
    assert found is not None and found[0].pair is not None
    pair = found[0].pair
    return pair.target, EngineConfig(device="cuda", max_ctx=2048, draft=DraftConfig(pair.draft))


def started(config: EngineConfig, turn: Turns) -> EngineWorker:
    path, _ = pair()
    worker = EngineWorker(lambda progress: load_session(path, config, progress=progress), turn=turn)
    worker.start()
    assert worker.ready.wait(300) and worker.failure is None, worker.failure
    return worker


async def text_of(job: Job) -> str:
    pieces = [event async for batch in job.batches() for _, event in batch]
    assert isinstance(pieces[-1], Finished)
    return "".join(piece.text for piece in pieces if isinstance(piece, Text))


async def texts(*workers: EngineWorker) -> list[list[str]]:
    """Return each worker's texts; all of them work at the same time."""
    requests = [
        TextRequest(
            messages=[{"role": "user", "content": prompt}], max_tokens=120, sampling=SamplingParams(seed=1)
        )
        for prompt in PROMPTS
    ]
    jobs = [[worker.submit(request) for request in requests] for worker in workers]
    return await asyncio.gather(*(asyncio.gather(*map(text_of, each)) for each in jobs))


def test_models_in_turns_write_what_they_write_alone():
    _, config = pair()
    turn = Turns()
    one, other = started(config, turn), started(replace(config, draft=None, kv_k="q8_0", kv_v="q8_0"), turn)
    try:
        alone = [asyncio.run(texts(worker))[0] for worker in (one, other)]
        for _ in range(3):
            assert asyncio.run(texts(one, other)) == alone
    finally:
        one.close()
        other.close()


def test_a_model_can_be_loaded_while_another_one_writes():
    _, config = pair()
    turn = Turns()
    one = started(config, turn)
    other = EngineWorker(lambda progress: load_session(pair()[0], config, progress=progress), turn=turn)
    try:
        alone = asyncio.run(texts(one))[0]
        other.start()
        while not other.ready.is_set():
            assert asyncio.run(texts(one))[0] == alone
        assert asyncio.run(texts(one, other)) == [alone, alone]
    finally:
        one.close()
        other.close()


def test_unloading_frees_the_memory():
    _, config = pair()
    used = []
    for _ in range(3):
        worker = started(config, Turns())
        asyncio.run(texts(worker))
        worker.close()
        del worker
        gc.collect()
        torch.cuda.empty_cache()
        used.append(torch.cuda.memory_reserved())
    assert used[2] <= used[0] + (32 << 20), used
