"""Attention of a step's rows over the paged KV cache, and of a draft block over its KV ring."""

from bough.kernels.attention import cpu
from bough.kernels.attention.records import SINKS, PagedContext
from bough.kernels.runtime.op import op

paged_attention = op(cpu.paged_attention, "tree attention", cuda="cuda", triton="triton_kernels")
chunk_attention = op(cpu.chunk_attention, "prompt attention", triton="prefill")
block_attention = op(cpu.block_attention, "draft attention", triton="triton_kernels")
