"""A small server with OpenAI's chat protocol and scripted replies."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]


class ChatServer:
    """`say` makes the pieces of a reply from the request; a dict is sent as a chunk as it is."""

    def __init__(
        self, say: Callable[[Json], list[str | Json]], *, owner: str = "someone", key: str | None = None
    ):
        self.say = say
        self.owner = owner
        self.key = key
        self.pause_s = 0.0  # between two pieces
        self.health = 200
        self.models: Any = {"object": "list", "data": [{"id": "served-model", "owned_by": owner}]}
        self.requests: list[Json] = []
        self.gone = threading.Event()  # a client left before its reply was over
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/health":
                    self._send(server.health, {"status": "ok"})
                elif server.key and self.headers["Authorization"] != f"Bearer {server.key}":
                    self._send(401, {"error": {"message": "wrong key"}})
                elif self.path == "/v1/models" and server.models is not None:
                    self._send(200, server.models)
                else:
                    self._send(404, {"error": {"message": "not found"}})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(body)
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                try:
                    self._stream(body)
                except OSError:
                    server.gone.set()

            def _stream(self, body: Json) -> None:
                self.wfile.write(b": a comment\n\n")
                pieces = server.say(body)
                for piece in pieces:
                    time.sleep(server.pause_s)
                    delta = {"choices": [{"index": 0, "delta": {"content": piece}}]}
                    self._event(piece if isinstance(piece, dict) else delta)
                self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
                usage = {
                    "prompt_tokens": 7,
                    "completion_tokens": len(pieces),
                    "total_tokens": 7 + len(pieces),
                }
                self._event({"choices": [], "usage": usage})
                self.wfile.write(b"data: [DONE]\n\n")

            def _event(self, value: Json) -> None:
                # Not escaped, as most servers send it.
                self.wfile.write(b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n")
                self.wfile.flush()

            def _send(self, status: int, value: Any) -> None:
                data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> "ChatServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


def thought(text: str) -> Json:
    return {"choices": [{"index": 0, "delta": {"reasoning_content": text}}]}


def echo(body: Json) -> list[str | Json]:
    """Says what was said, word by word."""
    return [f"{word} " for word in body["messages"][-1]["content"].split()]
