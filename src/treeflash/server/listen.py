"""Where a server listens, and whether it may; loads neither the application nor the engine."""

import errno
import re
import socket

from treeflash.config import ServerConfig
from treeflash.errors import UsageError

_LOOPBACK = re.compile(r"localhost|.+\.localhost|127(\.\d{1,3}){3}|\[?::1\]?")


def is_loopback(host: str) -> bool:
    return _LOOPBACK.fullmatch(host.lower()) is not None


def check(config: ServerConfig) -> None:
    """Refuses what must not be started, before any work."""
    if not is_loopback(config.host) and not config.api_keys:
        raise UsageError(
            f"--host {config.host} can be reached from other machines, and there is no key",
            "--api-key-file FILE with a long random line in it, or --host 127.0.0.1",
        )
    for key in config.api_keys:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError("a key has characters that cannot stand in a header, needed printable ASCII")


def bind(config: ServerConfig) -> socket.socket:
    """The socket the server will listen on, taken before minutes go into loading."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host.strip("[]"), config.port), family=family, backlog=512)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {config.port} on {config.host} is in use",
                f"--port N takes another; treeflash stop --port {config.port} ends one in the background",
            ) from error
        raise UsageError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}", "--host, --port"
        ) from error
