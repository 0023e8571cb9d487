"""A stand-in for the server that the page can talk to: scripted answers with trees, and failures on demand.

Knows the HTTP contract alone; nothing of the package is imported, so the page is tested without a model.
"""

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "src" / "bough" / "server" / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
WORD = re.compile(r" ?[A-Za-z]+|\n+ *| ?\d+| ?_+| ?[^\w\s]+|\s+|[^\W\d_]+")
DEFAULT_ANSWER = "A **tree** of guesses is checked in one pass."


@dataclass
class Script:
    """What the server does next, and the requests it received."""

    answer: str = DEFAULT_ANSWER
    answers: list[str] = field(default_factory=list)  # of the next requests, before `answer`
    reasoning: str = ""
    step_s: float = 0.004
    key: str = ""
    busy: int = 0  # requests to reject with 429 first
    loading: int = 0  # health checks and requests to answer with 503 first
    comments: tuple[str, ...] = ()
    break_after: int | None = None  # steps, then the connection is cut
    error_after: int | None = None  # steps, then an error event
    refuse: str = ""  # message of a 400
    finish: str = "stop"
    plain_answer: str | None = None  # when plain decoding is to differ
    models: tuple[str, ...] = ("bough-40m",)
    proposes: str = "draft"
    sees: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    read_ahead: list[dict[str, Any]] = field(default_factory=list)
    vanished: threading.Event = field(default_factory=threading.Event)


def words(text: str) -> list[str]:
    return WORD.findall(text)


def grow(tokens: list[str], position: int, budget: int, dice: random.Random) -> dict[str, Any]:
    """Return a tree at `position` whose accepted path is the text, with rejected branches."""
    right = min(dice.choice([1, 2, 3, 4, 5, 6, 8]), len(tokens) - position, budget + 1)
    names, parents, accepted = [tokens[position]], [-1], [0]
    for step in range(1, right):
        names.append(tokens[position + step])
        parents.append(accepted[-1])
        accepted.append(len(names) - 1)
    while len(names) < budget + 1:
        # Branches are spread along the path; about half of the rejected nodes extend another one.
        wrong = dice.random() < 0.5 and len(names) > right
        parents.append(dice.randrange(right, len(names)) if wrong else dice.choice(accepted))
        names.append(dice.choice(tokens))
    return {"tokens": names, "parents": parents, "accepted": accepted}


def chunks(script: Script, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    extension = body.get("bough", {})
    budget = extension.get("budget", 22)
    dice = random.Random(7)
    answer = script.plain_answer if script.plain_answer is not None and budget == 0 else script.answer
    answer = script.answers.pop(0) if script.answers else answer
    thought, tokens = words(script.reasoning), words(answer)
    everything = thought + tokens
    position = steps = 0
    while position < len(everything):
        if steps == script.error_after:
            yield {"error": {"message": "the engine ran out of memory", "type": "server_error", "code": 500}}
            return
        tree = grow(everything, position, budget, dice)
        kept = len(tree["accepted"])
        rows = len(tree["tokens"])
        tree |= {"draft_ms": 3.0, "step_ms": 20 + 0.35 * rows + dice.random() * 3}
        steps += 1
        choice: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": None}
        chunk: dict[str, Any] = {"object": "chat.completion.chunk", "choices": [choice]}
        for token in everything[position : position + kept]:
            name = "reasoning_content" if position < len(thought) else "content"
            choice["delta"][name] = choice["delta"].get(name, "") + token
            position += 1
        if extension.get("trees"):
            chunk["bough"] = {"tree": tree}
        time.sleep(script.step_s)
        yield chunk
    speed = 41.7 if budget == 0 else 142.4
    stats = {
        "generated_tokens": position,
        "decode_tok_s": speed,
        "tok_s": speed,
        "acceptance_length": position / max(steps, 1),
        "ttft_s": 0.21,
        "seed": body.get("seed", 0),
    }
    last = {"index": 0, "delta": {}, "finish_reason": script.finish}
    yield {"object": "chat.completion.chunk", "choices": [last], "bough": {"stats": stats}}
    usage = {"prompt_tokens": 100, "completion_tokens": position}
    yield {"object": "chat.completion.chunk", "choices": [], "usage": usage}


class _Handler(BaseHTTPRequestHandler):
    server: "PageServer"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status: int, message: str, **headers: str) -> None:
        error = {"error": {"message": message, "type": "error", "param": None, "code": None}}
        self._answer(status, json.dumps(error).encode(), **headers)

    def _loading(self) -> bool:
        script = self.server.script
        if script.loading <= 0:
            return False
        script.loading -= 1
        self._error(503, "the model is loading: layer 12 of 64")
        return True

    def do_GET(self) -> None:
        name = self.path.split("?")[0].lstrip("/") or "index.html"
        if name == "health":
            if not self._loading():
                self._answer(200, b'{"status": "ok"}')
        elif name == "v1/models":
            inputs = ["text", "image"] if self.server.script.sees else ["text"]
            about = {"max_model_len": 8192, "architecture": {"input_modalities": inputs}}
            models = [{"id": name, **about} for name in self.server.script.models]
            self._answer(200, json.dumps({"data": models}).encode())
        elif name == "props":
            props = {"sampling": {"temperature": 0.7, "top_k": 40}, "proposes": self.server.script.proposes}
            self._answer(200, json.dumps(props).encode())
        elif (PAGE / name).is_file() and "/" not in name:
            path = PAGE / name
            self._answer(200, path.read_bytes(), TYPES[path.suffix] + "; charset=utf-8")
        else:
            self._error(404, f"there is no {self.path}")

    def do_POST(self) -> None:
        script = self.server.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if script.key and self.headers["Authorization"] != f"Bearer {script.key}":
            return self._error(401, "the key is missing or wrong")
        if self._loading():
            return None
        if script.busy > 0:
            script.busy -= 1
            return self._error(429, "the queue holds 64 requests", Retry_After="1")
        if script.refuse:
            return self._error(400, script.refuse)
        if self.path == "/v1/prefill":
            script.read_ahead.append(body)
            return self._answer(200, b'{"ready_tokens": 70}')
        script.bodies.append(body)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self._stream(script, body)
        except (BrokenPipeError, ConnectionResetError):
            script.vanished.set()
        return None

    def _stream(self, script: Script, body: dict[str, Any]) -> None:
        for comment in script.comments:
            self.wfile.write(f": {comment}\n\n".encode())
            time.sleep(0.4)
        for count, chunk in enumerate(chunks(script, body)):
            if count == script.break_after:
                return
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")


class PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int = 0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.script = Script()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"
