"""`bough doctor` on the machine that runs the tests."""

import errno
import json
import tempfile

import torch

from bough.cli import selftest
from bough.kernels import attention
from bough.kernels.check import cases


def test_everything_works_here(bough):
    result = bough("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["ok"], report
    checks = {check["name"]: check for check in report["checks"]}
    assert torch.__version__ in checks["torch"]["detail"]
    assert {"python", "platform", "libraries", "memory", "disk", "model cache", "hub token"} <= set(checks)
    assert " right, relative error at most " in checks["cpu kernels"]["detail"]
    assert checks["native step (cpu)"]["status"] == "ok"
    assert torch.cuda.is_available() == ("gpu kernels" in checks)


def test_a_kernel_that_computes_wrongly_is_reported(bough, monkeypatch):
    monkeypatch.setattr(attention, "paged_attention", lambda q, *_, **__: torch.full_like(q, torch.nan))
    result = bough("doctor")
    assert result.exit_code == 1
    lines = [line for line in result.stdout.splitlines() if line.startswith("✗")]
    assert len(lines) == 3 and all("cpu kernels: tree attention" in line for line in lines)
    shown = " ".join(result.stdout.split())
    assert "wrong numbers: error inf" in shown and "hint: please report this" in shown
    assert "3 broken: cpu kernels: tree attention, f16, 1 rows" in shown


def test_kernels_that_all_fail_are_one_row(bough, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("illegal instruction\nmore")

    monkeypatch.setattr(
        selftest, "hot_cases", lambda device: [cases.Case("commit", name, fail) for name in "ab"]
    )
    result = bough("doctor")
    assert result.exit_code == 1 and "all 2 fail, the first: illegal instruction" in result.stdout


def test_a_cache_that_cannot_be_written_is_a_warning(bough, monkeypatch):
    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    result = bough("doctor")
    assert result.exit_code == 0
    assert "cannot be written: Read-only file system" in " ".join(result.stdout.split())
    last = " ".join(result.stdout.split())
    assert last.endswith("with 2 warnings: writing to the model cache, writing to the kernel cache.")
