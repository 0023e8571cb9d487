"""Measures prompt compression on a GPU: times to the first token, answers; compression.run: facts kept.

    python -m workshop gpu.compress --model DIR --scorer GGUF --out compress-gpu.jsonl

DIR holds a grown pair, target.gguf and draft.gguf (`bough grow DIR`); --shape 27b grows one. GGUF is a
real small model, Qwen2.5-Coder-0.5B: without it only times with random weights of the Qwen3.5-0.8B's shapes
are taken. Without --model and --shape the embedded pair and a small scorer are used, as in a trial run with
--device cpu --lengths 1500,2000 --texts 2.

times     exact and compressed time to the first token at keep 0.10 and 0.05, scoring included; also of a
          second question
answers   answers of the real small model from full and compressed prompts, and the task that must fail
"""

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch

from bough.compress.compressor import NOTE
from bough.compress.scorer import MixedScorer
from bough.compress.words import WordScorer
from bough.config import CompressConfig
from bough.convert.checkpoint import HFConfig
from bough.convert.convert import write_model
from bough.convert.families import read_sizes
from bough.convert.rules import Rule, tensor_rules
from bough.engine.sampler import SamplingParams
from bough.gguf.reader import GGUFFile
from bough.gguf.writer import ValueType
from bough.session.attention_scorer import AttentionScorer
from bough.session.compression import Compression, PromptCompression
from bough.session.requests import CompressOptions, Finished, Text, TextRequest
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
# Qwen3.5-0.8B; its vocabulary is the target's.
SHAPE = {
    "num_hidden_layers": 24,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_theta": 10000000.0, "mrope_section": [11, 11, 10]},
}
SMALL = {
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_theta": 10000000.0, "mrope_section": [2, 1, 1]},
}
_KINDS = {"tokenizer.ggml.token_type": ValueType.INT32, "tokenizer.ggml.eos_token_ids": ValueType.UINT32}


@dataclass
class Options:
    device: str
    model: Path | None
    shape: str | None
    scorer: Path | None
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


class RandomWeights:
    """Tensors of a checkpoint with random values: timings do not depend on them."""

    def __init__(self, rules: Sequence[Rule]):
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: shape for rule in rules for name, shape in rule.sources
        }

    def load(self, name: str) -> torch.Tensor:
        shape = self.shapes[name]
        values = torch.randn(shape) if len(shape) > 1 else torch.rand(shape)
        return values / shape[-1] ** 0.5 if len(shape) > 1 else values

    def where(self, name: str) -> str:
        return f"tensor {name}"


def write_scorer(target: Path, path: Path, shape: Mapping[str, Any]) -> Path:
    """Write a model of the shapes with random weights and the target's vocabulary."""
    with GGUFFile.open(target) as file:
        held = {key: file.metadata[key] for key in file.metadata if key.startswith("tokenizer.")}
    entries = [(key, value, _KINDS.get(key)) for key, value in held.items() if value != []]
    config = HFConfig(
        {
            "architectures": ["Qwen3_5ForCausalLM"],
            "vocab_size": len(held["tokenizer.ggml.tokens"]),
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            **shape,
        },
        "random scorer",
    )
    sizes = read_sizes(config)
    rules = list(tensor_rules(sizes))
    checkpoint = RandomWeights(rules)
    write_model(path, sizes, checkpoint, name="random 0.8B", entries=entries, mix="q8_0", rules=rules)
    return path


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
    begin = time.perf_counter()
    random = write_scorer(target, options.folder / "scorer.gguf", SMALL if options.small else SHAPE)
    report.log("wrote the random scorer", seconds=round(time.perf_counter() - begin, 1))
    session = load_session(
        target, draft, device=options.device, max_ctx=options.context, prefix_cache=8 << 30, parallel=1
    )
    exact: dict[int, float] = {}
    for path in filter(None, (random, options.scorer)):
        name = "random 0.8B" if path is random else path.stem
        with_scorer(session, path, options.device)
        # Kernels are compiled at their first use.
        text = next(contexts(1, min(8192, *options.lengths), session.tokenizer, seed=options.seed()))
        for compress in (CompressOptions("off"), CompressOptions("on", above=1, to=0.5)):
            first_token(session, asked(text, compress=compress))
        for length in options.lengths:
            if length not in exact:
                exact[length] = time_exact(report, session, options, length)
            for keep in KEEP:
                time_compressed(report, session, options, name, (length, keep), exact[length])
        second_question(report, session, options, name)


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
    if case in SECONDS and name.startswith("random"):
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
    """Answers of the real small model, as reader and scorer."""
    if options.scorer is None:
        return report.log("answers left out: no real model")
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
    scorer: Annotated[Path | None, "a real small model"] = None,
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
