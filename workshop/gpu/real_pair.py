"""Trains a draft of a real model on a rented GPU and measures it, in stages that can go on elsewhere.

    python -m workshop gpu.real_pair split --model FILE --work FOLDER --out FOLDER
    ... join answers train measure --work FOLDER --out FOLDER --prompts prompts.jsonl.xz --data DATA
    ... join answers train measure --toy --work FOLDER --out FOLDER --data DATA      a trial run on a CPU

`split` cuts a model's file into FOLDER/parts/NN/part, to be carried one by one, and parts.json with its size
and sum. `join` puts FOLDER/parts together and checks the sum. `answers` has the target answer the prompts for
`--answer-seconds`, in `--processes` processes, which leave no gaps on the device, and packs the tokens.
`train` trains for `--train-seconds`, with a checkpoint every minute. `measure` takes speed, acceptance,
identity to plain decoding and scores: plain, prompt lookup, the draft, both; greedy and at T 0.8.

Everything that a later session needs is written to --out as it comes, in few files of at most 16 MiB:
results.jsonl, tokens-*.npz.xz, portable-*, draft-q8_0.gguf and facts.tar.xz. With `--carried FOLDER`, which
holds such files, the stages go on from there. The machine needs torch, Triton, numpy, safetensors, tokenizers
and jinja2.
"""

import hashlib
import json
import lzma
import shutil
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal, get_args

from bough.bench.runner import PLAIN, Result
from bough.config import EngineConfig, SpecConfig
from bough.gguf.reader import GGUFFile
from bough.models.spec import ModelSpec
from bough.session.loading import load_session
from bough.train.draft_model import TrainedDraft, new_spec
from bough.train.shards import read_shard, shard_files
from workshop.case import case
from workshop.gpu.stages import Stages
from workshop.packed_shards import pack_shards
from workshop.report import Report

STOPPED = 3  # of workshop/training/draft.py
MOST_BYTES = 16 << 20  # of a file in --out
MOST_PARAMETERS = 30_000_000
Stage = Literal["split", "join", "answers", "train", "measure"]
STAGES = get_args(Stage)


@dataclass(frozen=True)
class Shape:
    """The draft's; docs/training.md has the arithmetic."""

    layers: int = 2
    kv_heads: int = 2
    feed_forward: int = 1280
    block: int = 12


@dataclass(frozen=True)
class Sizes:
    """How much of everything; the second set is for trial runs."""

    length: int
    n_gen: int
    batch: int
    anchors: int
    head_tokens: int
    save_every: float  # minutes
    greedy: str  # prompts of each suite: speed
    sampled: str
    fixed: str  # acceptance with whole trees
    measured_tokens: int


FULL = Sizes(
    length=512, n_gen=320, batch=64, anchors=128, head_tokens=49_152, save_every=1.0,
    greedy="humaneval:164,gsm8k:60,mbpp:60,mtbench:30", sampled="humaneval:50,gsm8k:50,mbpp:30,mtbench:15",
    fixed="humaneval:24,gsm8k:24,mbpp:24,mtbench:12", measured_tokens=640,
)  # fmt: skip
TOY = Sizes(
    length=72, n_gen=16, batch=2, anchors=4, head_tokens=310, save_every=0.0,
    greedy="humaneval:1,gsm8k:1", sampled="gsm8k:1", fixed="humaneval:1", measured_tokens=8,
)  # fmt: skip
TOY_PROMPTS = ("Count to ten.", "What is 3 + 4?", "def add(a, b):", "Name a colour.") * 2


@dataclass(frozen=True)
class Options:
    work: Annotated[Path, "on the machine, kept between commands"]
    out: Annotated[Path, "what comes back"]
    model: Annotated[Path | None, "a file to split, or to use as it is"] = None
    part_mib: float = 50
    carried: Annotated[Path | None, "folder of files that came back from an earlier session"] = None
    prompts: Annotated[Path | None, "JSONL, as workshop/training/prompts.py writes it"] = None
    data: Annotated[Path | None, "folder of the suites"] = None
    seconds: Annotated[float, "for all stages of this command"] = 570
    answer_seconds: float = 200
    train_seconds: float = 300
    pack_seconds: float = 60
    processes: int = 2
    device: str = "cuda"
    toy: Annotated[bool, "everything small, on a CPU"] = False
    compile: Annotated[Path | None, "compile this model's kernels, and nothing else"] = None


