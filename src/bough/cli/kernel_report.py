"""What `bough doctor --gpu` prints: every kernel on this card against its reference, as one Markdown page."""

import contextlib
import math
import platform
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import bough
from bough.cli import view
from bough.errors import ResourceError
from bough.memory.host import nvidia_smi

if TYPE_CHECKING:
    import torch

    from bough.kernels.check.cases import Case
    from bough.kernels.check.run import Peaks, Result

_QUERY = {
    "driver": "driver_version",
    "SM clock": "clocks.sm",
    "SM clock, highest": "clocks.max.sm",
    "memory clock": "clocks.mem",
    "power limit": "power.limit",
    "temperature": "temperature.gpu",
    "PCIe generation": "pcie.link.gen.current",
    "PCIe lanes": "pcie.link.width.current",
    "display": "display_active",
}
COLUMNS = ("operation", "variant", "model", "kernel", "registers", "spilled B", "shared B", "blocks/SM")
COLUMNS += ("error", "allowed", "µs", "share of the peak", "verdict")


def gpu_report(screen: view.Screen) -> bool:
    """Check every kernel, print the page, and return whether all are right."""
    device = _gpu()
    from bough.kernels.check.cases import cases_of
    from bough.kernels.check.run import flush_buffer, peaks, run_all
    from bough.kernels.check.shapes import COMMON, REAL

    cases = [case for shapes in COMMON for case in cases_of(shapes, device, REAL)]
    _compile(device, screen)
    flush, results = flush_buffer(device), []
    best = peaks(flush)
    with screen.counting("Checking kernels") as bar, contextlib.suppress(KeyboardInterrupt):
        for result in run_all(cases, flush):
            results.append(result)
            bar.update(len(results), len(cases))
    bad = [result for result in results if result.failure]
    view.plain(page(facts(device, best), results, best, shared_limit(device)))
    for result in bad:
        view.plain(f"broken: {result.case.name}: {result.failure}")
    if len(results) < len(cases):
        why = "the GPU's context is lost" if bad and bad[-1] is results[-1] else "interrupted"
        view.plain(f"{len(cases) - len(results)} more were not tried: {why}.")
    else:
        for line in _replacements(bad, cases):
            view.plain(line)
    right = f"All {len(results)} variants that were tried are right on this GPU."
    view.plain(f"\n{len(bad)} of {len(cases)} variants are broken." if bad else f"\n{right}")
    return not bad and len(results) == len(cases)


def _gpu() -> "torch.device":
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise ResourceError(
            "there is no NVIDIA GPU that PyTorch can use", "bough doctor says what this machine has"
        )
    from bough.memory.device import check_triton

    check_triton(torch.device("cuda"))
    return torch.device("cuda", torch.cuda.current_device())


def _compile(device: "torch.device", screen: view.Screen) -> None:
    """Compile the kernels of all cases in threads; what fails shows when it is run."""
    from bough.kernels.check.cases import cases_of
    from bough.kernels.check.shapes import COMMON, REAL
    from bough.kernels.runtime.ahead import CompileAhead

    def rehearse() -> None:
        for shapes in COMMON:
            for case in cases_of(shapes, device, REAL):
                try:
                    work = case.make()
                    work.run(*work.fresh())
                except Exception:  # the row of this case will say it
                    continue

    ahead = CompileAhead(rehearse, device, facts=repr((COMMON, REAL)))
    with screen.counting("Compiling kernels") as bar, ahead:
        ahead.wait(bar.update)


def _replacements(bad: "Iterable[Result]", cases: "Sequence[Case]") -> Iterable[str]:
    """Yield what would compute the broken operations instead, tried the same way."""
    from bough.kernels.check.run import check
    from bough.kernels.runtime import backends

    for operation in dict.fromkeys(result.case.operation for result in bad):
        for backend in backends.choices(operation)[1:]:
            backends.replace(operation, backend)
            some = [check(case) for case in cases if case.operation == operation]
            wrong = sum(bool(result.failure) for result in some)
            verdict = f"{wrong} of {len(some)} broken, too" if wrong else f"right in all {len(some)} variants"
            yield f"{operation} in {backends.NAMES[backend]}: {verdict}"
            if not wrong:
                break


def shared_limit(device: "torch.device") -> int:
    from bough.kernels.runtime.device import card_of

    return card_of(device).shared_per_block


def facts(device: "torch.device", best: "Peaks") -> dict[str, str]:
    """Return what a reader of the table has to know of the machine."""
    import torch
    import triton

    from bough.kernels.runtime.device import card_of, kind_of
    from bough.kernels.runtime.nvrtc import architectures, nvrtc_version

    card, (free, total) = card_of(device), torch.cuda.mem_get_info(device)
    known = architectures()
    return {
        "card": f"{kind_of(device)}, compiled for {card.target}",
        "memory": f"{view.amount(free)} of {view.amount(total)} free",
        "system": platform.platform(),
        "versions": f"bough {bough.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Triton {triton.__version__}, NVRTC {nvrtc_version()}",
        "NVRTC compiles for": ", ".join(known) if known else "does not say",
        "measured peak": f"{best.bandwidth / 1e9:,.0f} GB/s (copy), {best.arithmetic / 1e12:,.0f} TFLOP/s "
        "(matmul in 16 bits)",
        "shared memory of a block": f"{card.shared_per_block:,} bytes at most",
    } | _of_driver(device)


def _of_driver(device: "torch.device") -> dict[str, str]:
    """Return what nvidia-smi says of the card; nothing where it is missing."""
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    cards = nvidia_smi(list(_QUERY.values()), f"--id=GPU-{uuid}")
    return dict(zip(_QUERY, cards[0], strict=False)) if cards else {}


def page(header: dict[str, str], results: "Sequence[Result]", best: "Peaks", limit: int) -> str:
    lines = ["## bough doctor --gpu", "", *(f"* {name}: {value}" for name, value in header.items()), ""]
    lines += [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(_row(result, best, limit))} |" for result in results]
    return "\n".join(lines)


def _row(result: "Result", best: "Peaks", limit: int) -> list[str]:
    case, kernels = result.case, result.kernels
    ours = [each for each in kernels if each.language == "CUDA C++"]
    names = list(dict.fromkeys(each.name.strip("_") for each in ours or kernels))
    shared = max((each.shared for each in kernels), default=0)
    numbers = [""] * 4  # of what failed before a launch, and of PyTorch's kernels
    if kernels:
        numbers = [
            str(max(each.registers for each in kernels)),
            str(max(each.spilled for each in kernels)),
            f"{shared}{' of ' + str(limit) if shared > limit // 2 else ''}",
            str(min(each.blocks for each in kernels)),
        ]
    return [
        case.operation,
        case.variant,
        case.model,
        f"{', '.join(names)} ({'CUDA C++' if ours else 'Triton'})" if kernels else "",
        *numbers,
        f"{result.error:.1e}" if not math.isnan(result.error) else "",
        f"{result.tolerance:.0e}" if result.tolerance else "same",
        f"{1e6 * result.seconds:.1f}" if not math.isnan(result.seconds) else "",
        best.share(result),
        f"**{result.failure}**".replace("|", "/") if result.failure else "ok",
    ]
