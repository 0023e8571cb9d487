"""Saved states, masks and reasoning budgets on a GPU: a hit gives a miss's text; what each costs.

python benchmarks/gpu/prefix.py --out results.jsonl [--device cuda]
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from treeflash.config import DraftConfig, EngineConfig, SpecConfig
from treeflash.engine.requests import Finished, TextRequest
from treeflash.engine.sampler import Sampler, SamplingParams
from treeflash.engine.session import Session
from treeflash.hub.catalog import named

GREEDY = SamplingParams(seed=1)
SYSTEM = {"role": "system", "content": "You are a careful assistant who writes short answers. " * 40}


def load(device: str, *, conversations: int) -> Session:
    found = named("treeflash-40m")
    assert found is not None and found[0].pair is not None
    pair = found[0].pair
    config = EngineConfig(
        device=device,
        max_ctx=2048,
        speculation=SpecConfig(adaptive=False),
        draft=DraftConfig(pair.draft),
        conversations=conversations,
    )
    return Session.load(pair.target, config)


def ask(session: Session, messages: list[dict[str, str]], **options) -> Finished:
    request = TextRequest(messages=messages, max_tokens=48, sampling=GREEDY, **options)
    *_, last = session.generate(request)
    assert isinstance(last, Finished)
    return last


def hits(device: str) -> dict[str, float]:
    warm, cold = load(device, conversations=2), load(device, conversations=0)
    messages = [SYSTEM]
    same = cached = prompts = 0
    for question in ("def fibonacci(n):", "Count the vowels in a string.", "Why?", "Once more, please."):
        messages = [*messages, {"role": "user", "content": question}]
        found, expected = ask(warm, messages), ask(cold, messages)
        same += found.tokens == expected.tokens
        cached, prompts = cached + found.stats.cached_tokens, prompts + found.stats.prompt_tokens
        messages = [*messages, {"role": "assistant", "content": warm.tokenizer.decode(expected.tokens)}]
    # Sums of a prompt cut elsewhere round differently, so a near tie may fall the other way.
    assert same >= 3, f"{same} of 4 answers are those of a miss"
    assert cached > prompts / 2, f"{cached} of {prompts} prompt tokens were cached"
    return {"same": same, "cached": cached, "prompts": prompts}


def saving(device: str) -> dict[str, float]:
    session = load(device, conversations=2)
    ask(session, [SYSTEM, {"role": "user", "content": "Hello"}])
    engine = session.engine
    ids = session.encode(TextRequest(messages=[SYSTEM, {"role": "user", "content": "Hello"}]))
    found = engine.prefixes.match(ids)
    assert found is not None
    times: dict[str, list[float]] = {"restore_ms": [], "save_ms": []}
    with torch.inference_mode():
        for _ in range(12):
            slot = engine.states.open()
            started = _now(device)
            engine.states.restore(slot, found.state)
            middle = _now(device)
            again = engine.states.save(slot)
            times["restore_ms"].append(1000 * (middle - started))
            times["save_ms"].append(1000 * (_now(device) - middle))
            for old, new in zip(found.state.layers, again.layers, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(found.state.tail, again.tail, strict=True))
            engine.states.forget(again)
            engine.states.close(slot)
    return {name: statistics.median(values) for name, values in times.items()}


def masks(device: str) -> dict[str, float]:
    rows, vocabulary = 23, 248_320
    choose = np.random.default_rng(1)
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(2)).to(device)
    bits = [None if row % 5 == 4 else choose.integers(-(2**31), 2**31, vocabulary // 32, dtype=np.int32)
            for row in range(rows)]  # fmt: skip
    sampler = Sampler(GREEDY, [1], vocabulary, torch.device(device))
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    positions = torch.arange(rows, device=device)

    def draw() -> list[int]:
        return sampler.draw(logits, positions, nothing, nothing.expand(rows, 0).bool(), bits).tolist()

    drawn, table = draw(), logits.cpu().numpy()
    for row, mask in enumerate(bits):
        allowed = np.ones(vocabulary, bool)
        if mask is not None:
            allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
        assert drawn[row] == int(np.where(allowed, table[row], -np.inf).argmax()), f"row {row}"
    times = []
    for _ in range(15):
        started = _now(device)
        draw()
        times.append(1000 * (_now(device) - started))
    return {"draw_ms": statistics.median(times)}


def budgets(device: str) -> dict[str, float]:
    session = load(device, conversations=2)
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    found = [
        ask(session, messages, thinking=True, thinking_budget=9, draft_budget=size) for size in (None, 0)
    ]
    assert found[0].tokens == found[1].tokens
    assert found[0].stats.reasoning_tokens < 40
    return {"reasoning_tokens": found[0].stats.reasoning_tokens}


def _now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    parts: list[Callable[[str], dict[str, float]]] = [hits, saving, masks, budgets]
    failed = 0
    with options.out.open("w") as out:
        for part in parts:
            try:
                line = {"part": part.__name__, "device": options.device, **part(options.device)}
                print("PASS", line, flush=True)
                out.write(json.dumps(line) + "\n")
                out.flush()
            except Exception:
                failed += 1
                print("FAIL", part.__name__, flush=True)
                traceback.print_exc()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
