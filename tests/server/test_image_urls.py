"""Remote images: only with the flag, only from public addresses, and no more than the limits."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from bough.config import ServerConfig
from bough.errors import UsageError
from bough.images.opening import ImageLimits
from bough.server.image_urls import ImageUrls, is_public
from tests.images.files import encoded, quarters
from tests.server.live import scripted

PNG = encoded(quarters(), "PNG")
PUBLIC = "93.184.215.14"
LIMITS = ImageLimits(bytes=100_000)
WHERE = "messages[0].content[0]"


class Pages(BaseHTTPRequestHandler):
    seen: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.seen.append(f"{self.headers['host']} {self.path}")
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", "http://169.254.169.254/latest")
            self.end_headers()
            return
        self.send_response(404 if self.path == "/none" else 200)
        self.end_headers()
        try:
            if self.path == "/slow":
                for _ in range(200):
                    self.wfile.write(b"x")
                    self.wfile.flush()
                    time.sleep(0.05)
            self.wfile.write(bytes(200_000) if self.path == "/large" else PNG)
        except OSError:
            pass  # the client has left

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def pages() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


class Redirected(httpx2.AsyncHTTPTransport):
    """Stands for the internet: the public address is a server on this machine."""

    def __init__(self, port: int):
        super().__init__()
        self.port, self.requests = port, []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append((str(request.url), request.headers["host"], request.extensions["sni_hostname"]))
        request.url = request.url.copy_with(scheme="http", host="127.0.0.1", port=self.port)
        return await super().handle_async_request(request)


def resolving(*addresses: str) -> tuple[list[str], object]:
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return list(addresses)

    return asked, resolve


def fetch(urls: ImageUrls, *wanted: str) -> dict[str, bytes]:
    return asyncio.run(urls.fetch(dict.fromkeys(wanted, WHERE), LIMITS))


@pytest.mark.parametrize(
    ("address", "public"),
    [
        (PUBLIC, True),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True),
        ("::ffff:93.184.215.14", True),
        ("64:ff9b::5db8:d70e", True),
        ("127.0.0.1", False),
        ("127.9.9.9", False),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("172.16.5.4", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("192.0.0.1", False),
        ("198.18.0.1", False),
        ("203.0.113.5", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:169.254.169.254", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::5db8:d70e", False),
        ("2002:7f00:1::", False),
        ("::127.0.0.1", False),
        ("::ffff:0:10.0.0.1", False),
        ("::1:0:0:5db8:d70e", False),
        ("5f00::1", False),
        ("2001:db8::1", False),
        ("fc00::1", False),
        ("fd12:3456::1", False),
        ("fe80::1", False),
        ("fe80::1%eth0", False),
        ("fec0::1", False),
        ("ff02::1", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) == public


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "2130706433", "0x7f.1"]
)
def test_this_machine_is_not_asked(pages: int, host: str) -> None:
    before = len(Pages.seen)
    with pytest.raises(UsageError, match=r"no address of the public internet|cannot be fetched") as refusal:
        fetch(ImageUrls(), f"http://{host}:{pages}/a.png")
    assert refusal.value.http_status == 400 and refusal.value.param == WHERE
    assert len(Pages.seen) == before


def test_one_private_address_among_public_ones_refuses_the_name(pages: int) -> None:
    _, resolve = resolving(PUBLIC, "10.0.0.1")
    transport = Redirected(pages)
    with pytest.raises(UsageError, match=r"files\.example is no address"):
        fetch(ImageUrls(resolve, transport), "http://files.example/a.png")
    assert not transport.requests


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_name_is_resolved_once_and_its_address_is_pinned(pages: int, scheme: str) -> None:
    asked, resolve = resolving(PUBLIC)
    transport = Redirected(pages)
    url = f"{scheme}://user:secret@files.example/a%20b.png?x=1&y=2"
    assert fetch(ImageUrls(resolve, transport), url) == {url: PNG}
    assert asked == ["files.example"]
    [(sent, host, name)] = transport.requests
    assert sent.startswith(f"{scheme}://{PUBLIC}") and "secret" not in sent
    assert host == name == "files.example"
    assert Pages.seen[-1] == "files.example /a%20b.png?x=1&y=2"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/moved", "answers 302; redirects are not followed"),
        ("/none", "answers 404"),
        ("/large", "may have 100000 bytes"),
        ("/slow", "took longer than 0.5 s"),
    ],
)
def test_limits(pages: int, path: str, words: str) -> None:
    _, resolve = resolving(PUBLIC)
    begun = time.monotonic()
    with pytest.raises(UsageError, match=words):
        fetch(ImageUrls(resolve, Redirected(pages), seconds=0.5), f"http://files.example{path}")
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://a.example/x", "gopher://a.example/x"])
def test_other_schemes(url: str) -> None:
    _, resolve = resolving(PUBLIC)
    with pytest.raises(UsageError, match="not fetched"):
        fetch(ImageUrls(resolve), url)


@pytest.mark.parametrize(
    "url",
    [
        "http://a.example:99999/",
        "http://[::1/",
        "http:///a.png",
        f"http://{'a' * 70}.example/",
        "http://a..example/",
        "http://\0/",
        "http://\ud800/",
    ],
)
def test_invalid_urls(url: str) -> None:
    with pytest.raises(UsageError, match=r"is not a valid URL|cannot be fetched|no address"):
        fetch(ImageUrls(), url)


def test_names_that_do_not_resolve() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(UsageError, match="cannot be fetched: gaierror"):
        fetch(ImageUrls(resolve), "http://nothing.invalid/a.png")


def test_a_server_with_the_flag_refuses_this_machine(pages: int) -> None:
    body = {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:{pages}/a.png?key=s3cret"}}
                ],
            }
        ]
    }
    before = len(Pages.seen)
    with scripted(config=ServerConfig(image_urls=True), images=LIMITS) as server:
        answer = httpx2.post(f"{server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400 and "s3cret" not in answer.text
    assert "127.0.0.1 is no address of the public internet" in answer.json()["error"]["message"]
    assert len(Pages.seen) == before
