"""Compares the text of every proposer, alone and together, with plain decoding: token for token, on a CPU.

    python -m workshop lossless [--tokens 512] [--prompts 1] [--pair TARGET-MTP.gguf DRAFT]

A tiny random target with an MTP block, and random drafts of every kind; five ways to sample. With --pair also
a trained target with an MTP block and its draft, of whose trees much is accepted. Prints a JSON line for each
proposer and appends it to benchmarks/results/lossless.jsonl; fails if one token differs.
"""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Engine, Request
from bough.session.loading import load_session
from tests.engine.driving import run
from tests.engine.test_lossless import SAMPLINGS
from tests.every_draft import PROPOSERS, EveryDraft
from workshop.case import RESULTS, case
from workshop.report import Report
from workshop.tiny import make_tiny

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111] * 6
Texts = dict[str, list[int]]


def texts_of(engine: Engine, tokens: int, prompts: int = 1) -> tuple[Texts, float]:
    """Return the text of every sampling after each prompt, and tokens a step."""
    found, steps, committed = {}, 0, 0
    for number, (name, sampling) in itertools.product(range(prompts), SAMPLINGS.items()):
        request = Request([*PROMPT, *range(65, 65 + number)], tokens, sampling)
        found[f"{name} {number}".removesuffix(" 0")], done = run(engine, request)
        steps, committed = steps + done.stats.steps, committed + done.stats.step_tokens
    return found, committed / steps


def compared(plain: Texts, texts: Texts) -> dict[str, Any]:
    differing = [name for name in plain if plain[name] != texts[name]]
    return {"tokens": sum(map(len, texts.values())), "texts": len(texts), "differing": differing}


def tiny(tokens: int, prompts: int, budget: int, only: Sequence[str]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="bough-lossless-") as folder:
        target = make_tiny(Path(folder) / "target.gguf", layers=8, mtp=True, context=4096)
        drafts = EveryDraft(target, Path(folder))
        plain, _ = texts_of(drafts.plain().engine, tokens, prompts)
        for name in only:
            texts, acceptance = texts_of(drafts.session(name, budget=budget).engine, tokens, prompts)
            facts = {"target": "tiny random qwen35", "proposers": name, "acceptance": round(acceptance, 3)}
            yield {**facts, **compared(plain, texts)}


def of_pair(target: Path, draft: Path, tokens: int, budget: int) -> Iterator[dict[str, Any]]:
    def engine(speculation: SpecConfig | None, own: DraftConfig | None = None) -> Engine:
        config = EngineConfig("cpu", 2048, speculation=speculation, draft=own, prefix_cache=0)
        return load_session(target, config).engine

    plain, _ = texts_of(engine(None), tokens)
    for name, speculation, own in (
        ("mtp", SpecConfig(budget, adaptive=False, lookup=False), None),
        ("dflash", SpecConfig(budget, adaptive=False, lookup=False), DraftConfig(draft)),
        ("dflash, mtp, lookup", SpecConfig(budget, adaptive=False, mtp="on"), DraftConfig(draft)),
        ("dflash, mtp, lookup, adaptive", SpecConfig(budget, mtp="on"), DraftConfig(draft)),
    ):
        texts, acceptance = texts_of(engine(speculation, own), tokens)
        facts = {"proposers": name, "acceptance": round(acceptance, 3)}
        yield {"target": target.name, **facts, **compared(plain, texts)}


@case(out=RESULTS / "lossless.jsonl")
def main(
    report: Report,
    *,
    tokens: Annotated[int, "of each text"] = 512,
    prompts: Annotated[int, "of the tiny target, each in all samplings"] = 1,
    budget: int = 22,
    only: Annotated[Sequence[str], "proposers of the tiny target"] = tuple(PROPOSERS),
    pair: Annotated[Sequence[Path], "a target with an MTP block, and its draft"] = (),
) -> None:
    head = {"what": "lossless", "device": "cpu"}
    failed = total = 0
    trained = of_pair(*pair, tokens, budget) if pair else ()
    for line in itertools.chain(tiny(tokens, prompts, budget, only), trained):
        failed, total = failed + len(line["differing"]), total + line["tokens"]
        report.line(**head, **line, seconds=round(report.spent, 1))
    report.failed = failed > 0
    print("FAIL" if failed else "PASS", f"{total} tokens, {failed} texts differ", flush=True)
