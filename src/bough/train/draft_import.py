"""Loading an exported draft's weights, to continue training it: the inverse of draft_export."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bough.errors import UsageError
from bough.gguf.quants import dequantise
from bough.gguf.reader import GGUFFile
from bough.gguf.rotation import require_usual_basis
from bough.models.draft_spec import SHARED_TENSORS, DraftSpec
from bough.models.safetensors_source import (
    SafetensorsSource,
    checkpoint_name,
    find_checkpoint,
    read_config,
)
from bough.models.spec import ModelSpec
from bough.models.weights import TensorSource

# Fields that may differ between two specs of the same draft.
_FREE = ("source", "vocab_size")
_HEADS = ("second", "refine")  # that a draft without them may go on with


def read_draft(path: Path, spec: DraftSpec, target: ModelSpec) -> dict[str, Tensor]:
    """Return float32 tensors under z-lab's names from a GGUF file or a safetensors checkpoint.

    Raises if the file's draft has another shape than `spec`.
    """
    if path.suffix == ".gguf":
        with GGUFFile.open(path) as file:
            draft_spec = DraftSpec.from_gguf(file)
            return _weights(file, draft_spec, spec, target)
    weights, config = find_checkpoint(path)
    draft_spec = DraftSpec.from_config(
        read_config(config), source=str(config), target_depth=len(target.layers)
    )
    return _weights(SafetensorsSource(weights), draft_spec, spec, target)


def _weights(
    source: TensorSource, draft_spec: DraftSpec, spec: DraftSpec, target: ModelSpec
) -> dict[str, Tensor]:
    require_usual_basis(source, source.tensors)
    draft_spec = draft_spec.with_heads(source.tensors)
    has, needed = asdict(draft_spec), asdict(spec.with_heads({}))
    free = (*_FREE, *(head for head in _HEADS if has[head] is None))
    for name in needed:
        if name not in free and not _same(has[name], needed[name]):
            raise UsageError(
                f"{draft_spec.source}: its draft has {name} {has[name]}, needed {needed[name]}",
                "`continue_from` needs the target's own draft and the settings it was trained with",
            )
    draft_spec.check_tensors(source.tensors, target, draft_spec.source)
    names = (name for name in source.tensors if name not in SHARED_TENSORS)
    return {checkpoint_name(name): _expanded(source, name) for name in names}


def _same(one: Any, other: Any) -> bool:
    # A GGUF file stores numbers in float32.
    return math.isclose(one, other, rel_tol=1e-6) if isinstance(other, float) else one == other


def _expanded(source: TensorSource, name: str) -> Tensor:
    info = source.require_tensor(name)
    return dequantise(torch.from_numpy(source.raw(name).copy()), info.type).reshape(info.shape)