class Pair(Stages):
    def __init__(self, options: Options):
        self.work, self.out = options.work, options.out
        (self.work / "logs").mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        super().__init__(self.out / "results.jsonl", self.work / "logs", options.seconds)
        self.sizes, self.shape = (TOY if options.toy else FULL), Shape()
        if options.toy:
            self.shape = Shape(layers=1, kv_heads=1, feed_forward=64, block=4)
        self.options, self.device = options, "cpu" if options.toy else options.device
        self.target, self.answers, self.draft = (
            self.work / name for name in ("target.gguf", "answers", "draft")
        )
        self.portable = self.out

    @property
    def tokens(self) -> Path:
        return self.answers / "tokens"

    def use_carried(self) -> None:
        """Put the files of an earlier session where the stages look for them, on a machine without any."""
        carried = self.options.carried
        if carried is None or self.tokens.exists():
            return
        self.tokens.mkdir(parents=True, exist_ok=True)
        for path in sorted(carried.iterdir()):
            if path.name.startswith("tokens-"):
                shutil.copy(path, self.tokens)
            elif path.name.startswith("portable-"):
                shutil.copy(path, self.portable)
            elif path.name == "facts.tar.xz":
                with tarfile.open(path) as archive:
                    archive.extractall(self.work, filter="data")
            elif path.name == "draft-q8_0.gguf":
                self.draft.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, self.draft)
        self.log("carried", files=sorted(path.name for path in carried.iterdir()))

    def keep_facts(self) -> None:
        """Pack what is small and of interest into one file."""
        names = ("logs", "answers/tokens/index.json", "draft/training.json", "draft/training.png")
        with tarfile.open(self.out / "facts.tar.xz.part", "w:xz") as archive:
            for name in (*names, "draft/config.json", "lines"):
                if (self.work / name).exists():
                    archive.add(self.work / name, name)
        (self.out / "facts.tar.xz.part").replace(self.out / "facts.tar.xz")
        large = {path.name: path.stat().st_size for path in self.out.iterdir() if path.is_file()}
        self.log("written", mib={name: round(size / 2**20, 2) for name, size in sorted(large.items())})
        assert max(large.values()) <= MOST_BYTES, large


def split(pair: Pair) -> bool:
    """Cut the model into parts, each in a folder of its own."""
    source, size = pair.options.model, int(pair.options.part_mib * 2**20)
    digest, folder = hashlib.sha256(), pair.work / "parts"
    count = 0
    with source.open("rb") as file:
        while piece := file.read(size):
            (folder / f"{count:02}").mkdir(parents=True, exist_ok=True)
            (folder / f"{count:02}" / "part").write_bytes(piece)
            digest.update(piece)
            count += 1
    facts = {"name": source.name, "bytes": source.stat().st_size, "sha256": digest.hexdigest()}
    (folder / "parts.json").write_text(json.dumps(facts | {"parts": count}) + "\n")
    pair.log("split", parts=count, **facts)
    return True


def join(pair: Pair) -> bool:
    """Put the parts together; a model that is there already is checked alone."""
    folder, target = pair.work / "parts", pair.target
    if pair.options.model is not None and not target.exists():
        target.symlink_to(pair.options.model.resolve())
    if not (folder / "parts.json").exists():
        pair.log("join", bytes=target.stat().st_size, checked=False)
        return True
    facts = json.loads((folder / "parts.json").read_text())
    parts = sorted(folder.glob("*/part"))
    if not target.exists():
        if len(parts) != facts["parts"]:
            pair.log("join", parts=[path.parent.name for path in parts], needed=facts["parts"])
            pair.failed = True
            return False
        with target.with_suffix(".part").open("wb") as file:
            for path in parts:
                file.write(path.read_bytes())
        target.with_suffix(".part").replace(target)
    with target.open("rb") as file:
        same = hashlib.file_digest(file, "sha256").hexdigest() == facts["sha256"]
    if same:
        for path in parts:  # disk and page cache are for the model
            path.unlink()
    pair.log("join", bytes=target.stat().st_size, checked=same)
    pair.failed |= not same
    return same


