"""Tensors read ahead in threads: contents, order, errors and cancellation."""

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bough.errors import BadGGUF
from bough.gguf.header import TensorInfo
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.models.decoder import Decoder
from bough.models.measure import held_bytes, measured
from bough.models.spec import ModelSpec
from bough.models.staging import RangeSource, StagedReader
from bough.models.weights import WeightLoader

CPU = torch.device("cpu")


class Bytes:
    """A source in memory; `before` is called with each tensor's name before it is read."""

    def __init__(self, sizes: dict[str, int], before: Callable[[str], None] = lambda name: None):
        self.data = {name: random.Random(name).randbytes(size) for name, size in sizes.items()}
        self.tensors = {name: TensorInfo(name, (size // 4,), QuantType.F32) for name, size in sizes.items()}
        self._before = before

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self._before(name)
        out[:] = self.data[name][start : start + len(out)]


def taken(reader: StagedReader, source: Bytes, name: str) -> bytes:
    out = torch.empty(len(source.data[name]), dtype=torch.uint8)
    reader.take(name, out)
    return out.numpy().tobytes()


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_any_block_size_gives_the_tensors_bytes(block: int, threads: int) -> None:
    source = Bytes({"a": 12, "b": 64, "empty": 0, "c": 200, "d": 4})
    names = ["a", "b", "c", "empty", "b", "d", "a"]  # a tied head is read twice
    with StagedReader(source, names, CPU, block=block, buffers=3, threads=threads) as reader:
        assert [taken(reader, source, name) for name in names] == [source.data[name] for name in names]


def test_reading_goes_no_further_ahead_than_there_are_buffers() -> None:
    read: list[str] = []
    third = threading.Event()

    def before(name: str) -> None:
        read.append(name)
        if len(read) == 3:
            third.set()

    names = [f"t{number}" for number in range(9)]
    source = Bytes(dict.fromkeys(names, 8), before)
    with StagedReader(source, names, CPU, block=8, buffers=2, threads=2) as reader:
        assert not third.wait(0.05) and sorted(read) == names[: len(read)]
        taken(reader, source, "t0")
        assert third.wait(30) and set(read[:3]) == {"t0", "t1", "t2"}
        for name in names[1:]:
            assert taken(reader, source, name) == source.data[name]


def test_an_error_of_the_reading_thread_is_raised_where_the_tensor_is_taken() -> None:
    def before(name: str) -> None:
        if name == "bad":
            raise BadGGUF("bad is damaged")

    source = Bytes(dict.fromkeys(["good", "bad", "later"], 12), before)
    with StagedReader(source, ["good", "bad", "later"], CPU, block=12, buffers=1) as reader:
        assert taken(reader, source, "good") == source.data["good"]
        with pytest.raises(BadGGUF, match="bad is damaged"):
            taken(reader, source, "bad")
    assert not any(thread.is_alive() for thread in reader._threads)


def test_leaving_early_ends_the_threads() -> None:
    names = [f"t{number}" for number in range(20)]
    source = Bytes(dict.fromkeys(names, 100))
    with (
        pytest.raises(KeyboardInterrupt),
        StagedReader(source, names, CPU, block=100, buffers=2) as reader,
    ):
        taken(reader, source, "t0")
        raise KeyboardInterrupt
    assert not any(thread.is_alive() for thread in reader._threads)


def test_another_order_than_planned_is_our_mistake() -> None:
    source = Bytes({"a": 4, "b": 4})
    with (
        StagedReader(source, ["a", "b"], CPU) as reader,
        pytest.raises(AssertionError, match="a was planned"),
    ):
        taken(reader, source, "b")


def test_a_model_read_ahead_is_the_same_model(tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model(mix="q8_0")) as file:
        assert isinstance(file, RangeSource)
        spec = ModelSpec.from_gguf(file)
        plan = measured(file, lambda loader: Decoder(spec, loader, CPU))
        assert set(plan.names) == set(file.tensors)
        seen: list[int] = []
        with StagedReader(file, plan.names, CPU, block=1000, buffers=2) as staged:
            options = {"device": CPU, "tiles": True}
            ahead = WeightLoader(file, staged=staged, progress=lambda done, _: seen.append(done), **options)
            model = Decoder(spec, ahead, CPU)
        other = Decoder(spec, WeightLoader(file, device=CPU, tiles=True), CPU)
    assert torch.equal(model.embed.data, other.embed.data)
    assert torch.equal(model._head.data.data, other._head.data.data)
    tokens = torch.randn(2, spec.width, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.logits(tokens), other.logits(tokens))
    assert held_bytes(model) == held_bytes(other)
    assert seen == sorted(seen) and seen[-1] == sum(info.nbytes for info in file.tensors.values())


def test_a_file_that_shrinks_or_is_replaced_while_it_is_read(
    tmp_path: Path, tiny_model: Callable[..., Path]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model().read_bytes())
    with GGUFFile.open(path) as file:
        name = list(file.tensors)[-1]
        expected, out = file.raw(name).tobytes(), bytearray(file.tensors[name].nbytes)
        other = tmp_path / "other.gguf"
        other.write_bytes(b"another file of the same name")
        other.replace(path)
        file.read_into(name, 0, memoryview(out))
        assert bytes(out) == expected
        file.read_into(name, 3, memoryview(out)[:5])
        assert bytes(out[:5]) == expected[3:8]
    path.write_bytes(tiny_model().read_bytes())
    with GGUFFile.open(path) as file:
        os.truncate(path, path.stat().st_size - 64)
        with pytest.raises(BadGGUF, match=r"model\.gguf ends at byte \d+ while it is read, needed \d+ more"):
            file.read_into(name, 0, memoryview(out))
