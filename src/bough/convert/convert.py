"""Conversion of a Hugging Face model folder to one GGUF file, a tensor at a time."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from bough.convert.checkpoint import SafetensorsCheckpoint, read_config, read_optional_json
from bough.convert.families import Entry, ModelSizes, family_of, metadata, read_sizes
from bough.convert.hf_vocab import read_vocabulary
from bough.convert.mixes import FILE_TYPES, QUANTISATION_VERSION, check_mix, fitting_type, wanted_type
from bough.convert.rules import Rule, tensor_rules
from bough.errors import BoughError, ModelFileError, UnsupportedModel
from bough.gguf.quantise import quantise
from bough.gguf.types import QuantType
from bough.gguf.writer import GGUFWriter, ValueType

# name of the tensor just written, tensors written, total tensors
Progress = Callable[[str, int, int], None]


class Checkpoint(Protocol):
    """A source of tensors: their shapes by name, loaded one at a time."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def load(self, name: str) -> torch.Tensor: ...

    def where(self, name: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Fallback:
    """A tensor whose rows are not a multiple of the wanted type's block."""

    name: str
    wanted: QuantType
    used: QuantType


@dataclass(frozen=True, slots=True)
class ConversionReport:
    output: Path
    architecture: str
    tensors: int
    parameters: int
    bytes: int
    types: Mapping[QuantType, int]
    fallbacks: tuple[Fallback, ...]
    # omitted checkpoint tensors: other modalities, buffers, the copy of a tied head
    dropped: tuple[str, ...]


def convert(
    folder: Path,
    output: Path,
    *,
    mix: str = "q4_k_m",
    progress: Progress | None = None,
    device: str = "cpu",
    vocabulary: bool = True,
) -> ConversionReport:
    """Convert the model in `folder` to the GGUF file `output`, which is created atomically.

    device: where to quantise; vocabulary=False omits the tokenizer, for folders without one.
    """
    folder, output = Path(folder), Path(output)
    check_mix(mix)
    config = read_config(folder)
    family_of(config)
    checkpoint = SafetensorsCheckpoint(folder)
    if config.get("tie_word_embeddings") is None:
        config.values["tie_word_embeddings"] = "lm_head.weight" not in checkpoint.shapes
    sizes = read_sizes(config, mtp_layers=_prediction_layers(checkpoint.shapes))
    rules = tensor_rules(sizes, checkpoint.shapes)
    dropped = [*checkpoint.dropped, *_check_tensors(rules, checkpoint, sizes=sizes, folder=folder)]
    generation = read_optional_json(folder / "generation_config.json")
    entries = _sampling(generation)
    if vocabulary:
        entries += read_vocabulary(folder, config, generation, size=sizes.vocabulary)
    else:
        entries += [("tokenizer.ggml.model", "no_vocab", None)]
        key = f"{sizes.family.architecture}.vocab_size"
        entries += [(key, sizes.vocabulary, None)]
    return write_model(
        output,
        sizes,
        checkpoint,
        name=model_name(folder),
        entries=entries,
        mix=mix,
        rules=rules,
        progress=progress,
        device=device,
        dropped=dropped,
    )


def write_model(
    output: Path,
    sizes: ModelSizes,
    checkpoint: Checkpoint,
    *,
    name: str,
    entries: Iterable[Entry],
    mix: str,
    rules: Iterable[Rule],
    progress: Progress | None = None,
    device: str = "cpu",
    dropped: Iterable[str] = (),
) -> ConversionReport:
    """Write the tensors that `rules` build from `checkpoint`, with `entries` as additional metadata."""
    rules = list(rules)
    types: dict[str, QuantType] = {}
    fallbacks = []
    for rule in rules:
        tensor_kind = wanted_type(
            rule.name,
            len(rule.shape),
            mix=mix,
            layers=sizes.layers,
            interval=sizes.interval,
            tied=sizes.tied,
        )
        types[rule.name] = fitting_type(tensor_kind, rule.shape[-1])
        if types[rule.name] is not tensor_kind:
            fallbacks.append(Fallback(rule.name, tensor_kind, types[rule.name]))
    with GGUFWriter(output, sizes.family.architecture) as writer:
        last = {entry[0]: entry for entry in [*heading(name, mix), *metadata(sizes), *entries]}
        for key, value, kind in last.values():
            writer.add(key, value, kind)
        for rule in rules:
            writer.add_tensor(rule.name, rule.shape, types[rule.name])
        writer.write_header()
        for done, rule in enumerate(rules, 1):
            writer.write_tensor(rule.name, _encode(rule, checkpoint, types[rule.name], device))
            if progress is not None:
                progress(rule.name, done, len(rules))
    return ConversionReport(
        output=output,
        architecture=sizes.family.architecture,
        tensors=len(rules),
        parameters=sum(_elements(rule.shape) for rule in rules),
        bytes=output.stat().st_size,
        types=Counter(types.values()),
        fallbacks=tuple(fallbacks),
        dropped=tuple(dropped),
    )


def heading(name: str, mix: str) -> list[Entry]:
    """Return what a file says of itself."""
    return [
        ("general.type", "model", None),
        ("general.name", name, None),
        ("general.file_type", FILE_TYPES[mix], None),
        ("general.quantization_version", QUANTISATION_VERSION, None),
    ]


def model_name(folder: Path) -> str:
    """Return the folder's name, or the repository's if the folder is a snapshot in the hub's cache."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.split("--")[-1]
    return folder.name


def _encode(rule: Rule, checkpoint: Checkpoint, kind: QuantType, device: str) -> np.ndarray:
    tensor = rule.build([checkpoint.load(name) for name, _ in rule.sources])
    assert tuple(tensor.shape) == rule.shape, (rule.name, tensor.shape, rule.shape)
    try:
        return quantise(tensor.to(device), kind).cpu().numpy()
    except BoughError as error:
        origin = checkpoint.where(rule.sources[0][0]) if rule.sources else "config.json"
        raise type(error)(f"{origin}, for {rule.name}: {error.message}", error.hint) from error


def _prediction_layers(names: Iterable[str]) -> int:
    matches = (re.match(r"mtp\.layers\.(\d+)\.", name) for name in names)
    return max((int(match[1]) + 1 for match in matches if match), default=0)


def _check_tensors(
    rules: list[Rule], checkpoint: Checkpoint, *, sizes: ModelSizes, folder: Path
) -> list[str]:
    """Raise for absent, misshapen and unexpected tensors; return the names of redundant ones."""
    needed = {name: (shape, rule.name) for rule in rules for name, shape in rule.sources}
    absent = [name for name in needed if name not in checkpoint.shapes]
    if absent:
        shape, target = needed[absent[0]]
        raise ModelFileError(
            f"{folder}: {len(absent)} of {len(needed)} tensors are absent, first {absent[0]}, "
            f"needed: shape {list(shape)} for {target}",
            "the download may be incomplete: fetch the folder again",
        )
    for name, (shape, target) in needed.items():
        seen = checkpoint.shapes[name]
        if seen != shape:
            raise ModelFileError(
                f"{checkpoint.where(name)} has shape {list(seen)}, "
                f"needed: {list(shape)} for {target}, as config.json says"
            )
    unexpected = [name for name in checkpoint.shapes if name not in needed]
    redundant = [name for name in unexpected if sizes.tied and name == "lm_head.weight"]
    unexpected = [name for name in unexpected if name not in redundant]
    if unexpected:
        seen = checkpoint.shapes[unexpected[0]]
        raise UnsupportedModel(
            f"{checkpoint.where(unexpected[0])} of shape {list(seen)} is not a tensor of "
            f"{sizes.family.architecture} ({len(unexpected)} such tensors), needed: only its tensors"
        )
    return redundant


def _sampling(generation: dict[str, Any]) -> list[Entry]:
    """Return generation_config.json's sampling settings under llama.cpp's keys."""
    entries: list[Entry] = []
    for key, theirs, kind in (
        ("top_k", "top_k", ValueType.INT32),
        ("top_p", "top_p", ValueType.FLOAT32),
        ("min_p", "min_p", ValueType.FLOAT32),
        ("temp", "temperature", ValueType.FLOAT32),
    ):
        value = generation.get(theirs)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole or (isinstance(value, float) and kind is ValueType.FLOAT32):
            entries.append((f"general.sampling.{key}", value, kind))
    return entries


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
