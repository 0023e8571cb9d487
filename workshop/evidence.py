"""Runs the evidence of one commit on a GPU in parts, which can go on in a later command, and lists them.

    python -m workshop evidence --folder FOLDER --pair FOLDER --data FOLDER [--real FOLDER] [--llama FOLDER]
        [--only tests]
    python -m workshop evidence --folder FOLDER --list

--folder has a line for every part that ended, in evidence.jsonl, and each part's own lines in a file, which
name commit, command, date and card. Parts of this commit that succeeded are not run again. --pair has
target.gguf and draft.gguf of 27B shapes (`bough grow`), --real those of a published model, --data the suites
of prompts, --llama llama.cpp's libraries for CUDA (beside_llama.py). A part begins only if its folders are
there and the time that it needs is left (--seconds). Nothing is run for a tree with changes, whose lines
nobody could repeat; a copy without git gets --commit.
"""

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from workshop.case import ROOT, case, environment
from workshop.report import Report

LINES = "evidence.jsonl"
BOUGH = [sys.executable, "-c", "from bough.cli.main import main; main()"]


@dataclass(frozen=True, slots=True)
class EvidencePart:
    """A command and the seconds that it took on an H200; names of folders in braces are filled in."""

    shows: str
    seconds: float
    command: str

    def has(self, key: str, place: Path) -> bool:
        """Return whether a folder is there, if the command uses it."""
        return f"{{{key}}}" not in self.command or place.exists()


def _case(name: str, options: str) -> str:
    return f"workshop {name} {options}"


_PAIR = "--target {pair}/target.gguf --draft {pair}/draft.gguf --data {data}"
_SUITES = "humaneval,gsm8k,math500 {pair}/target.gguf --draft {pair}/draft.gguf --data {data} --prompts 50"
_SANITIZED = (
    "env PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --target-processes application-only"
    " --error-exitcode 9 {tool} {{python}} -m workshop gpu.one_step --sequences 2"
)
_LOAD = "--data {data} --least 128 --seconds 8 --idle 6 --users 1 2 4 8 16 --short --long 32000"
_BESIDE = (
    "--device cuda --llama {{llama}} --data {{data}} --model {{{0}}}/target.gguf --draft {{{0}}}/draft.gguf"
    " --suites humaneval --prompts 4 --n-gen 128 --rounds 2 --prefill 512,8192 --users 1,4,8,16"
)
PARTS = {
    "tests": EvidencePart(
        "kernels and texts", 300, 'pytest -m "gpu and not slow" -n 14 tests/gpu tests/train'
    ),
    "company": EvidencePart(
        "bits among others",
        180,
        _case("gpu.company", f"{_PAIR} --prompts 300 --alone 30 --long 3000 --n-gen 128"),
    ),
    "company-q8_0": EvidencePart(
        "the same in q8_0",
        60,
        _case("gpu.company", f"{_PAIR} --prompts 60 --alone 0 --kv q8_0 --n-gen 128"),
    ),
    "company-tq3_0": EvidencePart(
        "the same in tq3_0",
        60,
        _case("gpu.company", f"{_PAIR} --prompts 60 --alone 0 --kv tq3_0 --n-gen 128"),
    ),
    "exact": EvidencePart("bits of trees", 300, _case("gpu.exact", f"{_PAIR} --kv f16:60,q8_0:20,tq3_0:20")),
    "steps": EvidencePart(
        "steps by rows and parts",
        60,
        "bough step {pair}/target.gguf --draft {pair}/draft.gguf --max-ctx 32768 --save {out}",
    ),
    "suites": EvidencePart("greedy text", 330, f"bough bench {_SUITES} -n 256 --lines {{out}}"),
    "sampled": EvidencePart("sampled text", 330, f"bough bench {_SUITES} -n 256 -t 0.8 --lines {{out}}"),
    "users": EvidencePart(
        "several users",
        150,
        _case(
            "server_load",
            f"{_LOAD} -- {{pair}}/target.gguf --draft {{pair}}/draft.gguf --parallel 16 --max-ctx 49152",
        ),
    ),
    "long": EvidencePart("long contexts", 200, _case("gpu.long_context", "--folder {pair}")),
    "prefill": EvidencePart("prompts", 250, _case("gpu.prefill", "--only text,model")),
    "start": EvidencePart("starts", 120, _case("gpu.start", "--folder {pair}")),
    "compress": EvidencePart("compressed prompts", 150, _case("gpu.compress", "--model {pair} --only times")),
    "experts": EvidencePart("experts", 150, _case("gpu.moe", "--cold 0")),
    "training": EvidencePart("training steps", 60, _case("gpu.training", "--work {pair}/training")),
    "real": EvidencePart(
        "a published pair",
        300,
        "bough bench humaneval,gsm8k,mtbench {real}/target.gguf --draft {real}/draft.gguf --data {data}"
        " --prompts 20 -n 640 --lines {out}",
    ),
    # Not run yet: estimates, llama.cpp's compilation of its kernels included.
    "llama.cpp": EvidencePart(
        "the same file in llama.cpp", 400, _case("beside_llama", _BESIDE.format("pair"))
    ),
    "llama.cpp-real": EvidencePart(
        "a published model in llama.cpp", 200, _case("beside_llama", _BESIDE.format("real"))
    ),
    "memcheck": EvidencePart("accesses out of bounds", 200, _SANITIZED.format(tool="--tool memcheck")),
    "racecheck": EvidencePart(
        "races, but in cuBLAS, which has ten",
        300,
        _SANITIZED.format(tool="--tool racecheck --kernel-name-exclude kns=nvjet"),
    ),
}


