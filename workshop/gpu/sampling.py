"""Times sampling, ranking, tree building and acceptance on a GPU.

    python -m workshop gpu.sampling --out sampling.jsonl

tests/gpu/test_sampling.py and test_tree.py check them.
"""

import itertools
from collections.abc import Callable

import torch
import triton

from bough.kernels.sampling import (
    RowOwners,
    SamplingState,
    launch,
    make_workspace,
    rank_rows,
    sample_rows,
)
from bough.kernels.tree import Correction, accept_path, best_tree
from tests.gpu.inputs import DEVICE
from tests.gpu.sampling_inputs import FILTERS, VOCABULARY, random_logits, random_tree, set_request
from workshop.case import case
from workshop.report import Report, graph_ms


def measure(run: Callable[[int], object], buffers: int) -> float:
    """Return the microseconds of one call, from a graph that goes once round the buffers."""
    ms = graph_ms(lambda: [run(index) for index in range(buffers)], repeats=15)
    return round(1000 * ms / buffers, 2)


def time_sampling(report: Report) -> None:
    generator = torch.Generator(DEVICE).manual_seed(6)
    for kind, rows in itertools.product(("model", "normal", "flat"), (1, 24, 64)):
        buffers = max(4, 160 // rows)
        logits = [random_logits(kind, rows, VOCABULARY, generator) for _ in range(buffers)]
        state, work = SamplingState.empty(rows, VOCABULARY, DEVICE), make_workspace(rows, VOCABULARY, DEVICE)
        owners = RowOwners.one(0, rows, DEVICE)
        tree = random_tree(rows, VOCABULARY, generator)
        rest = (torch.arange(rows, device=DEVICE), *tree, owners, state, work)
        line = {}
        for name in ("greedy", "temperature", "top-p", "top-k", "min-p", "everything"):
            set_request(state, FILTERS[name], generator)
            line[name] = measure(lambda i, of=logits, rest=rest: sample_rows(of[i], *rest), buffers)
        line["torch argmax"] = measure(lambda i, of=logits: of[i].argmax(-1), buffers)
        report.time("sample", kind=kind, rows=rows, unit="us", **line)


def time_trees(report: Report) -> None:
    generator = torch.Generator(DEVICE).manual_seed(8)
    logits = [random_logits("model", 15, VOCABULARY, generator) for _ in range(12)]
    state, work = SamplingState.empty(15, VOCABULARY, DEVICE), make_workspace(15, VOCABULARY, DEVICE)
    positions, anchor = torch.arange(15, device=DEVICE), torch.tensor([5], device=DEVICE)
    for name in ("greedy", "temperature", "top-p", "everything"):
        set_request(state, FILTERS[name], generator)
        owners = RowOwners.one(0, 15, DEVICE)
        spent = measure(
            lambda i, owners=owners: rank_rows(logits[i], positions, anchor, owners, 16, state, work), 12
        )
        report.time("rank 15 rows, 16 best", filters=name, us=spent)
    report.time("torch topk of the same", us=measure(lambda i: logits[i].topk(16, -1), 12))
    for width, count, nodes in ((16, 0, 22), (16, 1, 22), (24, 1, 63)):
        ids = torch.randint(VOCABULARY, (1, 15, width), device=DEVICE)
        scores = (torch.randn(1, 15, width, device=DEVICE) * 3).log_softmax(-1)
        chains = torch.randint(VOCABULARY, (1, count, 15), device=DEVICE)
        gains = torch.full((1, count, 15), -0.2, device=DEVICE)
        table, edges = torch.zeros(6, 10, device=DEVICE), torch.linspace(-4, -0.1, 9, device=DEVICE)
        correction = Correction(edges, table, torch.zeros_like(positions))

        def build(_: int, parts=(anchor, ids, scores, chains, gains), n=nodes, c=correction):
            return best_tree(*parts, nodes=n, rows=64, spine=-4.0, correction=c)

        report.time("build", candidates=width, chains=count, nodes=nodes, us=measure(build, 16))
        tokens, parents, ancestors, _ = build(0)[0][0]
        stops, limits = torch.tensor([[1, 2]], device=DEVICE), torch.tensor([64], device=DEVICE)
        # The target samples every row's first child: the accepted path is as deep as the best one.
        sampled = torch.full_like(tokens, -5)
        for row in range(nodes, 0, -1):
            sampled[parents[row]] = tokens[row]
        tree, counts = (tokens, parents, ancestors, sampled), torch.zeros(1, VOCABULARY, device=DEVICE)
        tables = {"stops": stops, "limits": limits, "counts": counts, "slots": torch.zeros_like(limits)}

        def accept(_: int, tree=tree, tables=tables):
            return accept_path(*tree, **tables)

        report.time("accept", nodes=nodes, accepted=int(accept(0).counts), us=measure(accept, 16))


def time_kernels(report: Report) -> None:
    generator = torch.Generator(DEVICE).manual_seed(9)
    state, work = SamplingState.empty(24, VOCABULARY, DEVICE), make_workspace(24, VOCABULARY, DEVICE)
    logits = [random_logits("model", 24, VOCABULARY, generator) for _ in range(6)]
    tokens, ancestors = random_tree(24, VOCABULARY, generator)
    positions = torch.arange(24, device=DEVICE)
    for name in ("greedy", "top-p", "everything"):
        set_request(state, FILTERS[name], generator)
        sample_rows(
            logits[0], positions, tokens, ancestors, RowOwners.one(0, len(logits[0]), DEVICE), state, work
        )
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for part in logits:
                sample_rows(
                    part, positions, tokens, ancestors, RowOwners.one(0, len(part), DEVICE), state, work
                )
            torch.cuda.synchronize()
        kernels = {
            event.key.removesuffix("_kernel"): round(event.self_device_time_total / event.count, 1)
            for event in profile.key_averages()
            if event.key.endswith("_kernel")
        }
        report.time("kernels of sampling, 24 rows", filters=name, unit="us", **kernels)


def time_launches(report: Report) -> None:
    """Time other block sizes and numbers of programs than those in use."""
    generator = torch.Generator(DEVICE).manual_seed(10)
    logits = [random_logits("model", 24, VOCABULARY, generator) for _ in range(6)]
    state = SamplingState.empty(24, VOCABULARY, DEVICE)
    owners = RowOwners.one(0, 24, DEVICE)
    rest = (torch.arange(24, device=DEVICE), *random_tree(24, VOCABULARY, generator), owners, state)
    for name, values, filters in (
        ("_BLOCK", (2048, 4096), "greedy"),
        ("_PROGRAMS", (264, 528, 1056), "greedy"),
        ("_PROGRAMS", (264, 528, 1056), "top-p"),
        ("_NOISE_PROGRAMS", (528, 1056, 2112), "temperature"),
    ):
        chosen_value = getattr(launch, name)
        set_request(state, FILTERS[filters], generator)
        for value in values:
            setattr(launch, name, value)
            work = make_workspace(24, VOCABULARY, DEVICE)
            spent = measure(lambda i, work=work: sample_rows(logits[i], *rest, work), 6)
            report.time("24 rows", filters=filters, us=spent, **{name: value})
        setattr(launch, name, chosen_value)


@case()
def main(report: Report) -> None:
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    for part in (time_sampling, time_trees, time_kernels, time_launches):
        report.part(part)
