"""Remote images, for a server that may fetch them: from addresses of the public internet alone."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx2 as httpx

from bough.errors import UsageError
from bough.images.opening import ImageLimits
from bough.images.parts import refuse_fetching

_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the last four bytes are an IPv4 address
_UNICAST = ipaddress.ip_network("2000::/3")  # outside it are other forms of IPv4, and what is local
_PORTS = {"http": 80, "https": 443}


async def addresses(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_public(text: str) -> bool:
    """Return whether an IP address, and one inside it, belongs to the public internet."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if address not in _UNICAST:
            return False
    return address.is_global and not address.is_multicast


@dataclass(frozen=True, slots=True)
class ImageUrls:
    """Fetches images: resolves each name once, and connects to the address that was checked."""

    resolve: Callable[[str, int], Awaitable[list[str]]] = addresses
    transport: httpx.AsyncBaseTransport | None = None
    seconds: float = 10.0  # for all images of a request

    async def fetch(self, urls: Mapping[str, str], limits: ImageLimits) -> dict[str, bytes]:
        """Return the bytes at each URL; `urls`: with the field that has it, for messages of errors."""
        if not urls or len(urls) > limits.images:
            return {}  # too many are refused before they are needed
        # No proxies of the environment: they would resolve the name again.
        client = httpx.AsyncClient(
            transport=self.transport, trust_env=False, follow_redirects=False, timeout=self.seconds
        )
        left = limits.bytes

        async def one(url: str, where: str) -> bytes:
            nonlocal left
            host, request = await self._pinned(client, url, where)
            answer = await client.send(request, stream=True)
            try:
                if answer.status_code != 200:
                    note = "; redirects are not followed" if answer.is_redirect else ""
                    raise UsageError(f"{where}: {host} answers {answer.status_code}{note}", param=where)
                pieces: list[bytes] = []
                async for piece in answer.aiter_raw():  # unpacked, a piece might be a thousand times larger
                    left -= len(piece)
                    if left < 0:
                        raise UsageError(
                            f"{where} is too large: the images of a request may have {limits.bytes} bytes",
                            param=where,
                        )
                    pieces.append(piece)
                return b"".join(pieces)
            finally:
                await answer.aclose()

        last = ""
        try:
            async with client, asyncio.timeout(self.seconds):
                fetched: dict[str, bytes] = {}
                for last, where in urls.items():
                    fetched[last] = await one(last, where)
                return fetched
        except TimeoutError as error:
            where = urls[last]
            raise UsageError(f"{where} took longer than {self.seconds:g} s", param=where) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            where = urls[last]
            raise UsageError(f"{where} cannot be fetched: {type(error).__name__}", param=where) from error

    async def _pinned(self, client: httpx.AsyncClient, url: str, where: str) -> tuple[str, httpx.Request]:
        """Return the URL's host, and a request to the address that its name has now."""
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname or "", parts.port
        except ValueError as error:
            raise UsageError(f"{where} is not a valid URL", param=where) from error
        if scheme not in _PORTS:
            refuse_fetching(url, where)
        if not host:
            raise UsageError(f"{where} is not a valid URL", param=where)
        port = port or _PORTS[scheme]
        resolved = await self.resolve(host, port)
        if not resolved or not all(is_public(address) for address in resolved):
            raise UsageError(f"{where}: {host} is no address of the public internet", param=where)
        address = f"[{resolved[0]}]" if ":" in resolved[0] else resolved[0]
        path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
        return host, client.build_request(
            "GET",
            f"{scheme}://{address}:{port}{path}",
            headers={
                "host": host if port == _PORTS[scheme] else f"{host}:{port}",
                "accept": "image/*",
                "accept-encoding": "identity",
            },
            extensions={"sni_hostname": host},  # what the certificate has to name
        )
