"""A first start with a planted fault in a real kernel, in a process of its own: prints the text and the log.

    python -m tests.gpu.planted_fault FAULT FOLDER

FOLDER holds the compiled kernels and the verdict: two processes with one folder are a first and a second
start. The faults: none, wrong, compile, shared, capture.
"""

import json
import logging
import os
import sys
import time


def plant(fault: str) -> None:
    """Break the delta rule's CUDA C++ kernel, or the card around it."""
    from bough.kernels.delta_rule import cuda

    whole = cuda.source()
    if fault == "wrong":
        changed = whole.replace("expf(ahead.gate[i])", "0.5f * expf(ahead.gate[i])")  # another decay
        assert changed != whole
        cuda.source = lambda: changed
    elif fault == "compile":
        cuda.source = lambda: whole + "\n#error planted\n"
    elif fault == "shared":
        plain = cuda.spread
        cuda.spread = lambda card, shared, blocks: plain(card, shared, blocks) + (256 << 10)
    elif fault == "capture":
        from bough.state import graphs

        capture, calls = graphs.CapturedFunction.capture, []

        def failing(self, pool):
            calls.append(pool)
            if len(calls) == 3:
                raise RuntimeError("CUDA driver error 999: planted")
            return capture(self, pool)

        graphs.CapturedFunction.capture = failing


def main(fault: str, folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logging.getLogger("bough").addHandler(Lines())
    plant(fault)
    from bough.config import DraftConfig, EngineConfig
    from bough.session.loading import load_session
    from tests.gpu.texts import embedded_pair, generate

    target, draft = embedded_pair()
    limit = int(os.environ.get("LIMIT_MIB", "0")) << 20 or None
    config = EngineConfig("cuda", max_ctx=2048, draft=DraftConfig(draft), vram_limit=limit)
    start = time.perf_counter()
    session = load_session(target, config)
    loaded = time.perf_counter() - start
    answer = generate(session, "def fibonacci(n):", max_tokens=64)
    report = {
        "fault": fault,
        "text": session.tokenizer.decode(answer.tokens),
        "captured": session.engine.runner.captured,
        "load_s": round(loaded, 2),
        "phases": {name: round(value, 2) for name, value in session.load_seconds.items()},
        "log": lines,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
