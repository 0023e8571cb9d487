"""What the benchmark of a step's small kernels checks of embeddings, places and kernels that overlap."""

from collections.abc import Callable

import torch
from layer_checks import EPS, FAILED, LINES, Poison, say
from matmul_checks import Q
from torch import Tensor

from treeflash.bench.tuning import HALVES, random_rows
from treeflash.gguf.quants import dequantise
from treeflash.gguf.types import QuantType
from treeflash.kernels.embedding import triton_kernels as embedding_kernel
from treeflash.kernels.norm_rope import cuda as norm_cuda
from treeflash.kernels.quant_matmul import PartialSums, cuda, pack
from treeflash.kernels.slot_mapping import reference as places
from treeflash.kernels.slot_mapping import triton_kernels as places_kernel
from treeflash.models.weights import Embedding

REPLAYS = 50
LAYERS = 6


def equal(name: str, found: Tensor, wanted: Tensor) -> None:
    passed = torch.equal(found, wanted)
    if not passed:
        FAILED.append(name)
        say("FAIL", name, "differs in its bits")
    LINES.append({"check": name, "error": 0.0 if passed else 1.0, "passed": passed})


def packed_table(type: QuantType, rows: int, columns: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    shape = (rows * columns // type.block_elements, type.block_bytes)
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for offset in HALVES[type]:
        scales = torch.randn(len(data), 1, generator=generator) * 1e-3
        data[:, offset : offset + 2] = scales.half().view(torch.uint8)
    return data.view(rows, -1).to(device)


def check_embedding(device: str) -> None:
    """Against the decoders of the types, bit by bit; behind 2 GiB, and from the host's memory in a graph."""
    for type in (*embedding_kernel.TYPES, Q.Q4_0, Q.IQ4_XS):
        for columns in (5120, 768):
            data = packed_table(type, 50, columns, device)
            tokens = torch.tensor([[49, 0, 3, 3], [17, 1, 48, 30]], device=device)
            wanted = dequantise(data[tokens], type)
            if type in embedding_kernel.TYPES:
                with Poison():
                    found = embedding_kernel.embed(data, type, tokens)
                equal(f"embedding {type.name}, {columns} columns", found, wanted)
            if device == "cuda":
                held = Embedding(data.cpu().pin_memory(), type)
                equal(f"embedding {type.name} of the host, {columns} columns", held(tokens), wanted)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    found = held(tokens)
                tokens += 1 - 2 * (tokens > 40)
                graph.replay()
                wanted = dequantise(data[tokens], type)
                equal(f"embedding {type.name} of the host in a graph, {columns} columns", found, wanted)
    if device == "cuda":
        few = packed_table(Q.Q8_0, 50, 5120, device)
        rows = (1 << 31) // few.shape[1] + 100
        table = torch.zeros(rows, few.shape[1], dtype=torch.uint8, device=device)
        table[-50:] = few
        tokens = torch.arange(rows - 50, rows, device=device)
        equal(
            "embedding behind 2 GiB", embedding_kernel.embed(table, Q.Q8_0, tokens), dequantise(few, Q.Q8_0)
        )


def check_places(device: str) -> None:
    """Trees filled up and where rows stand, against the reference; at the end of 262,144 tokens, too."""
    generator = torch.Generator().manual_seed(2)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator).to(device)

    for count, size in ((1, 8), (8, 8), (5, 16), (24, 24), (33, 48), (64, 64)):
        tree, lengths = numbers(1 << 40, 4, 64), numbers(262144, 3)
        given = (tree, torch.tensor([count], device=device), torch.tensor([2], device=device), lengths)
        with Poison():
            found = places_kernel.padded_tree(*given, size=size)
        equal(f"tree of {count} in {size}", found, places.padded_tree(*given, size=size))
    for rows, pages in ((1, 5), (8, 33), (64, 4097), (2048, 4097)):
        table = torch.randperm(3 * pages, generator=generator).view(3, pages).to(device)
        most = max(0, 64 * pages - rows)
        lengths = torch.tensor([0, 7, most], device=device)
        given = (torch.tensor([2, 0], device=device), lengths, table, numbers(64, 3, 64), numbers(9, 3))
        with Poison():
            found = places_kernel.slot_mapping(*given, rows=rows, page=64)
        wanted = places.slot_mapping(*given, rows=rows, page=64)
        for name in ("lengths", "page_table", "pages", "offsets", "path", "count"):
            equal(f"{name} of {rows} rows, {pages} pages", getattr(found, name), getattr(wanted, name))


class Chain:
    """Norms, open and closed products and activations one behind the other, as in a step, each kernel let in
    before the one in front of it has ended; tensors are freed and taken again on the way."""

    def __init__(self, rows: int, width: int = 5120, inner: int = 6144):
        generator = torch.Generator("cuda").manual_seed(rows)

        def matrix(type: QuantType, n: int, k: int) -> object:
            return pack(random_rows(type, n, k, generator), type)

        self.x = torch.randn(1, rows, width, device="cuda")
        self.weight, self.inner = torch.rand(width, device="cuda") + 0.5, inner
        self.layers = [
            (
                [matrix(t, n, width) for t, n in ((Q.Q5_K, inner), (Q.Q4_K, inner), (Q.Q8_0, 96))],
                matrix(Q.Q5_K, width, inner),
                matrix(Q.Q4_K, 2 * inner, width),
                matrix(Q.Q6_K, width, inner),
            )
            for _ in range(LAYERS)
        ]

    def run(self, between: Callable[[], None]) -> Tensor:
        """`between` stands between any two launches."""
        x, add = self.x, None
        for several, first, second, third in self.layers:
            x, h = norm_cuda.add_rms_norm(x, add, self.weight, EPS)
            between()
            sizes = [weight.rows for weight in several]
            wide = torch.empty(h.rows, sum(sizes), device="cuda")
            cuda.matmuls(h, several, wide.split(sizes, 1))
            between()
            gate, up, _ = wide[None].split(sizes, -1)
            h = norm_cuda.gated_rms_norm(
                gate.contiguous().unflatten(-1, (-1, 128)), up, self.weight[:128], EPS
            )
            between()
            add = cuda.partial_matmul(h, first)
            between()
            x, h = norm_cuda.add_rms_norm(x, add, self.weight, EPS)
            between()
            sums = cuda.partial_matmul(h, second)
            between()
            h = norm_cuda.silu_mul(*sums.split([self.inner, self.inner]))
            between()
            add = cuda.partial_matmul(h, third)
            between()
        assert isinstance(add, PartialSums)
        return norm_cuda.add_rms_norm(x, add, self.weight, EPS)[0]


def check_chain() -> None:
    """Kernels that overlap give what they give one by one, replayed often; what they share would show."""
    for rows in (1, 8, 24, 61):
        chain = Chain(rows)
        inputs = [torch.randn_like(chain.x) for _ in range(3)]
        wanted = []
        for given in inputs:
            chain.x.copy_(given)
            wanted.append(chain.run(torch.cuda.synchronize).clone())
        assert all(bool(x.isfinite().all()) for x in wanted), "numbers that can be compared"
        for given, result in zip(inputs, wanted, strict=True):
            chain.x.copy_(given)
            equal(f"overlapping, {rows} rows", chain.run(lambda: None), result)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = chain.run(lambda: None)
        apart = 0
        for number in range(REPLAYS):
            chain.x.copy_(inputs[number % 3])
            graph.replay()
            apart += not torch.equal(found, wanted[number % 3])
        if apart:
            say("FAIL", f"{apart} of {REPLAYS} replays of {rows} rows differ")
            FAILED.append(f"overlapping in a graph, {rows} rows")
        LINES.append({"check": f"overlapping in a graph, {rows} rows", "error": apart, "passed": not apart})
