"""Sampling, ranking, tree building and walk on a GPU: checked against the references, then timed.

PYTHONPATH=src python benchmarks/gpu/sampling.py --out sampling.jsonl
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from sampling_checks import (
    DEVICE,
    FILTERS,
    VOCABULARY,
    Report,
    ask,
    batches,
    draws,
    make_logits,
    near_ties,
    poisoned,
    ranks,
    tree_of,
    trees,
)

from treeflash.kernels.sampling import (
    DrawState,
    draw_rows,
    launch,
    make_workspace,
    rank_rows,
)
from treeflash.kernels.sampling import state as plain
from treeflash.kernels.tree import Correction, build_tree, walk_tree


def measure(run: Callable[[int], object], buffers: int) -> float:
    """Microseconds of one call, median of 15 replays of a graph that goes once round the buffers."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(buffers):
            run(index)
    times = []
    for _ in range(15):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / buffers)
    return round(statistics.median(times), 2)


def draw_times(report: Report) -> None:
    generator = torch.Generator(DEVICE).manual_seed(6)
    for kind, rows in itertools.product(("model", "normal", "flat"), (1, 24, 64)):
        buffers = max(4, 160 // rows)
        logits = [make_logits(kind, rows, VOCABULARY, generator) for _ in range(buffers)]
        state, work = DrawState.empty(rows, VOCABULARY, DEVICE), make_workspace(rows, VOCABULARY, DEVICE)
        rest = (torch.arange(rows, device=DEVICE), *tree_of(rows, VOCABULARY, generator), state, work)
        line = {}
        for name in ("greedy", "temperature", "top-p", "top-k", "min-p", "everything"):
            ask(state, FILTERS[name], generator)
            line[name] = measure(lambda i, of=logits, rest=rest: draw_rows(of[i], *rest), buffers)
        line["torch argmax"] = measure(lambda i, of=logits: of[i].argmax(-1), buffers)
        report.time("draw", kind=kind, rows=rows, unit="us", **line)


def one_graph(report: Report) -> None:
    """A recorded draw serves requests with other numbers."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    state, work = DrawState.empty(24, VOCABULARY, DEVICE), poisoned(24, VOCABULARY)
    logits = make_logits("normal", 24, VOCABULARY, generator)
    tokens, ancestors = tree_of(24, VOCABULARY, generator)
    positions = torch.arange(24, device=DEVICE)
    draw_rows(logits, positions, tokens, ancestors, state, work)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = draw_rows(logits, positions, tokens, ancestors, state, work)
    same = True
    for options in FILTERS.values():
        ask(state, options, generator)
        positions += 100
        graph.replay()
        want = draw_rows(logits, positions, tokens, ancestors, state, None)
        adjusted = plain.adjusted(logits, tokens, ancestors, state)
        same &= near_ties(adjusted, positions, out, want, state.settings())
    report.check("one graph serves every request", same)


def other_times(report: Report) -> None:
    generator = torch.Generator(DEVICE).manual_seed(8)
    logits = [make_logits("model", 15, VOCABULARY, generator) for _ in range(12)]
    state, work = DrawState.empty(15, VOCABULARY, DEVICE), make_workspace(15, VOCABULARY, DEVICE)
    positions, anchor = torch.arange(15, device=DEVICE), torch.tensor([5], device=DEVICE)
    for name in ("greedy", "temperature", "top-p", "everything"):
        ask(state, FILTERS[name], generator)
        spent = measure(lambda i: rank_rows(logits[i], positions, anchor, 16, state, work), 12)
        report.time("rank 15 rows, 16 best", filters=name, us=spent)
    report.time("torch topk of the same", us=measure(lambda i: logits[i].topk(16, -1), 12))
    for width, count, nodes in ((16, 0, 22), (16, 1, 22), (24, 1, 63)):
        ids = torch.randint(VOCABULARY, (15, width), device=DEVICE)
        scores = (torch.randn(15, width, device=DEVICE) * 3).log_softmax(-1)
        chains = torch.randint(VOCABULARY, (count, 15), device=DEVICE)
        gains = torch.full((count, 15), -0.2, device=DEVICE)
        table, edges = torch.zeros(6, 10, device=DEVICE), torch.linspace(-4, -0.1, 9, device=DEVICE)
        correction = Correction(edges, table, torch.zeros_like(positions))

        def build(_: int, parts=(anchor, positions[:1], ids, scores, chains, gains), n=nodes, c=correction):
            return build_tree(*parts, nodes=n, rows=64, spine=-4.0, correction=c)

        report.time("build", candidates=width, chains=count, nodes=nodes, us=measure(build, 16))
        rows = build(0)
        stops, room = torch.tensor([1, 2], device=DEVICE), torch.tensor([64], device=DEVICE)
        # Behind every row its first child: the walk goes as deep as the best path.
        chosen = torch.full_like(rows.tokens, -5)
        for row in range(nodes, 0, -1):
            chosen[rows.parents[row]] = rows.tokens[row]

        def walk(_: int, r=rows, c=chosen, s=stops, m=room):
            return walk_tree(r.tokens, r.parents, r.ancestors, c, stops=s, room=m)

        report.time("walk", nodes=nodes, accepted=int(walk(0).count), us=measure(walk, 16))


def breakdown(report: Report) -> None:
    generator = torch.Generator(DEVICE).manual_seed(9)
    state, work = DrawState.empty(24, VOCABULARY, DEVICE), make_workspace(24, VOCABULARY, DEVICE)
    logits = [make_logits("model", 24, VOCABULARY, generator) for _ in range(6)]
    tokens, ancestors = tree_of(24, VOCABULARY, generator)
    positions = torch.arange(24, device=DEVICE)
    for name in ("greedy", "top-p", "everything"):
        ask(state, FILTERS[name], generator)
        draw_rows(logits[0], positions, tokens, ancestors, state, work)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for part in logits:
                draw_rows(part, positions, tokens, ancestors, state, work)
            torch.cuda.synchronize()
        kernels = {
            event.key.removesuffix("_kernel"): round(event.self_device_time_total / event.count, 1)
            for event in profile.key_averages()
            if event.key.endswith("_kernel")
        }
        report.time("kernels of a draw, 24 rows", filters=name, unit="us", **kernels)


def choices(report: Report) -> None:
    """Times with other numbers of programs than those in use."""
    generator = torch.Generator(DEVICE).manual_seed(10)
    logits = [make_logits("model", 24, VOCABULARY, generator) for _ in range(6)]
    state = DrawState.empty(24, VOCABULARY, DEVICE)
    rest = (torch.arange(24, device=DEVICE), *tree_of(24, VOCABULARY, generator), state)
    for name, values, filters in (
        ("_BLOCK", (2048, 4096), "greedy"),
        ("_PROGRAMS", (264, 528, 1056), "greedy"),
        ("_PROGRAMS", (264, 528, 1056), "top-p"),
        ("_NOISE_PROGRAMS", (528, 1056, 2112), "temperature"),
    ):
        usual = getattr(launch, name)
        ask(state, FILTERS[filters], generator)
        for value in values:
            setattr(launch, name, value)
            work = make_workspace(24, VOCABULARY, DEVICE)
            spent = measure(lambda i, work=work: draw_rows(logits[i], *rest, work), 6)
            report.time("24 rows", filters=filters, us=spent, **{name: value})
        setattr(launch, name, usual)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    report = Report(parser.parse_args().out)
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    for part in (draws, batches, one_graph, ranks, trees, draw_times, other_times, breakdown, choices):
        report.part(part)
    sys.exit(report.failed)


if __name__ == "__main__":
    main()
