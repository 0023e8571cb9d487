"""Folders of this user."""

from pathlib import Path

from bough.old_name import folder_in


def cache_folder() -> Path:
    from platformdirs import user_cache_path

    return folder_in(user_cache_path())


def state_folder() -> Path:
    """Return the folder of chat input, and of servers in the background."""
    from platformdirs import user_state_path

    return folder_in(user_state_path())


def costs_file() -> Path:
    """Return the file that keeps measured step costs from one run to the next."""
    return cache_folder() / "step-costs.json"
