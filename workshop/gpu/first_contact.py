"""First contact on a GPU: `doctor --gpu` as itself and as other cards, planted faults, the self-check's time.

    python -m workshop gpu.first_contact [--only start doctor memory drafts faults cards] [--tables F]

start: the time of the self-check at a first and a second start of the small pair, and of a 27B's kernels.
doctor: the table of this card, with nothing beside it. memory: 500 MB taken between plan and first prompt on
a card that the plan fills. drafts, with wrong settings, and faults, some at a time: each is found and
survived, and the text stays. cards: the tables as sm_86, sm_89 and sm_120. Each part is a process that cannot
take the others with it; what a part has when the seconds are over is kept.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from workshop.case import ROOT, case, environment, output_of
from workshop.report import Report

CARDS = ("sm_86", "sm_89", "sm_120")
CHECK_S, AGAIN_S = 1.5, 0.05  # what is asked for: of a first start, of others
TO_END_S = 8.0
# What is said of each fault; of `kernels` and `memory` nothing has to be.
EXPECTED = {
    "wrong": "tree delta rule runs in Triton (CUDA C++: ",
    "compile": "tree delta rule runs in Triton (CUDA C++: ",
    "shared": "tree delta rule runs in Triton (CUDA C++: ",
    "older NVRTC": "this NVRTC does not know sm_",
    "unknown to NVRTC": "run in Triton, slower: CUDA C++ needs NVRTC",
    "capture": "steps run without CUDA graphs, more slowly: CUDA driver error 999: planted",
    "out of memory": "planning again",
    "kernels": "",
}
DRAFTS = {
    "draft fits": "",
    "draft taps": "target_layer_ids is [3, 4, 5, 6, 7], [1, 2, 3, 4, 5] fits",
    "draft mask": "mask_token_id is 300, 16383 fits",
    "draft block": "block_size is 4, 16 fits",
    "draft causal": "causal is [True, True, True], the opposite fits",
}
EAGER = ("capture",)


def run(command: Sequence[str], extra: dict[str, str], seconds: float) -> tuple[int, str, str]:
    """Run a process; return its exit code, output and errors. A late one is interrupted, then killed."""
    if seconds < 2:
        return -1, "", "not begun: no seconds left"
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**environment(), "HF_HUB_OFFLINE": "1", **extra},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, errors, late = output_of(process, seconds, TO_END_S)
    if late:
        return process.returncode or -1, out, f"{errors}\nnot finished after {seconds:.0f} s"
    return process.returncode, out, errors or ""


def last_object(text: str) -> dict[str, Any]:
    """Return the last JSON object of an output; empty: there is none."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    return {}


