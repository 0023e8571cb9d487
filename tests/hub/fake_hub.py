"""A server on this machine that speaks as much of the Hugging Face hub's protocol as its client needs."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34
SMALL = (".json", ".md")  # kept by git itself: no checksum of the bytes, no other host


class FakeHub:
    """Repositories of files in memory; large ones are served from another host name, as the real hub does."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.failing: int | None = None  # answer everything with this status
        self.break_off: list[int] = []  # bytes after which the next downloads are broken off
        self.spoil = False  # send other bytes than promised
        self.ignore_ranges = False
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def downloads(self) -> list[dict[str, str]]:
        """Headers of the requests that fetched bytes of a large file."""
        return [
            headers for method, path, headers in self.requests if method == "GET" and path.startswith("/cdn/")
        ]


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.split("?")[0]
        self.hub.requests.append((self.command, path, dict(self.headers.items())))
        if self.hub.failing:
            return self._send(self.hub.failing, {})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            return self._describe(match[1])
        if match := re.fullmatch(r"/(?P<cdn>cdn/)?([^/]+/[^/]+)/resolve/(?:main|[0-9a-f]{40})/(.+)", path):
            return self._file(match[2], match[3], direct=bool(match["cdn"]))
        self._send(404, {})

    def _describe(self, repo: str) -> None:
        if repo not in self.hub.repos:
            return self._send(404, {"X-Error-Code": "RepoNotFound"})
        files = self.hub.repos[repo].items()
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files]
        body = json.dumps({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}).encode()
        self._send(200, {"Content-Type": "application/json"}, body)

    def _file(self, repo: str, name: str, *, direct: bool) -> None:
        data = self.hub.repos.get(repo, {}).get(name)
        if data is None:
            return self._send(
                404, {"X-Error-Code": "EntryNotFound" if repo in self.hub.repos else "RepoNotFound"}
            )
        if repo in self.hub.gated and "Authorization" not in self.headers and not direct:
            return self._send(403, {"X-Error-Code": "GatedRepo"})
        if direct:
            return self._bytes(data)
        if name.endswith(SMALL):
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            headers = {"ETag": f'"{blob}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(data))}
            return self._send(200, headers, data)
        checksum = hashlib.sha256(data).hexdigest()
        self._send(
            302,
            {
                "Location": f"http://localhost:{self.hub.port}/cdn{self.path}",
                "X-Repo-Commit": COMMIT,
                "X-Linked-Etag": f'"{checksum}"',
                "X-Linked-Size": str(len(data)),
            },
        )

    def _bytes(self, data: bytes) -> None:
        start, end = 0, len(data)
        if (asked := self.headers.get("Range")) and not self.hub.ignore_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last) + 1 if last else end
        body = bytes(len(data)) if self.hub.spoil else data
        body = body[start:end]
        headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        if self.hub.break_off and (limit := self.hub.break_off.pop(0)) < len(body):
            self._send(206 if start else 200, headers | {"Content-Length": str(len(body))}, body[:limit])
            self.close_connection = True
            return
        partial = asked is not None and not self.hub.ignore_ranges
        self._send(206 if partial else 200, headers, body)

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
