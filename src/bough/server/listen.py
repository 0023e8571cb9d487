"""The listening socket and the checks before it is opened. Imports neither the application nor the engine."""

import errno
import re
import socket

from bough.config import ServerConfig
from bough.errors import UsageError

BACKLOG = 512  # connections that the system accepts before the server does
_LOOPBACK = re.compile(r"([\w-]+\.)*localhost|127(\.\d{1,3}){3}|::1|\[::1\]")


def is_loopback(host: str) -> bool:
    return _LOOPBACK.fullmatch(host.lower()) is not None


def check(config: ServerConfig) -> None:
    """Raise if the server must not be started with these settings."""
    if not is_loopback(config.host) and not config.api_keys:
        raise UsageError(
            f"`host` is {config.host}, which other machines can reach, and there is no key",
            "set `api_key_file` to a file with one long random line, or `host` to 127.0.0.1",
        )
    for key in config.api_keys:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError(
                "a key has characters that a header cannot carry, needed printable ASCII", param="api_key"
            )


def bind(config: ServerConfig) -> socket.socket:
    """Return the listening socket, bound before the model is loaded, which takes minutes."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host.strip("[]"), config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {config.port} on {config.host} is in use",
                "choose another `port`; bough stop ends a server in the background",
                param="port",
            ) from error
        raise UsageError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}",
            "change `host` or `port`",
            param="host",
        ) from error
