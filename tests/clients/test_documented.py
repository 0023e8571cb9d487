"""The documents name the versions that the client tests install."""

import re
from pathlib import Path

import pytest

from tests.clients.environments import CLIENTS

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
BESIDE = ("zod", "openai", "anthropic", "mcp")  # packages that the clients use


@pytest.mark.parametrize("package", sorted({each for client in CLIENTS for each in client.packages}))
def test_a_version_is_documented(package: str) -> None:
    name, version = re.fullmatch(r"(.+?)(?:\[.*\])?(?:==|@)([\d.]+)", package).groups()
    assert name in BESIDE or f"`{name}` {version}" in PAGE.read_text()
