"""The kernels of a model are found by a dry run, and compiled in threads before they are needed."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.gguf.reader import GGUFFile
from bough.kernels.attention import prefill
from bough.kernels.kv_cache import rotation
from bough.kernels.runtime import ahead
from bough.kernels.runtime.ahead import CompileAhead
from bough.kernels.runtime.dry_run import DryRun, Launch, Tiles, current
from bough.kernels.slot_mapping import triton_kernels as slot_mapping
from bough.models.decoder import Decoder
from bough.models.measure import MeasuringLoader
from bough.models.spec import ModelSpec
from bough.models.step import ImageRows, Step
from bough.session.building import small_model
from bough.spec.costs import StepCosts
from bough.state.sequences import CacheConfig, SequenceStates
from tests.every_draft import EveryDraft
from tests.gpu.texts import embedded_pair
from tests.kernels.cards import CARDS
from tests.session.fake_gpu import GPU, dry_run, fake_gpu, gpu_plan


@pytest.fixture(scope="module")
def found() -> DryRun:
    target, draft = embedded_pair()
    return dry_run(target, EngineConfig("cuda", draft=DraftConfig(draft)))


def test_a_dry_run_finds_every_kernel_of_a_request(found: DryRun) -> None:
    names = Counter(launch.name for launch in found.launches)
    prompt = {"_chunk_conv_kernel", "_prepare_kernel", "_scan_kernel", "_chunk_attention_kernel"}
    step = {"_embed_kernel", "_order_kernel", "_cache_kernel", "_merge_kernel", "_pad_kernel"}
    draft = {"rank_kernel", "best_tree_kernel", "_ring_kernel"}
    after = {"adjust_kernel", "shortlist_kernel", "noise_kernel", "accept_path_kernel", "_commit_kernel"}
    assert prompt | step | draft | after <= set(names)
    # Matmuls for 8, 16 and 24 rows of four layouts, attention for each size, and the kernels of rows.
    assert len(found.modules) == 22
    # What has been found is neither compiled nor loaded.
    assert all(module._handle is None for module in found.modules)


def test_kernels_are_compiled_once_for_arguments_of_one_kind(found: DryRun) -> None:
    """Arguments that differ in alignment alone would be compiled a second time."""
    names = Counter(launch.name for launch in found.launches)
    assert names["noise_kernel"] == 1 and names["shortlist_kernel"] == 2  # sampling, and a draft's ranking
    assert names["_pad_kernel"] == names["_commit_kernel"] == names["accept_path_kernel"] == 1
    assert sum(names.values()) <= 45


def test_a_dry_run_finds_the_slices_of_long_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were compiled when a prompt first passed 16,384 tokens, and all requests waited 4 s."""
    monkeypatch.setattr(prefill, "SLICE_BYTES", 1 << 20)
    config = EngineConfig("cuda", max_ctx=4096, prefill_chunk=256, speculation=SpecConfig(mtp="off"))
    launches = dry_run(embedded_pair()[0], config).launches
    options = [dict(each.options) for each in launches if each.name == "_chunk_attention_kernel"]
    found = {(each["BEGIN"], each["END"]) for each in options}
    assert found == {(True, True), (True, False), (False, False), (False, True)}


@pytest.mark.parametrize("name", ["RTX 3090", "RTX 5090", "A100"])
def test_eight_sequences_on_other_cards(name: str) -> None:
    """Steps of 64 rows: where they do not fit, matmuls take them in parts; else the dry run would raise."""
    target, draft = embedded_pair()
    config = EngineConfig("cuda", draft=DraftConfig(draft), parallel=8)
    found = dry_run(target, config, CARDS[name])
    assert {"_merge_kernel", "_commit_kernel", "best_tree_kernel"} <= {each.name for each in found.launches}
    assert len(found.modules) >= 30


