"""What the benchmark of sampling checks: draws, batches, ranks, trees and walks against the references."""

import json
import random
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from treeflash.kernels import tree
from treeflash.kernels.sampling import (
    DrawState,
    draw_rows,
    filtered,
    gumbel,
    launch,
    rank_rows,
)
from treeflash.kernels.sampling import state as plain
from treeflash.kernels.sampling.filters import OPEN, THRESHOLD
from treeflash.kernels.tree import Correction, build_tree, walk_tree

DEVICE = torch.device("cuda")
VOCABULARY = 248_320
FILTERS = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "top-p high": {"temperature": 1.0, "top_p": 0.9999},
    "top-k": {"temperature": 0.7, "top_k": 20},
    "top-k large": {"temperature": 1.0, "top_k": 5000, "top_p": 0.5},
    "min-p": {"temperature": 1.5, "min_p": 0.05},
    "hot": {"temperature": 50.0, "top_p": 0.3},
}
FILTERS["everything"] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02}
FILTERS["everything"] |= {"repetition": 1.1, "presence": 0.4, "frequency": 0.3}
# With a short list of 8 nearly every row goes through the search.
SHAPES = ((VOCABULARY, 64, 1024), (VOCABULARY, 5, 1024), (32_003, 24, 1024), (VOCABULARY, 24, 8))
KINDS = ("normal", "flat", "model", "ties", "equal", "holes")


class Report:
    def __init__(self, out: Path | None):
        self.failed = False
        self._out = out.open("w") if out else None

    def check(self, name: str, passed: bool, **facts) -> None:
        self.failed |= not passed
        print("PASS" if passed else "FAIL", name, facts or "", flush=True)
        self._write({"check": name, "passed": passed, **facts})

    def time(self, name: str, **facts) -> None:
        print("TIME", name, facts, flush=True)
        self._write({"time": name, **facts})

    def _write(self, line: dict) -> None:
        if self._out:
            print(json.dumps(line), file=self._out, flush=True)

    def part(self, run: Callable[["Report"], None]) -> None:
        begun = time.perf_counter()
        try:
            run(self)
        except Exception:
            traceback.print_exc()
            torch.cuda.synchronize()
            self.check(f"{run.__name__} ran", False)
        self.time(f"the part {run.__name__}", seconds=round(time.perf_counter() - begun, 1))


