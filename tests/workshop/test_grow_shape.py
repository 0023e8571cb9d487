"""Shapes that can be grown, and the plan of the 27B; writes no large file."""

import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from bough.errors import ModelNotFound, ResourceError, UnsupportedModel, UsageError
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.hub.catalog import Pair, named
from bough.models.draft_spec import DraftSpec
from bough.models.spec import ModelSpec
from tests.workshop.test_grow import WIDER, specification, tiny_draft
from workshop.grow.grow import TARGET, grow
from workshop.grow.plan import TensorPlan, plan_draft, plan_target
from workshop.grow.shape import like, preset


@pytest.fixture(scope="module")
def embedded() -> Pair:
    found = named("bough-40m")
    assert found is not None and found[0].pair is not None
    return found[0].pair


def plans(pair: Pair, *, random: bool, name: str = "27b") -> tuple[list[TensorPlan], list[TensorPlan]]:
    """Of a preset and its draft."""
    with GGUFFile.open(pair.target) as target, GGUFFile.open(pair.draft) as draft:
        spec, draft_spec = ModelSpec.from_gguf(target), DraftSpec.from_gguf(draft)
        shape = preset(name, spec, draft_spec)
        return (
            plan_target(spec, target, shape, random=random),
            plan_draft(draft_spec, draft, shape.draft, shape.target.width, random=random),
        )


def test_the_random_27b_has_the_size_of_the_published_file(embedded: Pair):
    target, draft = plans(embedded, random=True)
    assert len(target) == 851
    # Qwen3.5-27B Q4_K_M has 16,740,812,160 bytes, of which about 11 MB are its header
    assert 16_728_000_000 < sum(plan.info.nbytes for plan in target) < 16_732_000_000
    assert sum(plan.info.elements for plan in draft) == 1_730_213_120


def test_the_random_35b_a3b_has_the_parameters_of_the_published_one(embedded: Pair):
    target, _ = plans(embedded, random=True, name="35b-a3b")
    assert len(target) == 733
    assert sum(plan.info.elements for plan in target) == 34_660_610_688
    types = {plan.name: plan.type for plan in target}
    assert types["blk.0.ffn_gate_inp.weight"] is QuantType.F32
    assert types["blk.20.ffn_gate_exps.weight"] is QuantType.Q4_K
    assert types["blk.39.ffn_down_exps.weight"] is QuantType.Q6_K
    active = sum(plan.info.elements // (32 if "_exps." in plan.name else 1) for plan in target)
    assert 3.3e9 < active < 3.6e9


def test_experts_are_random_only(tmp_path: Path):
    with pytest.raises(UsageError, match="256 experts cannot answer as") as raised:
        grow(tmp_path, "35b-a3b")
    assert "`random`" in (raised.value.hint or "")


def test_nine_in_ten_weights_of_the_grown_27b_are_not_zero(embedded: Pair):
    target, _ = plans(embedded, random=False)
    matrices = [plan for plan in target if plan.name.startswith("blk.") and len(plan.shape) == 2]
    zero = sum(plan.shape[0] * (stop - start) for plan in matrices for start, stop in plan.zero)
    assert 1 - zero / sum(plan.info.elements for plan in matrices) > 0.88
    real = {plan.name: plan.type for plan in target if plan.source is not None}
    with GGUFFile.open(embedded.target) as file:
        assert real["token_embd.weight"] is real["output.weight"] is file.tensors["token_embd.weight"].type


def test_like_takes_shape_and_types(tmp_path: Path, tiny_model):
    small = tiny_model()
    shape = replace(WIDER.target, layers=16, width=256)
    model = grow(tmp_path / "model", replace(WIDER, target=shape), target=small, random=True).target
    taken = like(model, specification(small))
    assert taken.target == replace(shape, context_length=4096) and taken.types is not None
    assert taken.types["blk.15.ffn_up.weight"] is QuantType.Q4_K
    grown = grow(tmp_path / "grown", target=small, as_file=model)
    with GGUFFile.open(grown.target) as file, GGUFFile.open(model) as original:
        # the real layers keep F32, the others are as in the file
        assert file.tensors["blk.3.attn_q.weight"].type is QuantType.F32
        assert file.tensors["blk.5.attn_gate.weight"] == original.tensors["blk.5.attn_gate.weight"]
        assert list(file.tensors) == list(original.tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 12}, "query heads per KV head: the shape has 12 / 4, needed 2, as in the pair"),
        ({"value_heads": 8}, "value heads per key head: the shape has 8 / 4, needed 3, as in the pair"),
        ({"width": 64}, "width is 64, needed: at least 65"),
        ({"layers": 4}, "layers is 4, needed: at least 8"),
        ({"layers": 10}, "layers is 10, needed: a multiple of 4"),
        ({"feed_forward": 64}, "feed_forward is 64, needed: at least 128"),
        ({"vocab_size": 319}, "vocabulary is 319, needed: at least 320"),
        ({"kv_heads": 1, "heads": 2}, "KV heads is 1, needed: at least 2"),
    ],
)
def test_shapes_that_do_not_fit(tmp_path: Path, tiny_model, change: dict[str, int], message: str):
    shape = replace(WIDER, target=replace(WIDER.target, **change))
    with pytest.raises(UsageError, match=message):
        grow(tmp_path / "grown", shape, target=tiny_model())
    assert not (tmp_path / "grown").exists()


