"""What the plan says of a GPU, which needs none: every exact part to the byte, and which formats it picks."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.sparse_pair import pair_27b
from tests.tiny_draft import draft_config, save_draft
from treeflash.config import DraftConfig, EngineConfig, SpecConfig
from treeflash.convert.grow import Growth, grow
from treeflash.convert.tiny import FAMILIES
from treeflash.engine.engine import Engine, Request
from treeflash.errors import ResourceError
from treeflash.gguf.reader import GGUFFile
from treeflash.gguf.types import QuantType
from treeflash.kernels.kv_cache.format import FORMATS
from treeflash.kernels.sampling.launch import Workspace
from treeflash.kernels.sampling.state import SamplingState
from treeflash.memory.device import CUDA_CONTEXT, Room, supposed_room
from treeflash.memory.estimate import EMBEDDING, Needs, draft_quant, measure, ring_dtype
from treeflash.memory.planner import LADDER, Survey, named
from treeflash.models.decoder import Decoder
from treeflash.models.dflash import DFlashDraft, open_draft
from treeflash.models.measure import held_bytes, tile_space
from treeflash.models.spec import ModelSpec
from treeflash.models.weights import WeightLoader
from treeflash.state.draft_ring import draft_buffers
from treeflash.state.sequences import SequenceStates

__all__ = ["pair_27b"]

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30
PAIRS = [(FORMATS[k], FORMATS[v]) for k, v in (*LADDER, ("tq3_0", "tq3_0"), ("bf16", "q4_0"))]


@pytest.mark.parametrize("mix", ["q8_0", "q4_k_m"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_in_tiles_to_the_byte(tiny_model: Callable[..., Path], family: str, mix: str) -> None:
    with GGUFFile.open(tiny_model(family, width=256, mix=mix)) as file:
        spec = ModelSpec.from_gguf(file)
        space = tile_space(file, lambda loader: Decoder(spec, loader, CPU))
        loader = WeightLoader(file, device=CPU, tiles=True, space=space)
        decoder = Decoder(spec, loader, CPU)
        needs = measure(file, spec, EngineConfig(), "cuda", context=256, memory=GIB)
        assert needs.parts["weights"] == held_bytes(decoder) - held_bytes(decoder.embed)
        assert needs.parts[EMBEDDING] == held_bytes(decoder.embed) == file.tensors["token_embd.weight"].nbytes
        # All tiles lie in one piece, which they fill.
        assert loader._space is not None and not len(loader._space)
        hidden = torch.randn(2, spec.width)
        apart = Decoder(spec, WeightLoader(file, device=CPU, tiles=True), CPU)
        assert torch.equal(decoder.logits(hidden), apart.logits(hidden))


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_on_a_cpu_to_the_byte(tiny_model: Callable[..., Path], family: str, expand: bool) -> None:
    with GGUFFile.open(tiny_model(family, mix="q8_0")) as file:
        spec = ModelSpec.from_gguf(file)
        needs = measure(file, spec, EngineConfig(), "cpu", context=256, memory=GIB, expand=expand)
        assert sum(needs.parts[part] for part in ("weights", EMBEDDING)) == held_bytes(
            Decoder.load(file, expand=expand)
        )


@pytest.mark.parametrize("quant", ["auto", "q4_k", "none"])
def test_the_draft_to_the_byte(tiny_model: Callable[..., Path], tmp_path: Path, quant: str) -> None:
    with GGUFFile.open(tiny_model(width=256)) as file:
        spec = ModelSpec.from_gguf(file)
        save_draft(tmp_path, draft_config(spec), dtype=torch.bfloat16)
        draft = DraftConfig(tmp_path, quant)
        needs = measure(file, spec, EngineConfig(draft=draft), "cuda", context=700, memory=GIB)
        with open_draft(tmp_path, spec, quant=draft_quant(draft, "cuda")) as (draft_spec, source):
            loaded = DFlashDraft(draft_spec, WeightLoader(source, device=CPU, tiles=True), CPU)
        assert needs.parts["draft"] == held_bytes(loaded)
        rings = draft_buffers(draft_spec, max_ctx=700, dtype=ring_dtype("cuda"))
        assert needs.parts["draft context"] == held_bytes(rings)
    assert draft_quant(DraftConfig(tmp_path), "cuda") is QuantType.Q8_0
    assert draft_quant(DraftConfig(tmp_path), "cpu") is None


@pytest.mark.parametrize("pair", PAIRS, ids=named)
@pytest.mark.parametrize(("context", "rows"), [(1, 8), (700, 24), (1000, 64)])
def test_states_to_the_byte(tiny_model: Callable[..., Path], pair, context: int, rows: int) -> None:
    with GGUFFile.open(tiny_model()) as file:
        spec = ModelSpec.from_gguf(file)
        config = EngineConfig(speculation=SpecConfig(budget=rows - 1))
        needs = measure(file, spec, config, "cuda", context=context, memory=GIB)
    states = SequenceStates(spec, max_ctx=context, max_rows=rows, kv=pair, whole=True)
    planned = needs.parts["recurrent states"] + needs.parts["tree rows"] + needs.kv(pair, context)
    assert planned == held_bytes(states.buffers)
    assert needs.context(pair, needs.kv(pair, context)) >= min(context, spec.context_length)
    assert needs.context(pair, needs.kv(pair, context) - 1) < context


def test_sampling_to_the_byte(tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model()) as file:
        spec = ModelSpec.from_gguf(file)
        needs = measure(file, spec, EngineConfig(), "cuda", context=256, memory=GIB)
    state, workspace = SamplingState.empty(64, spec.vocab_size, CPU), Workspace(64, spec.vocab_size, CPU)
    assert needs.parts["sampling"] == held_bytes(state, workspace)


def test_nothing_grows_while_text_is_written(tiny_model: Callable[..., Path]) -> None:
    with GGUFFile.open(tiny_model(layers=4)) as file:
        engine = Engine(Decoder.load(file), max_ctx=512, max_rows=8, runner="graph")
        config = EngineConfig(speculation=SpecConfig(budget=7))
        needs = measure(file, engine.target.spec, config, "cuda", context=512, memory=GIB)
    pair = (FORMATS["f32"], FORMATS["f32"])
    planned = needs.parts["recurrent states"] + needs.parts["tree rows"] + needs.kv(pair, 512)
    for count in (1, 200, 512):
        assert planned == held_bytes(engine.states.buffers)
        list(engine.generate(Request(prompt=[5, 6] * (count // 2) or [5], max_tokens=16)))
    assert planned == held_bytes(engine.states.buffers)


@pytest.fixture(scope="module")
def survey_27b(pair_27b: Growth) -> Iterator[Survey]:
    assert pair_27b.draft is not None
    config = EngineConfig(draft=DraftConfig(pair_27b.draft))
    with GGUFFile.open(pair_27b.target) as file:
        yield Survey.of(file, ModelSpec.from_gguf(file), config, GPU, supposed_room(24 * GIB))


def on(survey: Survey, gib: float, **wishes) -> Survey:
    config = replace(survey.config, **wishes)
    return Survey.of(survey.file, survey.spec, config, GPU, supposed_room(int(gib * GIB)))


@pytest.mark.parametrize(
    ("gib", "chosen", "host", "asked"),
    [
        (24, "q4_0", True, 262144),
        (32, "q8_0", False, None),
        (48, "f16", False, None),
        (141, "f16", False, None),
    ],
)
def test_the_whole_context_of_a_27b(
    survey_27b: Survey, gib: int, chosen: str, host: bool, asked: int | None
) -> None:
    plan = on(survey_27b, gib, max_ctx=asked).decide()
    assert (named(plan.kv), plan.max_ctx, plan.host_embedding) == (chosen, 262144, host)
    assert plan.total <= plan.room.limit == gib * GIB
    assert (EMBEDDING in plan.parts) != host and plan.parts["in use before"] == CUDA_CONTEXT
    assert plan.prefill_chunk == {24: 1024, 141: 8192}.get(gib, 4096)
    assert plan.parts["prefill"] == plan.needs.prefill[plan.prefill_chunk]
    assert chosen in plan.line() and ("host memory" in plan.line()) == host


def test_a_context_that_nobody_asked_for_loses_no_bits(survey_27b: Survey) -> None:
    plan = on(survey_27b, 24).decide()
    assert named(plan.kv) == "q8_0" and 100_000 < plan.max_ctx < 262144
    assert "(--max-ctx 262144 fits in q4_0)" in plan.line()
    assert named(on(survey_27b, 24, kv_v="q4_0").decide().kv) == "q5_0/q4_0"
    tight = on(survey_27b, 19.5).decide()
    assert any(format.lossy for format in tight.kv) and tight.max_ctx >= 32768


def test_known_sizes_of_a_27b(survey_27b: Survey) -> None:
    parts, spec = survey_27b.needs.parts, survey_27b.spec
    stored = sum(info.nbytes for info in survey_27b.file.tensors.values())
    assert stored < parts["weights"] + parts[EMBEDDING] < 1.03 * stored
    assert parts[EMBEDDING] == 248320 * 20 * 144
    assert parts["recurrent states"] == 48 * (48 * 128 * 128 + 3 * 10240) * 4
    assert parts["draft context"] == 5 * 2 * 16384 * 8 * 128 * 2 + 16
    tokens = {name: survey_27b.needs.page((FORMATS[name],) * 2) // 64 for name in FORMATS}
    assert tokens["f16"] == tokens["bf16"] == 65536 and tokens["q8_0"] == 34816
    assert tokens["q5_0"] == 22528 and tokens["q4_0"] == 18432 and tokens["tq3_0"] == 12800
    assert spec.context_length == 262144
    choices = {named(choice.pair): choice for choice in survey_27b.choices()}
    assert [choice.max_ctx for choice in choices.values()] == sorted(c.max_ctx for c in choices.values())
    assert choices["q8_0"].max_ctx > 130_000 and not choices["q8_0"].fits and choices["tq3_0"].fits


def test_a_lone_root_takes_what_eight_rows_do_but_for_their_logits(survey_27b: Survey) -> None:
    """Products and attention fill rows up."""
    plain, eight = (
        on(survey_27b, 24, draft=None, speculation=speculation).needs
        for speculation in (None, SpecConfig(budget=7))
    )
    assert (plain.rows, eight.rows) == (1, 8)
    assert eight.parts["steps"] - plain.parts["steps"] == 8 * 248320 * 4


def test_only_the_pair_of_holes_has_holes(pair_27b: Growth, tmp_path: Path, tiny_model) -> None:
    """What other tests grow in the same process is written."""
    with GGUFFile.open(pair_27b.target) as file:
        assert not file.raw("output_norm.weight").any()
    with GGUFFile.open(grow(tmp_path / "grown", "double", target=tiny_model()).target) as file:
        assert file.raw("output_norm.weight").any() and file.raw("token_embd.weight").any()


def flags(text: str) -> dict:
    """A refusal's flags as the settings they stand for."""
    found: dict = {}
    for name, value in re.findall(r"--([a-z-]+)(?: (\w+))?", text):
        match name:
            case "max-ctx":
                found["max_ctx"] = int(value)
            case "kv":
                found |= {"kv_k": value, "kv_v": value}
            case "kv-k" | "kv-v":
                found[name.replace("-", "_")] = value
            case "no-draft":
                found["draft"] = None
    return found


