"""Thousands of damaged files: each one opens or raises a BoughError, quickly and in little memory."""

import random
import struct
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bough.errors import BoughError
from bough.gguf import GGUFFile, GGUFWriter, QuantType, ValueType

MUTATIONS = 24_000
SHARDS = 4
TRACED_MUTATIONS = 3_000
MEMORY_LIMIT = 16 << 20
SECONDS_LIMIT = 60 / SHARDS
VALUES = [0, 1, 2, 3, 4, 8, 9, 12, 13, 31, 32, 33, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1]
VALUES_64 = [*VALUES, 2**32, 2**40, 2**60, 2**61, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]


def write_seed_file(path: Path) -> bytes:
    """A few KB with every type of value, single and in arrays, and tensors of several types and ranks."""
    with GGUFWriter(path, "qwen35") as writer:
        writer.add("general.alignment", 32)
        writer.add("general.name", "fuzz – 模型")
        for kind in ValueType:
            if kind is ValueType.STRING:
                writer.add("t.strings", ["<s>", "", "Ġthe", "ä" * 20, "\udcff"], kind)
            elif kind is ValueType.BOOL:
                writer.add("t.bool", True)
                writer.add("t.bools", [True, False, True])
            elif kind is not ValueType.ARRAY:
                writer.add(f"t.{kind.name}", 7, kind)
                writer.add(f"t.{kind.name}s", [1, 2, 3], kind)
        writer.add("t.epsilon", 1e-6)
        shapes = {"a": (2, 3, 4, 8), "b": (5,), "c": (3, 64), "d": (2, 256), "e": (256,), "f": (1, 32)}
        types = [
            QuantType.F32,
            QuantType.F16,
            QuantType.Q8_0,
            QuantType.Q4_K,
            QuantType.BF16,
            QuantType.MXFP4,
        ]
        for (name, shape), type in zip(shapes.items(), types, strict=True):
            writer.add_tensor(f"blk.0.{name}.weight", shape, type)
        writer.write_header()
        rng = np.random.default_rng(1)
        for (name, shape), type in zip(shapes.items(), types, strict=True):
            size = (*shape[:-1], type.row_bytes(shape[-1]))
            writer.write_tensor(f"blk.0.{name}.weight", rng.integers(0, 256, size, dtype=np.uint8))
    return insert_nested_array(path.read_bytes())


def insert_nested_array(whole: bytes) -> bytes:
    """Adds an array of arrays, which the writer does not make; the length of its key keeps the alignment."""
    value = struct.pack("<IIQ", ValueType.ARRAY, ValueType.ARRAY, 3)
    for count in (0, 4, 8):
        value += struct.pack("<IQ", ValueType.UINT8, count) + bytes(count)
    key = b"t.nested".ljust(32 + -(8 + len(value)) % 32, b"_")
    key_count = int.from_bytes(whole[16:24], "little") + 1
    return whole[:16] + struct.pack("<QQ", key_count, len(key)) + key + value + whole[24:]


def header_bytes(whole: bytes, file: GGUFFile) -> int:
    return len(whole) - sum(-(-info.nbytes // 32) * 32 for info in file.tensors.values())


def mutate(whole: bytes, header: int, rng: random.Random) -> bytes:
    content = bytearray(whole)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        # most of the interest is in the header
        offset = rng.randrange(header if rng.random() < 0.95 else len(content)) % max(len(content), 1)
        kind = rng.randrange(9)
        if kind == 0:
            content[offset : offset + 1] = (
                bytes([content[offset] ^ 1 << rng.randrange(8)]) if content else b""
            )
        elif kind == 1:
            content[offset : offset + 1] = bytes([rng.randrange(256)])
        elif kind == 2:
            content[offset : offset + 4] = rng.choice(VALUES).to_bytes(4, "little")
        elif kind == 3:
            content[offset : offset + 8] = rng.choice(VALUES_64).to_bytes(8, "little")
        elif kind == 4:
            content[offset:offset] = rng.randbytes(rng.choice((1, 4, 8, 32)))
        elif kind == 5:
            del content[offset : offset + rng.choice((1, 4, 8, 32))]
        elif kind == 6:
            del content[rng.randrange(len(content) + 1) :]
        elif kind == 7:
            other, length = rng.randrange(len(content) + 1), rng.choice((4, 8, 16, 40))
            here, there = content[offset : offset + length], content[other : other + length]
            content[offset : offset + length], content[other : other + length] = there, here
        else:
            # a small change of a field keeps more of the file plausible than any special value
            value = int.from_bytes(content[offset : offset + 8].ljust(8, b"\0"), "little")
            content[offset : offset + 8] = ((value + rng.randint(-40, 40)) % 2**64).to_bytes(8, "little")
        if not content:
            break
    return bytes(content)


def touch(path: Path) -> int:
    """Opens the file and reads all there is to read."""
    with GGUFFile.open(path) as file:
        total = len(repr(dict(file.metadata)))
        for name in file.tensors:
            total += int(file.raw(name).sum())
        return total


def survive(folder: Path, count: int, *, seed: int) -> Counter[str]:
    """Opens `count` damaged files and counts what came of it; any error but ours ends the test."""
    path = folder / "fuzz.gguf"
    whole = write_seed_file(path)
    path.write_bytes(whole)
    assert touch(path) > 0
    with GGUFFile.open(path) as file:
        assert next(iter(file.metadata.values())) == [[], [0] * 4, [0] * 8]
        header = header_bytes(whole, file)
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        content = mutate(whole, header, rng)
        # a new file each time: cutting one that is still mapped would kill the process
        path.unlink()
        path.write_bytes(content)
        try:
            touch(path)
            outcomes["opened"] += 1
        except BoughError as error:
            assert str(path) in error.message
            assert len(error.message) < 1000
            outcomes[type(error).__name__] += 1
    return outcomes


@pytest.mark.parametrize("shard", range(SHARDS))
def test_damaged_files(tmp_path: Path, shard: int) -> None:
    start = time.process_time()
    outcomes = survive(tmp_path, MUTATIONS // SHARDS, seed=shard)
    assert time.process_time() - start < SECONDS_LIMIT
    assert sum(outcomes.values()) == MUTATIONS // SHARDS
    # a fuzz in which every file fails at once, or none does, would show nothing
    assert outcomes["opened"] > 200 and outcomes["UnsupportedQuant"] > 20, outcomes
    assert outcomes["BadGGUF"] > 2000, outcomes


def test_damaged_files_take_little_memory(tmp_path: Path) -> None:
    """Apart from the above because tracing makes it four times slower."""
    tracemalloc.start()
    try:
        survive(tmp_path, TRACED_MUTATIONS, seed=SHARDS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_LIMIT
