"""Compiles CUDA C++ to machine code with the NVRTC library of torch's wheels, through ctypes. Needs no GPU.

Cubins are cached on disk beside Triton's own cache, by the hash of source, options and NVRTC version.
"""

import ctypes
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from bough.old_name import folder_in


class CompileFailed(RuntimeError):
    """NVRTC refused our source; its log is the message."""


def compile_cubin(source: str, *, defines: Mapping[str, int], arch: str, cached: bool = True) -> bytes:
    """Return machine code of `source` for an architecture such as sm_90, PTX for compute_90. Thread-safe."""
    library = nvrtc()
    assert library is not None, "libnvrtc was not found"
    options = [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        *(f"-D{key}={value}" for key, value in defines.items()),
    ]
    path = _cache_path(source, options, _version(library)) if cached else None
    if path is not None and path.is_file():
        return path.read_bytes()
    cubin = _compile(library, source, options)
    if path is not None:
        _store(path, cubin)
    return cubin


@cache
def nvrtc() -> ctypes.CDLL | None:
    """Return the library, preferably of the CUDA version torch was built for; None if none is installed."""
    major = (torch.version.cuda or "13").split(".")[0]
    package = importlib.util.find_spec("nvidia")
    folders = map(Path, (package.submodule_search_locations or ()) if package else ())
    wheels = sorted(str(path) for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*"))
    # The wheel's before one of the system, which may be older.
    ours = [name for name in wheels if f".so.{major}" in name]
    names = [*ours, f"libnvrtc.so.{major}", f"nvrtc64_{major}0_0.dll", *wheels]
    for name in [*names, "libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@cache
def architectures() -> tuple[str, ...]:
    """Return the architectures that the library compiles for, such as sm_90; none if it does not say."""
    library, count = nvrtc(), ctypes.c_int()
    if library is None or library.nvrtcGetNumSupportedArchs(ctypes.byref(count)):
        return ()
    numbers = (ctypes.c_int * count.value)()
    return () if library.nvrtcGetSupportedArchs(numbers) else tuple(f"sm_{number}" for number in numbers)


def nvrtc_version() -> str:
    """Return the version of the library; "none" without one."""
    library = nvrtc()
    return "none" if library is None else ".".join(map(str, _version(library)))


def _version(library: ctypes.CDLL) -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def _compile(library: ctypes.CDLL, source: str, options: list[str]) -> bytes:
    program = ctypes.c_void_p()
    status = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"bough.cu", 0, None, None)
    assert status == 0, f"nvrtcCreateProgram: {status}"
    try:
        encoded = [option.encode() for option in options]
        status = library.nvrtcCompileProgram(
            program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)
        )
        if status:
            raise CompileFailed(f"{' '.join(options)}\n{_read(library, program, 'ProgramLog').decode()}")
        virtual = options[0].startswith("--gpu-architecture=compute_")
        return _read(library, program, "PTX" if virtual else "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _read(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{what}")(program, buffer)
    return buffer.raw


def cache_folder() -> Path:
    """Return the folder of compiled kernels and of what was found about them: Triton's own, where it is."""
    try:
        from triton import knobs
    except ImportError:
        return folder_in(Path.home() / ".triton" / "cache")
    return folder_in(Path(knobs.cache.dir))


def _cache_path(source: str, options: list[str], version: tuple[int, int]) -> Path:
    key = hashlib.sha256("\0".join([source, *options, repr(version)]).encode()).hexdigest()
    return cache_folder() / f"{key}.cubin"


def _store(path: Path, cubin: bytes) -> None:
    # A disk that cannot be written only costs compiling again.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(cubin)
        os.replace(name, path)
    except OSError:
        return
