"""`bough doctor` on the machine that runs the tests."""

import errno
import json
import tempfile

import torch

from bough.cli import selftest


def test_everything_works_here(bough):
    result = bough("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report["ok"], report
    checks = {check["name"]: check for check in report["checks"]}
    assert torch.__version__ in checks["torch"]["detail"]
    assert {"python", "platform", "libraries", "memory", "disk", "model cache", "hub token"} <= set(checks)
    for name in ("delta rule (cpu)", "paged attention (cpu)", "quantised matmul (cpu)"):
        assert checks[name]["status"] == "ok"
    assert torch.cuda.is_available() == ("triton (cuda)" in checks)


def test_a_kernel_that_computes_wrongly_is_reported(bough, monkeypatch):
    monkeypatch.setattr(selftest, "paged_attention", lambda q, *_: torch.full_like(q, torch.nan))
    result = bough("doctor")
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("✗")]
    assert "paged attention (cpu)" in line and "relative error nan" in line
    assert "hint: please report this" in result.stdout
    assert "broken: paged attention (cpu)" in result.stdout


def test_a_kernel_that_fails_is_reported(bough, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("illegal instruction\nmore")

    monkeypatch.setattr(selftest, "chunk_delta", fail)
    result = bough("doctor")
    assert result.exit_code == 1 and "RuntimeError: illegal instruction" in result.stdout


def test_a_cache_that_cannot_be_written_is_a_warning(bough, monkeypatch):
    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    result = bough("doctor")
    assert result.exit_code == 0
    assert "cannot be written: Read-only file system" in " ".join(result.stdout.split())
    assert "with 2 warnings: model cache, writing, kernel cache, writing." in result.stdout.splitlines()[-1]
