"""The native target: near the torch reference, and the same bits for a row whatever is computed beside it."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bough.config import EngineConfig
from bough.gguf.reader import GGUFFile
from bough.kernels import native
from bough.kernels.kv_cache.format import FORMATS
from bough.kernels.native.library import CACHE_FORMATS
from bough.memory.planner import plan_memory
from bough.models.decoder import Decoder, Target
from bough.models.native import NativeDecoder, NativeLoader, native_gap, packed_model_bytes
from bough.models.spec import ModelSpec
from bough.models.step import Step
from bough.models.weights import WeightLoader
from bough.state.sequences import CacheConfig, SequenceStates
from tests.kernels.native_library import needs_native, opened, variants
from workshop.steps import commit

pytestmark = needs_native

FAMILIES = ("qwen35", "qwen3", "qwen2", "llama")
ERRORS = {"f32": 1e-5, "f16": 2e-3, "q8_0": 1e-2}  # relative RMS, by the cache
PAIR = Path(__file__).parents[2] / "src/bough/pair/target.gguf"


class Run:
    """One sequence on a target: prompt chunks, trees, commits."""

    def __init__(self, target: Target, *, cache: str = "f32", max_rows: int = 64, max_ctx: int = 512):
        format = FORMATS[cache]
        self.target = target
        self.states = SequenceStates(
            target.spec, max_ctx=max_ctx, max_rows=max_rows, cache=CacheConfig(format, format)
        )
        self.slot = self.states.open()
        self.slots = torch.tensor([self.slot])

    def chunk(self, tokens: list[int], **options) -> tuple[torch.Tensor, torch.Tensor]:
        self.states.reserve(self.slot, len(tokens))
        step = Step.chunk(self.slots, torch.tensor([tokens]), self.states.buffers.lengths[self.slots])
        output = self.target.forward(step, self.states.buffers, **options)
        self.states.advance(step)
        return output.hidden[0], output.features[0]

    def tree(self, tokens: list[int], parents: list[int], *, last: int, taps: tuple[int, ...] = ()):
        """Verify a tree and commit the path to row `last`; return features and logits."""
        self.states.reserve(self.slot, len(tokens))
        lengths = self.states.buffers.lengths[self.slots]
        step = Step.tree(self.slots, torch.tensor([tokens]), torch.tensor([parents]), lengths)
        features, logits = self.target.verify(step, self.states.buffers, taps=taps)
        commit(self.states, step, torch.tensor([last]))
        return features[0], logits[0]


def loaded(path: Path, threads: int | None = None, variant: str | None = None) -> Target:
    """Return the native target with so many threads; None: the torch reference."""
    with GGUFFile.open(path) as file:
        return Decoder.load(file) if threads is None else NativeDecoder.load(file, opened(threads, variant))


def random_tokens(spec: ModelSpec, count: int, seed: int) -> list[int]:
    return torch.randint(0, spec.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def story(target: Target, cache: str = "f32") -> list[torch.Tensor]:
    """Run chunks and trees with commits of several lengths; return all outputs."""
    run, generator = Run(target, cache=cache), torch.Generator().manual_seed(5)
    found = [*run.chunk(random_tokens(target.spec, 90, 1), taps=(0, 2), tapped=77)]
    for rows, last in ((1, 0), (9, 8), (24, 11), (64, 63), (3, -1), (5, 2)):
        parents = [-1, *(int(torch.randint(0, i, (1,), generator=generator)) for i in range(1, rows))]
        found += run.tree(random_tokens(target.spec, rows, rows), parents, last=last, taps=(1, 3))
    found += run.chunk(random_tokens(target.spec, 7, 2))
    found += run.tree([5], [-1], last=0)
    return found


@torch.inference_mode()
@pytest.mark.parametrize("cache", CACHE_FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_near_the_reference(tiny_model: Callable[..., Path], family: str, cache: str) -> None:
    """Float weights: what remains is the order of additions, and what a cache rounds to the other side."""
    path = tiny_model(family, layers=4, width=128)  # heads of at least 32
    for expected, found in zip(
        story(loaded(path), cache), story(loaded(path, threads=2), cache), strict=True
    ):
        assert found.shape == expected.shape
        assert (found - expected).norm() <= ERRORS[cache] * expected.norm() + 1e-30


@torch.inference_mode()
@pytest.mark.parametrize(("mode", "error"), [(native.INT16, 2e-4), (native.INT8, 5e-2)])
def test_near_the_reference_with_quantised_weights(mode: int, error: float) -> None:
    with GGUFFile.open(PAIR) as file:
        target = NativeDecoder.load(file, opened(1), mode=mode)
    assert target.approximate == (("activations in int8",) if mode == native.INT8 else ())
    pairs = zip(story(loaded(PAIR)), story(target), strict=True)
    errors = [float((found - each).norm() / each.norm()) for each, found in pairs if each.numel()]
    assert error / 50 < max(errors) <= error


def compare_rows(plain: Run, wide: Run, count: int, *, chunk: int, seed: int) -> None:
    """Decode `count` tokens plainly and in random trees, after a prompt in one piece and in chunks.

    No bit of features, logits and hidden states may differ.
    """
    generator, done, vocabulary = torch.Generator().manual_seed(seed), 0, plain.target.spec.vocab_size

    def below(limit: int) -> int:
        return int(torch.randint(0, limit, (1,), generator=generator))

    prompt, rest = (random_tokens(plain.target.spec, size, seed) for size in (100, count))
    parts = [prompt[at : at + chunk] for at in range(0, len(prompt), chunk)]
    assert torch.equal(plain.chunk(prompt)[0], torch.cat([wide.chunk(part)[0] for part in parts]))
    alone = [plain.tree([token], [-1], last=0, taps=(1,)) for token in rest]
    while done < count:
        path_tokens = rest[done : done + 1 + below(9)]
        tokens, parents, rows = [], [], []
        for token in path_tokens:
            for _ in range(below(3) if rows else 0):  # wrong siblings, with children of their own
                tokens.append(below(vocabulary))
                parents.append(rows[-1] if below(2) else below(len(tokens) - 1))
            tokens.append(token)
            parents.append(rows[-1] if rows else -1)
            rows.append(len(tokens) - 1)
        features, logits = wide.tree(tokens, parents, last=rows[-1], taps=(1,))
        for row, (expected_features, expected_logits) in zip(rows, alone[done:], strict=False):
            assert torch.equal(logits[row], expected_logits[0])
            assert torch.equal(features[row], expected_features[0])
        done += len(rows)
    # The states are equal, too: a chunk after it has the same bits.
    assert torch.equal(plain.chunk(prompt)[0], wide.chunk(prompt)[0])


@torch.inference_mode()
@pytest.mark.parametrize("cache", CACHE_FORMATS)
@pytest.mark.parametrize("model", ["pair", *FAMILIES])
def test_a_row_alone_and_in_trees(tiny_model: Callable[..., Path], model: str, cache: str) -> None:
    """Plain decoding with one thread against random trees with three."""
    path = PAIR if model == "pair" else tiny_model(model, layers=4, width=128)
    plain, wide = Run(loaded(path, threads=1), cache=cache), Run(loaded(path, threads=3), cache=cache)
    compare_rows(plain, wide, 120 if model == "pair" else 300, chunk=33, seed=3)


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("model", ["pair", *FAMILIES])
def test_thousands_of_rows_alone_and_in_trees(tiny_model: Callable[..., Path], model: str) -> None:
    """2,048 rows of every family, with quantised weights, caches of all kinds and every kind of CPU here."""
    path = PAIR if model == "pair" else tiny_model(model, width=256, layers=4, mix="q4_k_m")
    one = loaded(path, threads=1)
    cases = itertools.product(CACHE_FORMATS, variants())
    for seed, (cache, variant) in enumerate(cases):
        two = loaded(path, threads=2, variant=variant)
        for chunk in (1, 7, 64, 65):
            runs = [Run(target, cache=cache, max_ctx=1024) for target in (one, two)]
            compare_rows(*runs, 512, chunk=chunk, seed=seed)


@torch.inference_mode()
def test_a_prompt_in_one_piece_is_decoding_it(tiny_model: Callable[..., Path]) -> None:
    target = loaded(tiny_model(layers=4), threads=2)
    tokens = random_tokens(target.spec, 150, 6)
    one, other = Run(target), Run(target)
    hidden = one.chunk(tokens)[0]
    logits = torch.cat([other.tree([token], [-1], last=0)[1] for token in tokens])
    assert torch.equal(target.logits(hidden), logits)


@torch.inference_mode()
def test_other_slots_are_not_touched(tiny_model: Callable[..., Path]) -> None:
    target = loaded(tiny_model(layers=4), threads=1)
    states = SequenceStates(target.spec, max_ctx=128, slots=2, max_rows=8)
    tokens = torch.tensor([random_tokens(target.spec, 20, seed) for seed in (1, 2)])
    for slot in (states.open(), states.open()):
        states.reserve(slot, 30)
    both = torch.tensor([0, 1])
    together = target.forward(Step.chunk(both, tokens, states.buffers.lengths), states.buffers).hidden
    for slot in (0, 1):
        assert torch.equal(together[slot], Run(target).chunk(tokens[slot].tolist())[0])


@torch.inference_mode()
def test_refuses_what_would_leave_its_buffers(tiny_model: Callable[..., Path]) -> None:
    target = loaded(tiny_model(layers=4), threads=1)
    run = Run(target, max_rows=4)
    vocabulary = target.spec.vocab_size
    for tokens, parents in (
        ([vocabulary], [-1]),
        ([-1], [-1]),
        ([1, 2], [-1, 1]),
        ([1] * 5, [-1, 0, 1, 2, 3]),
    ):
        with pytest.raises(AssertionError, match="native step refused"):
            run.states.reserve(run.slot, len(tokens))
            empty = torch.zeros(1, len(tokens), dtype=torch.int64)
            step = Step(run.slots, torch.tensor([tokens]), empty, torch.tensor([parents]), empty)
            target.verify(step, run.states.buffers)
    with pytest.raises(AssertionError, match="native step refused"):
        long = torch.zeros(1, 640, dtype=torch.int64)  # more than the page table holds
        target.forward(Step.chunk(run.slots, long, run.states.buffers.lengths), run.states.buffers)


def test_what_native_code_does_not_run(tiny_model: Callable[..., Path]) -> None:
    f32, q4_0 = FORMATS["f32"], FORMATS["q4_0"]

    def gap(kv=(f32, f32), window=None, family="qwen35", **options) -> str:
        with GGUFFile.open(tiny_model(family, layers=4, **options)) as file:
            return native_gap(file, ModelSpec.from_gguf(file), kv, window) or ""

    assert gap() == ""
    assert "q4_0" in gap((f32, q4_0))
    assert "window" in gap(window=64)
    assert "experts" in gap(family="qwen35moe")


@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_counts_what_is_packed(tiny_model: Callable[..., Path], tied: bool) -> None:
    path = tiny_model(width=256, mix="q4_k_m", tied=tied)
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file)
        plan = plan_memory(file, spec, EngineConfig(device="cpu", max_ctx=256), torch.device("cpu"))
    target = loaded(path, threads=1)
    assert isinstance(target, NativeDecoder) and plan.estimate.native and not plan.backend_note()
    assert plan.weights == target.packed_bytes


def test_packed_weights_take_what_the_file_takes() -> None:
    with GGUFFile.open(PAIR) as file:
        size = packed_model_bytes(file, ModelSpec.from_gguf(file))
        assert size <= 1.03 * sum(info.nbytes for info in file.tensors.values())


def test_a_load_gives_back_what_it_has_read(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each matrix is packed from the mapped file, whose pages then leave the process's memory."""
    path, released = tiny_model(layers=4), []
    release = GGUFFile.release

    def noted(file: GGUFFile, name: str) -> None:
        before = bytes(file.raw(name))
        release(file, name)
        assert bytes(file.raw(name)) == before  # still readable
        released.append(name)

    monkeypatch.setattr(GGUFFile, "release", noted)
    monkeypatch.setattr(NativeLoader, "_packed", vectors_only)
    loaded(path, threads=1)
    with GGUFFile.open(path) as file:
        matrices = {name for name, info in file.tensors.items() if is_matrix(name, info.shape)}
    assert matrices == set(released)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and name.endswith(".weight") and "conv1d" not in name


def vectors_only(loader: NativeLoader, name: str) -> torch.Tensor:
    """Copy a tensor, which no matrix may be."""
    info = loader._file.tensors[name]
    assert not is_matrix(name, info.shape), f"{name} was copied"
    return WeightLoader._packed(loader, name)
