"""Times the steps of training a draft on a GPU, with random texts, and lists where their time goes.

    python -m workshop gpu.training --work FOLDER --out FILE [--target GGUF] [--steps 24] [--profile]

Without --target it is a random model of Qwen2.5-0.5B's shapes, written to FOLDER. Every text occurs in each
of `--epochs` epochs; the first one computes the features, which later ones may find stored.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from bough.convert.checkpoint import HFConfig
from bough.convert.convert import write_model
from bough.convert.families import Entry, read_sizes
from bough.convert.hf_vocab import UNUSED
from bough.convert.rules import Rule, tensor_rules
from bough.gguf.writer import ValueType
from bough.train.draft_data import TokenData
from bough.train.draft_settings import TrainConfig
from bough.train.draft_target import load_target
from bough.train.draft_trainer import Trainer
from workshop.case import case
from workshop.report import Report
from workshop.tiny import VOCABULARY, vocabulary

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
LENGTHS = (96, 512)  # tokens of a text
PROMPT = 48
USED = 40_000  # tokens that occur


class RandomWeights:
    """Normal weights by name, of the size that keeps the residual stream's."""

    def __init__(self, rules: list[Rule]):
        self.shapes = {name: shape for rule in rules for name, shape in rule.sources}
        self._generator = torch.Generator().manual_seed(0)

    def load(self, name: str) -> torch.Tensor:
        noise = torch.randn(self.shapes[name], generator=self._generator)
        return noise / noise.shape[-1] ** 0.5 if noise.ndim > 1 else 1 + noise * 0.1

    def where(self, name: str) -> str:
        return f"tensor {name}"


def write_random(path: Path) -> Path:
    """Write a random model of SHAPE in Q8_0."""
    config = HFConfig(SHAPE, "random 0.5B")
    sizes = read_sizes(config, mtp_layers=0)
    rules = list(tensor_rules(sizes))
    entries = [*_entries(SHAPE["vocab_size"])]
    write_model(
        path, sizes, RandomWeights(rules), name="random 0.5B", entries=entries, mix="q8_0", rules=rules
    )
    return path


def _entries(size: int) -> Iterator[Entry]:
    for name, value, kind in vocabulary("qwen2"):
        if name == "tokenizer.ggml.tokens":
            value = [*value, *(f"[PAD{i}]" for i in range(VOCABULARY, size))]
        elif name == "tokenizer.ggml.token_type":
            value = [*value, *[UNUSED] * (size - VOCABULARY)]
            kind = ValueType.INT32
        yield name, value, kind


def random_texts(count: int, vocabulary_size: int) -> TokenData:
    generator = np.random.default_rng(0)
    lengths = generator.integers(*LENGTHS, count)
    starts = np.concatenate([[0], lengths.cumsum()])
    tokens = generator.integers(0, min(USED, vocabulary_size), starts[-1]).astype(np.int32)
    return TokenData(tokens, starts, np.full(count, PROMPT), np.arange(count))


@case()
def main(
    report: Report,
    *,
    work: Annotated[Path, "folder for the model and the run"],
    target: Path | None = None,
    steps: Annotated[int, "of an epoch"] = 12,
    epochs: int = 2,
    layers: int = 2,
    feed_forward: int = 1280,
    block: int = 12,
    batch: int = 64,
    anchors: int = 128,
    head_tokens: int = 49_152,
    rank: Annotated[int, "of a DFlash2 draft's selector; 0: a DFlash draft"] = 0,
    profile: Annotated[bool, "list the kernels of two steps"] = False,
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    if target is None:
        target = work / "random-0.5b.gguf"
        if not target.exists():
            write_random(target)
    loaded = load_target(target, device=report.device)
    data = random_texts(steps * batch + batch, loaded.spec.vocab_size)
    config = TrainConfig(
        kind="dflash2" if rank else "dflash", rank=max(1, rank), layers=layers, kv_heads=2,
        feed_forward=feed_forward, block=block, batch=batch, anchors=anchors, head_tokens=head_tokens,
        steps=steps * epochs, mask_token=loaded.spec.vocab_size - 1, held_out=batch // 2,
    )  # fmt: skip
    trainer = Trainer(loaded, data, work / "run", config)
    for epoch in range(epochs):
        times, tokens = [], 0
        for index, numbers in enumerate(trainer._epoch(0)):
            _wait(report.device)
            begin = time.perf_counter()
            texts = trainer._batch(numbers)
            tally, _ = trainer._step(texts, 0.5)
            loss = tally.mean_loss
            _wait(report.device)
            times.append(time.perf_counter() - begin)
            trainer._state.step += 1
            if index:
                tokens += texts.real
        report.log(
            "steps", epoch=epoch, first_ms=round(1000 * times[0], 1), micro_batch=trainer._micro,
            median_ms=round(1000 * float(np.median(times[1:])), 1), tok_s=round(tokens / sum(times[1:])),
            loss=round(loss, 3), gib=_memory(report.device), **report.head("commit", "command", "date"),
        )  # fmt: skip
    begin = time.perf_counter()
    trainer._evaluate()
    report.log("evaluation", seconds=round(time.perf_counter() - begin, 2))
    if profile:
        _profile(report, trainer)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _memory(device: str) -> float:
    return round(torch.cuda.max_memory_allocated() / 2**30, 1) if device == "cuda" else 0.0


def _profile(report: Report, trainer: Trainer) -> None:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (report.device == "cuda")
    with profile(activities=activities) as trace:
        for numbers in trainer._epoch(0)[:2]:
            trainer._step(trainer._batch(numbers), 0.5)
        _wait(report.device)
    key = "self_device_time_total" if report.device == "cuda" else "self_cpu_time_total"
    events = sorted(trace.key_averages(), key=lambda event: getattr(event, key), reverse=True)
    for event in events[:28]:
        ms = getattr(event, key) / 2000
        print(f"{ms:9.2f} ms a step  {event.count // 2:6d} calls  {event.key[:100]}", flush=True)
