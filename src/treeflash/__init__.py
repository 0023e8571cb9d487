"""TreeFlash: fast, exact tree-speculative decoding of GGUF language models. Importing this loads no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from treeflash.config import set_openmp_waiting

if TYPE_CHECKING:
    from treeflash.config import EngineConfig
    from treeflash.engine.engine import Engine
    from treeflash.engine.sampler import SamplingParams
    from treeflash.session.loading import load_session
    from treeflash.session.session import Finished, Session, Text, TextRequest

__version__ = "0.1.0"

set_openmp_waiting()

_PUBLIC = {
    "Engine": "treeflash.engine.engine",
    "EngineConfig": "treeflash.config",
    "Finished": "treeflash.session.session",
    "SamplingParams": "treeflash.engine.sampler",
    "Session": "treeflash.session.session",
    "Text": "treeflash.session.session",
    "TextRequest": "treeflash.session.session",
    "load_session": "treeflash.session.loading",
}
__all__ = [
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
