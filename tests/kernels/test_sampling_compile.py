"""The kernels of sampling and trees compile for every card on the list."""

import pytest
import triton
from triton.compiler import ASTSource

from bough.kernels.sampling import search
from bough.kernels.sampling import triton_kernels as sampling
from bough.kernels.tree import triton_kernels as tree
from tests.kernels.cards import TARGETS

FLOATS = "logits adjusted maxima numbers counts bias scores chain_scores edges table corrected gains"
FLOATS = {*FLOATS.split(), "out_weights", "scores_out"}
SCALARS = "tree_rows stride vocabulary words capacity splits depths width chain_count edge_count nodes rows"
SCALARS = {*SCALARS.split(), "stop_count", "lines"}
TYPES = {
    "count": "*i32",
    "arrived": "*i32",
    "prompt": "*i1",
    "allowed": "*i32",
    "homes": "*i32",
    "spine": "fp32",
}
# A short list a quarter of the usual length: sorting it is most of what there is to compile.
CONSTANTS = {"SPLITS": 256, "BLOCK": 2048, "CHUNK": 1024, "WIDE": 32, "MASKS": 4, "LIST": 256}
CONSTANTS |= {"CLASSES": 64, "MAXIMA": 4096, "RANK": 697, "DEEP": 16}
KERNELS = {
    "adjust": (sampling.adjust_kernel, {"COUNT": 0, "BLOCK": 4096}, 8),
    "shortlist": (sampling.shortlist_kernel, {"COUNT": 0}, 8),
    "histogram": (search.histogram_kernel, {"COUNT": 0}, 8),
    "gather": (search.gather_kernel, {"COUNT": 0}, 8),
    "noise": (sampling.noise_kernel, {"BLOCK": 1024}, 4),
    "shortlist for a ranking": (sampling.shortlist_kernel, {"COUNT": 24}, 8),
    "rank": (search.rank_kernel, {"COUNT": 24}, 8),
    "best tree": (tree.best_tree_kernel, {"CORRECTED": True}, 1),
    "accept path": (tree.accept_path_kernel, {"RAGGED": False}, 1),
    "accept paths": (tree.accept_path_kernel, {"RAGGED": True}, 1),
}


def type_of(name: str) -> str:
    if name in SCALARS:
        return "i32"
    return TYPES.get(name, "*fp32" if name in FLOATS else "*i64")


@pytest.mark.parametrize("card", TARGETS)
def test_kernels_compile(card: str) -> None:
    for kernel, own, warps in KERNELS.values():
        constants = {key: value for key, value in {**CONSTANTS, **own}.items() if key in kernel.arg_names}
        types = {name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind[0] == "*"}
        source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
        options = {"num_warps": warps, "enable_fp_fusion": False}
        made = triton.compile(source, target=TARGETS[card][0], options=options)
        # So little shared memory that it never decides how many programs fit.
        assert made.metadata.shared <= 32 << 10