@case(seconds=560)
def main(
    report: Report,
    *,
    folder: Annotated[Path, "results; kept between commands"] = Path("evidence"),
    pair: Annotated[Path, "folder of the grown pair"] = Path("grown-27b"),
    real: Annotated[Path, "folder of a published pair"] = Path("real"),
    data: Annotated[Path, "folder of the suites"] = Path("data"),
    llama: Annotated[Path, "folder of llama.cpp's libraries"] = Path("llama"),
    only: Annotated[str, "parts, in the order in which they run"] = ",".join(PARTS),
    commit: Annotated[str, "of this tree, where git does not say it"] = "",
    list: Annotated[bool, "say what has been run, and run nothing"] = False,
) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    facts = report.head("commit", "bough", "cpus")
    facts |= {"commit": commit} if commit else {}
    if not list and not re.fullmatch("[0-9a-f]{7,40}", facts["commit"]):
        print(f"the commit is {facts['commit']!r}, needed one that can be checked out: commit, or --commit")
        return 2
    done = {line["part"] for line in read(folder) if line["commit"] == facts["commit"] and line["passed"]}
    failed = False
    places = {"pair": pair, "real": real, "data": data, "llama": llama}
    for name in only.split(","):
        part = PARTS[name]
        absent = [f"no folder {place}" for key, place in places.items() if not part.has(key, place)]
        late = ["too little time is left"] if part.seconds > report.left else []
        if list or name in done or absent or late:
            begun = "to be run" if list and not absent else f"not begun: {(absent or late or [''])[0]}"
            state = "done" if name in done else begun
            print(f"{name:14s} {part.seconds:4.0f} s  {part.shows}: {state}", flush=True)
            continue
        failed |= not run(report, folder, name, places, facts)
    return int(failed)


def read(folder: Path) -> list[dict[str, Any]]:
    path = folder / LINES
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(report: Report, folder: Path, name: str, places: dict[str, Path], facts: dict[str, Any]) -> bool:
    """Run a part in a process of its own and write how it ended; return whether it succeeded."""
    part, out = PARTS[name], folder / f"{name}.jsonl"
    words = filled(part.command, out, places)
    begin = time.perf_counter()
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(words, env=environment(), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        try:
            code = process.wait(max(part.seconds, report.left))
        except subprocess.TimeoutExpired:
            process.terminate()
            code = process.wait(30)
    tail = (folder / f"{name}.log").read_text(errors="replace").splitlines()[-12:]
    print(f"{name}: exit {code}", *tail, sep="\n  ", flush=True)
    line = {"part": name, "passed": code == 0, "code": code, **facts, "command": part.command}
    line |= {
        "seconds": round(time.perf_counter() - begin, 1),
        **report.head("date", "load"),
        "tail": tail[-3:],
    }
    with (folder / LINES).open("a") as file:
        file.write(json.dumps(line) + "\n")
    if out.exists():
        stamp(out, {**report.head("date"), **card(), "commit": facts["commit"], "command": part.command})
    return code == 0


def card() -> dict[str, str]:
    """Return the card and the versions that lines of a GPU name."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(), "torch": version("torch"), "triton": version("triton")}


def stamp(path: Path, facts: dict[str, str]) -> None:
    """Have every line of a file name where it comes from; a run's commit counts, not what it took it for."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        head = line.get("run", line)
        if "prompt" not in head:  # a prompt's line of `bough bench` follows the line of its run
            head |= {**facts, **head, "commit": facts["commit"]}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def filled(command: str, out: Path, places: dict[str, Path]) -> Sequence[str]:
    """Return a part's command as a process is started with."""
    resolved = {name: place.resolve() for name, place in places.items()}
    words = command.format(out=out.resolve(), python=sys.executable, **resolved)
    program, *options = shlex.split(words)
    if program == "bough":
        return [*BOUGH, *options]
    if program == "pytest":
        return [sys.executable, "-m", "pytest", *options, "-o", "addopts=--strict-markers -ra"]
    if program == "workshop":
        return [sys.executable, "-m", "workshop", options[0], "--out", str(out.resolve()), *options[1:]]
    return [program, *options]
