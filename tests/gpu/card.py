"""Which kernels the card runs, or the one that it acts as (BOUGH_PRETEND_CARD); tests of others skip."""

import pytest

from bough.kernels.attention import cuda as attention_cuda
from tests.gpu.inputs import CUDA_KERNELS, PagedStep

needs_cuda_kernels = pytest.mark.skipif(not CUDA_KERNELS, reason="this card runs Triton's kernels")


def needs_cuda_attention(step: PagedStep) -> None:
    """Skip where the CUDA C++ kernel of tree attention does not fit."""
    if not attention_cuda.takes(step.q.flatten(0, 1), *step.pools):
        pytest.skip("this card runs Triton's attention here")
