"""Remembered prompts on a GPU: a hit gives a miss's text; what a second turn costs from memory and disk.

python benchmarks/gpu/prefix.py --out prefix.jsonl [--model FOLDER | --shape 27b] [--tokens 24000]

FOLDER holds a grown pair, target.gguf and draft.gguf; --shape grows one. With neither, as on a CPU with
--device cpu --tokens 1500, the small pair has the long conversation. Masks and reasoning budgets are looked
at, too.
"""

import argparse
import json
import statistics
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treeflash.config import DraftConfig, EngineConfig, SpecConfig
from treeflash.convert.grow import grow
from treeflash.engine.sampler import Sampler, SamplingParams
from treeflash.hub.catalog import named
from treeflash.session.loading import load_session
from treeflash.session.requests import Finished, TextRequest
from treeflash.session.session import Session

GREEDY = SamplingParams(seed=1)
SHOWN = SamplingParams(seed=1, logprobs=2)
SYSTEM = {"role": "system", "content": "You are a careful assistant who writes short answers. " * 40}
NEAR_TIE = 0.05  # between the log probabilities of the two likeliest tokens: rounding may close it


@dataclass(frozen=True)
class Options:
    device: str
    model: Path | None
    shape: str | None
    tokens: int


def pair() -> tuple[Path, Path]:
    found = named("treeflash-40m")
    assert found is not None and found[0].pair is not None
    return found[0].pair.target, found[0].pair.draft


def load(
    options: Options, files: tuple[Path, Path] | None = None, *, graphs: bool = True, **settings: Any
) -> Session:
    target, draft = files or pair()
    config = EngineConfig(
        device=options.device,
        speculation=SpecConfig(adaptive=False),
        draft=DraftConfig(draft),
        **{"max_ctx": 2048, **settings},
    )
    return load_session(target, config, graphs=graphs)


def ask(session: Session, messages: list[dict[str, str]], **settings: Any) -> Finished:
    request = TextRequest(messages=messages, **{"max_tokens": 48, "sampling": GREEDY, **settings})
    *_, last = session.generate(request)
    assert isinstance(last, Finished)
    return last


def same_text(session: Session, messages: list[dict[str, str]], found: Finished) -> dict[str, Any]:
    """As that of a request that finds nothing?"""
    session.engine.prefixes.clear()
    return compared(found, ask(session, messages, sampling=SHOWN))


def compared(found: Finished, fresh: Finished) -> dict[str, Any]:
    """Where the texts part, and how near a tie that was."""
    assert fresh.logprobs is not None and fresh.stats.cached_tokens == 0
    places = (i for i, (a, b) in enumerate(zip(found.tokens, fresh.tokens, strict=False)) if a != b)
    place = next(places, None)
    if place is None:
        return {"same": found.tokens == fresh.tokens}
    first, second = (logprob for _, logprob in fresh.logprobs[place].top[:2])
    return {"same": abs(first - second) < NEAR_TIE, "parts_at": place, "gap": round(abs(first - second), 5)}


def hits(options: Options) -> dict[str, Any]:
    session = load(options)
    messages = [SYSTEM]
    texts, cached, prompts = [], 0, 0
    for question in ("def fibonacci(n):", "Count the vowels in a string.", "Why?", "Once more, please."):
        messages = [*messages, {"role": "user", "content": question}]
        found = ask(session, messages)
        kept = found.stats.cached_tokens
        texts.append(same_text(session, messages, found))
        cached, prompts = cached + kept, prompts + found.stats.prompt_tokens
        messages = [*messages, {"role": "assistant", "content": session.tokenizer.decode(found.tokens)}]
    assert all(each["same"] for each in texts), texts
    # The first prompt finds nothing, and the others what was kept of the one before.
    assert cached > prompts / 2, f"{cached} of {prompts} prompt tokens were cached"
    return {"texts": texts, "cached": cached, "prompts": prompts}


def formats(options: Options) -> dict[str, Any]:
    """Pages of every format leave the pool, come back, and are the bytes they were."""
    found = {}
    for kv in ("f16", "bf16", "q8_0", "q5_0", "q4_0", "tq3_0"):
        session = load(options, graphs=False, kv_k=kv, kv_v=kv)
        messages = [SYSTEM, {"role": "user", "content": "Hello"}]
        first = ask(session, messages)
        spill(session)
        usage = session.engine.prefixes.usage
        assert usage.device_bytes == 0 and usage.host_bytes > 0, usage
        again = ask(session, messages)
        assert again.stats.cached_tokens > 0
        found[kv] = same_text(session, messages, again) | {"first": first.tokens == again.tokens}
    assert all(each["same"] for each in found.values()), found
    return found


def spill(session: Session) -> None:
    """All that is remembered leaves the pool, as if a prompt came that needs the whole of it."""
    states = session.engine.states
    with torch.inference_mode():
        slot = states.open()
        session.engine.prefixes.reserve(slot, states.buffers.page_table.shape[1] * 64)
        states.close(slot)


def saving(options: Options) -> dict[str, Any]:
    session = load(options)
    messages = [SYSTEM, {"role": "user", "content": "Hello"}]
    ask(session, messages)
    return _copies(options, session, session.encode(TextRequest(messages=messages)))