def test_row_scales_are_fused(found: DryRun) -> None:
    """Into the norm and the activation of a chunk; the other matmuls are scaled by a kernel of ours."""
    options = [(launch.name, dict(launch.options)) for launch in found.launches]
    assert ("_norm_kernel", 2) in [(name, given.get("ADD")) for name, given in options]
    assert ("_silu_rows_kernel", True) in [(name, given.get("SCALED")) for name, given in options]
    assert "_scale_rows_kernel" in [name for name, _ in options]


@pytest.mark.parametrize(("name", "warps"), [("_pad_kernel", 1), ("_chunk_attention_kernel", 8)])
def test_launches_are_what_triton_compiles(
    found: DryRun, monkeypatch: pytest.MonkeyPatch, name: str, warps: int
) -> None:
    """The attention of a chunk reads through tensor descriptors."""

    class Driver:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    launch = next(each for each in found.launches if each.name == name)
    assert any(isinstance(each, Tiles) for each in launch.arguments) == (warps == 8)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(), raising=False)
    launch.touch(GPU)
    try:
        compiled = launch.compile()
        assert compiled.metadata.num_warps == warps and "cubin" in compiled.asm
        assert len(launch.kernel.device_caches[0][0]) == 1
    finally:
        launch.kernel.device_caches.clear()


def test_a_dry_run_leaves_nothing_behind(found: DryRun) -> None:
    assert current() is None
    assert rotation.signs(rotation.FIRST_SIGNS, 16, torch.device("cpu")).device.type == "cpu"
    with fake_gpu(), DryRun(GPU):
        inside = torch.zeros(3, device="cuda")
        assert inside.is_cuda and inside.device == GPU and torch.zeros(3).device.type == "cpu"
        rotation.signs(rotation.FIRST_SIGNS, 16, GPU)
        other = []
        thread = threading.Thread(target=lambda: other.append((current(), torch.zeros(2).sum().item())))
        thread.start()
        thread.join()
        assert other == [(None, 0.0)]
    assert inside.is_meta and not inside.is_cuda
    with pytest.raises((AssertionError, RuntimeError)):  # not a tensor without memory from the cache
        rotation.signs(rotation.FIRST_SIGNS, 16, GPU)


def test_the_same_kind_of_launch_is_recorded_once() -> None:
    with fake_gpu(), DryRun(GPU) as found:
        rows, one, two = (torch.zeros(n, dtype=torch.int64, device=GPU) for n in ((4, 64), 1, 2))
        for size in (1, 8, 64):
            slot_mapping.padded_tree(rows, one, one, one, size=size)
        assert len(found.launches) == 1
        slot_mapping.padded_tree(rows, two[1:], one, one, size=8)
        assert len(found.launches) == 2  # another alignment


@pytest.mark.parametrize("speculation", [None, SpecConfig(), SpecConfig(chain=True)])
def test_other_settings(tiny_model: Callable[..., Path], speculation: SpecConfig | None) -> None:
    launches = dry_run(tiny_model(), EngineConfig("cuda", max_ctx=256, speculation=speculation)).launches
    assert "noise_kernel" in {launch.name for launch in launches}


def test_steps_of_several_sequences(found: DryRun) -> None:
    target, draft = embedded_pair()
    many = dry_run(target, EngineConfig("cuda", draft=DraftConfig(draft), parallel=2))
    assert Counter(launch.name for launch in many.launches)["_ragged_kernel"] == 1  # for all sizes
    assert "_ragged_kernel" not in {launch.name for launch in found.launches}
    assert {launch.name for launch in found.launches} < {launch.name for launch in many.launches}


def test_the_models_mtp_block(tiny_model: Callable[..., Path]) -> None:
    launches = dry_run(tiny_model(mtp=True), EngineConfig("cuda", max_ctx=256)).launches
    assert "rank_kernel" in {launch.name for launch in launches}


