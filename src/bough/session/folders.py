"""Folders of this user that hold what can be made again."""

from pathlib import Path


def cache_folder() -> Path:
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("bough"))


def costs_file() -> Path:
    """Return the file that keeps measured step costs from one run to the next."""
    return cache_folder() / "step-costs.json"
