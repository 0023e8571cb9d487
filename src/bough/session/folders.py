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


def first_time(notice: str) -> bool:
    """Return whether this user is told something for the first time; noted, as far as a file can be."""
    path = cache_folder() / "told.txt"
    try:
        if path.exists() and notice in path.read_text(encoding="utf-8").splitlines():
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{notice}\n")
    except (OSError, UnicodeDecodeError):
        pass
    return True


def costs_file() -> Path:
    """Return the file that keeps measured step costs from one run to the next."""
    return cache_folder() / "step-costs.json"
