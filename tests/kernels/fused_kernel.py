"""Compiles x * y + z for a card as kernels that do not say are compiled; prints the fused multiply-adds."""

import bough  # isort: skip  (before Triton, as in every program of ours)
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

assert bough.__version__


@triton.jit
def multiply_add(x, y, z, out):
    tl.store(out, tl.load(x) * tl.load(y) + tl.load(z))


def fused(options: dict[str, bool]) -> int:
    source = ASTSource(
        fn=multiply_add, signature=dict.fromkeys(multiply_add.arg_names, "*fp32"), constexprs={}
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert made.metadata.enable_fp_fusion == options.get("enable_fp_fusion", True)
    return made.asm["ptx"].count("fma.rn.f32")


print(f"by default {fused({})}, without fusion {fused({'enable_fp_fusion': False})}")
