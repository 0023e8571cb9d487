"""Reading Hugging Face model folders: JSON files and safetensors."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open

from bough.errors import ModelFileError, ModelNotFound, UnsupportedModel

INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
_DTYPES = ("BF16", "F16", "F32")
_FETCH_AGAIN = "the download may be incomplete: fetch the folder again"
# Prefixes of a multimodal checkpoint's tensors that the text model does not need.
_OTHER_MODALITIES = (
    *("model.visual.", "visual.", "model.audio_tower.", "audio_tower."),
    *("model.vision_tower.", "model.vision_adapter.", "model.vision_projection."),
)
# Buffers in old checkpoints that are computed from the configuration.
_BUFFERS = (".rotary_emb.inv_freq",)
_MISSING = object()


class HFConfig:
    """config.json, with text_config merged into the top level; errors name the file and the key."""

    def __init__(self, values: dict[str, Any], source: str):
        text = values.get("text_config")
        self.values = {**values, **text} if isinstance(text, dict) else dict(values)
        # these two belong to the whole checkpoint
        for key in ("architectures", "tie_word_embeddings"):
            if values.get(key) is not None:
                self.values[key] = values[key]
        self.source = source

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: Any = _MISSING) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self._refuse(key, value, "a positive whole number")
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            self._refuse(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return value

    def _refuse(self, key: str, value: Any, needed: str) -> NoReturn:
        seen = "is absent" if value is _MISSING else f"is {json.dumps(value)[:80]}"
        raise ModelFileError(f"{self.source}: {key} {seen}, needed: {needed}")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; raise if the file is absent."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(
            f"{path.parent} has no {path.name}, needed: a Hugging Face model folder"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelFileError(f"{path} cannot be read as JSON: {error}", _FETCH_AGAIN) from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds a JSON {type(value).__name__}, needed: an object")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, empty if there is no such file."""
    return read_json(path) if path.exists() else {}


def read_config(folder: Path) -> HFConfig:
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is not a folder, needed: a Hugging Face model folder")
    path = folder / "config.json"
    return HFConfig(read_json(path), str(path))


@dataclass(frozen=True, slots=True)
class _Location:
    file: Path
    name: str


class SafetensorsCheckpoint:
    """The text model's tensors in one or several safetensors files, loaded one at a time.

    `shapes` has every tensor under its name without `language_model.`; `dropped` lists the omitted ones.
    """

    def __init__(self, folder: Path):
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dropped: list[str] = []
        self._locations: dict[str, _Location] = {}
        for file, names in _weight_files(folder).items():
            self._read_header(file, names)

    def load(self, name: str) -> torch.Tensor:
        location = self._locations[name]
        try:
            with safe_open(location.file, "pt") as file:
                return file.get_tensor(location.name)
        except (OSError, SafetensorError) as error:
            raise ModelFileError(
                f"{location.file}: tensor {location.name} cannot be read: {error}", _FETCH_AGAIN
            ) from error

    def where(self, name: str) -> str:
        """Return file and tensor name, for messages."""
        return f"{self._locations[name].file}: tensor {self._locations[name].name}"

    def _read_header(self, path: Path, expected: set[str] | None) -> None:
        try:
            with safe_open(path, "pt") as file:
                names = set(file.keys())
                if expected is not None and names != expected:
                    odd = min(names ^ expected)
                    seen = "is not in the file" if odd in expected else "is not in the index"
                    raise ModelFileError(
                        f"{path}: tensor {odd} {seen}, needed: the tensors {INDEX_FILE} lists", _FETCH_AGAIN
                    )
                for name in sorted(names):
                    tensor = file.get_slice(name)
                    self._add(path, name, tuple(tensor.get_shape()), tensor.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ModelFileError(f"{path} cannot be read as safetensors: {error}", _FETCH_AGAIN) from error

    def _add(self, path: Path, name: str, shape: tuple[int, ...], dtype: str) -> None:
        if name.startswith(_OTHER_MODALITIES) or name.endswith(_BUFFERS):
            self.dropped.append(name)
            return
        if dtype not in _DTYPES:
            raise UnsupportedModel(
                f"{path}: tensor {name} has dtype {dtype}, needed: {', '.join(_DTYPES)}",
                "convert the original checkpoint, not a quantised copy",
            )
        plain = name.replace("model.language_model.", "model.", 1)
        if plain in self._locations:
            raise ModelFileError(f"{path}: tensor {name} occurs twice, first as {self.where(plain)}")
        self._locations[plain] = _Location(path, name)
        self.shapes[plain] = shape


def _weight_files(folder: Path) -> dict[Path, set[str] | None]:
    """Return each weight file with the tensor names that the index lists for it, or None without an index."""
    index = folder / INDEX_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFileError(f"{index} has no weight_map, needed: tensor names with their files")
        listed: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            # a name with a folder in it would read outside the model's folder
            if not isinstance(file, str) or Path(file).name != file:
                raise ModelFileError(f"{index}: tensor {name} is in {file!r}, needed: a file name")
            listed.setdefault(folder / file, set()).add(name)
        for path in listed:
            if not path.exists():
                raise ModelFileError(f"{path} is absent, but {INDEX_FILE} lists it", _FETCH_AGAIN)
        return dict(listed)
    if (folder / WEIGHTS_FILE).exists():
        return {folder / WEIGHTS_FILE: None}
    present = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt"))
    seen = f"has {', '.join(present[:3])}" if present else "has no weights"
    raise ModelFileError(f"{folder} {seen}, needed: {WEIGHTS_FILE} or {INDEX_FILE}", _FETCH_AGAIN)
