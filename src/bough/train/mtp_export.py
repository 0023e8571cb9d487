"""A target's file with a trained MTP block, and the block read back from it."""

import shutil
from pathlib import Path

import torch

from bough.errors import ResourceError
from bough.gguf.header import ValueType
from bough.gguf.quantise import quantise
from bough.gguf.quants import dequantise
from bough.gguf.reader import GGUFFile
from bough.gguf.rotation import require_usual_basis
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
        require_usual_basis(file, tensors)
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


def load_block(path: Path, device: torch.device, dtype: torch.dtype) -> MTPBlock:
    with GGUFFile.open(path) as file:
        return MTPBlock.load(file, ModelSpec.from_gguf(file), device=device, dtype=dtype)


@torch.no_grad()
def read_block(path: Path, model: TrainedMTP) -> None:
    """Set a model's weights to those of a file, quantised as they are there."""
    with GGUFFile.open(path) as file:
        require_usual_basis(file, model.tensors())
        for name, tensor in model.tensors().items():
            info = file.require_tensor(name, tuple(tensor.shape))
            raw = torch.from_numpy(file.raw(name).copy())
            tensor.copy_(dequantise(raw, info.type).reshape(tensor.shape))
