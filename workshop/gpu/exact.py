"""Compares the logits of tree decoding with those of plain decoding, bit for bit, and the texts.

    python -m workshop gpu.exact --data DIR --target GGUF --draft GGUF --out FILE

Plain decoding is an engine whose steps have one row. A 64-bit hash of the logits is taken on the device at
every position; the rows that trees accept must have the same. Trees come from the draft, with budgets of 7 to
63 nodes, and at random: the plain text's next tokens somewhere among wrong ones. Prompts of all suites in
--data, greedy and at temperature 0.8, by cache format; then long prompts from a book. Without --target the
embedded pair is compared.
"""

import gzip
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from bough.bench.suites import SOURCES, load
from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Done, Engine, Request, Tokens
from bough.engine.inputs import Verify
from bough.engine.runner import Accepted, Forward, Masks, StepTimes
from bough.engine.sampler import SamplingParams
from bough.kernels.tree import MAX_ROWS
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from bough.session.session import Session
from bough.spec.drafter import NoDrafter, Piece, Turn
from bough.spec.tree import SharedTrees, Tree
from bough.state.sequences import CacheConfig
from workshop.case import DRAFT, TARGET, case
from workshop.report import Report

GREEDY = SamplingParams(seed=1)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
BUDGETS = (7, 15, 22, 31, 47, 63)


@dataclass(frozen=True)
class Options:
    data: Annotated[Path, "folder of the suites and haystack/*.txt.gz"]
    target: Path = TARGET
    draft: Path = DRAFT
    kv: Annotated[str, "cache formats and prompts of each"] = "f16:200,q8_0:60,tq3_0:60"
    n_gen: int = 256
    at_random: Annotated[int, "random trees for every N-th prompt, too"] = 3
    long: Annotated[Sequence[int], "tokens of a book"] = (8150, 16380, 32700)


class LogitHashes:
    """Hashes of the logits of accepted rows by slot, kept on the device until they are compared."""

    def __init__(self, engine: Engine):
        runner, vocabulary = engine.runner, engine.target.spec.vocab_size
        odd = torch.randint(0, 2**62, (vocabulary,), generator=torch.Generator().manual_seed(0)) * 2 + 1
        self._odd = odd.to(engine.target.device)
        self._works: Sequence[Verify] = ()
        self._last: tuple[Forward, Sequence[Verify], Tensor]  # of the last step, with hashes of all rows
        self.owners: dict[int, list[Tensor]] = {0: []}  # by slot
        verify, accept, read_back = runner.verify, runner.accept, runner.read_back

        def noted_verify(works: Sequence[Verify], shared: SharedTrees | None = None) -> Forward:
            self._works = works
            return verify(works, shared)

        def hashed_accept(forward: Forward, masks: Sequence[Masks] = (), ended: Sequence[int] = ()) -> None:
            self._last = forward, self._works, self._hash(forward.logits)
            accept(forward, masks, ended)

        def hashed_read_back() -> tuple[list[Accepted], StepTimes]:
            forward, works, hashes = self._last
            found, times = read_back()
            for first, work, accepted in zip(forward.bounds, works, found, strict=False):
                if not work.given:
                    rows = first + torch.tensor(accepted.path, device=hashes.device)
                    self.owners[work.slot].append(hashes[rows])
            return found, times

        runner.verify, runner.accept, runner.read_back = noted_verify, hashed_accept, hashed_read_back  # ty: ignore[invalid-assignment]

    def _hash(self, logits: Tensor) -> Tensor:
        assert logits.dtype == torch.float32, f"{logits.dtype}"
        return (logits.view(torch.int32).long() * self._odd).sum(-1)

    def take(self) -> list[int]:
        """Return those of slot 0, and begin anew."""
        found, self.owners[0] = self.owners[0], []
        return torch.cat(found).tolist() if found else []