class Contact:
    """The parts, and the folder of compiled kernels that they share."""

    def __init__(self, report: Report, folder: Path, tables: Path):
        self.report, self._folder, self._tables = report, folder, tables
        self._base = folder / "kernels"

    @cached_property
    def whole(self) -> dict[str, Any]:
        """The start without a fault, whose texts the others must have; the first one compiles."""
        return self._start("none", self._base)

    def start(self) -> None:
        first, second = self.whole, self._start("none", self._base)
        for name, facts in (("first", first), ("second", second)):
            self.report.log(f"{name} start", load_s=facts.get("load_s"), phases=facts.get("phases"))
        phases = [facts.get("phases", {}).get("checking") for facts in (first, second)]
        self._within("small pair", phases)
        self.report.check("both starts give one text", first.get("texts") == second.get("texts") is not None)
        larger = [self._start("27B", self._base) for _ in range(2)]
        for facts in larger:
            self.report.log("kernels of a 27B", **facts)
        self._within("27B", [facts.get("checking_s") for facts in larger])

    def _within(self, name: str, seconds: Sequence[float | None]) -> None:
        first, second = seconds
        good = first is not None and second is not None and first <= CHECK_S and second <= AGAIN_S
        self.report.check(f"self-check of the {name}", good, first_s=first, second_s=second)

    def doctor(self) -> None:
        self._table("")

    def cards(self) -> None:
        with ThreadPoolExecutor(len(CARDS)) as pool:
            list(pool.map(self._guarded(self._table), CARDS))

    def _table(self, card: str) -> None:
        """Write the table of this card, or of one that it acts as."""
        extra = {"TRITON_CACHE_DIR": str(self._base)} | ({"BOUGH_PRETEND_CARD": card} if card else {})
        begin = time.perf_counter()
        code, text, errors = run(["-m", "bough", "doctor", "--gpu"], extra, self.report.left - TO_END_S)
        path = self._tables / f"{card or 'itself'}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        rows = [line for line in text.splitlines() if line.startswith("| ") and "| operation |" not in line]
        broken = [line for line in rows if not line.endswith("| ok |")]
        facts = {"seconds": round(time.perf_counter() - begin, 1), "rows": len(rows), "broken": len(broken)}
        good = code == 0 and bool(rows) and not broken
        self.report.check(f"doctor --gpu as {card or 'itself'}", good, code=code, **facts)
        for line in [*broken[:12], *text.splitlines()[-3:], *errors.splitlines()[-6:]]:
            print("   ", line[:400], flush=True)

    def faults(self) -> None:
        _ = self.whole
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(self._guarded(self._fault), EXPECTED))
        self._without_triton()

    def drafts(self) -> None:
        """Start with drafts whose config is wrong: each is named after the first answer, in its notes."""
        _ = self.whole

        def one(name: str) -> None:
            facts = self._start(name, self._copy(name))
            self.report.log(name, examined_s=facts.get("examined_s"), notes=facts.get("notes"))
            self._judge(name, facts | {"log": facts.get("notes", [])}, DRAFTS[name])
            if not DRAFTS[name]:
                self.report.check(f"{name}: nothing is said", facts.get("notes") == [])

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._guarded(one), DRAFTS))

    def memory(self) -> None:
        facts = self._start("memory", self._copy("memory"))
        self._judge("memory", facts, "")

    def _fault(self, name: str) -> None:
        extra = {"BOUGH_KERNELS": "triton"} if name == "kernels" else {}
        facts = self._start("none" if name == "kernels" else name, self._copy(name), **extra)
        self._judge(name, facts, EXPECTED[name])

    def _judge(self, name: str, facts: dict[str, Any], line: str) -> None:
        lines = facts.get("log", [])
        said = any(line in each for each in lines) if line else True
        same = facts.get("texts") == self.whole.get("texts") and bool(facts.get("texts"))
        captured = facts.get("captured") is (name not in EAGER)
        good = said and same and captured
        self.report.check(
            f"fault {name}", good, said=said, same_texts=same, captured=facts.get("captured"), log=lines
        )
        if not good:
            print("   ", json.dumps(facts)[:3000], flush=True)
            print("    expected", json.dumps(self.whole.get("texts"))[:1500], flush=True)

    def _without_triton(self) -> None:
        paths = os.pathsep.join(map(str, (ROOT / "tests/platforms", ROOT / "src", ROOT)))
        extra = {"LIKE": "wsl2", "PYTHONPATH": paths}
        prompt = ["-m", "bough", "run", "-p", "def fibonacci(n):", "-n", "16", "--greedy"]
        code, _, errors = run(prompt, extra, self.report.left)
        refused = code != 0 and "a GPU needs Triton, which is not installed" in errors
        self.report.check("Triton missing: refused", refused, code=code, said=errors[-400:])
        code, text, errors = run([*prompt, "--device", "cpu"], extra, self.report.left)
        self.report.check(
            "Triton missing: the CPU", code == 0 and "def fibonacci" in text, said=errors[-400:]
        )
        code, text, _ = run(["-m", "bough", "doctor"], extra, self.report.left)
        said = [line for line in text.splitlines() if "triton" in line.lower()]
        self.report.check("Triton missing: doctor", code == 1 and bool(said), said=said)

    def _start(self, fault: str, folder: Path, **extra: str) -> dict[str, Any]:
        command = ["-m", "tests.gpu.planted_fault", fault, str(folder), self.report.device]
        code, text, errors = run(command, extra, self.report.left - TO_END_S)
        facts = last_object(text)
        if code or not facts or "error" in facts:
            print(f"    {fault}: exit code {code}\n{errors[-2500:]}", flush=True)
        return facts

    def _copy(self, name: str) -> Path:
        """Return a folder with the kernels that are compiled, for another first start."""
        folder = self._folder / name.replace(" ", "-")
        _ = self.whole
        ignored = shutil.ignore_patterns("*.compiled", "*.checked", "*.part")
        if self._base.is_dir():
            with contextlib.suppress(shutil.Error):  # temporary files of a compiler go while they are copied
                shutil.copytree(self._base, folder, ignore=ignored, dirs_exist_ok=True)
        return folder

    def _guarded(self, work: Callable[[str], None]) -> Callable[[str], None]:
        def guarded(name: str) -> None:
            try:
                work(name)
            except Exception as error:
                self.report.check(f"{name} ran", False, error=repr(error)[:500])

        return guarded


PARTS = ("start", "doctor", "memory", "drafts", "faults", "cards")


@case(seconds=150, out=Path("first_contact.jsonl"))
def main(
    report: Report,
    *,
    only: Sequence[str] = PARTS,
    tables: Annotated[Path, "folder of the tables"] = ROOT / "docs" / "cards",
) -> None:
    with tempfile.TemporaryDirectory(prefix="first-contact-") as folder:
        contact = Contact(report, Path(folder), tables.resolve())
        for part in only:
            begin = time.perf_counter()
            try:
                getattr(contact, part)()
            except Exception as error:
                report.check(f"{part} ran", False, error=repr(error)[:500])
            report.log(f"{part} done", seconds=round(time.perf_counter() - begin, 1))
