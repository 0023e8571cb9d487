"""The CUDA C++ sources in the kernels' folders. NVRTC has no include path, so files are concatenated."""

from functools import cache
from importlib.resources import files


@cache
def source(package: str, *names: str) -> str:
    """Return the named .cu files of kernels/<package>, concatenated."""
    folder = files(f"bough.kernels.{package}")
    return "\n".join(folder.joinpath(name).read_text() for name in names)


def pdl_source(package: str, *names: str) -> str:
    """Return the same, after runtime/pdl.cu: for kernels with programmatic dependent launch (PDL)."""
    return "\n".join((source("runtime", "pdl.cu"), source(package, *names)))


def warp_group_mma(name: str, columns: int, layout: int, *, bf16: bool = False) -> str:
    """Return a CUDA function that adds one step of 16 to a warp group's sums [columns / 8][4]; Hopper only.

    `more` = 0 starts new sums. The first operand is in registers, the second in shared memory: b and `layout`
    are the halves of its descriptor.
    """
    kind, count = "bf16" if bf16 else "f16", columns // 2
    sums = ",".join(f"%{i}" for i in range(count))
    a, b, more = ",".join(f"%{count + i}" for i in range(4)), f"%{count + 4}", f"%{count + 5}"
    outputs = ",".join(f'"+f"(c[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void {name}(float* c, const unsigned* a, unsigned b, int more) {{\n"
        f'  asm volatile("{{.reg .pred p; .reg .b64 d; "\n'
        f'    "setp.ne.b32 p,{more},0; mov.b64 d,{{{b},{layout}}}; "\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "\n'
        f'    "{{{sums}}},{{{a}}},d,p,1,1,0;}}"\n'
        f"    : {outputs}\n"
        f'    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(more));\n}}'
    )
