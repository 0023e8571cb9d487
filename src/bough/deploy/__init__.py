"""Replicas of a model behind one endpoint, on Ray Serve: `serve run bough.deploy:app`. Needs ray."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bough.deploy.application import app

__all__ = ["app"]


def __getattr__(name: str) -> Any:
    """Import the application when it is asked for: its parts can be used before Ray is imported."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bough.deploy.application import app

    return app
