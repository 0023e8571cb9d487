"""Token shards of `bough train`, packed smaller, to be carried elsewhere."""

import io
import lzma
from pathlib import Path

import numpy as np

from bough.train.files import write_whole
from bough.train.shards import Shard, arrays, read_shard, shard_files

PACKED_TOKENS = 8_000_000  # of a packed shard: at 8 to 11 bits a token 8 to 11 MB


def pack_shards(folder: Path, into: Path) -> list[Path]:
    """Write all shards of a folder as few small files, to be carried elsewhere; return them."""
    shards = [read_shard(path) for path in shard_files(folder)]
    groups: list[list[Shard]] = []
    room = 0
    for shard in shards:
        if len(shard.tokens) > room:
            groups.append([])
            room = PACKED_TOKENS
        groups[-1].append(shard)
        room -= len(shard.tokens)
    paths = []
    for number, group in enumerate(groups):
        raw = io.BytesIO()
        np.savez(
            raw,
            **{name: np.concatenate([arrays(shard)[name] for shard in group]) for name in Shard.__slots__},
        )
        # Of LZMA, which finds what recurs in texts of one target: four fifths of a deflated file.
        data = lzma.compress(raw.getvalue(), preset=6)
        paths.append(into / f"tokens-{number:05}.npz.xz")
        write_whole(paths[-1], lambda file, data=data: file.write(data))
    return paths
