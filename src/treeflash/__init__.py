"""TreeFlash: fast, exact tree-speculative decoding of GGUF language models. Importing this loads no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from treeflash.openmp import set_waiting

if TYPE_CHECKING:
    from treeflash.config import EngineConfig
    from treeflash.engine.engine import Engine
    from treeflash.llm import LLM, Answer, SamplingParams
    from treeflash.session.loading import load_session
    from treeflash.session.session import Finished, Session, Text, TextRequest

__version__ = "0.1.0"

set_waiting()

_PUBLIC = {
    "LLM": "treeflash.llm",
    "Answer": "treeflash.llm",
    "Engine": "treeflash.engine.engine",
    "EngineConfig": "treeflash.config",
    "Finished": "treeflash.session.session",
    "SamplingParams": "treeflash.llm",
    "Session": "treeflash.session.session",
    "Text": "treeflash.session.session",
    "TextRequest": "treeflash.session.session",
    "load_session": "treeflash.session.loading",
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
        raise AttributeError(f"module 'treeflash' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
