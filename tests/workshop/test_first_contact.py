"""The parts of first contact with stubs for what runs on a GPU: what is judged, what ends badly or late."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import planted_fault
from workshop.gpu import first_contact
from workshop.gpu.first_contact import DRAFTS, EXPECTED, PARTS, Contact, last_object, run
from workshop.report import Report

PAGE = "## bough\n\n| operation | verdict |\n|---|---|\n| matmul | ok |\n| norms | {} |\n\nThe end.\n"


class Machine:
    """Answers for the processes that would need a GPU."""

    def __init__(self, **changes: dict[str, Any]):
        self.changes, self.commands = changes, []

    def __call__(self, command: list[str], extra: dict[str, str], seconds: float) -> tuple[int, str, str]:
        self.commands.append(command)
        if "doctor" in command and "--gpu" in command:
            return (
                0,
                PAGE.format(self.changes.get("doctor", {}).get(extra.get("BOUGH_PRETEND_CARD"), "ok")),
                "",
            )
        if "LIKE" in extra:
            refused = "run" in command and "cpu" not in command
            text = "def fibonacci(n):\n" if "run" in command else "x  triton  not installed"
            return int(refused or "doctor" in command), text, "a GPU needs Triton, which is not installed"
        fault, folder = command[2:4]
        Path(folder, "bough").mkdir(parents=True, exist_ok=True)
        Path(folder, "bough", "a.checked").write_text("{}")
        facts: dict[str, Any] = {"texts": ["a", "b"], "captured": fault != "capture", "checking_s": 0.02}
        facts |= {"log": [EXPECTED.get(fault, "")], "phases": {"checking": 0.03}}
        facts["notes"] = [DRAFTS[fault]] if DRAFTS.get(fault) else []
        return 0, "noise\n" + json.dumps(facts | self.changes.get(fault, {})), ""


def judged(monkeypatch: pytest.MonkeyPatch, folder: Path, machine: Machine) -> dict[str, bool]:
    monkeypatch.setattr(first_contact, "run", machine)
    report = Report(folder / "lines.jsonl", 150.0)
    contact = Contact(report, folder / "work", folder / "tables")
    for part in PARTS:
        getattr(contact, part)()
    lines = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
    return {line["check"]: line["passed"] for line in lines if "check" in line}


def test_all_parts_pass_where_all_is_said_and_the_text_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = judged(monkeypatch, tmp_path, Machine())
    assert {f"fault {name}" for name in (*EXPECTED, "memory")} <= set(found) and len(found) == 25
    assert [name for name, passed in found.items() if not passed] == []
    tables = sorted(path.name for path in (tmp_path / "tables").iterdir())
    assert tables == ["itself.md", "sm_120.md", "sm_86.md", "sm_89.md"]
    assert not list((tmp_path / "work" / "wrong").rglob("a.checked.part"))


def test_what_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changes = {"wrong": {"texts": ["a", "c"]}, "shared": {"log": []}, "capture": {"captured": True}}
    changes["doctor"] = {"sm_86": "**wrong numbers**"}
    found = judged(monkeypatch, tmp_path, Machine(**changes, none={"phases": {"checking": 3.0}}))
    failed = {name for name, passed in found.items() if not passed}
    assert failed == {
        *("fault wrong", "fault shared", "fault capture", "self-check of the small pair"),
        "doctor --gpu as sm_86",
    }


def test_processes_that_end_badly_or_late(tmp_path: Path) -> None:
    assert last_object('x\n{"a": 1}\ny') == {"a": 1} and last_object("x") == {}
    assert run(["-c", "raise SystemExit(3)"], {}, 20)[0] == 3
    assert run(["-c", "raise SystemExit(3)"], {}, 1)[0] == -1
    late = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "try:\n time.sleep(60)\nexcept KeyboardInterrupt:\n print('page'); raise SystemExit(1)"
    )
    code, text, errors = run(["-c", late], {}, 2)
    assert (code, text) == (1, "page\n") and "not finished after 2 s" in errors


@pytest.mark.parametrize("fault", ["wrong", "compile", "shared", "older NVRTC", "capture", "out of memory"])
def test_faults_can_be_planted(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    from bough.kernels.delta_rule import cuda
    from bough.kernels.runtime import device
    from bough.state import graphs

    for owner, name in ((cuda, "source"), (cuda, "spread"), (device, "architectures")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(graphs.CapturedFunction, "capture", lambda self, pool: None)
    before = (cuda.source, cuda.spread, device.architectures, graphs.CapturedFunction.capture)
    planted_fault.FAULTS[fault]()
    assert before != (cuda.source, cuda.spread, device.architectures, graphs.CapturedFunction.capture)
    if fault in ("capture", "out of memory"):
        function = graphs.CapturedFunction(lambda: None)
        function.capture(None), function.capture(None)
        with pytest.raises(torch.OutOfMemoryError if fault == "out of memory" else RuntimeError):
            function.capture(None)
        function.capture(None)


def test_a_card_is_filled_up_to_the_plan_and_its_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    from bough.memory import device as memory
    from bough.session import loading

    taken: list[int] = []
    monkeypatch.setattr(planted_fault, "take", taken.append)
    monkeypatch.setattr(memory, "_SHARED_SHARE", memory._SHARED_SHARE)
    monkeypatch.setattr(loading, "limit_allocator", lambda budget, device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (139 << 30, 140 << 30))
    planted_fault.full_card()
    left = (139 << 30) - taken[0] - memory.SHARED_RESERVE
    assert 500 << 20 < left < 1500 << 20, left  # the small pair's plan and a little more
    loading.limit_allocator(None, torch.device("cuda", 0))
    assert taken[1] == planted_fault.TAKEN < memory.SHARED_RESERVE
