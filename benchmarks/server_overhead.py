"""Time per token through the server against the engine alone: same process, same model, in turns.

python benchmarks/server_overhead.py [--repeats 7] [--tokens 64] [--device auto] [--out FILE]

The client is a process of its own that reads the stream. Prints the median of each way and their ratio.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import treeflash
from treeflash.config import DraftConfig, EngineConfig, ServerConfig
from treeflash.engine.requests import Finished, Text, TextRequest
from treeflash.engine.sampler import SamplingParams
from treeflash.engine.session import Session
from treeflash.engine.worker import EngineWorker
from treeflash.hub.catalog import named
from treeflash.server.app import create_app
from treeflash.server.listen import bind
from treeflash.server.metrics import Metrics
from treeflash.server.run import make_server

MESSAGES = [{"role": "user", "content": "Write a Python function that merges two sorted lists."}]
# Reads a stream as it comes; prints the seconds from its first text to its last.
CLIENT = """
import json, socket, sys, time
port, body = int(sys.argv[1]), sys.argv[2].encode()
with socket.create_connection(("127.0.0.1", port)) as connection:
    head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: {len(body)}"
    connection.sendall(head.encode() + b"\\r\\n\\r\\n" + body)
    first = last = None
    whole = b""
    while b"[DONE]" not in whole[-200:]:
        piece = connection.recv(65536)
        if b'"delta":{"content":"' in piece and b'"role"' not in piece:
            last = time.perf_counter()
            first = first or last
        whole += piece
print(last - first)
"""


def engine_alone(session: Session, tokens: int) -> float:
    request = TextRequest(messages=MESSAGES, max_tokens=tokens, sampling=SamplingParams())
    first = last = 0.0
    for event in session.generate(request):
        if isinstance(event, Text):
            last = time.perf_counter()
            first = first or last
        elif isinstance(event, Finished):
            assert event.stats.generated_tokens > 1
    return last - first


def through_the_server(port: int, tokens: int) -> float:
    body = json.dumps({"messages": MESSAGES, "max_tokens": tokens, "temperature": 0, "stream": True})
    command = [sys.executable, "-c", CLIENT, str(port), body]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = named("treeflash-40m")
    assert found is not None and found[0].pair is not None
    pair = found[0].pair
    config = EngineConfig(device=options.device, max_ctx=1024, draft=DraftConfig(pair.draft))
    session = Session.load(pair.target, config)
    server_config = ServerConfig(port=0)
    worker = EngineWorker(lambda _progress: session)
    metrics = Metrics()
    app = create_app(worker, server_config, metrics=metrics, model_name="pair")
    server = make_server(app, server_config)
    listening = bind(server_config)
    port = listening.getsockname()[1]
    worker.start()
    threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True, name="server"
    ).start()
    worker.ready.wait()
    for _ in range(2):
        engine_alone(session, options.tokens)
        through_the_server(port, options.tokens)
    alone, served = [], []
    for _ in range(options.repeats):
        alone.append(engine_alone(session, options.tokens))
        served.append(through_the_server(port, options.tokens))
    result = {
        "case": "server_overhead",
        "version": treeflash.__version__,
        "device": str(session.engine.target.device),
        "tokens": options.tokens,
        "engine_ms_per_token": 1000 * statistics.median(alone) / (options.tokens - 1),
        "server_ms_per_token": 1000 * statistics.median(served) / (options.tokens - 1),
        "ratio_of_medians": statistics.median(served) / statistics.median(alone),
        "ratio_of_best": min(served) / min(alone),
    }
    print(json.dumps(result))
    if options.out:
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    server.should_exit = True
    worker.close()


if __name__ == "__main__":
    main()