@settings(max_examples=40, deadline=None)
@given(
    gib=st.floats(12, 60),
    max_ctx=st.none() | st.integers(1, 262144),
    asked=st.sampled_from([("auto", "auto"), ("q8_0", "auto"), ("auto", "q4_0"), ("q5_0", "q5_0")]),
)
def test_a_plan_fits_and_a_refusal_tells_the_truth(
    survey_27b: Survey, gib: float, max_ctx: int | None, asked: tuple[str, str]
) -> None:
    survey = on(survey_27b, gib, max_ctx=max_ctx, kv_k=asked[0], kv_v=asked[1])
    try:
        plan = survey.decide()
    except ResourceError as error:
        ways = error.hint.partition(": ")[2].split("; ")
        assert 1 <= len(ways) <= 3
        for way in ways:
            if way.startswith("--"):
                assert on(survey_27b, gib, **({"max_ctx": max_ctx} | flags(way))).decide()
        return
    assert plan.total <= plan.room.limit and 1 <= plan.max_ctx <= (max_ctx or 262144)
    for format, name in zip(plan.kv, asked, strict=True):
        assert name in ("auto", format.name)
    if max_ctx is not None:
        assert plan.max_ctx == max_ctx
    # Nothing better on the ladder would have done.
    better = survey.pairs[: list(survey.pairs).index(plan.kv)]
    for choice in survey.choices():
        if choice.pair in better and choice.pair[0].quantised:
            assert not choice.fits


