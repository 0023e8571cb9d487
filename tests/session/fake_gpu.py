"""A GPU that is not there: enough of one for dry runs, which launch nothing."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from unittest.mock import MagicMock, patch

import torch

from bough.config import EngineConfig
from bough.gguf.reader import GGUFFile
from bough.kernels.runtime import backends
from bough.kernels.runtime.device import Card
from bough.kernels.runtime.dry_run import DryRun
from bough.memory.device import MemoryBudget
from bough.memory.planner import MemoryPlan, MemoryPlanner
from bough.models.spec import ModelSpec
from bough.session.building import rehearse

GPU = torch.device("cuda", 0)
H200 = Card("sm_90", 132, 233472, 232448)
_KERNELS = ("attention", "causal_conv", "delta_rule", "experts", "norm_rope", "quant_matmul")


@contextmanager
def fake_gpu(card: Card = H200) -> Iterator[None]:
    """Have torch and our kernels believe in a card; restores all of it, caches included."""
    capability = divmod(int(card.arch.removeprefix("sm_")), 10)
    with ExitStack() as stack:

        def replace(owner: object, name: str, value: object) -> None:
            stack.enter_context(patch.object(owner, name, value))

        backends.reset()
        modules = [import_module(f"bough.kernels.{name}.cuda") for name in _KERNELS]
        runtime = [import_module(f"bough.kernels.runtime.{name}") for name in ("device", "driver")]
        for module in [*runtime, *modules]:
            for name, value in (("card_of", card), ("usable", True), ("kind_of", card.arch)):
                if hasattr(module, name):
                    replace(module, name, lambda device, value=value: value)
        for name in ("Event", "current_stream", "device", "synchronize"):
            replace(torch.cuda, name, MagicMock())
        replace(torch.cuda, "get_device_capability", lambda device=None: capability)
        caches = [
            each for module in modules for each in vars(module).values() if hasattr(each, "cache_clear")
        ]
        caches.append(import_module("bough.kernels.runtime.triton_pdl").launch_options)
        for each in caches:
            each.cache_clear()
            stack.callback(each.cache_clear)
        yield


def gpu_plan(path: Path, config: EngineConfig) -> MemoryPlan:
    """Plan a model for the GPU that is not there."""
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file)
        budget = MemoryBudget(limit=140 << 30, in_use=1 << 30)
        return MemoryPlanner.create(file, spec, config, GPU, budget).plan()


def dry_run(path: Path, config: EngineConfig, card: Card = H200) -> DryRun:
    """Return the launches of a model."""
    plan = gpu_plan(path, config)
    with fake_gpu(card), GGUFFile.open(path) as file, DryRun(GPU) as found:
        rehearse(file, config, plan, GPU)
    return found