def test_a_head_over_a_draft(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Its calls and the tree of its paths, for one text and for several."""
    target = tiny_model(mtp=True)
    drafts = EveryDraft(target, tmp_path)
    for parallel in (1, 2):
        alone, first, second = (
            set(dry_run(target, drafts.config(name, {"parallel": parallel})).launches)
            for name in ("dflash", "first weaver", "weaver, lookup")
        )
        for launches in (first, second):
            # Norms as wide as the head; what ranks more candidates, and takes paths into the tree.
            assert {"_norm_kernel", "rank_kernel", "best_tree_kernel"} <= {
                each.name for each in launches - alone
            }
            assert "_ring_kernel" not in {each.name for each in alone - launches}


@pytest.mark.parametrize("family", ["qwen3", "qwen35"])
def test_a_small_model(tiny_model: Callable[..., Path], tmp_path: Path, family: str) -> None:
    """Its calls, and pieces of a text of any length."""
    target, small = tiny_model(mtp=True), tiny_model(family)
    draft = DraftConfig(small)
    speculation = SpecConfig(adaptive=False, mtp="off")
    config = EngineConfig("cuda", max_ctx=2048, draft=draft, speculation=speculation, parallel=2)
    found = set(dry_run(target, config).launches)
    plan = gpu_plan(target, config)
    with fake_gpu(), GGUFFile.open(small) as file, DryRun(GPU) as used:
        decoder = Decoder(ModelSpec.from_gguf(file), MeasuringLoader(file, tiles=True), GPU)
        model = small_model(decoder, config, decoder, plan, StepCosts())
        for length in (17, 33, 63, 64, 65, 129, 500, 900):
            model.begin(0)
            model.flush(0, [1] * length)
    assert {"_chunk_attention_kernel"} <= {each.name for each in used.launches}
    assert set(used.launches) <= found


def test_every_mix_of_drafts(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """The first answer may call any of them."""
    target = tiny_model(mtp=True)
    drafts = EveryDraft(target, tmp_path)
    both, alone = (dry_run(target, drafts.config(name)) for name in ("dflash2, mtp, lookup", "mtp"))
    # Trees are as deep as the shallowest draft.
    assert {each for each in alone.launches if each.name != "best_tree_kernel"} <= set(both.launches)


def test_routed_experts(tiny_model: Callable[..., Path]) -> None:
    """Kernels for few rows, for more, and for those of a prompt."""
    path = tiny_model("qwen35moe", mtp=True, width=256, mix="q4_k_m")
    found = dry_run(path, EngineConfig("cuda", max_ctx=256, experts_host=2))
    routed = [module for module in found.modules if "experts" in module._most_shared]
    assert {each.name for each in found.launches} >= {"_router_kernel", "_route_kernel", "_combine_kernel"}
    assert len(routed) % 3 == 0 and routed
    cached = {"_resolve_kernel", "_rounds_kernel", "_copy_kernel"}
    assert {each.name for each in found.launches} >= cached
    whole = dry_run(path, EngineConfig("cuda", max_ctx=256))
    assert {each.name for each in found.launches} - {each.name for each in whole.launches} == cached


def test_a_chunk_with_images(tiny_model: Callable[..., Path]) -> None:
    """Kernels read contiguous cos and sin, also where each pair of a head turns by its own axis."""
    path = tiny_model()
    plan = gpu_plan(path, EngineConfig("cuda", max_ctx=256))
    spec = plan.estimate.spec
    with fake_gpu(), GGUFFile.open(path) as file, DryRun(GPU) as found:
        target = Decoder(spec, MeasuringLoader(file, tiles=True), GPU)
        states = SequenceStates(spec, max_ctx=256, device=GPU, cache=CacheConfig(*plan.kv), static=True)
        slots = torch.tensor([states.open()], device=GPU)
        tokens, rows = (torch.zeros(size, dtype=torch.int64, device=GPU) for size in ((1, 90), (64,)))
        positions = torch.zeros(3, 90, dtype=torch.int64, device=GPU)
        images = ImageRows(rows, torch.zeros(64, spec.width, device=GPU), positions)
        chunk = replace(Step.chunk(slots, tokens, states.buffers.lengths[slots]), images=images)
        target.forward(chunk, states.buffers)
    assert "_cache_kernel" in {launch.name for launch in found.launches}


def test_operations_with_a_destination_are_not_run() -> None:
    """Some have no form for tensors without memory: a matmul into float32 in older versions of torch."""
    with fake_gpu(), DryRun(GPU):
        out = torch.empty(3, 5, device=GPU)
        assert torch.mm(torch.empty(3, 4, device=GPU), torch.empty(2, 5, device=GPU), out=out) is out


def test_a_kernel_gets_all_its_handles_at_once() -> None:
    """The thread that loads weights may launch it meanwhile."""

    class Compiled:
        module = function = _run = None

        def _init_handles(self) -> None:
            self._run = "launcher"
            assert compiled._run is None
            self.module, self.function = "module", "function"

    class Kernel:
        def warmup(self, *arguments: object, **options: object) -> Compiled:
            return compiled

    compiled = Compiled()
    with fake_gpu():
        Launch(Kernel(), (), ()).load(GPU)
    assert (compiled._run, compiled.module, compiled.function) == ("launcher", "module", "function")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ahead, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(ahead, "kind_of", lambda device: "H200")
    return tmp_path


class FakeLaunch(Launch):
    """Compiles nothing, or fails."""

    loaded: ClassVar[list[str]] = []

    def touch(self, device: torch.device) -> None: ...

    def load(self, device: torch.device) -> None:
        if self.kernel == "broken":
            raise RuntimeError("ptxas failed")
        self.loaded.append(self.kernel)

    @property
    def name(self) -> str:
        return self.kernel


def recording(*names: str) -> Callable[[], None]:
    def rehearse() -> None:
        run = current()
        assert run is not None
        run.launches |= {FakeLaunch(name, (), ()): None for name in names}

    return rehearse


def waited(work: CompileAhead) -> list[tuple[int, int]]:
    seen: list[tuple[int, int]] = []
    with work:
        work.wait(lambda done, total: seen.append((done, total)))
    return seen


def test_all_kernels_are_compiled_with_progress_and_only_once(folder: Path) -> None:
    FakeLaunch.loaded.clear()
    seen = waited(CompileAhead(recording("a", "b", "c"), GPU, facts="one model"))
    assert sorted(FakeLaunch.loaded) == ["a", "b", "c"] and seen[-1] == (3, 3) and seen == sorted(seen)
    assert waited(CompileAhead(recording("a", "b", "c"), GPU, facts="one model")) == []  # nothing to do
    assert len(FakeLaunch.loaded) == 3
    assert waited(CompileAhead(recording("d"), GPU, facts="another model"))[-1] == (1, 1)


def test_what_cannot_be_compiled_ahead_does_not_fail_a_start(folder: Path) -> None:
    def rehearse() -> None:
        raise ValueError("a bug of ours")

    assert waited(CompileAhead(recording("a", "broken"), GPU, facts="x"))[-1] == (2, 2)
    assert waited(CompileAhead(rehearse, GPU, facts="x")) == []
    assert not list(folder.iterdir())  # the next start tries again


def test_leaving_early_cancels_what_has_not_begun(folder: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()
    later: list[str] = []

    def rehearse() -> None:
        begun.set()
        assert go_on.wait(60)
        later.append("listed")

    with pytest.raises(KeyboardInterrupt), CompileAhead(rehearse, GPU, facts="x") as work:
        assert begun.wait(60)
        raise KeyboardInterrupt
    FakeLaunch.loaded.clear()
    go_on.set()
    work._pool.shutdown(wait=True)
    assert later == ["listed"] and FakeLaunch.loaded == []