def make_logits(kind: str, rows: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    noise = torch.randn(rows, vocabulary, device=DEVICE, generator=generator)
    match kind:
        case "flat":
            return noise
        case "model":  # a bulk far below, a few tokens above it
            return noise * 2.2 + 14 * (torch.rand_like(noise) < 30 / vocabulary)
        case "ties":
            return (noise * 3).bfloat16().float()
        case "equal":
            return torch.full_like(noise, 1.5)
        case "holes":
            return torch.where(torch.rand_like(noise) < 0.5, -torch.inf, noise * 3)
        case _:
            return noise * 3


def poisoned(rows: int, vocabulary: int, shortlist: int = 1024) -> launch.Workspace:
    work = launch.Workspace(rows, vocabulary, DEVICE, shortlist=shortlist)
    for name, part in vars(work).items():
        if isinstance(part, Tensor) and name not in ("arrived", "roots"):
            part.fill_(torch.nan if part.is_floating_point() else 0x7B7B7B7B)
    return work


def ask(state: DrawState, options: dict, generator: torch.Generator) -> None:
    vocabulary = state.bias.shape[0]

    def some(n: int) -> Tensor:
        return torch.randint(vocabulary, (n,), device=DEVICE, generator=generator)

    more = {}
    if "repetition" in options:
        biased = some(20).unique()
        bias = torch.linspace(-5, 5, len(biased), device=DEVICE)
        more = {"prompt": some(50), "biased": biased, "bias": bias, "masked": True}
        state.allowed.random_(-(2**31), 2**31 - 1, generator=generator)
    state.ask(**options, seed=2**63 + 12345, **more)
    state.written[some(60)] += 2


def tree_of(rows: int, vocabulary: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (rows,), device=DEVICE, generator=generator)
    ancestors = [1]
    for row in range(1, rows):
        ancestors.append(ancestors[random.randrange(row)] | 1 << row)
    signed = [bits - 2**64 if bits >= 2**63 else bits for bits in ancestors]
    return tokens, torch.tensor(signed, device=DEVICE)


def near_ties(logits: Tensor, positions: Tensor, got: Tensor, want: Tensor, settings: dict) -> bool:
    """Whether rows that differ do so between tokens whose noisy scores are equal to the last digits."""
    different = (got != want).nonzero()[:, 0].tolist()
    if settings["temperature"] == 0:
        return not different
    for row in different:
        pair = torch.stack([got[row], want[row]])
        scores = (logits[row, pair].double() / settings["temperature"]) + gumbel(
            settings["seed"], pair, positions[row]
        ).double()
        if not abs(float(scores[0] - scores[1])) < 2e-5:
            return False
    return True


def same_set(work, adjusted: Tensor, settings: dict) -> bool:
    """The tokens from the threshold up are those that the reference keeps."""
    filters = {key: settings[key] for key in ("temperature", "top_k", "top_p")}
    scores, ids = filtered(adjusted, **filters, min_p=0.0)
    want = torch.zeros_like(adjusted, dtype=torch.bool)
    want.scatter_(1, ids, scores > -torch.inf)
    threshold = work.record[: len(adjusted), THRESHOLD.value, None]
    bits = torch.where(adjusted == 0, 0.0, adjusted).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 20
    keys = ordered | (0xFFFFF - torch.arange(adjusted.shape[1], device=DEVICE))
    top = adjusted.amax(-1, keepdim=True)
    temperature = torch.full((), settings["temperature"], device=DEVICE)
    near = (adjusted - top) / temperature * -(1.4426950408889634 * 2**20) < 41 << 20
    return torch.equal(want, (keys >= threshold) & near)


def draws(report: Report) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    random.seed(1)
    for vocabulary, rows, shortlist in SHAPES:
        state = DrawState.empty(rows, vocabulary, DEVICE)
        for kind in KINDS:
            equal, ties, sets, seen, searched = 0, True, True, 0, 0
            for options in FILTERS.values():
                # A row may begin anywhere: the rows of a wider tensor.
                logits = make_logits(kind, rows, vocabulary + 16, generator)[:, :vocabulary]
                tokens, ancestors = tree_of(rows, vocabulary, generator)
                positions = torch.randint(2**40, (rows,), device=DEVICE, generator=generator)
                ask(state, options, generator)
                work = poisoned(rows, vocabulary, shortlist)
                got = draw_rows(logits, positions, tokens, ancestors, state, work).clone()
                want = draw_rows(logits, positions, tokens, ancestors, state, None)
                settings = state.settings()
                adjusted = plain.adjusted(logits, tokens, ancestors, state)
                equal += int((got == want).sum())
                seen += rows
                ties &= near_ties(adjusted, positions, got, want, settings)
                if settings["temperature"] > 0 and (settings["top_k"] or settings["top_p"] < 1):
                    sets &= same_set(work, adjusted, settings)
                    searched += int(work.record[:, OPEN.value].sum())
            name = f"draw {kind} V={vocabulary} R={rows} list={shortlist}"
            report.check(name, ties and sets, equal=equal, of=seen, sets=sets, searched=searched)


def batches(report: Report) -> None:
    """A row's draw does not depend on what else is drawn, nor on how often it is."""
    generator = torch.Generator(DEVICE).manual_seed(2)
    state, work = DrawState.empty(64, VOCABULARY, DEVICE), poisoned(64, VOCABULARY)
    logits = make_logits("normal", 64, VOCABULARY, generator)
    tokens, ancestors = tree_of(64, VOCABULARY, generator)
    positions, different = torch.arange(64, device=DEVICE), []
    for name, options in FILTERS.items():
        ask(state, options, generator)
        whole = draw_rows(logits, positions, tokens, ancestors, state, work).clone()
        for part in (slice(0, 1), slice(3, 11), slice(40, 64), *[slice(0, 64)] * 20):
            # A grammar's masks belong to the rows of the call.
            own = replace(state, allowed=state.allowed[part])
            got = draw_rows(logits[part], positions[part], tokens, ancestors[part], own, work)
            if not torch.equal(got, whole[part]):
                different.append((name, part.start, part.stop))
    report.check("a row alone is the row among others", not different, different=different[:5])


def ranks(report: Report) -> None:
    generator = torch.Generator(DEVICE).manual_seed(4)
    for vocabulary in (VOCABULARY,):
        state = DrawState.empty(15, vocabulary, DEVICE)
        for kind in KINDS:
            passed, worst = True, 0.0
            for options in FILTERS.values():
                logits = make_logits(kind, 15, vocabulary, generator)
                ask(state, options, generator)
                positions = torch.arange(100, 115, device=DEVICE)
                anchor = torch.tensor([7], device=DEVICE)
                work = poisoned(15, vocabulary)
                ids, scores = rank_rows(logits, positions, anchor, 16, state, work)
                want_ids, want = rank_rows(logits, positions, anchor, 16, state, None)
                live = want > -torch.inf
                # What lies 28 and more below the best is no candidate on the device.
                far = live & (scores == -torch.inf)
                passed &= bool((want[far] < -25).all()) and bool((scores[~live] == -torch.inf).all())
                live &= ~far
                worst = max(worst, float((scores - want)[live].abs().max()))
                # Equal noisy scores may change places.
                wrong = live & (ids != want_ids)
                neighbours = (want[:, 1:] - want[:, :-1]).abs() < 3e-5
                close = torch.zeros_like(wrong)
                close[:, 1:] |= neighbours
                close[:, :-1] |= neighbours
                close[:, -1] = True
                passed &= not bool((wrong & ~close).any())
            report.check(f"rank {kind} V={vocabulary}", passed and worst < 1e-4, worst=worst)


def trees(report: Report) -> None:
    random.seed(5)
    torch.manual_seed(5)
    passed = walked = True
    for coarse in (False, True):
        for case in range(60):
            depths, width = random.choice(((15, 24), (15, 16), (7, 5)))
            count, nodes = random.randint(0, 2), random.choice((1, 7, 22, 63))
            ids = torch.stack([torch.randperm(40)[:width] for _ in range(depths)])
            scores = (torch.randn(depths, width) * 2).log_softmax(-1)
            scores = (scores * 2).round() / 2 if coarse else scores
            chains = torch.randint(-1, 40, (count, depths))
            chain_scores = -torch.randint(0, 4, (count, depths)).float() / 2
            edges = torch.linspace(-4, -0.1, 9)
            bins = (torch.arange(depths) // 3).clamp(max=5)
            correction = Correction(edges, torch.randn(6, 10) / 4, bins) if case % 2 else None
            spine = random.choice((1.0, -4.0, -20.0))
            rows = random.choice([bucket for bucket in (8, 16, 24, 64) if bucket > nodes])
            parts = (torch.tensor([99]), torch.tensor([2**33]), ids, scores, chains, chain_scores)
            want = build_tree(*parts, nodes=nodes, rows=rows, spine=spine, correction=correction)
            if correction:
                correction = Correction(edges.cuda(), correction.table.cuda(), bins.cuda())
            there = [part.cuda() for part in parts]
            got = build_tree(*there, nodes=nodes, rows=rows, spine=spine, correction=correction)
            names = ("tokens", "parents", "weights", "ancestors", "positions")
            passed &= all(torch.equal(getattr(got, name).cpu(), getattr(want, name)) for name in names)
            walked &= walks_equally(want)
    report.check("120 trees and walks", passed and walked, trees=passed, walks=walked)


def walks_equally(rows: tree.TreeRows) -> bool:
    chosen = rows.tokens[torch.randint(len(rows.tokens), (len(rows.tokens),))]
    for row in range(len(chosen)):
        children = (rows.parents == row).nonzero()[:, 0].tolist()
        if children and random.random() < 0.9:
            chosen[row] = rows.tokens[random.choice(children)]
    stops = chosen[torch.randint(len(chosen), (random.choice((0, 1)),))]
    room = torch.tensor([random.choice((1, 3, 64))])
    written = [torch.zeros(100), torch.zeros(100, device=DEVICE)]
    args = (rows.tokens, rows.parents, rows.ancestors, chosen)
    want = walk_tree(*args, stops=stops, room=room, written=written[0])
    there = [part.cuda() for part in args]
    got = walk_tree(*there, stops=stops.cuda(), room=room.cuda(), written=written[1])
    return torch.equal(got.flat.cpu(), want.flat) and torch.equal(written[1].cpu(), written[0])
