"""Folders of the name that this program had before: they are used where there are none of the new one."""

import functools
import logging
from pathlib import Path

log = logging.getLogger(__name__)

NAME, OLD_NAME = "bough", "treeflash"


@functools.cache  # one folder for the whole run, and one line about it
def folder_in(parent: Path) -> Path:
    """Return this program's folder in `parent`, which need not exist."""
    folder, old = parent / NAME, parent / OLD_NAME
    if folder.exists() or not old.is_dir():
        return folder
    log.warning("%s is used, of this program's old name; renaming it to %s keeps what is in it", old, NAME)
    return old