def read_prompts(pair: Pair) -> Path:
    """Return the prompts as JSONL."""
    path = pair.work / "prompts.jsonl"
    if pair.options.prompts is not None:
        raw = pair.options.prompts.read_bytes()
        path.write_bytes(lzma.decompress(raw) if pair.options.prompts.suffix == ".xz" else raw)
    elif not path.exists():
        lines = [
            {"messages": [{"role": "user", "content": f"{text} {number}"}]}
            for number, text in enumerate(TOY_PROMPTS)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(pair: Pair) -> bool:
    """Have the target answer prompts, and pack the tokens from time to time."""
    sizes, count = pair.sizes, pair.options.processes
    prompts, before = read_prompts(pair), tokens_of(pair)
    if not pair.options.toy:
        compile_kernels(pair)
    begun = time.perf_counter()
    command = ["training.draft", pair.target, "--prompts", prompts, "--output", pair.answers]
    command += ["--data-only", "--n-gen", sizes.n_gen, "--seq", sizes.length, "--temperature", 0.0, 0.8]
    command += ["--answer-minutes", pair.options.answer_seconds / 60, "--device", pair.device]
    command += ["--events", pair.work / "logs" / "events.jsonl"]
    processes = {
        f"answers-{part}": pair.start(f"answers-{part}", *command, "--part", f"{part}/{count}")
        for part in range(count)
    }
    stop = threading.Event()
    packing = threading.Thread(target=pack_often, args=(pair, stop))
    packing.start()
    good = pair.wait(processes, reserve=30, good_codes=(0, STOPPED))
    stop.set()
    packing.join()
    pack_shards(pair.tokens, pair.out)
    seconds, after = time.perf_counter() - begun, tokens_of(pair)
    made = {name: after[name] - before[name] for name in after}
    speed = round(made["tokens"] / seconds)
    pair.log("answered", seconds=round(seconds, 1), tok_s=speed, **{f"new_{k}": v for k, v in made.items()})
    return good and after["answers"] > 0


def compile_kernels(pair: Pair) -> None:
    """Compile all kernels at once, on all cores: each process would compile them one by one."""
    failed = pair.failed
    script = ("gpu.real_pair", "answers", "--compile", pair.target)
    process = pair.start("compile", *script, "--work", pair.work, "--out", pair.out)
    pair.wait({"compile": process}, reserve=pair.left - 90)
    pair.failed = failed  # what is not compiled now is compiled when it is needed


def pack_often(pair: Pair, stop: threading.Event) -> None:
    while not stop.wait(pair.options.pack_seconds):
        if shard_files(pair.tokens):
            pack_shards(pair.tokens, pair.out)


def tokens_of(pair: Pair) -> dict[str, int]:
    """Return how many answers there are, and how many tokens they have without their prompts."""
    shards = [read_shard(path) for path in shard_files(pair.tokens)] if pair.tokens.exists() else []
    return {
        "answers": sum(len(each.lengths) for each in shards),
        "tokens": int(sum(each.lengths.sum() - each.boundaries.sum() for each in shards)),
    }


def train(pair: Pair) -> bool:
    sizes, shape = pair.sizes, pair.shape
    with GGUFFile.open(pair.target) as file:
        spec = new_spec(
            ModelSpec.from_gguf(file), mask_id=0, layers=shape.layers, kv_heads=shape.kv_heads,
            feed_forward=shape.feed_forward, block_size=shape.block,
        )  # fmt: skip
    parameters = sum(each.numel() for each in TrainedDraft(spec).parameters())
    assert parameters <= MOST_PARAMETERS, parameters
    pair.log("draft", parameters=parameters, shape=repr(shape), **tokens_of(pair))
    command = ["training.draft", pair.target, "--tokens", pair.tokens, "--output", pair.draft]
    command += ["--resume", "--layers", shape.layers, "--kv-heads", shape.kv_heads, "--block", shape.block]
    command += ["--feed-forward", shape.feed_forward, "--head-tokens", sizes.head_tokens]
    command += ["--batch", sizes.batch, "--anchors", sizes.anchors, "--seq", sizes.length]
    command += ["--minutes", pair.options.train_seconds / 60, "--checkpoint-minutes", sizes.save_every]
    command += ["--portable", pair.portable, "--gguf", "--no-vocabulary", "--device", pair.device]
    command += ["--events", pair.out / "results.jsonl"]
    process = pair.start("train", *command)
    good = pair.wait({"train": process}, reserve=15)
    if process.returncode == STOPPED:
        pair.log("stopped", why="no time was left; the same command goes on from the last checkpoint")
    elif good:
        shutil.copy(pair.draft / "draft-q8_0.gguf", pair.out)
        found = json.loads((pair.draft / "training.json").read_text())
        facts = {name: found[name] for name in ("steps", "seconds", "texts", "tokens", "parity", "engine")}
        curve = [
            {name: point[name] for name in ("answers", "tokens", "acceptance", "tree_acceptance")}
            for point in found["history"]
        ]
        pair.log("trained", **facts, curve=curve)
    return good


def measure(pair: Pair) -> bool:
    """Take one process of `acceptance.py` after the other: what matters most first."""
    sizes, lines = pair.sizes, pair.work / "lines"
    lines.mkdir(exist_ok=True)
    draft = ["--draft", pair.draft / "draft-q8_0.gguf"]
    runs: list[tuple[str, str, list[object], list[float]]] = [
        ("both", sizes.greedy, ["--adaptive", "--no-plain", *draft], [0.0]),
        ("lookup", sizes.greedy, ["--adaptive"], [0.0]),
        ("draft-fixed", sizes.fixed, ["--no-lookup", "--no-plain", *draft], [0.0, 0.8]),
        ("both-fixed", sizes.fixed, ["--no-plain", *draft], [0.0, 0.8]),
        ("both-sampled", sizes.sampled, ["--adaptive", "--no-plain", *draft], [0.8]),
        ("lookup-sampled", sizes.sampled, ["--adaptive"], [0.8]),
        ("draft", sizes.sampled, ["--adaptive", "--no-lookup", "--no-plain", *draft], [0.0, 0.8]),
    ]
    good = True
    for name, suites, own, temperatures in runs:
        command = ["acceptance", "--model", pair.target, "--data", pair.options.data, *own]
        command += ["--suites", suites, "--temperature", *temperatures, "--n-gen", sizes.measured_tokens]
        command += ["--label", name, "--device", pair.device, "--max-ctx", 2048 if sizes is FULL else 512]
        command += ["--lines", lines / f"{name}.jsonl", "--out", pair.work / "logs" / "rows.jsonl"]
        good &= pair.wait({name: pair.start(name, *command)}, reserve=8)
        if pair.left < 15:
            break
    for name, *_ in runs:
        for row in summary(lines, name):
            pair.log("measured", **row)
    return good


def read_lines(path: Path) -> Iterator[Result]:
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # of a run that was killed
        if "prompt" in line and "skipped" not in line:
            yield line


def summary(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return a row for every suite and temperature of a run, against the plain decoding that there is."""
    found = {
        (line["prompt"], line["budget"], line["temperature"]): line
        for line in read_lines(folder / f"{name}.jsonl")
    }
    plain = {
        (line["prompt"], line["temperature"]): line
        for path in sorted(folder.glob("lookup*.jsonl"))
        for line in read_lines(path)
        if line["budget"] == PLAIN
    }
    groups: dict[tuple[str, float, bool], list[Result]] = {}
    for line in found.values():
        groups.setdefault((line["suite"], line["temperature"], line["budget"] == PLAIN), []).append(line)
    return [_row(name, group, lines, plain) for group, lines in groups.items()]


def _row(
    name: str, group: tuple[str, float, bool], lines: Sequence[Result], plain: Mapping[Any, Result]
) -> dict[str, Any]:
    suite, temperature, is_plain = group
    pairs = [
        (plain[line["prompt"], temperature], line) for line in lines if (line["prompt"], temperature) in plain
    ]
    ratios = [new["tok_s"] / old["tok_s"] for old, new in pairs if old["tok_s"] and new["tok_s"]]
    scored = [bool(line["right"]) for line in lines if line.get("right") is not None]
    positions = [line["accepted_by_position"] or [] for line in lines]
    steps = sum(line["steps"] or 0 for line in lines)
    deepest = max(map(len, positions), default=0)
    return {
        "run": "plain" if is_plain else name,
        "suite": suite,
        "temperature": temperature,
        "prompts": len(lines),
        "tok_s": round(fmean(line["tok_s"] for line in lines), 1),
        "tokens_a_step": round(fmean(line["acceptance_length"] for line in lines), 3),
        "speed_up": round(fmean(ratios), 3) if ratios and not is_plain else None,
        "identical": round(fmean(old["text"] == new["text"] for old, new in pairs), 4) if pairs else None,
        "score": round(fmean(scored), 4) if scored else None,
        "cut": sum(line["finish"] == "length" for line in lines if line.get("right") is not None),
        "loops": sum(bool(line["loops"]) for line in lines),
        "by_position": [
            round(sum(each[depth] for each in positions if len(each) > depth) / max(1, steps), 3)
            for depth in range(deepest)
        ],
    }


@case()
def main(report: Report, stages: Sequence[Stage], options: Options) -> bool:
    if options.compile is not None:
        speculation = SpecConfig(budget=15, lookup=False)  # steps of as many rows as answers are made with
        load_session(
            options.compile,
            EngineConfig(max_ctx=FULL.length, parallel=64, speculation=speculation),
            graphs=False,
        )
        return False
    pair = Pair(options)
    pair.use_carried()
    work = {"split": split, "join": join, "answers": answers, "train": train, "measure": measure}
    try:
        for stage in STAGES:
            if stage in stages and not work[stage](pair):
                pair.failed = True
                break
    finally:
        pair.keep_facts()
    print("FAIL" if pair.failed else "PASS", f"{report.spent:.0f} s", flush=True)
    return pair.failed
