"""Measures prompt compression on a GPU: times to the first token, answers; compression.run: facts kept.

    python -m workshop gpu.compress --model DIR --scorer GGUF --out compress-gpu.jsonl

DIR holds a grown pair, target.gguf and draft.gguf (`bough grow DIR`); --shape 27b grows one. GGUF is a small
model, Qwen2.5-Coder-0.5B. Without --model and --shape the embedded pair is used, as in a trial run with
--device cpu --lengths 1500,2000 --texts 2.

times     exact and compressed time to the first token at keep 0.10 and 0.05, scoring included; also of a
          second question
answers   answers of the real small model from full and compressed prompts, and the task that must fail
"""

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

import torch

from bough.compress.compressor import NOTE
from bough.compress.scorer import MixedScorer
from bough.compress.words import WordScorer
from bough.config import CompressConfig
from bough.engine.sampler import SamplingParams
from bough.session.attention_scorer import AttentionScorer
from bough.session.compression import Compression, PromptCompression
from bough.session.events import Finished, Text
from bough.session.requests import CompressOptions, TextRequest
from bough.session.session import Session
from tests.gpu.conversation import raise_context_length
from tests.gpu.texts import embedded_pair, load_session
from workshop.case import case
from workshop.compression.answers import answers, table
from workshop.compression.texts import Context, aggregation, contexts
from workshop.grow.grow import grow
from workshop.report import Report

KEEP = (0.10, 0.05)
SECONDS = {(32768, 0.10): 0.8, (65536, 0.10): 1.6, (131072, 0.10): 3.0, (131072, 0.05): 2.1}  # asked
SECOND_QUESTION_S = 0.2
MARGIN = 4096  # tokens of the context for the question, the template and texts that end late


@dataclass
class Options:
    device: str
    model: Path | None
    shape: str | None
    scorer: Path
    lengths: Sequence[int]
    texts: int
    folder: Path
    seeds: list[int] = field(default_factory=lambda: [0])

    @property
    def small(self) -> bool:
        return self.model is None and self.shape is None

    @cached_property
    def pair(self) -> tuple[Path, Path]:
        if self.small:
            target, draft = embedded_pair()
            copied = Path(shutil.copy(target, self.folder / "target.gguf"))
            raise_context_length(copied, self.context)
            return copied, draft
        folder = self.model or grow(self.folder / "grown", self.shape or "27b", force=True).target.parent
        return folder / "target.gguf", folder / "draft.gguf"

    @property
    def context(self) -> int:
        return max(self.lengths) + MARGIN

    def seed(self) -> int:
        """Return a new number, so that no text has a prefix in common with one before."""
        self.seeds[0] += 1
        return self.seeds[0]


def with_scorer(session: Session, path: Path, device: str) -> None:
    """Give a loaded session another scorer."""
    model = AttentionScorer.load(path, device=torch.device(device), target=session.tokenizer)
    compression = Compression(CompressConfig(), MixedScorer(model, WordScorer()))
    session._compression = PromptCompression(session._prompts, session.tokenizer, compression)


def asked(context: Context, *, compress: CompressOptions, question: int = 0) -> TextRequest:
    parts = [context.text, context.questions[question].text]
    content = [{"type": "text", "text": part} for part in parts]
    messages = [{"role": "user", "content": content}]
    return TextRequest(
        messages=messages,
        max_tokens=1,
        sampling=SamplingParams(temperature=0, seed=1),
        compress=compress,
    )


def first_token(session: Session, request: TextRequest) -> tuple[float, Finished]:
    """Return the seconds from the request to its first token, tokenising and scoring included."""
    begin, seconds, last = time.perf_counter(), 0.0, None
    for event in session.generate(request):
        if isinstance(event, Text | Finished) and not seconds:
            seconds = time.perf_counter() - begin
        last = event
    assert isinstance(last, Finished)
    return seconds, last


def times(report: Report, options: Options) -> None:
    target, draft = options.pair
    session = load_session(
        target, draft, device=options.device, max_ctx=options.context, prefix_cache=8 << 30, parallel=1
    )
    with_scorer(session, options.scorer, options.device)
    # Kernels are compiled at their first use.
    text = next(contexts(1, min(8192, *options.lengths), session.tokenizer, seed=options.seed()))
    for compress in (CompressOptions("off"), CompressOptions("on", above=1, to=0.5)):
        first_token(session, asked(text, compress=compress))
    for length in options.lengths:
        exact = time_exact(report, session, options, length)
        for keep in KEEP:
            time_compressed(report, session, options, options.scorer.stem, (length, keep), exact)
    second_question(report, session, options, options.scorer.stem)


