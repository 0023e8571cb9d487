"""The layers' kernels compile for every card on the list; the hot ones fit into its shared memory."""

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from bough.kernels.attention import triton_kernels as attention
from bough.kernels.causal_conv import cuda as conv_cuda
from bough.kernels.causal_conv import triton_kernels as conv
from bough.kernels.commit import triton_kernels as commit
from bough.kernels.delta_rule import cuda as delta_cuda
from bough.kernels.delta_rule import triton_kernels as delta
from bough.kernels.delta_rule.cpu import saved_states
from bough.kernels.embedding import triton_kernels as embedding
from bough.kernels.kv_cache import triton_kernels as cache
from bough.kernels.norm_rope import cuda as rows_cuda
from bough.kernels.norm_rope import ring
from bough.kernels.norm_rope import triton_kernels as norm
from bough.kernels.runtime.nvrtc import compile_cubin
from bough.kernels.slot_mapping import triton_kernels as slot_mapping
from bough.kernels.tree import MAX_ROWS
from tests.kernels.cards import CARDS, TARGETS

INT64 = "slots path count index parents ancestors first begins end table lengths starts positions tokens tree"
INT64 += " rows own_lengths own_table own_path own_count last counts source page_table pages offsets"
POINTERS = {
    **dict.fromkeys(INT64.split(), "*i64"),
    **dict.fromkeys(("order", "plane", "active"), "*i32"),
    **dict.fromkeys(("key_scales", "value_scales", "keys", "values", "window", "stash"), "*fp16"),
    "data": "*u8",
}
NUMBERS = ("row_bytes", "T", "slot_stride", "PATH", "SAVED", "units", "width", "ring", "sequences")
NUMBERS += ("spare_page", "size", "tree_rows")
HEAD = {"D": 256, "HALF": 32, "BLOCK": 256, "NORM": True, "INTERLEAVED": False}
SPLIT = {"KV": 4, "GROUP": 6, "D": 256, "BLOCK": 256, "SPLITS": attention.SPLITS}
NORM = {"WIDTH": 5120, "PADDED": 5120, "BLOCK": 8192, "ADD": 1}
SILU = {"WIDTH": 17408, "PADDED": 17408, "FIRST": 16384, "REST": 1024}
SIMPLE = {
    "norm": (norm._norm_kernel, {**NORM, "PACK": False}),
    "packed norm": (norm._norm_kernel, {**NORM, "PACK": True}),
    "packed norm with row scales": (norm._norm_kernel, {**NORM, "PACK": True, "ADD": 2}),
    "packed gated norm": (
        norm._gated_norm_rows_kernel,
        {"HEADS": 48, "D": 128, "PADDED": 6144, "BLOCK_HEADS": 64, "BLOCK": 128},
    ),
    "packed silu": (norm._silu_rows_kernel, {**SILU, "SCALED": False}),
    "packed silu with row scales": (norm._silu_rows_kernel, {**SILU, "SCALED": True}),
    "gated norm": (norm._gated_norm_kernel, {"HEADS": 48, "D": 128, "BLOCK": 128, "UNITS": 4}),
    "silu": (norm._silu_mul_kernel, {"BLOCK": 1024}),
    "heads": (norm._head_kernel, {"HEADS": 24, **HEAD}),
    "ring": (
        ring._ring_kernel,
        {"HEADS": 8, "D": 128, "HALF": 64, "BLOCK": 128, "INTERLEAVED": False},
    ),
    **{
        f"embedding {bits}": (embedding._embed_kernel, {"WIDTH": 5120, "BITS": bits, "COLUMNS": 256})
        for bits in embedding.TYPES.values()
    },
    "tree": (slot_mapping._pad_kernel, {"BLOCK": 64}),
    "ragged rows": (slot_mapping._ragged_kernel, {"BLOCK": 64}),
    "move": (
        commit._move_kernel,
        {"ROWS": 64, "BLOCK": 64, "HEADS": 4, "PAGE": 64, "WIDTH": 128, "BLOCK_WIDTH": 128},
    ),
}
BY_SEQUENCE = {
    "slot mapping": (
        slot_mapping._slot_mapping_kernel,
        {"PAGE": 64, "PAGES": 129, "SAVED": 64, "BLOCK": 256},
    ),
    "path": (commit._commit_kernel, {"BLOCK": 64}),
    "index": (conv._index_kernel, {"WIDTH": 4, "BLOCK": 128}),
    "conv": (
        conv._conv_kernel,
        {"KEY_HEADS": 16, "VALUE_HEADS": 48, "D": 128, "WIDTH": 4, "ROWS": 16, "WINDOW": 4},
    ),
    "merge": (
        attention._merge_kernel,
        {**SPLIT, "TAILS": 2, "ROTATION": 128, "PARTS": 64, "STEP": 32, "GATE": True},
    ),
}
SIMPLE |= {
    f"{name}{' of ragged rows' if ragged else ''}": (kernel, {**constants, "RAGGED": ragged})
    for name, (kernel, constants) in BY_SEQUENCE.items()
    for ragged in (False, True)
}