def _copies(options: Options, session: Session, ids: list[int]) -> dict[str, Any]:
    """What taking and restoring a state costs; restored ones are bit for bit what was taken."""
    engine = session.engine
    store = engine.prefixes.store
    times: dict[str, list[float]] = {"restore_ms": [], "save_ms": []}
    with torch.inference_mode():
        for _ in range(8):
            slot = engine.states.open()
            started = _now(options.device)
            found = engine.prefixes.restore(slot, ids, range(len(ids)))
            assert found is not None
            middle = _now(options.device)
            again = store.save(slot)
            times["restore_ms"].append(1000 * (middle - started))
            times["save_ms"].append(1000 * (_now(options.device) - middle))
            for old, new in zip(found.state.layers, again.layers, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
            assert found.state.pages == again.pages
            store.release(again)
            engine.states.close(slot)
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def long(options: Options) -> dict[str, Any]:
    """A second turn on a long conversation: what it costs from the pool, from host memory and from disk."""
    with tempfile.TemporaryDirectory(prefix="treeflash-prefix") as place:
        files, folder = _large(options, Path(place)), Path(place) / "snapshots"
        room = {"max_ctx": options.tokens + 2048, "prefix_cache": 24 << 30}
        return _second_turn(options, load(options, files, prefix_cache_dir=folder, **room), folder)


def _second_turn(options: Options, session: Session, folder: Path) -> dict[str, Any]:
    asked = [SYSTEM, {"role": "user", "content": _document(session, options.tokens)}]
    ask(session, [{"role": "user", "content": "Hello"}])  # warms up
    first = ask(session, asked)
    told = {"role": "assistant", "content": session.tokenizer.decode(first.tokens)}
    messages = [*asked, told, {"role": "user", "content": "Why?"}]
    # An answer that comes back changed, as templates that drop reasoning do: what counts is the last cut.
    rewritten = [*asked, {"role": "assistant", "content": "Because."}, {"role": "user", "content": "Why?"}]
    ways: dict[str, Finished] = {"first": first, "pool": ask(session, messages)}
    ways["rewritten"] = ask(session, rewritten)
    usage = asdict(session.engine.prefixes.usage)
    copies = _copies(options, session, session.encode(TextRequest(messages=messages)))
    spill(session)
    ways["host"] = ask(session, messages)
    session.engine.prefixes.clear()
    ways["disk"] = ask(session, messages)
    session.engine.prefixes.clear()
    for file in folder.iterdir():
        file.unlink()
    ways["nothing"] = ask(session, messages, sampling=SHOWN)
    session.engine.prefixes.clear()  # once everything is written
    text, without = compared(ways["pool"], ways["nothing"]), ways["nothing"].stats
    found = {
        name: {
            "ttft_s": round(way.stats.ttft_s, 4),
            "cached": way.stats.cached_tokens,
            "prompt": way.stats.prompt_tokens,
            "times_faster": round(without.ttft_s / way.stats.ttft_s, 1),
            "same": way.tokens == ways["pool"].tokens,
        }
        for name, way in ways.items()
    }
    print(json.dumps(found, indent=1), flush=True)
    result = {"ways": found, "text": text, "usage": usage, **copies}
    assert text["same"], result
    if options.tokens >= 16_000:
        assert found["pool"]["times_faster"] >= 10, result
    return result


def _document(session: Session, tokens: int) -> str:
    lines: list[str] = []
    while len(session.tokenizer.encode("\n".join(lines))) < tokens:
        start = len(lines)
        lines += [
            f"{n}: the {n * 7919 % 1009}th value is {n * n % 977}, then {n % 31}."
            for n in range(start, start + 200)
        ]
    ids = session.tokenizer.encode("\n".join(lines))[:tokens]
    return session.tokenizer.decode(ids)


def _large(options: Options, folder: Path) -> tuple[Path, Path]:
    if options.model is None and options.shape is None:
        return pair()
    model = options.model or folder / "grown"
    if options.model is None:
        started = time.perf_counter()
        grow(model, options.shape)
        print(f"grew {options.shape} in {time.perf_counter() - started:.0f} s", flush=True)
    files = model / "target.gguf", model / "draft.gguf"
    for file in files:
        widen(file, options.tokens + 2048)
    return files


def widen(file: Path, context: int) -> None:
    """Lets a grown model take a longer text than the small one was trained on: the number in its header."""
    with file.open("r+b") as stream:
        start = stream.read(1 << 16)
        key = start.index(b".context_length") + len(b".context_length")
        kind, value = struct.unpack_from("<II", start, key)
        assert kind == 4, kind  # UINT32
        if value < context:
            stream.seek(key + 4)
            stream.write(struct.pack("<I", context))


def masks(options: Options) -> dict[str, Any]:
    device = options.device
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


def budgets(options: Options) -> dict[str, Any]:
    session = load(options)
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


PARTS: list[Callable[[Options], dict[str, Any]]] = [hits, long, saving, masks, budgets, formats]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", type=Path, help="folder of a grown pair")
    parser.add_argument("--shape", help="of a pair to be grown: 27b")
    parser.add_argument("--tokens", type=int, default=24_000, help="of the long conversation")
    parser.add_argument("--only", default="", help="parts, by name")
    parser.add_argument("--seconds", type=float, default=150, help="behind which no further part begins")
    given = parser.parse_args()
    options = Options(given.device, given.model, given.shape, given.tokens)
    out = given.out.open("a") if given.out else None
    failed, begin = 0, time.perf_counter()
    for part in PARTS:
        if given.only and part.__name__ not in given.only.split(","):
            continue
        started = time.perf_counter()
        if started - begin > given.seconds:
            print("no time left for", part.__name__, flush=True)
            continue
        try:
            line = {"part": part.__name__, "device": options.device, **part(options)}
            line["seconds"] = round(time.perf_counter() - started, 1)
            print("PASS", line, flush=True)
            if out:
                print(json.dumps(line), file=out, flush=True)
        except Exception:
            failed += 1
            print("FAIL", part.__name__, flush=True)
            traceback.print_exc()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
