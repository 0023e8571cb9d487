"""`bough doctor`: what this machine has, and whether its kernels compute correctly."""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import typer

import bough
from bough.cli import view
from bough.cli.kernel_report import gpu_report
from bough.cli.loading import show_warnings
from bough.cli.options import grouped, option
from bough.errors import UsageError
from bough.memory.host import nvidia_smi, physical_memory

LIBRARIES = ("numpy", "safetensors", "tokenizers", "jinja2", "huggingface-hub", "typer", "rich")
LOW_DISK = 20 << 30  # a 27B model at four bits takes 17 GB
BFLOAT16_CAPABILITY = (8, 0)
BROKEN = 1
GPU_KERNELS = "gpu kernels"
NAMED = 5  # of those that are broken, in the last line


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Literal["ok", "note", "warn", "fail"]
    detail: str
    hint: str = ""


@grouped
def doctor(
    *,
    as_json: bool = option("Print one JSON object.", "--json", default=False),
    gpu: bool = option(
        "Run every kernel on this GPU; print one table, to paste into an issue.", default=False
    ),
) -> None:
    """Check this machine: Python, PyTorch, GPU, memory, disk, model cache, and the kernels.

    The exit code is 1 when something is broken. Having no GPU is not.
    """
    screen = view.Screen(quiet=as_json)
    if gpu:
        if as_json:
            raise UsageError("--gpu prints Markdown, --json JSON", "leave one of them out")
        show_warnings(screen)
        if not gpu_report(screen):
            raise typer.Exit(BROKEN)
        return
    checks = []
    with screen.waiting("Checking"):
        for part in (system, pytorch, native_code, resources, models, caches, kernels):
            checks += part()
    broken = [check.name for check in checks if check.status == "fail"]
    if as_json:
        view.print_json({"ok": not broken, "checks": [asdict(check) for check in checks]})
    else:
        view.checks([(check.status, check.name, check.detail, check.hint) for check in checks])
        view.plain("\n" + verdict(checks))
    if broken:
        raise typer.Exit(BROKEN)


def verdict(checks: Sequence[Check]) -> str:
    """Return what all checks come to."""
    broken = [check.name for check in checks if check.status == "fail"]
    warned = [check.name for check in checks if check.status == "warn"]
    if broken:
        more = f" and {len(broken) - NAMED} more" if len(broken) > NAMED else ""
        return f"{len(broken)} broken: {', '.join(broken[:NAMED])}{more}"
    noted = f", with {len(warned)} warning{'s' * (len(warned) > 1)}: {', '.join(warned)}" if warned else ""
    if any(check.name == "gpu" and check.status == "warn" for check in checks):
        return f"The CPU works; the GPU was not tried{noted}."
    if any(check.name.startswith(GPU_KERNELS) for check in checks):
        return f"All that was tried works{noted}. `bough doctor --gpu` tries every kernel on this GPU."
    return f"Everything works{noted}."


