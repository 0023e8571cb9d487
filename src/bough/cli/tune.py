"""`bough tune`: measures the fastest settings of the quantised matmuls on this GPU and saves them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bough.cli import view
from bough.cli.interrupt import held
from bough.cli.loading import show_warnings
from bough.cli.options import MODEL_HELP, argument, grouped, option
from bough.errors import ResourceError, UsageError
from bough.hub.resolve import meaning, resolve

if TYPE_CHECKING:
    import torch

    from bough.bench.tuning import Found, Shapes
    from bough.kernels.quant_matmul.tuned import TunedFile


@grouped
def tune(
    *,
    model: str | None = argument(
        f"{MODEL_HELP}: its shapes and types are timed; else those of a 27B.", "MODEL"
    ),
    reset: bool = option("Delete the saved settings of all GPUs, and leave.", default=False),
) -> None:
    """Find the fastest settings of the quantised matmuls on this GPU, and save them.

    Text does not change: every setting adds the same numbers in the same order, which is checked. Weights
    are random; of a MODEL only the header is read.
    """
    if reset and model is not None:
        raise UsageError(f"MODEL is {model!r}, but --reset deletes the settings of all", "bough tune --reset")
    screen = view.Screen()
    show_warnings(screen)
    with screen.waiting("Starting PyTorch"), held():
        from bough.bench.tuning import LAYERS_27B, Stack
        from bough.bench.tuning import tune as find
        from bough.kernels.quant_matmul.tuned import TunedFile
        from bough.kernels.runtime.device import card_of, kind_of
    file = TunedFile.default()
    if reset:
        view.plain(f"{file.path} is removed." if file.remove() else f"Nothing was saved: no {file.path}.")
        return
    device = _gpu()
    shapes = LAYERS_27B if model is None else _shapes(model)
    with screen.counting("Timing matmuls") as bar:
        stack = Stack(shapes, device)
        results = find(card_of(device), stack.layouts, stack.measure, progress=bar.update)
    show(results, file, kind_of(device), screen)


def _gpu() -> "torch.device":
    import torch

    from bough.kernels.runtime import nvrtc
    from bough.kernels.runtime.device import usable

    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise ResourceError(
            "tuning needs an NVIDIA GPU, none was found", "bough doctor says what this machine has"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    if nvrtc.nvrtc() is None:
        raise ResourceError(
            "tuning needs NVRTC, which was not found",
            "it comes with PyTorch's wheels: reinstall torch, https://pytorch.org",
        )
    if not usable(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise ResourceError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, tuning needs 8.0",
            "such cards run the Triton kernels, which have no settings",
        )
    return device


def _shapes(model: str) -> "Sequence[Shapes]":
    from bough.gguf.reader import GGUFFile
    from bough.models.matmuls import layer_matmuls

    with GGUFFile.open(resolve(meaning(model), offline=True)) as file:
        return layer_matmuls(file)


def show(results: "Sequence[Found]", file: "TunedFile", kind: str, screen: view.Screen) -> None:
    """Show the result, and save the settings that are faster than the built-in ones."""
    for result in results:
        for tiling in result.differing:
            screen.warning(
                f"{result.rows} rows, {tiling.compare(result.built_in)}: different sums, not used",
                "please report it with what `bough doctor` says",
            )
    cells = [
        (
            str(result.rows),
            f"{result.built_in_s * 1e3:.4f}",
            f"{result.best_s * 1e3:.4f}",
            result.best.compare(result.built_in),
        )
        for result in results
    ]
    columns = ("rows", "built in ms", "best ms", "setting")
    view.table(f"Matmuls on {kind}", columns, cells, texts=columns[-1:])
    settings = {result.rows: result.best for result in results if result.best != result.built_in}
    try:
        file.save(kind, settings)
    except OSError as error:
        raise ResourceError(
            f"{file.path} cannot be written: {error.strerror}, nothing was saved",
            "set TRITON_CACHE_DIR to a folder that can be written, here and wherever a model is run",
        ) from None
    if settings:
        view.plain(f"\nSaved in {file.path} for every later start; `bough tune --reset` undoes it.")
    else:
        view.plain("\nNothing is more than 1% faster than what is built in: nothing was saved.")
