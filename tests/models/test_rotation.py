"""Weights in a rotated basis: the logits of the same model without it, and refusals of what is not known."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bough.errors import UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.gguf.rotation import require_usual_basis, rotation_of
from bough.gguf.types import QuantType
from bough.kernels.hadamard import BlockRotation, reference
from bough.kernels.kv_cache.format import FORMATS
from bough.models.decoder import Decoder
from bough.models.dflash import DFlashDraft, open_draft
from bough.models.measure import measured
from bough.models.mtp import MTPBlock
from bough.models.native import native_gap
from bough.models.native_draft import draft_gap
from bough.models.spec import ModelSpec
from bough.models.weights import WeightLoader
from bough.state.draft_ring import mtp_buffers
from tests.gguf_edit import edited
from tests.kernels.native_library import needs_native
from tests.models.rotated import EMBEDDING, PREFIX, Basis, hadamard, write_rotated
from tests.models.test_biases import logits_of
from tests.models.test_native import Run, compare_rows, loaded, story
from tests.tiny_draft import draft_config, draft_tensors, gguf_metadata, poisoned, random_rows, save_gguf
from workshop.grow.grow import grow

IDS = torch.arange(60, 90)
CLOSE, FAR = 2e-5, 1e-2  # relative RMS: float32 in another order, and another function
Q = QuantType


def logits(path: Path, **options: Any) -> torch.Tensor:
    with GGUFFile.open(path) as file, torch.inference_mode():
        return logits_of(Decoder.load(file, **options), IDS).double()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("block", [2, 32, 1024])
def test_the_transform_is_that_of_the_matrix(block: int) -> None:
    """In float64, and so are signs and order; restoring undoes it."""
    generator = torch.Generator().manual_seed(block)
    x = torch.randn(3, 2 * block, generator=generator, dtype=torch.float64)
    signs = torch.randint(0, 2, (2 * block,), generator=generator) * 2.0 - 1
    order = torch.randperm(2 * block, generator=generator)
    matrix = torch.from_numpy(hadamard(block))
    expected = ((x[:, order] * signs).view(3, 2, block) @ matrix).view(3, -1)
    found = BlockRotation(signs.double(), order, block)(x)
    assert (found - expected).abs().max() < 1e-12
    assert torch.equal(found[:1], BlockRotation(signs.double(), order, block)(x[:1])), "a row alone"
    in_order = BlockRotation(signs.double(), None, block)
    assert (in_order.restored(in_order(x)) - x).abs().max() < 1e-12


@pytest.mark.parametrize("expand", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("family", ["qwen35", "qwen3"])
def test_logits_are_those_of_the_unrotated_model(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, grouped: bool, expand: bool
) -> None:
    source = tiny_model(family, width=128, layers=4)
    rotated, plain = write_rotated(source, tmp_path, block=32, grouped=grouped)
    assert error(logits(plain), logits(source)) < CLOSE
    assert error(logits(rotated, expand=expand), logits(plain)) < CLOSE


@pytest.mark.parametrize("type", [Q.PQ2_0, Q.PTQ1_0, Q.Q2_0, Q.Q1_0], ids=lambda type: type.name)
def test_ternary_weights_in_another_basis(
    tiny_model: Callable[..., Path], tmp_path: Path, type: QuantType
) -> None:
    """Blocks of the rotation that are larger than those of the type, which are 64 or 128."""
    source = tiny_model(width=512, layers=4)
    rotated, plain = write_rotated(source, tmp_path, block=256, type=type)
    expected = logits(plain)
    for expand in (True, False):
        assert error(logits(rotated, expand=expand), expected) < CLOSE


@pytest.fixture(scope="module")
def pair(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_rotated(tiny_model(width=128, layers=4), tmp_path_factory.mktemp("pair"), block=32)


def keys_of(path: Path) -> dict[str, Any]:
    with GGUFFile.open(path) as file:
        return {key: value for key, value in file.metadata.items() if key.startswith(PREFIX)}


def test_every_tensor_and_every_key_counts(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A name left out, another block size, other signs, other heads: never the same function."""
    rotated, plain = pair
    expected, keys = logits(plain), keys_of(rotated)
    names = [
        (key, name) for key in ("weight_names", "inverse_weight_names") for name in keys[f"{PREFIX}{key}"]
    ]
    assert len(names) > 20 and any(name == EMBEDDING for _, name in names)
    mistakes: list[dict[str, Any]] = [
        {f"{PREFIX}{key}": [other for other in keys[f"{PREFIX}{key}"] if other != name] or None}
        for key, name in names
    ]
    signs = keys[f"{PREFIX}sign_values"]
    mistakes += [
        {f"{PREFIX}block_size": 16},
        {f"{PREFIX}sign_values": [*signs[:-1], -signs[-1]]},
        {f"{PREFIX}sign_values": signs[::-1]},
        {f"{PREFIX}sign_mode": "identity", f"{PREFIX}sign_widths": None, f"{PREFIX}sign_values": None},
        {f"{PREFIX}gdn_v_grouped": False},
        dict.fromkeys(keys),
    ]
    for change in mistakes:
        path = edited(rotated, tmp_path / "changed.gguf", keys=change)
        assert error(logits(path), expected) > FAR / 10, change  # one sign of 256 is the smallest