class RandomTrees(NoDrafter):
    """Random trees that hold the next tokens of a known text somewhere."""

    def __init__(self, vocabulary: int, seed: int = 0):
        self._random, self._vocabulary = random.Random(seed), vocabulary
        self.prompt: int = 0
        self.known: Sequence[int] = ()

    def plain_steps(self, turns: Sequence[Turn]) -> int:
        return 0

    def trees(self, turns: Sequence[Turn], prompts: Sequence[Piece] = ()) -> list[Tree]:
        return [self._tree(turn.anchor, turn.position, turn.max_rows) for turn in turns]

    def _tree(self, anchor: int, position: int, max_rows: int) -> Tree:
        choose = self._random
        size = min(max_rows, choose.choice((2, 8, 9, 16, 17, 24, 31, 32, 33, 48, 63, 64)))
        ahead = list(self.known[position - self.prompt + 1 :][: choose.choice((0, 1, 3, 8, 20, 63))])
        tokens, parents, right = [anchor], [-1], [0]
        while len(tokens) < size:
            left = size - len(tokens)
            if ahead and (left <= len(ahead) or choose.random() < 0.5):
                token, parent = ahead.pop(0), right[-1]
                right.append(len(tokens))
            else:
                # Below the right path's nodes as often as below any other.
                parent = choose.choice((choose.randrange(len(tokens)), choose.choice(right)))
                token = choose.randrange(self._vocabulary)
                if parent == right[-1] and ahead and token == ahead[0]:
                    continue
            tokens.append(token)
            parents.append(parent)
        return Tree.of(tokens, parents)


@dataclass(slots=True)
class Text:
    prompt: list[int]
    sampling: SamplingParams
    count: int
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Tally:
    texts: int = 0
    same_texts: int = 0
    tokens: int = 0
    rows: int = 0  # positions whose logits were compared
    different_rows: int = 0
    steps: int = 0

    def add(self, plain: Text, tokens: list[int], hashes: list[int], steps: int) -> None:
        self.texts += 1
        self.same_texts += tokens == plain.tokens
        self.tokens += len(tokens)
        self.steps += steps
        # A step may accept rows beyond the end of the text.
        pairs = list(zip(plain.hashes, hashes, strict=False))
        self.rows += len(pairs)
        self.different_rows += sum(a != b for a, b in pairs) + max(0, len(plain.hashes) - len(hashes))


def generate(engine: Engine, text: Text, stops: frozenset[int], budget: int | None) -> tuple[list[int], int]:
    tokens: list[int] = []
    request = Request(text.prompt, text.count, text.sampling, stops, may_stop=False, draft_budget=budget)
    for event in engine.generate(request):
        if isinstance(event, Tokens):
            tokens += event.ids
        elif isinstance(event, Done):
            return tokens, event.stats.steps
    raise AssertionError("no end")


@dataclass(slots=True)
class Engines:
    """Three engines over the same weights and cache format."""

    session: Session
    plain: Engine
    drafted: Engine
    mixed: Engine
    trees: RandomTrees
    hashes: dict[str, LogitHashes]

    @classmethod
    def load(cls, target: Path, draft: Path, kv: str, max_ctx: int, device: str) -> "Engines":
        config = EngineConfig(
            device,
            max_ctx=max_ctx,
            kv_k=kv,
            kv_v=kv,
            speculation=SpecConfig(budget=MAX_ROWS - 1, adaptive=False),
            draft=DraftConfig(draft),
            prefix_cache=0,
        )
        session = load_session(target, config)
        weights, chunk = session.engine.target, session.engine.prefill_chunk
        trees = RandomTrees(weights.spec.vocab_size)
        shared = {"max_ctx": session.max_ctx, "prefill_chunk": chunk, "cache": CacheConfig(*session.plan.kv)}
        plain = Engine(weights, **shared)
        mixed = Engine(weights, **shared, drafter=trees, max_rows=MAX_ROWS)
        if device != "cpu":
            assert plain.warmup.capture() and mixed.warmup.capture(), "no CUDA graphs"
        engines = {"plain": plain, "drafted": session.engine, "mixed": mixed}
        hashes = {name: LogitHashes(engine) for name, engine in engines.items()}
        return cls(session, plain, session.engine, mixed, trees, hashes)

    def read_plain(self, text: Text) -> None:
        text.tokens, _ = generate(self.plain, text, self.session.tokenizer.stop_ids, None)
        text.hashes = self.hashes["plain"].take()[: max(0, len(text.tokens))]

    def compare(self, text: Text, budget: int, drafted: Tally, mixed: Tally, *, at_random: bool) -> None:
        stops = self.session.tokenizer.stop_ids
        tokens, steps = generate(self.drafted, text, stops, budget)
        drafted.add(text, tokens, self.hashes["drafted"].take(), steps)
        if at_random:
            self.trees.prompt, self.trees.known = len(text.prompt), text.tokens
            tokens, steps = generate(self.mixed, text, stops, None)
            mixed.add(text, tokens, self.hashes["mixed"].take(), steps)


