"""Plans for a GPU, made without one: every exact part to the byte, and the KV cache formats chosen."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.cli.footprint import in_native_code, on_gpu
from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Engine, Request
from bough.errors import ResourceError, UsageError
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.kernels.experts import ExpertStack
from bough.kernels.kv_cache.format import FORMATS
from bough.kernels.native import unavailable
from bough.kernels.sampling.launch import Workspace
from bough.kernels.sampling.state import SamplingState
from bough.memory.device import CUDA_CONTEXT, MemoryBudget, assumed_budget, gib
from bough.memory.estimate import EMBEDDING, MemoryEstimate, draft_quant, estimate_memory, ring_dtype
from bough.memory.planner import AUTO_FORMATS, MemoryPlanner, format_names
from bough.models.decoder import Decoder
from bough.models.dflash import DFlashDraft, open_draft
from bough.models.measure import held_bytes, measured
from bough.models.spec import ModelSpec
from bough.models.step import largest_padded
from bough.models.weights import WeightLoader
from bough.session.expert_uses import ExpertUses
from bough.state.draft_ring import draft_buffers
from bough.state.sequences import PAGE, CacheConfig, SequenceStates
from tests.engine.sparse_pair import pair_27b, pair_35b
from tests.models.rotated import EMBEDDING as EMBEDDING_NAME
from tests.models.rotated import Basis
from tests.tiny_draft import draft_config, save_draft
from workshop.grow.grow import Growth, grow
from workshop.tiny import FAMILIES

__all__ = ["pair_27b", "pair_35b"]

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30
KV_FORMATS = [(FORMATS[k], FORMATS[v]) for k, v in (*AUTO_FORMATS, ("tq3_0", "tq3_0"), ("bf16", "q4_0"))]


@pytest.mark.parametrize("mix", ["q8_0", "q4_k_m"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_in_tiles_to_the_byte(tiny_model: Callable[..., Path], family: str, mix: str) -> None:
    with GGUFFile.open(tiny_model(family, width=256, mix=mix)) as file:
        spec = ModelSpec.from_gguf(file)
        space = measured(file, lambda loader: Decoder(spec, loader, CPU)).tile_bytes
        loader = WeightLoader(file, device=CPU, tiles=True, space=space)
        decoder = Decoder(spec, loader, CPU)
        estimate = estimate_memory(file, spec, EngineConfig(), "cuda", context=256)
        assert estimate.parts["weights"] == held_bytes(decoder) - held_bytes(decoder.embed)
        assert (
            estimate.parts[EMBEDDING] == held_bytes(decoder.embed) == file.tensors["token_embd.weight"].nbytes
        )
        # All tiles are in one allocation, which they fill.
        assert loader._space is not None and not len(loader._space)
        hidden = torch.randn(2, spec.width)
        apart = Decoder(spec, WeightLoader(file, device=CPU, tiles=True), CPU)
        assert torch.equal(decoder.logits(hidden), apart.logits(hidden))


def test_experts_in_host_memory_to_the_byte(tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model("qwen35moe", width=256, mix="q4_k_m")) as file:
        spec = ModelSpec.from_gguf(file)
        whole, *plans = [
            estimate_memory(file, spec, EngineConfig(experts_host=count), "cuda", context=256)
            for count in (0, 3, 6)
        ]
        tile_bytes = measured(file, lambda loader: Decoder(spec, loader, CPU), expert_slots=5).tile_bytes
        loader = WeightLoader(file, device=CPU, tiles=True, space=tile_bytes, expert_slots=5)
        decoder = Decoder(spec, loader, CPU)
        assert loader._space is not None and not len(loader._space)
        apart = Decoder(spec, WeightLoader(file, device=CPU, tiles=True), CPU)
    stacks = [stack for stack in decoder.routed if isinstance(stack, ExpertStack) and stack.host is not None]
    on_host = sum(stack.host.numel() for stack in stacks if stack.host is not None)
    assert len(stacks) == 2 * len(spec.layers) and whole.host_experts == 0
    assert all(plan.host_experts == on_host and plan.routed == whole.routed for plan in plans)
    weights = held_bytes(decoder) - held_bytes(decoder.embed) - on_host
    assert plans[0].parts["weights"] == weights
    assert plans[0].dense == weights + on_host * 3 // 8 - whole.routed >= whole.dense
    # One row takes two of eight experts, and three of eight have no place.
    assert plans[0].missed_bytes(1) == round(on_host * 2 / 8 * 3 / 8)
    assert plans[0].missed_bytes(1) < plans[0].missed_bytes(8) < on_host * 3 / 8 and not whole.missed_bytes(8)
    # Every expert has the same bytes in host memory as it would have on the card.
    for stack, plain in zip(stacks, apart.routed, strict=True):
        assert isinstance(plain, ExpertStack) and stack.host is not None
        assert torch.equal(stack.host, plain.data) and torch.equal(stack.row_scale, plain.row_scale)
        assert torch.equal(stack.unpacked(), plain.unpacked()) and len(stack.data) == 5


def test_the_most_used_experts_have_places(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_model("qwen35moe", width=256, mix="q4_k_m")
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file)
        decoder = Decoder(spec, WeightLoader(file, device=CPU, tiles=True, expert_slots=3), CPU)
    caches = decoder.expert_caches
    uses = ExpertUses(tmp_path / "costs.json", path, caches)
    uses.warm()
    assert caches.layers[1].cache is not None and caches.layers[1].cache.owners.tolist() == [0, 1, 2]
    caches.counts[1] = torch.tensor([0, 0, 9, 1, 0, 0, 7, 0])
    uses.save()
    again = ExpertUses(tmp_path / "costs.json", path, caches)
    again.warm()
    layer = caches.layers[1]
    assert layer.cache is not None and layer.cache.owners.tolist() == [2, 6, 3]
    assert layer.cache.places.tolist() == [-1, -1, 0, 2, -1, -1, 1, -1]
    for stack in layer.stacks:
        assert stack.host is not None and torch.equal(stack.data, stack.host[[2, 6, 3]])
    assert not caches.counts.any() and caches.use is not None and caches.use.hits == 0
    again.save()  # what earlier runs used fades
    assert json.loads(next(tmp_path.glob("experts-*.json")).read_text())[1] == [0, 0, 4, 0, 0, 0, 3, 0]
    next(tmp_path.glob("experts-*.json")).write_text("[[1], 2]")
    ExpertUses(tmp_path / "costs.json", path, caches).warm()
    assert layer.cache.owners.tolist() == [0, 1, 2]


def test_experts_in_host_memory_are_named_and_checked(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(family: str, device: torch.device = GPU, limit: int = 8 * GIB, **settings) -> str:
        config = EngineConfig(max_ctx=512, speculation=None, **settings)
        with GGUFFile.open(tiny_model(family, width=256, mix="q4_k_m")) as file:
            spec = ModelSpec.from_gguf(file)
            return MemoryPlanner.create(file, spec, config, device, assumed_budget(limit)).plan().line()

    assert "6 of 8 in each layer cached on the card" in planned("qwen35moe", experts_host=2)
    assert "experts" not in planned("qwen35moe") and "experts" not in planned("qwen35moe", experts_host=0)
    for family, count, needed in (("qwen35moe", 7, "0 to 6"), ("qwen35", 1, "0: tiny random qwen35 has no")):
        with pytest.raises(UsageError, match=f"`experts_host` is {count}, needed {needed}"):
            planned(family, experts_host=count)
    with pytest.raises(UsageError, match="on a CPU all weights are in host memory"):
        planned("qwen35moe", CPU, experts_host=1)
    assert planned("qwen35moe", CPU) == planned("qwen35moe", CPU, experts_host=0)
    monkeypatch.setattr("bough.memory.planner.available_memory", lambda device: GIB + 1000)
    with pytest.raises(ResourceError, match=r"must stay free: 1\.00 GiB are free"):
        planned("qwen35moe", experts_host=2)


@pytest.mark.parametrize("context", [None, 16384])
def test_experts_take_what_a_card_has_left(
    pair_35b: Growth, context: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bough.memory.planner.available_memory", lambda device: 64 * GIB)
    slots = []
    for size in (8, 12, 16, 48):
        with GGUFFile.open(pair_35b.target) as file:
            spec = ModelSpec.from_gguf(file)
            budget = assumed_budget(size * GIB)
            plan = MemoryPlanner.create(file, spec, EngineConfig(max_ctx=context), GPU, budget).plan()
        slots.append(plan.estimate.expert_slots)
        assert plan.max_ctx >= (context or 32768) and plan.total <= budget.limit
        if plan.estimate.expert_slots is not None:
            # There is no room for one more expert of each layer.
            one = plan.estimate.host_experts // 256
            assert budget.limit - plan.total < 2 * one + 64 * plan.kv_per_token, gib(
                budget.limit - plan.total
            )
    assert slots[3] is None and 8 <= slots[0] < slots[1] < slots[2] < 256
    monkeypatch.setattr("bough.memory.planner.available_memory", lambda device: 12 * GIB)
    with GGUFFile.open(pair_35b.target) as file:
        planner = MemoryPlanner.create(file, spec, EngineConfig(), GPU, assumed_budget(12 * GIB))
        with pytest.raises(ResourceError, match="do not fit on the card and take"):
            planner.plan()


def test_who_wants_all_experts_on_the_card_is_told_of_auto(
    pair_35b: Growth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bough.memory.planner.available_memory", lambda device: 64 * GIB)
    with GGUFFile.open(pair_35b.target) as file:
        config = EngineConfig(experts_host=0)
        planner = MemoryPlanner.create(file, ModelSpec.from_gguf(file), config, GPU, assumed_budget(12 * GIB))
        with pytest.raises(ResourceError) as failed:
            planner.plan()
    assert "`experts_host` auto" in failed.value.hint


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_on_a_cpu_to_the_byte(tiny_model: Callable[..., Path], family: str, expand: bool) -> None:
    with GGUFFile.open(tiny_model(family, mix="q8_0")) as file:
        spec = ModelSpec.from_gguf(file)
        estimate = estimate_memory(file, spec, EngineConfig(), "cpu", context=256, expand=expand)
        assert sum(estimate.parts[part] for part in ("weights", EMBEDDING)) == held_bytes(
            Decoder.load(file, expand=expand)
        )


@pytest.mark.parametrize("quant", ["auto", "q4_k", "none"])
def test_the_draft_to_the_byte(tiny_model: Callable[..., Path], tmp_path: Path, quant: str) -> None:
    with GGUFFile.open(tiny_model(width=256)) as file:
        spec = ModelSpec.from_gguf(file)
        save_draft(tmp_path, draft_config(spec), dtype=torch.bfloat16)
        draft = DraftConfig(tmp_path, quant)
        estimate = estimate_memory(file, spec, EngineConfig(draft=draft), "cuda", context=700)
        with open_draft(tmp_path, spec, quant=draft_quant(draft, "cuda")) as (draft_spec, source):
            loaded = DFlashDraft(draft_spec, WeightLoader(source, device=CPU, tiles=True), CPU)
        assert estimate.parts["draft"] == held_bytes(loaded)
        rings = draft_buffers(draft_spec, max_ctx=700, dtype=ring_dtype("cuda"))
        assert estimate.parts["draft context"] == held_bytes(rings)
    assert draft_quant(DraftConfig(tmp_path), "cuda") is QuantType.Q8_0
    assert draft_quant(DraftConfig(tmp_path), "cpu") is None


@pytest.mark.parametrize("formats", KV_FORMATS, ids=format_names)
@pytest.mark.parametrize(("context", "rows"), [(1, 8), (700, 24), (1000, 64)])
def test_states_to_the_byte(tiny_model: Callable[..., Path], formats, context: int, rows: int) -> None:
    with GGUFFile.open(tiny_model()) as file:
        spec = ModelSpec.from_gguf(file)
        config = EngineConfig(speculation=SpecConfig(budget=rows - 1))
        estimate = estimate_memory(file, spec, config, "cuda", context=context)
    states = SequenceStates(
        spec, max_ctx=context, max_rows=largest_padded(rows), cache=CacheConfig(*formats), static=True
    )
    planned = (
        estimate.parts["recurrent states"] + estimate.parts["tree rows"] + estimate.kv_bytes(formats, context)
    )
    assert planned == held_bytes(states.buffers)
    assert estimate.max_context(formats, estimate.kv_bytes(formats, context)) >= min(
        context, spec.context_length
    )
    assert estimate.max_context(formats, estimate.kv_bytes(formats, context) - 1) < context


def test_sampling_to_the_byte(tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model()) as file:
        spec = ModelSpec.from_gguf(file)
        estimate = estimate_memory(file, spec, EngineConfig(), "cuda", context=256)
    state, workspace = SamplingState.empty(64, spec.vocab_size, CPU), Workspace(64, spec.vocab_size, CPU)
    assert estimate.parts["sampling"] == held_bytes(state, workspace)


def test_buffers_do_not_grow_while_decoding(tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model(layers=4)) as file:
        engine = Engine(Decoder.load(file), max_ctx=512, max_rows=8, runner="graph")
        config = EngineConfig(speculation=SpecConfig(budget=7))
        estimate = estimate_memory(file, engine.target.spec, config, "cuda", context=512)
    formats = (FORMATS["f32"], FORMATS["f32"])
    planned = (
        estimate.parts["recurrent states"] + estimate.parts["tree rows"] + estimate.kv_bytes(formats, 512)
    )
    for count in (1, 200, 512):
        assert planned == held_bytes(engine.states.buffers)
        list(engine.generate(Request(prompt=[5, 6] * (count // 2) or [5], max_tokens=16)))
    assert planned == held_bytes(engine.states.buffers)


@pytest.fixture(scope="module")
def planner_27b(pair_27b: Growth) -> Iterator[MemoryPlanner]:
    assert pair_27b.draft is not None
    config = EngineConfig(draft=DraftConfig(pair_27b.draft))
    with GGUFFile.open(pair_27b.target) as file:
        yield MemoryPlanner.create(file, ModelSpec.from_gguf(file), config, GPU, assumed_budget(24 * GIB))


def on(planner: MemoryPlanner, gib: float, **overrides) -> MemoryPlanner:
    config = replace(planner.config, **overrides)
    return MemoryPlanner.create(planner.file, planner.spec, config, GPU, assumed_budget(int(gib * GIB)))


@pytest.mark.parametrize(
    ("gib", "chosen", "host", "requested"),
    [
        (24, "q4_0", True, 262144),
        (32, "q8_0", False, None),
        (48, "f16", False, None),
        (141, "f16", False, None),
    ],
)
def test_the_whole_context_of_a_27b(
    planner_27b: MemoryPlanner, gib: int, chosen: str, host: bool, requested: int | None
) -> None:
    plan = on(planner_27b, gib, max_ctx=requested).plan()
    assert (format_names(plan.kv), plan.max_ctx, plan.host_embedding) == (chosen, 262144, host)
    assert plan.total <= plan.budget.limit == gib * GIB
    assert (EMBEDDING in plan.parts) != host and plan.parts["in use before"] == CUDA_CONTEXT
    assert plan.prefill_chunk == {24: 1024, 32: 2048, 48: 2048, 141: 4096}[gib]
    assert plan.parts["prefill"] == plan.estimate.prefill[plan.prefill_chunk]
    assert chosen in plan.line() and ("host memory" in plan.line()) == host


def test_the_default_context_is_shortened_before_lossy_formats(planner_27b: MemoryPlanner) -> None:
    plan = on(planner_27b, 24).plan()
    assert format_names(plan.kv) == "q8_0" and 100_000 < plan.max_ctx < 262144
    assert "(`max_ctx` 262144 fits in q4_0)" in plan.line()
    assert format_names(on(planner_27b, 24, kv_v="q4_0").plan().kv) == "q5_0/q4_0"
    tight = on(planner_27b, 19.5).plan()
    assert any(format.lossy for format in tight.kv) and tight.max_ctx >= 32768


@pytest.mark.parametrize("gib", [18.95, 19.0, 19.1, 19.3])
def test_a_short_context_is_not_made_shorter_by_more_bits(planner_27b: MemoryPlanner, gib: float) -> None:
    """With formats of fewer bits a context below 32,768 could at most be twice as long."""
    planner = on(planner_27b, gib)
    plan, longest = planner.plan(), planner.options()[len(AUTO_FORMATS) - 1].max_ctx
    assert plan.max_ctx < 65536 and 2 * plan.max_ctx > min(longest, 32768), (plan.max_ctx, longest)


def test_sizes_of_a_27b(planner_27b: MemoryPlanner) -> None:
    parts, spec = planner_27b.estimate.parts, planner_27b.spec
    stored = sum(info.nbytes for info in planner_27b.file.tensors.values())
    assert stored < parts["weights"] + parts[EMBEDDING] < 1.03 * stored
    assert parts[EMBEDDING] == 248320 * 20 * 144
    assert parts["recurrent states"] == 48 * (48 * 128 * 128 + 3 * 10240) * 4
    assert parts["draft context"] == 5 * 2 * 16384 * 8 * 128 * 2 + 16
    tokens = {name: planner_27b.estimate.page_bytes((FORMATS[name],) * 2) // 64 for name in FORMATS}
    assert tokens["f16"] == tokens["bf16"] == 65536 and tokens["q8_0"] == 34816
    assert tokens["q5_0"] == 22528 and tokens["q4_0"] == 18432 and tokens["tq3_0"] == 12800
    assert spec.context_length == 262144
    options = {format_names(option.formats): option for option in planner_27b.options()}
    assert [option.max_ctx for option in options.values()] == sorted(c.max_ctx for c in options.values())
    assert options["q8_0"].max_ctx > 130_000 and not options["q8_0"].fits and options["tq3_0"].fits


def test_sizes_of_a_ternary_27b_in_another_basis(pair_27b: Growth) -> None:
    """The tensors of the published Bonsai 2: 7.2 GB in the file, 4.5 bits a weight on a GPU, 2.5 on a CPU."""
    with GGUFFile.open(pair_27b.target) as file:
        names = [name for name, info in file.tensors.items() if len(info.shape) == 2 and "conv1d" not in name]
        rotated = [name for name in names if "ssm_alpha" not in name and "ssm_beta" not in name]
        assert len(rotated) == 402
        basis = Basis(1024, heads=(16, 48))
        for name in rotated:
            basis.signs_of(file.tensors[name].shape[1])
        file.metadata = {**file.metadata, **basis.keys(rotated)}
        types = {name: QuantType.PQ2_0 if name in rotated else QuantType.BF16 for name in names}
        file.tensors = {
            name: replace(info, type=types.get(name, info.type)) for name, info in file.tensors.items()
        }
        stored = sum(info.nbytes for info in file.tensors.values())
        assert 7.1e9 < stored < 7.3e9
        spec, config = ModelSpec.from_gguf(file), EngineConfig()
        gpu = MemoryPlanner.create(file, spec, config, GPU, assumed_budget(24 * GIB)).plan()
        embedding = file.tensors[EMBEDDING_NAME].nbytes
        matrices = (
            sum(file.tensors[name].elements for name in rotated) - file.tensors[EMBEDDING_NAME].elements
        )
        assert gpu.weights == pytest.approx(embedding + matrices * 4.5 / 8, rel=0.01)
        (note,) = gpu.notes()
        assert "PQ2_0 (held as Q4_0)" in note and "7.08 GiB more" in note
        assert gpu.weights == pytest.approx(on_gpu(file, spec).weights, rel=0.01)
        if unavailable() is None:
            cpu = MemoryPlanner.create(
                file, spec, config, torch.device("cpu"), assumed_budget(24 * GIB)
            ).plan()
            assert cpu.weights == pytest.approx((matrices + 248320 * 5120) * 2.5 / 8, rel=0.01)
            assert cpu.weights == pytest.approx(in_native_code(file, spec).weights, rel=0.01)


def test_one_row_needs_as_much_as_sixteen(planner_27b: MemoryPlanner) -> None:
    """Steps without trees read short prompts, too."""
    plain, sixteen, more = (
        on(planner_27b, 24, draft=None, speculation=speculation).estimate
        for speculation in (None, SpecConfig(budget=15), SpecConfig(budget=23))
    )
    assert (plain.rows, sixteen.rows, more.rows) == (16, 16, 24)
    assert plain.parts == sixteen.parts
    assert more.parts["steps"] - plain.parts["steps"] >= 8 * 248320 * 4


def test_only_the_sparse_pair_has_holes(pair_27b: Growth, tmp_path: Path, tiny_model) -> None:
    """Models that other tests grow in the same process have their data written."""
    with GGUFFile.open(pair_27b.target) as file:
        assert not file.raw("output_norm.weight").any()
    with GGUFFile.open(grow(tmp_path / "grown", "double", target=tiny_model()).target) as file:
        assert file.raw("output_norm.weight").any() and file.raw("token_embd.weight").any()


def overrides_in(text: str) -> dict:
    """Return the settings that a hint names, as configuration overrides."""
    found: dict = {}
    for name, value in re.findall(r"`(\w+)`(?: (\w+))?", text):
        match name:
            case "max_ctx":
                found["max_ctx"] = int(value)
            case "kv":
                found |= {"kv_k": value, "kv_v": value}
            case "kv_k" | "kv_v":
                found[name] = value
            case "no_draft":
                found["draft"] = None
    return found


@settings(max_examples=40, deadline=None)
@given(
    gib=st.floats(12, 60),
    max_ctx=st.none() | st.integers(1, 262144),
    requested=st.sampled_from([("auto", "auto"), ("q8_0", "auto"), ("auto", "q4_0"), ("q5_0", "q5_0")]),
)
def test_a_plan_fits_or_the_hint_does(
    planner_27b: MemoryPlanner, gib: float, max_ctx: int | None, requested: tuple[str, str]
) -> None:
    planner = on(planner_27b, gib, max_ctx=max_ctx, kv_k=requested[0], kv_v=requested[1])
    try:
        plan = planner.plan()
    except ResourceError as error:
        alternatives = error.hint.partition(": ")[2].split("; ")
        assert 1 <= len(alternatives) <= 3
        for each in alternatives:
            if each.startswith("`"):
                assert on(planner_27b, gib, **({"max_ctx": max_ctx} | overrides_in(each))).plan()
        return
    assert plan.total <= plan.budget.limit and 1 <= plan.max_ctx <= (max_ctx or 262144)
    for format, name in zip(plan.kv, requested, strict=True):
        assert name in ("auto", format.name)
    if max_ctx is not None:
        assert plan.max_ctx == max_ctx
    # No better format would have fit.
    better = planner.candidates[: list(planner.candidates).index(plan.kv)]
    for option in planner.options():
        if option.formats in better and option.formats[0].quantised:
            assert not option.fits


def test_the_hint_names_three_alternatives(planner_27b: MemoryPlanner) -> None:
    with pytest.raises(ResourceError) as refused:
        on(planner_27b, 23, max_ctx=262144).plan()
    assert re.search(
        r"needs 23\.\d+ GiB with a context of 262,144 tokens in q4_0, 23\.00 GiB", str(refused.value)
    )
    shorter, smaller, lighter = refused.value.hint.removeprefix("any of these would fit: ").split("; ")
    assert shorter.startswith("`max_ctx` ") and (smaller, lighter) == ("`kv` tq3_0", "`no_draft`")
    with pytest.raises(ResourceError, match="a context of 256 tokens") as hopeless:
        on(planner_27b, 8).plan()
    assert hopeless.value.hint == "this would fit: a smaller model" or "weights take" in hopeless.value.hint


def test_memory_of_other_processes_counts(planner_27b: MemoryPlanner) -> None:
    crowded = replace(planner_27b, budget=MemoryBudget(48 * GIB, 20 * GIB)).plan()
    assert format_names(crowded.kv) != "f16" and crowded.parts["in use before"] == 20 * GIB
    assert crowded.total <= 48 * GIB


def test_head_sizes_without_whole_blocks_stay_in_16_bits(planner_27b: MemoryPlanner) -> None:
    odd = replace(planner_27b.spec, head_dim=80)
    planner = replace(planner_27b, spec=odd)
    assert [format_names(option.formats) for option in planner.options()][:1] == ["f16"]


def test_types_without_a_kernel_are_named(planner_27b: MemoryPlanner) -> None:
    estimate: MemoryEstimate = replace(planner_27b.estimate, widened={"Q2_K": 3 * GIB, "IQ2_XS": GIB})
    (note,) = replace(planner_27b, estimate=estimate, budget=assumed_budget(80 * GIB)).plan().notes()
    assert "Q2_K (held as F16), IQ2_XS (held as F16)" in note and "4.00 GiB" in note
    assert on(planner_27b, 80).plan().notes() == []


def test_several_sequences_share_the_pages(planner_27b: MemoryPlanner) -> None:
    one, four = (on(planner_27b, 141, parallel=count).plan() for count in (1, 4))
    for part in ("recurrent states", "draft context"):
        assert four.parts[part] == 4 * one.parts[part]
    assert four.parts["weights"] == one.parts["weights"] and four.max_ctx == one.max_ctx == 262144
    assert (one.kv_tokens, four.kv_tokens) == (262144, 4 * 262144)
    assert four.total <= 0.9 * 141 * GIB
    eight = on(planner_27b, 141, parallel=8).plan()
    # No fixed split: less than eight contexts, and a tenth of the memory stays free.
    assert 4 * 262144 < eight.kv_tokens < 8 * 262144 and eight.total <= 0.9 * 141 * GIB
    assert "8 requests at once share" in eight.line() and "requests" not in one.line()


@given(st.lists(st.integers(1, 500), min_size=4, max_size=4))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_split_of_the_tokens_has_pages(planner_27b: MemoryPlanner, lengths: list[int]) -> None:
    """Each sequence begins a page of its own."""
    estimate: MemoryEstimate = replace(planner_27b.estimate, sequences=len(lengths))
    pages = sum(-(-length // PAGE) for length in lengths)
    assert pages <= estimate.pool_pages(sum(lengths))


def test_the_number_of_sequences_is_what_fits(planner_27b: MemoryPlanner) -> None:
    wide = on(planner_27b, 141, parallel=None).plan()
    assert (wide.sequences, wide.max_ctx, format_names(wide.kv)) == (8, 262144, "f16")
    alone, some = (on(planner_27b, 24, parallel=count).plan() for count in (1, None))
    # A card with less memory runs fewer, and its formats and its chunks do not depend on them.
    assert 2 <= some.sequences < 8
    assert (some.kv, some.prefill_chunk, some.host_embedding) == (
        alone.kv,
        alone.prefill_chunk,
        alone.host_embedding,
    )
    assert alone.max_ctx > some.max_ctx > 0.6 * alone.max_ctx
    # A context that was requested is kept whole, at the expense of sequences.
    requested = on(planner_27b, 24, parallel=None, max_ctx=150_000).plan()
    assert requested.max_ctx == 150_000 and requested.sequences < some.sequences


def test_the_hint_for_too_many_sequences_fits(planner_27b: MemoryPlanner) -> None:
    with pytest.raises(UsageError, match="`parallel` is 65, needed 1 to 64"):
        on(planner_27b, 24, parallel=65)
    with pytest.raises(ResourceError):
        on(planner_27b, 24, parallel=64).plan()
    assert on(planner_27b, 24, parallel=4).plan().sequences == 4