def test_drafts_that_do_not_fit(tmp_path: Path, tiny_model):
    target = tiny_model()
    draft = tiny_draft(target, tmp_path / "draft.gguf", QuantType.F32)
    for change, message in (
        ({"layers": 2}, "the draft's layers is 2, needed: at least 3"),
        ({"heads": 12}, "the draft's query heads per KV head: the shape has 12 / 4, needed 2"),
    ):
        shape = replace(WIDER, draft=replace(WIDER.draft, **change))
        with pytest.raises(UsageError, match=message):
            grow(tmp_path / "grown", shape, target=target, draft=draft)


def test_models_that_cannot_be_grown(tmp_path: Path, tiny_model):
    with pytest.raises(UnsupportedModel, match="'qwen3', only 'qwen35' can be grown"):
        grow(tmp_path / "grown", WIDER, target=tiny_model("qwen3"))
    with pytest.raises(UnsupportedModel, match="'llama', needed 'qwen35'"):
        grow(tmp_path / "grown", as_file=tiny_model("llama"), target=tiny_model())
    with pytest.raises(UsageError, match=r"attention\.key_length is 32, needed 256"):
        grow(tmp_path / "grown", as_file=tiny_model())
    with pytest.raises(UsageError, match="`preset` is '9b', needed: one of 27b, 35b-a3b, double"):
        grow(tmp_path / "grown", "9b")
    with pytest.raises(ModelNotFound):
        grow(tmp_path / "grown", target=tmp_path / "none.gguf")
    # K types have blocks of 256
    odd = replace(WIDER, target=replace(WIDER.target, width=320, feed_forward=768))
    with pytest.raises(UnsupportedModel, match="needs a multiple of 256"):
        grow(tmp_path / "grown", odd, target=tiny_model(mix="q4_k_m", width=256))


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free=10_000_000_000))
    with pytest.raises(ResourceError, match=r"growing needs 1[89]\.\d\d GB, 10\.00 GB are free"):
        grow(tmp_path / "grown")
    assert not list((tmp_path / "grown").iterdir())


def test_existing_files_are_not_overwritten(tmp_path: Path, tiny_model):
    (tmp_path / TARGET).write_bytes(b"precious")
    with pytest.raises(UsageError, match="exists"):
        grow(tmp_path, WIDER, target=tiny_model())
    assert (tmp_path / TARGET).read_bytes() == b"precious"
    grow(tmp_path, WIDER, target=tiny_model(), force=True)
    assert specification(tmp_path / TARGET).width == 192


def test_an_interruption_leaves_nothing(tmp_path: Path, tiny_model):
    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        grow(tmp_path / "grown", WIDER, target=tiny_model(), progress=interrupt)
    assert not list((tmp_path / "grown").iterdir())
