"""Small computations with reference results, which check that this machine's kernels are correct."""

import torch
from torch import Tensor

from bough.gguf.reader import GGUFFile
from bough.hub.catalog import EMBEDDED
from bough.hub.resolve import meaning, resolve
from bough.kernels.check.cases import Case, cases_of
from bough.kernels.check.shapes import COMMON
from bough.kernels.native import Library
from bough.models.decoder import Decoder
from bough.models.native import NativeDecoder
from bough.models.step import Step
from bough.state.sequences import SequenceStates

# In which a step of a 27B spends its time.
HOT = {
    "matmul": ("Q4_K, 8 rows", "Q4_K, 24 rows", "Q5_K, 24 rows", "Q6_K, 24 rows", "Q4_K, 200 rows"),
    "norms": ("Q4_K, partial sums", "norm, 48 rows", "SiLU, 48 rows", "gated norm, 48 rows"),
    "tree attention": ("f16, 1 rows", "f16, 24 rows", "q8_0, 24 rows"),
    "prompt attention": ("f16",),
    "KV cache": ("q8_0",),
    "tree delta rule": ("24 rows",),
    "tree convolution": ("24 rows",),
    "prompt delta rule": ("130 tokens",),
    "draft attention": ("16 rows",),
    "tree building": ("22 nodes",),
    "sampling": ("greedy", "top-p"),
    "embedding": ("Q4_K",),
}
TOLERANCE = 1e-4  # relative RMS error of native code


def native_answer() -> float:
    """Compare the logits of the small model that comes with Bough in native code with PyTorch's."""
    target = resolve(meaning(EMBEDDED), offline=True)
    tokens, logits = torch.tensor([[5, 300, 17, 42, 9, 1000, 77, 3]]), []
    with GGUFFile.open(target) as file:
        for model in (NativeDecoder.load(file, Library(1)), Decoder.load(file)):
            states = SequenceStates(model.spec, max_ctx=64, max_rows=1)
            slots = torch.tensor([states.open()])
            states.reserve(0, tokens.shape[1])
            step = Step.chunk(slots, tokens, states.buffers.lengths[slots])
            logits.append(model.logits(model.forward(step, states.buffers).hidden[0]))
    return _error(logits[0], logits[1])


def hot_cases(device: torch.device) -> list[Case]:
    """Return the operations in which a step of a 27B spends its time, each in one or two variants."""
    return [
        case
        for case in cases_of(COMMON[0], device)
        if case.variant in HOT.get(case.operation, ())
        and (device.type == "cuda" or case.operation != "norms")
    ]


def _error(logits: Tensor, exact: Tensor) -> float:
    logits, exact = logits.detach().double().cpu(), exact.double()
    return float((logits - exact).norm() / exact.norm())
