"""A prompt and a few whole steps of a small model, to run under NVIDIA's compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=src:. compute-sanitizer --tool memcheck \\
        python -m workshop gpu.one_step [--steps 2] [--temperature 0.8]

Without the allocator's cache every tensor is its own allocation, so that an access one element out of bounds
is found. Steps run without CUDA graphs: a graph would hide which kernel it was.
"""

from typing import Annotated

import torch

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Done, Request, Tokens, VerifiedTree
from bough.engine.sampler import SamplingParams
from bough.models.decoder import Decoder
from bough.models.step import Step
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.state.sequences import SequenceStates
from tests.gpu.inputs import random_trees
from workshop.case import DRAFT, TARGET, case
from workshop.report import Report
from workshop.steps import commit


@torch.inference_mode()
def batched(target: Decoder, sequences: int, steps: int, rows: int = 24) -> None:
    """Run steps over trees of several sequences of different lengths at once."""
    device = target.device
    states = SequenceStates(target.spec, max_ctx=512, slots=sequences, max_rows=rows, device=device)
    slots = torch.tensor([states.open() for _ in range(sequences)], device=device)
    for index in range(sequences):
        tokens = torch.randint(0, 1000, (1, 60 + 37 * index), device=device)
        states.reserve(index, tokens.shape[1])
        chunk = Step.chunk(slots[index : index + 1], tokens, states.buffers.lengths[slots[index : index + 1]])
        target.forward(chunk, states.buffers)
        states.advance(chunk)
    for number in range(steps):
        for index in range(sequences):
            states.reserve(index, rows)
        parents = random_trees(rows, batch=sequences, seed=number, device=device).parents
        tokens = torch.randint(0, 1000, (sequences, rows), device=device)
        tree = Step.tree(slots, tokens, parents, states.buffers.lengths[slots])
        target.verify(tree, states.buffers)
        commit(states, tree, torch.full((sequences,), rows - 1, device=device))


@case()
def main(
    report: Report,
    *,
    steps: int = 2,
    temperature: float = 0.8,
    sequences: Annotated[int, "further steps with this many sequences"] = 1,
) -> None:
    config = EngineConfig(
        report.device,
        512,
        prefill_chunk=64,
        speculation=SpecConfig(adaptive=False),
        draft=DraftConfig(DRAFT),
    )
    session = load_session(TARGET, config, graphs=False)
    sampling = SamplingParams(temperature=temperature, top_p=0.95, top_k=50, repetition_penalty=1.1, seed=3)
    # Longer than a chunk, so that a second chunk continues from the first one's state.
    text = "Write a function that returns the sum of the even numbers of a list. " * 4
    prompt = session.encode(TextRequest(messages=[{"role": "user", "content": text}]))
    request = Request(prompt, 200, sampling, session.tokenizer.stop_ids, trees=True)
    tokens, trees = 0, 0
    events = session.engine.generate(request)
    for event in events:
        if isinstance(event, Tokens):
            tokens += len(event.ids)
        trees += isinstance(event, VerifiedTree)
        if isinstance(event, Done) or trees >= steps:
            break
    events.close()
    if sequences > 1:
        batched(session.engine.target, sequences, steps)
    if report.device == "cuda":
        torch.cuda.synchronize()
    print(f"{len(prompt)} prompt tokens, {trees} steps, {tokens} tokens", flush=True)
