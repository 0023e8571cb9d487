"""Copies of GGUF files with other keys, tokens and tensors."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.gguf.writer import GGUFWriter
from bough.text.tokenizer import KEY, TokenType

GAP_TOKENS = (
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
)


def edited(
    source: Path,
    path: Path,
    *,
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    without: Sequence[str] = (),
    controls: Sequence[str] = (),
) -> Path:
    """Copy a file with these keys (None: without it) and float32 tensors; unused tokens become `controls`."""
    added = dict(tensors or {})
    with GGUFFile.open(source) as file:
        metadata = dict(file.metadata)
        metadata |= {**_with_controls(metadata, controls), **(keys or {})}
        with GGUFWriter(path, metadata.pop("general.architecture")) as writer:
            for key, value in metadata.items():
                if value is not None:
                    writer.add(key, value)
            infos = [info for name, info in file.tensors.items() if name not in (*without, *added)]
            for info in infos:
                writer.add_tensor(info.name, info.shape, info.type)
            for name, values in added.items():
                writer.add_tensor(name, values.shape, QuantType.F32)
            writer.write_header()
            for info in infos:
                writer.write_tensor(info.name, file.raw(info.name))
            for name, values in added.items():
                writer.write_tensor(name, values.astype(np.float32))
    return path


def _with_controls(metadata: Mapping[str, Any], controls: Sequence[str]) -> dict[str, Any]:
    tokens, types = list(metadata[f"{KEY}tokens"]), list(metadata[f"{KEY}token_type"])
    unused = [id for id, type in enumerate(types) if type == TokenType.UNUSED]
    for id, token in zip(unused, controls, strict=False):
        tokens[id], types[id] = token, int(TokenType.CONTROL)
    return {f"{KEY}tokens": tokens, f"{KEY}token_type": types}
