"""Bough: fast, exact tree-speculative decoding of GGUF language models. Importing this loads no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bough.startup import set_variables

if TYPE_CHECKING:
    from bough.config import EngineConfig
    from bough.engine.engine import Engine
    from bough.llm import LLM, Answer, SamplingParams
    from bough.session.loading import load_session
    from bough.session.session import Finished, Session, Text, TextRequest

__version__ = "0.1.0"

set_variables()

_PUBLIC = {
    "LLM": "bough.llm",
    "Answer": "bough.llm",
    "Engine": "bough.engine.engine",
    "EngineConfig": "bough.config",
    "Finished": "bough.session.session",
    "SamplingParams": "bough.llm",
    "Session": "bough.session.session",
    "Text": "bough.session.session",
    "TextRequest": "bough.session.session",
    "load_session": "bough.session.loading",
}
__all__ = [
    "LLM",
    "Answer",
    "Engine",
    "EngineConfig",
    "Finished",
    "SamplingParams",
    "Session",
    "Text",
    "TextRequest",
    "load_session",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'bough' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