def test_a_refusal_names_three_ways_out(survey_27b: Survey) -> None:
    with pytest.raises(ResourceError) as refused:
        on(survey_27b, 23, max_ctx=262144).decide()
    assert re.search(
        r"needs 23\.\d+ GiB with a context of 262,144 tokens in q4_0, 23\.00 GiB", str(refused.value)
    )
    shorter, smaller, lighter = refused.value.hint.removeprefix("any of these fits: ").split("; ")
    assert shorter.startswith("--max-ctx ") and (smaller, lighter) == ("--kv tq3_0", "--no-draft")
    with pytest.raises(ResourceError, match="a context of 256 tokens") as hopeless:
        on(survey_27b, 8).decide()
    assert hopeless.value.hint == "what would fit: a smaller model" or "weights take" in hopeless.value.hint


def test_what_others_use_counts(survey_27b: Survey) -> None:
    crowded = replace(survey_27b, room=Room(48 * GIB, 20 * GIB)).decide()
    assert named(crowded.kv) != "f16" and crowded.parts["in use before"] == 20 * GIB
    assert crowded.total <= 48 * GIB


def test_heads_that_no_block_divides_stay_in_16_bits(survey_27b: Survey) -> None:
    odd = replace(survey_27b.spec, head_dim=80)
    survey = replace(survey_27b, spec=odd)
    assert [named(choice.pair) for choice in survey.choices()][:1] == ["f16"]


def test_types_without_a_kernel_are_named(survey_27b: Survey) -> None:
    needs: Needs = replace(survey_27b.needs, widened={"Q2_K": 3 * GIB, "IQ2_XS": GIB})
    (note,) = replace(survey_27b, needs=needs, room=supposed_room(80 * GIB)).decide().notes()
    assert "Q2_K, IQ2_XS" in note and "4.00 GiB" in note
    assert on(survey_27b, 80).decide().notes() == []
