"""Times the second turn of a conversation with its prefix cached on the GPU, in host memory and on disk.

    python -m workshop gpu.prefix --out prefix.jsonl [--model DIR | --shape 27b]

DIR holds a grown pair, target.gguf and draft.gguf; --shape grows one. With neither, the embedded pair is
used, as in a trial run with --device cpu --tokens 1500. Also times saving and restoring a state.
tests/gpu/test_prefix_cache.py checks the results.
"""

import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from bough.session.requests import TextRequest
from bough.session.session import Session
from tests.gpu.conversation import raise_context_length, second_turns
from tests.gpu.texts import Messages, divergence, embedded_pair, load_session
from workshop.case import case
from workshop.grow.grow import grow
from workshop.report import Report

FASTER = 10  # times, at least, that a hit in the pool beats a miss of 16,000 tokens or more


@dataclass(frozen=True)
class Options:
    device: str
    model: Path | None
    shape: str | None
    tokens: int


def long(options: Options) -> dict[str, Any]:
    """Time the second turn of a long conversation by the tier that holds its prefix."""
    with tempfile.TemporaryDirectory(prefix="bough-prefix") as scratch:
        (target, draft), folder = _pair(options, Path(scratch)), Path(scratch) / "snapshots"
        session = load_session(
            target, draft, device=options.device, max_ctx=options.tokens + 2048, prefix_cache=24 << 30,
            prefix_cache_dir=folder,
        )  # fmt: skip
        return _second_turns(options, session, folder)


def _second_turns(options: Options, session: Session, folder: Path) -> dict[str, Any]:
    cached: dict[str, Any] = {}

    def measure(session: Session, messages: Messages) -> None:
        cached["usage"] = asdict(session.engine.prefixes.usage)
        cached.update(_copies(options, session, messages))

    turns = second_turns(session, folder, options.tokens, measure)
    miss = turns.pop("none")
    turns["nothing"] = miss
    ways = {
        name: {
            "ttft_s": round(turn.stats.ttft_s, 4),
            "cached": turn.stats.cached_tokens,
            "prompt": turn.stats.prompt_tokens,
            "times_faster": round(miss.stats.ttft_s / turn.stats.ttft_s, 1),
            "same": turn.tokens == turns["pool"].tokens,
        }
        for name, turn in turns.items()
    }
    index = divergence(turns["pool"].tokens, miss.tokens)
    result = {"ways": ways, "text": {"same": index is None, "parts_at": index}, **cached}
    if options.tokens >= 16_000:
        assert ways["pool"]["times_faster"] >= FASTER, result
    return result


def _copies(options: Options, session: Session, messages: Messages) -> dict[str, Any]:
    engine, ids = session.engine, session.encode(TextRequest(messages=messages))
    times: dict[str, list[float]] = {"restore_ms": [], "save_ms": []}
    with torch.inference_mode():
        for _ in range(8):
            slot = engine.states.open()
            started = _now(options.device)
            found = engine.prefixes.restore(slot, ids, range(len(ids)))
            assert found is not None
            restored = _now(options.device)
            again = engine.prefixes.store.save(slot)
            times["restore_ms"].append(1000 * (restored - started))
            times["save_ms"].append(1000 * (_now(options.device) - restored))
            engine.prefixes.store.release(again)
            engine.states.close(slot)
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def _pair(options: Options, folder: Path) -> tuple[Path, Path]:
    if options.model is None and options.shape is None:
        return embedded_pair()
    model = options.model or folder / "grown"
    if options.model is None:
        started = time.perf_counter()
        grow(model, options.shape)
        print(f"grew {options.shape} in {time.perf_counter() - started:.0f} s", flush=True)
    files = model / "target.gguf", model / "draft.gguf"
    for file in files:
        raise_context_length(file, options.tokens + 2048)
    return files


def _now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


@case(seconds=150)
def main(
    report: Report,
    *,
    model: Annotated[Path | None, "folder of a grown pair"] = None,
    shape: Annotated[str | None, "of a pair to be grown: 27b"] = None,
    tokens: Annotated[int, "of the long conversation"] = 24_000,
) -> None:
    line = long(Options(report.device, model, shape, tokens))
    report.line(part="long", device=report.device, **line, seconds=round(report.spent, 1))
