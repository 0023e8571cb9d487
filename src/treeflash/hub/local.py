"""Model files on disk: a folder that holds one model, or a good answer where there is no such file."""

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from treeflash.errors import ModelNotFound
from treeflash.hub.drafts import CONFIG, is_draft_config
from treeflash.hub.names import group, listing


def model_in(folder: Path) -> Path:
    """The one model of a folder: its file, or the first of its split files."""
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
            f"name the target, and this with --draft {folder}",
        )
    if (folder / CONFIG).exists() and any(folder.glob("*.safetensors")):
        raise ModelNotFound(
            f"{folder} holds a Hugging Face model, needed: a .gguf file", f"treeflash convert {folder}"
        )
    raise ModelNotFound(f"{folder} holds no .gguf file")


def draft_in(folder: Path) -> Path:
    """The draft of a folder: the folder itself where it is a checkpoint, else its one GGUF file."""
    if (folder / CONFIG).exists() and any(folder.glob("*.safetensors")):
        return folder
    if any(folder.glob("*.gguf")):
        return model_in(folder)
    raise ModelNotFound(f"{folder} holds no draft: needed {CONFIG} and a .safetensors file, or a .gguf file")


def meant_as_file(name: str) -> bool:
    """Whether a name like USER/REPO is more likely a file of a folder here, with its ending spelt wrong."""
    path = Path(name).expanduser()
    if not path.parent.is_dir():
        return False
    ending = re.fullmatch(r"\.[guf]{2,6}", path.suffix.lower())
    return ending is not None or path.with_name(f"{path.name}.gguf").is_file()


def no_such_file(name: str, known: Sequence[str] = ()) -> ModelNotFound:
    """What to say about a name that is neither there nor a repository's; `known`: names it may have meant."""
    if any(character.isspace() for character in name) and not name.lower().endswith(".gguf"):
        return ModelNotFound(
            f"{name[:80]!r} is no model: neither a file nor USER/REPO[:QUANT]",
            "a prompt goes behind the model or after --prompt",
        )
    path = Path(name).expanduser()
    if not path.parent.is_dir():
        return ModelNotFound(f"{name}: no such file, and no folder {path.parent}")
    here = [each.name for each in path.parent.iterdir() if each.suffix == ".gguf" or each.is_dir()]
    ended = f"{path.name}.gguf"
    alike = [ended] if ended in here else difflib.get_close_matches(path.name, here, n=3)
    close = [str(path.with_name(each)) for each in alike]
    if close or known:
        hint = f"did you mean {' or '.join(close or known)}?"
    elif "/" in name or path.suffix == ".gguf":
        hint = ""
    else:
        hint = "treeflash list shows short names; models on huggingface.co are named USER/REPO[:QUANT]"
    return ModelNotFound(f"{name}: no such file", hint)
