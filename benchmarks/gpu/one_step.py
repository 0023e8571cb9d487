"""A prompt and a few whole steps of a small model, for NVIDIA's compute-sanitizer to look at.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=src compute-sanitizer --tool memcheck \\
        python benchmarks/gpu/one_step.py [--steps 2] [--temperature 0.8]

Without the allocator's cache every tensor is an allocation of its own, so that one element too far is seen.
Steps run as they are: a graph would hide which kernel it was.
"""

import argparse

import torch

from treeflash.config import DraftConfig, EngineConfig, SpecConfig
from treeflash.engine.engine import Done, Request, Tokens, Tree
from treeflash.engine.sampler import SamplingParams
from treeflash.hub.catalog import named
from treeflash.session.loading import load_session
from treeflash.session.requests import TextRequest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    found = named("treeflash-40m")
    assert found is not None and found[0].pair is not None
    pair = found[0].pair
    config = EngineConfig(
        options.device,
        512,
        prefill_chunk=64,
        speculation=SpecConfig(adaptive=False),
        draft=DraftConfig(pair.draft),
    )
    session = load_session(pair.target, config, graphs=False)
    sampling = SamplingParams(
        temperature=options.temperature, top_p=0.95, top_k=50, repetition_penalty=1.1, seed=3
    )
    # Longer than a chunk, so that a second one goes on from the first one's states.
    text = "Write a function that returns the sum of the even numbers of a list. " * 4
    prompt = session.encode(TextRequest(messages=[{"role": "user", "content": text}]))
    request = Request(prompt, 200, sampling, session.tokenizer.stop_ids, trees=True)
    tokens, trees = 0, 0
    events = session.engine.generate(request)
    for event in events:
        if isinstance(event, Tokens):
            tokens += len(event.ids)
        trees += isinstance(event, Tree)
        if isinstance(event, Done) or trees >= options.steps:
            break
    events.close()
    if options.device == "cuda":
        torch.cuda.synchronize()
    print(f"{len(prompt)} tokens of prompt, {trees} steps, {tokens} tokens", flush=True)


if __name__ == "__main__":
    main()