def time_exact(report: Report, session: Session, options: Options, length: int) -> float:
    text = next(contexts(1, length, session.tokenizer, seed=options.seed()))
    seconds, last = first_token(session, asked(text, compress=CompressOptions("off")))
    report.time(
        "exact",
        length=length,
        seconds=round(seconds, 3),
        prompt_tokens=last.stats.prompt_tokens,
        ttft_s=round(last.stats.ttft_s, 3),
        cached=last.stats.cached_tokens,
    )
    return seconds


def time_compressed(
    report: Report, session: Session, options: Options, name: str, case: tuple[int, float], exact: float
) -> None:
    length, keep = case
    text = next(contexts(1, length, session.tokenizer, seed=options.seed()))
    seconds, last = first_token(session, asked(text, compress=CompressOptions("on", above=1, to=keep)))
    facts = {"scorer": name, "length": length, "keep": keep, "seconds": round(seconds, 3)}
    facts |= {"exact_s": round(exact, 3), "times_faster": round(exact / seconds, 2)}
    report.time("compressed", **last.stats.compression_dict() | facts)
    report.check("faster than exact", seconds < exact, **facts)
    if case in SECONDS:
        report.check("time to the first token", seconds <= SECONDS[case], limit=SECONDS[case], **facts)


def second_question(report: Report, session: Session, options: Options, name: str) -> None:
    """Ask again about a document that was read: only the question is scored, the prefix is cached."""
    length = options.lengths[min(1, len(options.lengths) - 1)]
    text = next(contexts(1, length, session.tokenizer, seed=options.seed()))
    compress = CompressOptions("on", above=1, to=0.1)
    request = asked(text, compress=compress)
    _, first = first_token(session, request)
    before = session.prepare(request).encoded
    more = [{"role": "assistant", "content": "So."}, {"role": "user", "content": text.questions[1].text}]
    request = dataclasses.replace(request, messages=[*(request.messages or ()), *more])
    seconds, last = first_token(session, request)
    found = session.prepare(request).encoded
    assert before is not None and found is not None and found.compressed is not None
    score_s = last.stats.compression.score_s if last.stats.compression is not None else 0.0
    said = str(found.compressed.messages[-1]["content"])
    kept = str(found.compressed.messages)
    facts = {"scorer": name, "length": length, "seconds": round(seconds, 3), "score_s": round(score_s, 3)}
    facts |= {"cached": last.stats.cached_tokens, "first_prompt": first.stats.prompt_tokens}
    facts |= {"appended": NOTE in said, "fact_found": all(f in kept for f in text.questions[1].facts)}
    report.time("second question", **facts)
    report.check("second question scored in time", score_s <= SECOND_QUESTION_S, **facts)
    common = sum(1 for _ in _common(before.ids, found.ids))
    report.check("prefix kept", common >= 0.8 * len(before.ids), common=common, before=len(before.ids))


def _common(a: Sequence[int], b: Sequence[int]):
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def say(report: Report, options: Options) -> None:
    """Answers of the small model, as reader and scorer."""
    context = 16384 if not options.small else options.context
    config = CompressConfig(scorer=options.scorer)
    session = load_session(
        options.scorer, None, device=options.device, max_ctx=context, compress=config, prefix_cache=4 << 30
    )
    for length in (2048, 8192) if not options.small else options.lengths:
        texts = list(contexts(options.texts, length, session.tokenizer))
        texts += [aggregation(length, session.tokenizer, seed=seed) for seed in range(8)]
        for row in table(list(answers(session, texts, 0.1))):
            report.log("answers", length=length, keep=0.1, model=options.scorer.stem, **row)


PARTS = {"times": times, "answers": say}


@case(seconds=560)
def main(
    report: Report,
    *,
    model: Annotated[Path | None, "folder of a grown pair"] = None,
    shape: Annotated[str | None, "of a pair to be grown: 27b"] = None,
    scorer: Annotated[Path, "a small model"],
    lengths: Annotated[str, "tokens"] = "32768,65536,131072",
    texts: Annotated[int, "of each length; 13 questions about two"] = 16,
    only: str = ",".join(PARTS),
) -> None:
    with tempfile.TemporaryDirectory(prefix="bough-compress") as folder:
        tokens = [int(length) for length in lengths.split(",")]
        options = Options(report.device, model, shape, scorer, tokens, texts, Path(folder))
        for name in only.split(","):

            def run(report: Report, name: str = name) -> None:
                PARTS[name](report, options)

            run.__name__ = name
            report.part(run, needs=30)
