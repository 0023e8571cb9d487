"""Damaged copies of the embedded models: each loads and writes six tokens, or is refused in a sentence.

    python -m workshop attack.files [--count 300] [--model draft]

Every copy is loaded in a process of its own, with 8 GB of address space and 30 s.
"""

import os
import random
import resource
import signal
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from bough.config import DraftConfig, EngineConfig
from bough.errors import BoughError
from bough.gguf.reader import GGUFFile
from bough.session.loading import load_session
from bough.session.requests import TextRequest
from tests.gguf.test_fuzz import VALUES_64, mutate
from workshop.case import DRAFT, RESULTS, TARGET, case
from workshop.report import Report

LIMIT_S, LIMIT_BYTES = 30, 8 << 30
REFUSED, FAILED = 3, 4
FLOATS = (0.0, -1.0, 1e-45, 1e38, float("inf"), float("nan"))
Damage = Callable[[bytearray, random.Random], None]


def places(content: bytes, names: list[str]) -> list[int]:
    """Return where the facts behind names begin; a name follows its length."""
    written = [struct.pack("<Q", len(name.encode())) + name.encode() for name in names]
    return [content.index(name) + len(name) for name in written]


def damages(path: Path) -> dict[str, Damage]:
    content = path.read_bytes()
    with GGUFFile.open(path) as file:
        scalars = [name for name, value in file.metadata.items() if isinstance(value, int | float)]
        arrays = [name for name in file.metadata if name not in scalars]
        tensors, size = list(file.tensors), len(content)
        start = size - sum(info.nbytes for info in file.tensors.values())
    values, lists, infos = places(content, scalars), places(content, arrays), places(content, tensors)

    def value(target: bytearray, choose: random.Random) -> None:
        at = choose.choice(values) + 4
        number = struct.pack("<f", choose.choice(FLOATS))
        if choose.random() < 0.8:
            number = (choose.choice(VALUES_64) % 2**32).to_bytes(4, "little")
        target[at : at + 4] = number

    def tensor(target: bytearray, choose: random.Random) -> None:
        at = choose.choice(infos)
        (ranks,) = struct.unpack_from("<I", target, at)
        assert ranks <= 4
        at, width = choose.choice(
            [(at, 4), *((at + 4 + 8 * rank, 8) for rank in range(ranks)), (at + 4 + 8 * ranks, 4)]
        )
        target[at : at + width] = (choose.choice(VALUES_64) % 2 ** (8 * width)).to_bytes(width, "little")

    def header(target: bytearray, choose: random.Random) -> None:
        at = choose.choice([*values, *lists, *infos]) + choose.randrange(-12, 24)
        target[at : at + 64] = mutate(bytes(target[at : at + 64]), 64, choose)[:64].ljust(64, b"\0")

    def weights(target: bytearray, choose: random.Random) -> None:
        for _ in range(choose.choice((1, 9, 99))):
            at, width = choose.randrange(start, size - 64), choose.choice((1, 4, 64))
            target[at : at + width] = choose.choice((b"\xff", b"\x7f", b"\x00", b"\xfc")) * width

    def cut(target: bytearray, choose: random.Random) -> None:
        del target[choose.randrange(size) :]

    return {"values": value, "tensors": tensor, "header": header, "weights": weights, "cut": cut}


def load(target: Path, draft: Path) -> int:
    """Load two files and write six tokens; return the exit code of what came of it."""
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    signal.alarm(LIMIT_S)
    try:
        config = EngineConfig("cpu", max_ctx=256, draft=DraftConfig(draft), prefix_cache=0)
        session = load_session(target, config)
        request = TextRequest(messages=[{"role": "user", "content": "Hello"}], max_tokens=6)
        list(session.generate(request))
        return 0
    except BoughError as error:
        return REFUSED if "\n" not in error.message and len(error.message) < 2000 else FAILED
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return FAILED


@case(out=RESULTS / "server_attack.jsonl")
def main(
    report: Report, *, count: int = 300, seed: int = 1, model: Literal["target", "draft"] = "target"
) -> None:
    torch.set_num_threads(1)
    outcomes, failed, slowest = Counter[str](), [], 0.0
    whole = {"target": TARGET, "draft": DRAFT}
    content, kinds = whole[model].read_bytes(), damages(whole[model])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "damaged.gguf")
        for number in range(count):
            name = list(kinds)[number % len(kinds)]
            copy = bytearray(content)
            if number:  # the first one is whole
                kinds[name](copy, random.Random(f"{seed} {number}"))
            path.unlink(missing_ok=True)
            path.write_bytes(copy)
            begin = time.monotonic()
            if (child := os.fork()) == 0:
                os._exit(load(**whole | {model: path}))
            _, status = os.waitpid(child, 0)
            slowest = max(slowest, time.monotonic() - begin)
            code = os.waitstatus_to_exitcode(status)
            outcome = {0: "answered", REFUSED: "refused"}.get(code, f"code {code}")
            outcomes[outcome] += 1
            if code not in (0, REFUSED) or (not number and code):
                failed.append(f"{name} {number}: {outcome}")
    report.failed |= bool(failed)
    facts = {"outcomes": dict(outcomes), "failed": failed, "slowest_s": round(slowest, 1)}
    report.line(what="files", model=model, cases=count, **facts)