def suite_prompts(session: Session, data: Path, count: int) -> list[list[int]]:
    """Return `count` prompts, as many of each suite as there are."""
    suites = [load(name, -(-count // len(SOURCES)), data=data, offline=True) for name in SOURCES]
    mixed = [prompt for group in itertools.zip_longest(*suites) for prompt in group if prompt is not None]
    return [session.encode(TextRequest(messages=list(prompt.messages))) for prompt in mixed[:count]]


def book_prompts(session: Session, data: Path, lengths: Sequence[int]) -> list[list[int]]:
    book = next((data / "haystack").glob("*.txt.gz"))
    words = gzip.decompress(book.read_bytes()).decode()[: 8 * max(lengths, default=0) + 8]
    ids = session.tokenizer.encode(words)
    assert not lengths or len(ids) >= max(lengths), f"{len(ids)} tokens"
    return [ids[:length] for length in lengths]


@contextmanager
def timed(report: Report, name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    report.log(name, seconds=round(time.perf_counter() - begin, 1))


def formats(options: Options) -> dict[str, range]:
    """Return which of all prompts each cache format gets: no format the prompts of another."""
    found, first = {}, 0
    for part in options.kv.split(","):
        kv, _, count = part.partition(":")
        found[kv] = range(first, first + int(count))
        first = found[kv].stop
    return found


def compare_format(report: Report, options: Options, kv: str) -> bool:
    """Compare a format's prompts, every --at-random-th of them also with random trees, and the long ones."""
    longest = max(options.long, default=0)
    with timed(report, f"{kv} loaded"):
        max_ctx = max(4096, longest + 1024)
        engines = Engines.load(options.target, options.draft, kv, max_ctx, report.device)
    session, drafted, mixed = engines.session, Tally(), Tally()
    own, every = formats(options)[kv], max(each.stop for each in formats(options).values())
    chosen = suite_prompts(session, options.data, every)[own.start : own.stop]
    prompts = [(ids, options.n_gen) for ids in chosen]
    prompts += [(ids, min(128, options.n_gen)) for ids in book_prompts(session, options.data, options.long)]
    for index, (ids, n_gen) in enumerate(prompts):
        if report.left < 10:
            report.log(f"{kv} stops early", prompts=index)
            break
        text = Text(ids, SAMPLED if index % 2 else GREEDY, n_gen)
        engines.read_plain(text)
        random_too = index % options.at_random == 0 or index >= len(chosen)
        engines.compare(text, BUDGETS[index % len(BUDGETS)], drafted, mixed, at_random=random_too)
    passed = True
    for name, tally in (("drafted trees", drafted), ("random trees", mixed)):
        facts = {name: getattr(tally, name) for name in Tally.__slots__}
        good = tally.rows > 0 and not tally.different_rows and tally.same_texts == tally.texts
        report.check(f"{kv}, {name} as plain decoding", good, longest=longest, **facts)
        passed &= good
    return passed


@case()
def main(report: Report, options: Options) -> None:
    for kv in formats(options):
        compare_format(report, options, kv)
        if report.device != "cpu":
            torch.cuda.empty_cache()
    print("FAIL" if report.failed else "PASS", json.dumps({"kv": options.kv}), flush=True)
