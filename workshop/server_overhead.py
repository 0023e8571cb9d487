"""Time per token through the server against the engine alone: same process, same model, alternating.

python -m workshop server_overhead [--repeats 7] [--tokens 64] [--device auto] [--out FILE]

The client is a separate process that reads the stream. Prints both medians and their ratio.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace

import bough
from bough.config import DraftConfig, EngineConfig, ServerConfig
from bough.server.app import create_app
from bough.server.listen import bind
from bough.server.metrics import Metrics
from bough.server.models import Models, ServedModel
from bough.server.run import make_server
from bough.session.loading import load_session
from bough.session.requests import Finished, Text, TextRequest
from bough.session.session import Session
from bough.session.worker import EngineWorker
from workshop.case import DRAFT, TARGET, case
from workshop.report import Report

MESSAGES = [{"role": "user", "content": "Write a Python function that merges two sorted lists."}]
# Reads a stream; prints the seconds from its first text to its last, and the text.
CLIENT = """
import json, socket, sys, time
port, body = int(sys.argv[1]), sys.argv[2].encode()
with socket.create_connection(("127.0.0.1", port)) as connection:
    # HTTP/1.0 sends the events without chunked transfer encoding.
    head = f"POST /v1/chat/completions HTTP/1.0\\r\\nHost: localhost\\r\\nContent-Length: {len(body)}"
    connection.sendall(head.encode() + b"\\r\\n\\r\\n" + body)
    first = last = None
    whole = b""
    while b"[DONE]" not in whole[-200:]:
        piece = connection.recv(65536)
        if b'"delta":{"content":"' in piece:
            last = time.perf_counter()
            first = first or last
        whole += piece
events = [json.loads(line[6:]) for line in whole.split(b"\\n") if line.startswith(b"data: {")]
text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
print(json.dumps([last - first, text]))
"""


def engine_alone(session: Session, tokens: int) -> tuple[float, str, int]:
    """Return the seconds from the first text to the last, the text, and its number of tokens."""
    sampling = replace(session.sampling_for(None), temperature=0.0)  # as the server interprets the body below
    request = TextRequest(messages=MESSAGES, max_tokens=tokens, sampling=sampling)
    first = last = 0.0
    text, count = "", 0
    for event in session.generate(request):
        if isinstance(event, Text):
            last = time.perf_counter()
            first = first or last
            text += event.text
        elif isinstance(event, Finished):
            count = event.stats.generated_tokens
    assert count > 1
    return last - first, text, count


def through_the_server(port: int, tokens: int) -> tuple[float, str]:
    body = json.dumps({"messages": MESSAGES, "max_tokens": tokens, "temperature": 0, "stream": True})
    command = [sys.executable, "-c", CLIENT, str(port), body]
    seconds, text = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return seconds, text


@case(device="auto")
def main(report: Report, *, repeats: int = 7, tokens: int = 64) -> None:
    config = EngineConfig(device=report.device, max_ctx=1024, draft=DraftConfig(DRAFT))
    session, alone_session = load_session(TARGET, config), load_session(TARGET, config)
    server_config = ServerConfig(port=0)
    models = Models([ServedModel("pair", lambda _progress: session)], server_config, EngineWorker)
    metrics = Metrics()
    app = create_app(models, server_config, metrics=metrics)
    server = make_server(app, server_config)
    listening = bind(server_config)
    port = listening.getsockname()[1]
    models.start()
    threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True, name="server"
    ).start()
    models.first.worker.ready.wait()
    for _ in range(2):
        engine_alone(alone_session, tokens)
        through_the_server(port, tokens)
    alone, served, count = [], [], 0
    for turn in range(repeats):
        # The order alternates.
        for way in ("alone", "served") if turn % 2 else ("served", "alone"):
            if way == "alone":
                seconds, text, count = engine_alone(alone_session, tokens)
                alone.append(seconds)
            else:
                seconds, streamed = through_the_server(port, tokens)
                served.append(seconds)
        assert streamed == text, "the server's output differs from the engine's"
    result = {
        "case": "server_overhead",
        "version": bough.__version__,
        "device": str(session.engine.target.device),
        "tokens": count,
        "engine_ms_per_token": 1000 * statistics.median(alone) / (count - 1),
        "server_ms_per_token": 1000 * statistics.median(served) / (count - 1),
        "ratio_of_medians": statistics.median(served) / statistics.median(alone),
        "ratio_of_best": min(served) / min(alone),
    }
    report.line(**result)
    server.should_exit = True
    models.close()