def test_the_wrong_side_is_another_function(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs after the transform, and an embedding that is rotated forth instead of back."""
    rotated, plain = pair
    expected = logits(plain)
    for wrong in ("rotated", "restored"):
        with monkeypatch.context() as patched:
            if wrong == "rotated":
                patched.setattr(
                    BlockRotation, "__call__", lambda self, x: reference.restore(x, self.signs, self.block)
                )
            else:
                patched.setattr(
                    BlockRotation,
                    "restored",
                    lambda self, z: reference.rotate(z, self.signs, None, self.block),
                )
            assert error(logits(rotated), expected) > FAR, wrong


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version is 2, needed 1"),
        ({"version": None}, "version is 'missing'"),
        ({"seed": 7}, r"key prism\.hadamard\.seed is not known"),
        ({"transform": "dct"}, "transform is 'dct'"),
        ({"axis": "output"}, "axis is 'output'"),
        ({"sign_mode": "random"}, "sign_mode is 'random'"),
        ({"block_size": 48}, "block_size is 48, needed a power of two"),
        ({"block_size": 256}, "whose columns are blocks of 256"),
        ({"block_size": "32"}, "block_size is '32'"),
        ({"sign_widths": [128]}, "sign_values"),
        ({"sign_widths": None}, "sign_widths is 'missing'"),
        ({"sign_values": [0]}, "sign_values"),
        ({"weight_names": ["blk.0.attn_q.weight", "blk.0.attn_q.weight"]}, "different names"),
        ({"weight_names": ["blk.9.attn_q.weight"]}, r"blk\.9\.attn_q\.weight is missing"),
        ({"weight_names": ["blk.0.ssm_conv1d.weight"]}, r"ssm_conv1d\.weight is not"),
        ({"weight_names": [EMBEDDING]}, "weight_names"),
        ({"inverse_weight_names": ["output.weight"]}, "inverse_weight_names"),
        ({"gdn_v_grouped": 1}, "gdn_v_grouped is 1"),
    ],
)
def test_what_is_not_known_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    changed = {f"{PREFIX}{key}": value for key, value in change.items()}
    path = edited(pair[0], tmp_path / "changed.gguf", keys=changed)
    with GGUFFile.open(path) as file, pytest.raises(UnsupportedModel, match=message):
        ModelSpec.from_gguf(file)


def test_other_keys_of_the_publisher_and_a_tied_head_are_refused(
    tiny_model: Callable[..., Path], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    path = edited(pair[0], tmp_path / "key.gguf", keys={"prism.quant.recipe": "x"})
    with GGUFFile.open(path) as file, pytest.raises(UnsupportedModel, match=r"prism\.quant\.recipe"):
        rotation_of(file)
    tied = edited(pair[0], tmp_path / "tied.gguf", without=("output.weight",))
    with GGUFFile.open(tied) as file, pytest.raises(UnsupportedModel, match="whose embedding is its head"):
        rotation_of(file)


@pytest.mark.parametrize(
    ("name", "accepted"),
    [
        ("Ternary-Bonsai-8B-PQ2_0", True),
        ("Bonsai-27B-PQ2_0", True),
        ("Ternary-Bonsai-2-27B-PQ2_0", False),
        ("Qwen3-4B-PQ2_0", False),
    ],
)
def test_private_types_without_keys(
    tiny_model: Callable[..., Path], tmp_path: Path, name: str, accepted: bool
) -> None:
    """Only in files of a model that had them before the rotation."""
    rotated, plain = write_rotated(
        tiny_model("qwen3", width=512, layers=2), tmp_path, block=256, type=Q.PQ2_0
    )
    path = edited(rotated, tmp_path / f"{name}.gguf", keys=dict.fromkeys(keys_of(rotated)))
    if accepted:
        assert error(logits(path), logits(plain)) > FAR  # of weights in the usual basis
    else:
        with GGUFFile.open(path) as file, pytest.raises(UnsupportedModel, match="PQ2_0"):
            ModelSpec.from_gguf(file)


def test_signs_are_by_width_and_order_by_heads() -> None:
    """Value head v reads with key head v % keys: tiled, key heads are together in strides of their count."""
    basis = Basis(4, heads=(2, 6))
    weight = np.arange(48.0).reshape(1, 48)
    assert np.allclose(basis.unfold("ssm_out", basis.fold("ssm_out", weight)), weight)
    assert not np.allclose(basis.fold("ssm_out", weight), basis.fold("attn_q", weight))


def published(tiny_model: Callable[..., Path], folder: Path, type: QuantType) -> tuple[Path, Path]:
    """A model in the published mix, all matrices in one type but two of a delta layer, and it unrotated."""
    return write_rotated(tiny_model(width=512, layers=4), folder, block=256, type=type)


@needs_native
@torch.inference_mode()
@pytest.mark.parametrize("type", [Q.PQ2_0, Q.PTQ1_0], ids=lambda type: type.name)
def test_native_code_is_near_the_unrotated_reference(
    tiny_model: Callable[..., Path], tmp_path: Path, type: QuantType
) -> None:
    """Chunks, trees, commits and taps; a row has the same bits alone and in trees."""
    rotated, plain = published(tiny_model, tmp_path, type)
    with GGUFFile.open(rotated) as file:
        assert native_gap(file, ModelSpec.from_gguf(file), (FORMATS["f32"],) * 2) is None
    for expected, found in zip(story(loaded(plain)), story(loaded(rotated, threads=2)), strict=True):
        assert (found - expected).norm() <= 1e-3 * expected.norm() + 1e-30  # activations in 16 bits
    alone, wide = Run(loaded(rotated, threads=1)), Run(loaded(rotated, threads=3))
    compare_rows(alone, wide, 60, chunk=33, seed=3)


@needs_native
def test_native_code_leaves_other_mixtures_to_torch(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Floats in the basis, and quantised matrices that are not."""
    with GGUFFile.open(pair[0]) as file:
        gap = native_gap(file, ModelSpec.from_gguf(file), (FORMATS["f32"],) * 2)
        assert gap is not None and "in F32 is rotated" in gap


@torch.inference_mode()
@pytest.mark.parametrize("type", [Q.PQ2_0, Q.PTQ1_0, Q.Q2_0, Q.Q1_0], ids=lambda type: type.name)
def test_in_tiles(tiny_model: Callable[..., Path], tmp_path: Path, type: QuantType) -> None:
    """As on a GPU: in Q4_0, neighbours joined where they are in one basis; the plan counts them so."""
    rotated, plain = published(tiny_model, tmp_path, type)
    device = torch.device("cpu")
    with GGUFFile.open(rotated) as file:
        spec, loader = ModelSpec.from_gguf(file), WeightLoader(file, device=device, tiles=True)
        found = logits_of(Decoder(spec, loader, device), IDS).double()
        plan = measured(file, lambda loader: Decoder(spec, loader, device))
        names = [name for name in rotation_of(file).names if name != EMBEDDING]
        extra = sum(file.tensors[name].elements * 18 // 32 - file.tensors[name].nbytes for name in names)
    assert error(found, logits(plain)) < 1e-3  # alpha and beta in float16
    assert loader.widened == plan.widened and set(plan.widened) == {type}
    # Rows are filled up to 128: those of this model are few.
    assert extra <= plan.widened[type] <= 1.1 * extra


@torch.inference_mode()
def test_the_mtp_block_in_another_basis(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """With the target's embedding and head, which are rotated, too: its outputs and their logits."""
    source = tiny_model(width=128, layers=4, mtp=True)
    outputs = []
    for path in write_rotated(source, tmp_path, block=32):
        with GGUFFile.open(path) as file:
            target = Decoder.load(file)
            assert any("nextn.eh_proj" in name for name in file.tensors)
            block = MTPBlock.load(file, target.spec, device=target.device, dtype=torch.float32)
        buffers = mtp_buffers(target.spec, max_ctx=64)
        slots, ids = torch.tensor([0]), torch.arange(60, 72)
        hidden = torch.randn(1, 12, 128, generator=torch.Generator().manual_seed(0))
        block.append(torch.cat([target.embed(ids)[None], hidden], -1), slots, buffers)
        x = block.fuse(target.embed(ids[:1]), buffers.newest.last(slots)[:, 0])
        rows, _ = block.step(x, torch.tensor([0]), block.nothing(1), slots, buffers)
        outputs.append(torch.cat([rows.flatten(), target.draft_logits(rows).flatten()]).double())
    assert error(*outputs) < CLOSE


@torch.inference_mode()
def test_a_draft_in_another_basis(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """A DFlash draft whose file has keys of its own."""
    with GGUFFile.open(tiny_model("qwen3", layers=12)) as file:
        target = ModelSpec.from_gguf(file)
    config = draft_config(target)
    source = save_gguf(tmp_path / "draft.gguf", gguf_metadata(config), draft_tensors(config))
    outputs = []
    for path in write_rotated(source, tmp_path, block=16):
        with open_draft(path, target) as (spec, file):
            assert (draft_gap(file, spec) is None) == (rotation_of(file) is None)
        draft = DFlashDraft.load(path, target)
        buffers, slot = poisoned(draft), torch.zeros(1, dtype=torch.int64)
        draft.append(random_rows(1, 45, 3 * target.width), slot, buffers)
        outputs.append(draft.block(random_rows(1, 16, target.width), slot, buffers).double())
    assert error(*outputs) < CLOSE


def test_what_copies_weights_as_they_are_stored_refuses(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with GGUFFile.open(pair[0]) as file:
        require_usual_basis(file, ["blk.0.attn_norm.weight"])
        with pytest.raises(UnsupportedModel, match=r"blk\.0\.ffn_up\.weight is in a rotated basis"):
            require_usual_basis(file, ["blk.0.ffn_up.weight", "blk.1.ffn_up.weight"])
    with pytest.raises(UnsupportedModel, match="is in a rotated basis"):
        grow(tmp_path / "grown", target=pair[0])
