"""Cross-compiles the Triton matmuls; run in a process of its own, without the interpreter."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bough.gguf.types import QuantType
from bough.kernels.quant_matmul import triton_kernels
from bough.kernels.quant_matmul.layout import DENSE, LAYOUTS
from tests.kernels.cards import TARGETS

POINTERS = {"data": "*u8", "table": "*fp32", "x": "*fp16", "out": "*fp16"}
FLOATS = ("row_scale", "x_scale", "y", "factor", "scale")


def compile_kernel(function, constants: dict, target: GPUTarget, warps: int = 4, **pointers: str) -> None:
    types = {**POINTERS, **dict.fromkeys(FLOATS, "*fp32"), **pointers}
    signature = {name: types.get(name, "i32") for name in function.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    positions = {(function.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, signature, positions)
    compiled = triton.compile(source, target=target, options={"num_warps": warps})
    binary = compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]
    assert binary, (function.__name__, target)


def main() -> None:
    target, _ = TARGETS[sys.argv[1]]
    compile_kernel(
        triton_kernels._expand_kernel,
        triton_kernels.constants(LAYOUTS[QuantType.IQ4_XS]) | {"ROWS": 64},
        target,
    )
    for layout in (LAYOUTS[QuantType.Q4_K], DENSE):
        constants = triton_kernels.constants(layout) | {"ROWS": 64, "BUCKET": 24, "COLUMNS": 32}
        compile_kernel(triton_kernels._matmul_kernel, constants, target, warps=triton_kernels._WARPS)
    compile_kernel(triton_kernels._add_kernel, {"WIDTH": 1024}, target, parts="*fp32")
    compile_kernel(triton_kernels._pack_rows_kernel, {"WIDTH": 1024}, target, x="*fp32")


if __name__ == "__main__":
    main()
