"""Model files on disk: the model in a folder, and helpful errors for files that do not exist."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from bough.errors import ModelNotFound
from bough.hub.drafts import CONFIG, is_draft_config
from bough.hub.names import draft_sidecars, encoders, group, listing


def model_in(folder: Path) -> Path:
    """Return the only model of a folder: its file, or the first of its split files."""
    sets = group((each.name, each.stat().st_size) for each in folder.iterdir() if each.is_file())
    if len(sets) == 1:
        return folder / sets[0].files[0]
    if sets:
        raise ModelNotFound(
            f"{folder} holds {len(sets)} models: {listing(sets, by_file=True)}",
            f"name one: {folder / sets[0].files[0]}",
        )
    if is_draft_config(folder / CONFIG):
        raise ModelNotFound(
            f"{folder} holds a draft, needed: a .gguf file of a target",
            f"name the target, and set `draft` to {folder}",
        )
    if (folder / CONFIG).exists() and any(folder.glob("*.safetensors")):
        raise ModelNotFound(
            f"{folder} holds a Hugging Face model, needed: a .gguf file", f"bough convert {folder}"
        )
    if drafts := drafts_beside(folder / CONFIG):
        raise ModelNotFound(
            f"{folder} holds only a draft, {drafts[0].name}; needed: a .gguf file of a target"
        )
    raise ModelNotFound(f"{folder} holds no .gguf file")


def draft_in(folder: Path) -> Path:
    """Return the draft in a folder: the folder itself if it is a checkpoint, else its GGUF file."""
    if (folder / CONFIG).exists() and any(folder.glob("*.safetensors")):
        return folder
    if (beside := drafts_beside(folder / CONFIG)) and len(beside) == 1:
        return beside[0]
    if any(folder.glob("*.gguf")):
        return model_in(folder)
    raise ModelNotFound(f"{folder} holds no draft: needed {CONFIG} and a .safetensors file, or a .gguf file")


def drafts_beside(path: Path) -> list[Path]:
    """Return the GGUF drafts, by their names, in the folder of a file."""
    files = ((each.name, each.stat().st_size) for each in path.parent.iterdir() if each.is_file())
    return [path.parent / each.files[0] for each in draft_sidecars(files)]


def encoders_beside(path: Path) -> list[Path]:
    """Return the image encoders in the folder of a model, those of its name and the most precise first."""
    # In the hub's cache a quantisation may have a folder of its own below the encoder's.
    first, *above = path.absolute().parents
    folders = [first, *above[: len(above) > 1 and above[1].name == "snapshots"]]
    return [
        folder / name
        for folder in folders
        for name in encoders((each.name for each in folder.iterdir() if each.is_file()), path.name)
    ]


def paired_draft(path: Path) -> Path | None:
    """Return the draft beside a model where the folder holds just these two."""
    drafts = drafts_beside(path)
    sets = group((each.name, each.stat().st_size) for each in path.parent.iterdir() if each.is_file())
    alone = len(sets) == 1 and path.name in sets[0].files
    return drafts[0] if len(drafts) == 1 and alone else None


def meant_as_file(name: str) -> bool:
    """Return whether a name like USER/REPO is more likely a local file with a misspelt suffix."""
    path = Path(name).expanduser()
    if not path.parent.is_dir():
        return False
    ending = re.fullmatch(r"\.[guf]{2,6}", path.suffix.lower())
    return ending is not None or path.with_name(f"{path.name}.gguf").is_file()


def no_such_file(name: str, similar: Sequence[str] = ()) -> ModelNotFound:
    """Return the error for a name that is neither a file nor a repository; `similar`: catalogue names."""
    if any(character.isspace() for character in name) and not name.lower().endswith(".gguf"):
        return ModelNotFound(
            f"{name[:80]!r} is no model: neither a file nor USER/REPO[:QUANT]",
            "a prompt follows the model's name, or is given with `prompt`",
        )
    path = Path(name).expanduser()
    if not path.parent.is_dir():
        return ModelNotFound(f"{name}: no such file, and no folder {path.parent}")
    here = [each.name for each in path.parent.iterdir() if each.suffix == ".gguf" or each.is_dir()]
    ended = f"{path.name}.gguf"
    alike = [ended] if ended in here else difflib.get_close_matches(path.name, here, n=3)
    close = [str(path.with_name(each)) for each in alike]
    if close or similar:
        hint = f"did you mean {' or '.join(close or similar)}?"
    elif "/" in name or path.suffix == ".gguf":
        hint = ""
    else:
        hint = (
            "bough list shows short names; others are GGUF repositories on huggingface.co, "
            "USER/REPO[:QUANT]: unsloth/Llama-3.2-3B-Instruct-GGUF:Q4_K_M"
        )
    what = "no such file" if "/" in name or path.suffix == ".gguf" else "no such file or short name"
    return ModelNotFound(f"{name}: {what}", hint)