def system() -> Iterator[Check]:
    yield Check("bough", "ok", bough.__version__)
    yield Check("python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield Check("platform", "ok", f"{platform.platform()}, {os.cpu_count()} CPUs")
    versions = {name: _version(name) for name in LIBRARIES}
    missing = [name for name, version in versions.items() if version is None]
    listed = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    hint = f"pip install {' '.join(missing)}" if missing else ""
    yield Check("libraries", "fail" if missing else "ok", listed, hint)


def pytorch() -> Iterator[Check]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Check("torch", "fail", f"cannot be imported: {error}", "reinstall it: https://pytorch.org")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Check("torch", "ok", f"{torch.__version__}, {build}, {torch.get_num_threads()} threads")
    yield _triton(torch)
    yield from _graphics(torch)


def _triton(torch: Any) -> Check:
    """Return whether the language is there in which most of a GPU's kernels are written."""
    from bough.memory.device import TRITON_ON_WINDOWS, triton_version

    version = triton_version()
    if version is not None:
        return Check("triton", "ok", version)
    if not torch.cuda.is_available():
        return Check("triton", "note", "not installed: only a GPU needs it")
    hint = TRITON_ON_WINDOWS if platform.system() == "Windows" else "pip install triton"
    return Check("triton", "fail", "not installed: without it models run on the CPU alone", hint)


def native_code() -> Iterator[Check]:
    """Yield whether models run in native code on this CPU."""
    try:
        from bough.kernels.native.library import find_library
    except (ImportError, OSError):
        return
    library, detail = find_library()
    if library is None:
        hint = "install a C compiler, then the package again" if "compiler" in detail else ""
        yield Check("native CPU code", "note", f"none, {detail}: PyTorch computes on a CPU, slowly", hint)
    else:
        yield Check("native CPU code", "ok", f"for {detail}")


def _graphics(torch: Any) -> Iterator[Check]:
    from bough.memory.device import cuda_torch, has_driver

    driver = _driver() or ("of unknown version" if has_driver() else None)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _card(torch, index, driver)
    elif driver is None:
        yield Check("gpu", "note", "none: no NVIDIA driver is loaded; models run on the CPU, slowly")
    elif torch.version.cuda is None:
        hint = f"install a PyTorch with CUDA: {cuda_torch()}"
        yield Check("gpu", "warn", f"not used: driver {driver} is there, but this PyTorch has no CUDA", hint)
    else:
        yield _no_card(torch, driver)


def _no_card(torch: Any, driver: str) -> Check:
    """Return why PyTorch cannot use the GPU although a driver is loaded."""
    reason = "No CUDA GPUs are available"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    if "No CUDA GPUs" in reason:
        hint = "is CUDA_VISIBLE_DEVICES set? It hides cards that are not in it"
        return Check("gpu", "warn", f"none visible (driver {driver}): models run on the CPU, slowly", hint)
    hint = f"the driver must support CUDA {torch.version.cuda}: update it, or install an older PyTorch"
    return Check("gpu", "fail", f"cannot be used (driver {driver}): {reason}", hint)


def _card(torch: Any, index: int, driver: str | None) -> Check:
    free, total = torch.cuda.mem_get_info(index)
    capability = torch.cuda.get_device_capability(index)
    detail = (
        f"{torch.cuda.get_device_name(index)}, {view.amount(free)} of {view.amount(total)} free, "
        f"compute capability {capability[0]}.{capability[1]}, driver {driver or 'unknown'}"
    )
    if capability < BFLOAT16_CAPABILITY:
        return Check(
            f"gpu {index}", "warn", detail, "cards before Ampere have no bfloat16 units and are slow here"
        )
    return Check(f"gpu {index}", "ok", detail)


def _driver() -> str | None:
    """Return the version of the NVIDIA driver; None: there is no driver."""
    try:
        match = re.search(
            r"Module\s+(?:for \S+\s+)?([\d.]+)", Path("/proc/driver/nvidia/version").read_text()
        )
        if match:
            return match[1]
    except OSError:
        pass
    cards = nvidia_smi(["driver_version"])
    return cards[0][0] or None if cards else None


def resources() -> Iterator[Check]:
    try:
        import torch

        from bough.memory.device import available_memory
    except (ImportError, OSError):
        return
    free = available_memory(torch.device("cpu"))
    yield Check("memory", "ok", f"{view.amount(free)} of {view.amount(physical_memory())} free")


def models() -> Iterator[Check]:
    try:
        from huggingface_hub import constants, get_token
    except ImportError:
        return
    cache = Path(constants.HF_HUB_CACHE)
    folders = list(cache.glob("models--*"))
    size = sum(blob.stat().st_size for folder in folders for blob in folder.glob("blobs/*") if blob.is_file())
    yield Check("model cache", "ok", f"{cache}: {len(folders)} repositories, {view.amount(size)}")
    free = shutil.disk_usage(_existing(cache)).free
    hint = "set HF_HOME to a folder on a larger disk" if free < LOW_DISK else ""
    yield Check("disk", "warn" if hint else "ok", f"{view.amount(free)} free for the model cache", hint)
    token = get_token()
    yield Check(
        "hub token",
        "ok" if token else "note",
        "present" if token else "none; only gated and private models need one",
    )


def kernels() -> Iterator[Check]:
    try:
        import torch

        from bough.cli import selftest
        from bough.kernels.native.library import find_library
        from bough.memory.device import triton_version
    except (ImportError, OSError) as error:
        yield Check("kernels", "fail", f"cannot be tested: {error}", "see the torch line")
        return
    yield from _operations(torch.device("cpu"), "cpu kernels")
    if find_library()[0] is not None:
        yield _timed("native step (cpu)", selftest.native_answer, selftest.TOLERANCE)
    if torch.cuda.is_available() and triton_version() is not None:
        yield from _operations(torch.device("cuda", torch.cuda.current_device()), GPU_KERNELS)


def _operations(device: Any, name: str) -> Iterator[Check]:
    """Run the operations in which a step spends its time against their references."""
    from bough.cli import selftest
    from bough.kernels.check.run import check

    start, results = time.perf_counter(), [check(case) for case in selftest.hot_cases(device)]
    broken = [result for result in results if result.failure]
    if not broken:
        elapsed = time.perf_counter() - start
        error = max(result.error for result in results)
        yield Check(name, "ok", f"{len(results)} right, relative error at most {error:.1e}, {elapsed:.1f} s")
        return
    hint = "please report this"
    if device.type == "cuda":
        hint = "the first start replaces it; `bough doctor --gpu` shows all; --device cpu avoids the GPU"
    if len(broken) == len(results):
        reason = broken[0].failure
        yield Check(name, "fail", f"all {len(results)} fail, the first: {reason}", hint)
        return
    for result in broken:
        case = result.case
        yield Check(f"{name}: {case.operation}, {case.variant}", "fail", result.failure, hint)


def caches() -> Iterator[Check]:
    """Yield whether the folders can be written that a start writes to."""
    try:
        from huggingface_hub import constants

        from bough.kernels.runtime.nvrtc import cache_folder
    except (ImportError, OSError):
        return
    folders = {"model cache": Path(constants.HF_HUB_CACHE), "kernel cache": cache_folder()}
    for name, folder in folders.items():
        try:
            with tempfile.TemporaryFile(dir=_existing(folder)) as file:
                file.write(bytes(4096))
        except OSError as error:
            hint = "set HF_HOME" if name == "model cache" else "set TRITON_CACHE_DIR"
            detail = f"{folder} cannot be written: {error.strerror or error}"
            yield Check(f"writing to the {name}", "warn", detail, f"{hint} to a folder that can be")
        else:
            yield Check(f"writing to the {name}", "ok", str(folder))


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that there is."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def _timed(name: str, test: Callable[[], float], tolerance: float) -> Check:
    start = time.perf_counter()
    try:
        error = test()
    except Exception as problem:  # anything that a driver or compiler raises is the finding
        first = (str(problem).strip() or type(problem).__name__).splitlines()[0]
        return Check(
            name,
            "fail",
            f"{type(problem).__name__}: {first[:200]}",
            "bough run --device cpu avoids the GPU",
        )
    elapsed = f"{1000 * (time.perf_counter() - start):.0f} ms"
    if not error <= tolerance:
        return Check(
            name, "fail", f"relative error {error:.1e}, needed at most {tolerance:.0e}", "please report this"
        )
    return Check(name, "ok", f"relative error {error:.1e}, {elapsed}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
