"""Prefill in int8: which matrices, what the output says, where it is refused, what is kept apart."""

from dataclasses import replace

import pytest
import torch

from bough.config import EngineConfig, SpecConfig
from bough.errors import UsageError
from bough.gguf.reader import GGUFFile
from bough.kernels.quant_matmul import PackedWeight
from bough.memory.estimate import prefill_bytes
from bough.models.decoder import Decoder
from bough.models.measure import MeasuringLoader, held_bytes
from bough.models.spec import ModelSpec
from bough.models.step import Step
from bough.models.weights import WeightLoader
from bough.session import loading
from bough.state.sequences import SequenceStates
from bough.text.tokenizer import Tokenizer
from tests.gpu.texts import embedded_pair
from tests.session.fake_gpu import dry_run, gpu_plan

TARGET = embedded_pair()[0]


def decoder(*, int8: bool) -> Decoder:
    """Return the embedded target with its weights in tiles, as on a GPU, multiplied by the reference."""
    with GGUFFile.open(TARGET) as file:
        spec, cpu = ModelSpec.from_gguf(file), torch.device("cpu")
        return Decoder(spec, WeightLoader(file, device=cpu, tiles=True, int8_prefill=int8), cpu)


@torch.inference_mode()
def log_probabilities(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    states = SequenceStates(model.spec, max_ctx=256)
    slots = torch.tensor([states.open()])
    states.reserve(0, tokens.shape[1])
    step = Step.chunk(slots, tokens, states.buffers.lengths[slots])
    return model.logits(model.forward(step, states.buffers).hidden[0]).log_softmax(-1)


def test_the_text_hardly_changes() -> None:
    """On real weights and text, with the head exact: a mean divergence far below that of a sampled token."""
    with GGUFFile.open(TARGET) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata, source=str(file.path))
    text = (
        "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"
    )
    tokens = torch.tensor([tokenizer.encode(text * 3)[:90]])
    assert tokens.shape[1] > 64
    exact, found = (log_probabilities(decoder(int8=int8), tokens) for int8 in (False, True))
    divergence = (exact.exp() * (exact - found)).sum(-1).mean()
    assert 0 < float(divergence) < 0.02
    assert float((exact.argmax(-1) == found.argmax(-1)).float().mean()) > 0.95


def test_large_matrices_of_layers_are_in_int8_and_gates_are_not() -> None:
    with GGUFFile.open(TARGET) as file:
        spec = ModelSpec.from_gguf(file)
        loader = MeasuringLoader(file, tiles=True, int8_prefill=True)
        made = Decoder(spec, loader, torch.device("cpu"))
        exact = Decoder(spec, MeasuringLoader(file, tiles=True), torch.device("cpu"))
    assert made.approximate == ("prefill in int8",) and exact.approximate == ()
    assert held_bytes(made) == held_bytes(exact)
    assert isinstance(made._head.data, PackedWeight) and made._head.data.int8_rows == 0
    assert spec.delta is not None
    inputs = [matrix.data for matrix in made._blocks[0]._mixer._in.matrices]  # ty: ignore[unresolved-attribute]
    marked = sum(data.int8_rows for data in inputs)
    assert (
        marked
        == spec.delta.channels + spec.delta.inner
        == sum(d.rows for d in inputs) - 2 * spec.delta.value_heads
    )


def test_it_is_refused_on_a_cpu_and_on_old_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="`prefill` is int8, which a GPU computes") as raised:
        loading.load_session(TARGET, EngineConfig("cpu", prefill="int8"))
    assert raised.value.param == "prefill"
    monkeypatch.setattr(loading, "capability_of", lambda _: (7, 5))
    with pytest.raises(UsageError, match=r"capability 8.0, this one has 7.5"):
        loading._check_prefill(EngineConfig(prefill="int8"), torch.device("cuda", 0))
    loading._check_prefill(EngineConfig(), torch.device("cuda", 0))


def test_its_kernels_are_found_ahead_and_its_memory_is_planned() -> None:
    config = EngineConfig("cuda", prefill="int8", speculation=SpecConfig(mtp="off"))
    found, exact = dry_run(TARGET, config), dry_run(TARGET, replace(config, prefill="exact"))
    names = [{launch.name for launch in each.launches} for each in (found, exact)]
    assert names[0] - names[1] == {"_quantise_kernel", "_requantise_kernel", "_matmul_kernel"}
    plan, exact = gpu_plan(TARGET, config), gpu_plan(TARGET, EngineConfig("cuda"))
    chunk, spec = plan.prefill_chunk, plan.estimate.spec
    assert plan.parts["prefill"] - exact.parts["prefill"] >= chunk * spec.feed_forward
    assert prefill_bytes(spec, chunk, int8=True) > prefill_bytes(spec, chunk)