def built(
    kernel, target: GPUTarget, constants: dict, *, scalars: dict | None = None, **options
) -> CompiledKernel:
    if "OVERLAP" in kernel.arg_names:
        has_pdl = capability(target) is not None and capability(target) >= (9, 0)
        constants = {**constants, "OVERLAP": has_pdl}
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in (scalars or {}):
            types[name] = scalars[name]
        elif name in NUMBERS or name.endswith(("stride", "_row", "_head")):
            types[name] = "i32"
        else:
            types[name] = "fp32" if name in ("eps", "scale") else POINTERS.get(name, "*fp32")
    # As at a launch: tensors lie at multiples of 16 bytes.
    aligned = {(i,): [["tt.divisibility", 16]] for i, type in enumerate(types.values()) if type[0] == "*"}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=target, options={"num_warps": 4, **options})


def shared_memory(kernel, target: GPUTarget, constants: dict, **more) -> int:
    """Compiles a kernel and gives the bytes of shared memory that a program takes."""
    return built(kernel, target, constants, **more).metadata.shared


def capability(target: GPUTarget) -> tuple[int, int] | None:
    return divmod(target.arch, 10) if target.backend == "cuda" else None


def tiled(kernel, card: str, constants: dict, chosen: dict, **more) -> CompiledKernel:
    """With tiles as the launcher chooses them: those in capitals are constants, the others options."""
    fixed = {name: value for name, value in chosen.items() if name.isupper()}
    options = {name: value for name, value in chosen.items() if not name.isupper()}
    return built(kernel, TARGETS[card][0], {**constants, **fixed}, **options, **more)


def compiled(kernel, card: str, constants: dict, chosen: dict, **more) -> int:
    """The bytes of shared memory that a program takes then."""
    return tiled(kernel, card, constants, chosen, **more).metadata.shared


@pytest.mark.parametrize("card", TARGETS)
def test_small_kernels(card: str) -> None:
    target, limit = TARGETS[card]
    for kernel, constants in SIMPLE.values():
        assert shared_memory(kernel, target, constants) <= limit


@pytest.mark.parametrize("card", TARGETS)
def test_delta(card: str) -> None:
    target, limit = TARGETS[card]
    constants = {"KEY_HEADS": 16, "VALUE_HEADS": 48, "D": 128, "COLUMNS": delta.COLUMNS, "RAGGED": True}
    fixed = {"enable_fp_fusion": False}
    assert shared_memory(delta._tree_kernel, target, {**constants, "LEVELS": 4}, **fixed) <= limit
    assert shared_memory(delta._order_kernel, target, {"RAGGED": True, "ROWS": 64}) <= limit


def sides(keys: str, values: str) -> tuple[dict, dict]:
    """Constants of a pair of formats, and the types of what they are stored in."""
    stored = {"float": "*fp16", "bf16": "*bf16"}
    types = {"key_codes": stored.get(keys, "*u8"), "value_codes": stored.get(values, "*u8")}
    return {"KEYS": keys.replace("bf16", "float"), "VALUES": values.replace("bf16", "float")}, types


@pytest.mark.parametrize(
    ("card", "pair"),
    [(card, ("q8_0", "tq3_0")) for card in TARGETS]
    + [("sm_90", ("q4_0", "q5_0")), ("sm_90", ("float", "bf16"))],
)
def test_cache(card: str, pair: tuple[str, str]) -> None:
    constants, types = sides(*pair)
    pages = {"KV": 4, "PAGE": 64, "SIZE": 128}
    chosen = {"num_warps": 1, "enable_fp_fusion": False}
    heads = {**HEAD, "HEADS": 24, "STRETCH": 1.0}
    compiled(cache._cache_kernel, card, {**heads, **pages, **constants}, chosen, scalars=types)
    if pair[0] != "float":
        types = {"codes": "*u8", "scales": "*fp16", "out": "*fp16", "first": "i32", "count": "i32"}
        constants = {**pages, "D": 256, "FORMAT": pair[0], "BLOCK_N": 32}
        assert compiled(cache._expand_kernel, card, constants, {}, scalars=types) <= TARGETS[card][1]


