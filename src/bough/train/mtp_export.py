"""A target's file with a trained MTP block, and the block read back from it."""

import shutil
from collections.abc import Collection
from pathlib import Path

import torch

from bough.errors import ResourceError, UnsupportedModel
from bough.gguf.header import ValueType
from bough.gguf.quantise import quantise
from bough.gguf.quants import dequantise
from bough.gguf.reader import GGUFFile
from bough.gguf.rotation import rotation_of
from bough.gguf.writer import GGUFWriter
from bough.models.mtp import MTPBlock
from bough.models.spec import ModelSpec
from bough.train.draft_export import tensor_type
from bough.train.mtp_model import TrainedMTP

MTP_TARGET = "target-mtp.gguf"
_WRITER_KEYS = ("general.architecture", "general.alignment")  # which the writer sets


def export_mtp(path: Path, target: Path, model: TrainedMTP) -> None:
    """Write a copy of the target's file with the block at its end, its matrices in Q8_0."""
    tensors = {name: tensor.float().cpu() for name, tensor in model.tensors().items()}
    with GGUFFile.open(target) as file:
        free = shutil.disk_usage(path.parent).free
        if free < 1.1 * file.size_bytes:
            raise ResourceError(
                f"{path}: needs {file.size_bytes / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free",
                "choose another `output`",
            )
        prefix, layers = file.architecture, len(ModelSpec.from_gguf(file).layers)
        counts = {f"{prefix}.block_count": layers + 1, f"{prefix}.nextn_predict_layers": 1}
        _check_basis(file, tensors)
        infos = {name: info for name, info in file.tensors.items() if name not in tensors}
        with GGUFWriter(path, file.architecture) as writer:
            for key, value in {**file.metadata, **counts}.items():
                if key not in _WRITER_KEYS and value != []:
                    writer.add(key, value, ValueType.INT32 if key.endswith("token_type") else None)
            for name, info in infos.items():
                writer.add_tensor(name, info.shape, info.type)
            for name, tensor in tensors.items():
                writer.add_tensor(name, tuple(tensor.shape), tensor_type(tensor))
            writer.write_header()
            for name in infos:
                writer.write_tensor(name, file.raw(name))
            for name, tensor in tensors.items():
                writer.write_tensor(name, quantise(tensor, tensor_type(tensor)).numpy())


def _check_basis(file: GGUFFile, tensors: Collection[str]) -> None:
    """Refuse a file whose own block is rotated: a trained one is not."""
    rotation = rotation_of(file)
    if rotation is not None and (names := rotation.names.intersection(tensors)):
        raise UnsupportedModel(
            f"{file.path}: tensor {min(names)} is in a rotated basis, needed an MTP block that is not",
            "train for the model without its block",
        )


def load_block(path: Path, device: torch.device, dtype: torch.dtype) -> MTPBlock:
    with GGUFFile.open(path) as file:
        return MTPBlock.load(file, ModelSpec.from_gguf(file), device=device, dtype=dtype)


@torch.no_grad()
def read_block(path: Path, model: TrainedMTP) -> None:
    """Set a model's weights to those of a file, quantised as they are there."""
    with GGUFFile.open(path) as file:
        _check_basis(file, model.tensors())
        for name, tensor in model.tensors().items():
            info = file.require_tensor(name, tuple(tensor.shape))
            raw = torch.from_numpy(file.raw(name).copy())
            tensor.copy_(dequantise(raw, info.type).reshape(tensor.shape))
