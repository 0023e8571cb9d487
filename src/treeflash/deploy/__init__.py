"""Replicas of a model behind one endpoint, on Ray Serve: `serve run treeflash.deploy:app`. Needs ray."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treeflash.deploy.application import app

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    """Import the application when it is asked for: its parts can be used before Ray is imported."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from treeflash.deploy.application import app

    return app
