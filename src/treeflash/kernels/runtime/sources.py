"""The CUDA C++ sources in the kernels' folders. NVRTC has no include path, so files are concatenated."""

from functools import cache
from importlib.resources import files


@cache
def source(package: str, *names: str) -> str:
    """Return the named .cu files of kernels/<package>, concatenated."""
    folder = files(f"treeflash.kernels.{package}")
    return "\n".join(folder.joinpath(name).read_text() for name in names)


def pdl_source(package: str, *names: str) -> str:
    """Return the same, after runtime/pdl.cu: for kernels with programmatic dependent launch (PDL)."""
    return "\n".join((source("runtime", "pdl.cu"), source(package, *names)))