@pytest.mark.parametrize(
    ("card", "pair", "window"),
    [(card, pair, False) for card in TARGETS for pair in (("float", "float"), ("q8_0", "q8_0"))]
    + [
        ("sm_90", ("q4_0", "tq3_0"), False),
        ("sm_90", ("bf16", "q5_0"), True),
        ("sm_86", ("tq3_0", "q4_0"), True),
        ("sm_75", ("q5_0", "tq3_0"), False),
    ],
)
def test_paged_attention(card: str, pair: tuple[str, str], window: bool) -> None:
    """Of the target, with heads of 256."""
    target, limit = TARGETS[card]
    constants, types = sides(*pair)
    operands = [tl.bfloat16 if side == "bf16" else tl.float16 for side in pair]
    row_bytes = 512 if types["key_codes"] != "*u8" or types["value_codes"] != "*u8" else 256
    constants |= {**SPLIT, "TIER0": 66, "SPLITS0": 22, "TIER1": 128, "SPLITS1": 30}
    constants |= {"PRECISION": "ieee", "PAGE": 64}
    constants |= {"WINDOW": window, "RAGGED": window}
    constants |= {"KEY_TYPE": operands[0], "VALUE_TYPE": operands[1]}
    constants["ROTATION"] = 128 if types["key_codes"] == "*u8" else 0
    chosen = attention.tiles(256, row_bytes, capability(target)) | {"enable_fp_fusion": False}
    types |= dict.fromkeys(("rows", "sequences", "tiles", "window"), "i32")
    assert compiled(attention._paged_kernel, card, constants, chosen, scalars=types) <= limit


@pytest.mark.parametrize("card", TARGETS)
def test_ring_attention(card: str) -> None:
    """Of the draft, with heads of 128."""
    target, limit = TARGETS[card]
    constants = {**SPLIT, "PRECISION": "ieee", "CAUSAL": True, "D": 128, "BLOCK": 128}
    chosen = attention.tiles(128, 256, capability(target))
    assert compiled(attention._ring_kernel, card, constants, chosen, scalars={"window": "i32"}) <= limit


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_cuda_kernels(arch: str) -> None:
    overlap = int(arch in ("sm_90", "sm_120"))
    for dim in (16, 64, 128) if arch != "sm_90" else (32, 128, 256):
        macros = {"D": dim, "OVERLAP": overlap}
        assert compile_cubin(delta_cuda.source(), defines=macros, arch=arch, cached=False)
    for half, sequences in ((False, 1), (True, 1), (True, 4), (True, 16)):
        macros = conv_cuda.defines(half, conv_cuda.warps_of(sequences), bool(overlap))
        assert compile_cubin(conv_cuda.source(), defines=macros, arch=arch, cached=False)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_120"])
def test_cuda_rows(arch: str) -> None:
    """The 27B's rows and odd ones."""
    overlap = arch in ("sm_90", "sm_120")
    sizes = [(rows_cuda.NORM, 5120), (rows_cuda.NORM, 100), (rows_cuda.SILU, 17408), (rows_cuda.SILU, 1028)]
    shapes = [rows_cuda.shape_of(kind, width) for kind, width in sizes]
    shapes += [rows_cuda.shape_of(rows_cuda.GATED, 6 * dim, dim) for dim in (32, 128)]
    for shape in shapes:
        cubin = compile_cubin(rows_cuda.source(), defines=shape.defines(overlap), arch=arch, cached=False)
        assert cubin, shape


def test_rows_are_cut_into_blocks_that_hold_whole_heads() -> None:
    for kind in (rows_cuda.NORM, rows_cuda.SILU, rows_cuda.GATED):
        for head in (4, 8, 32, 128):
            for heads in (1, 3, 48, 136):
                width = heads * head
                shape = rows_cuda.shape_of(kind, width, head)
                parts = -(-width // 256) * 64 // shape.cluster
                assert shape.cluster >= 1 and parts % (head // 4) == 0
                assert shape.threads % 32 == 0 and 32 <= shape.threads <= 1024
    assert rows_cuda.shape_of(rows_cuda.SILU, 17408).cluster == 8


@pytest.mark.parametrize("card", CARDS)
def test_the_cuda_delta_rule_fits_every_card(card: str) -> None:
    """With every number of rows, and with a warp for each scheduler of an SM."""
    for dim in (16, 32, 64, 128):
        for saved in range(saved_states(MAX_ROWS) + 1):
            for groups, units in ((16, 48), (64, 48), (2, 3 * dim // 8)):
                warps = delta_cuda.warps_of(CARDS[card], dim, saved, groups=groups, units=units)
                assert delta_cuda.shared_bytes(dim, warps, saved) <= CARDS[card].shared_per_block
                assert warps >= 4 or groups * units < 8 * CARDS[card].processors


def test_the_cuda_delta_rule_gives_each_sm_of_an_h200_six_warps_of_a_27b() -> None:
    assert [delta_cuda.warps_of(CARDS["H200"], 128, n, groups=16, units=48) for n in range(5)] == [6] * 5
