"""`bough doctor --gpu` with a CPU in the GPU's place: its page, its facts, and what broken kernels become."""

import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bough.cli import kernel_report, view
from bough.errors import ResourceError
from bough.kernels.check import cases, run
from bough.kernels.check.cases import Case, Work
from bough.kernels.check.run import Peaks
from bough.kernels.runtime import ahead, backends, device, nvrtc
from bough.kernels.runtime.device import Card
from bough.kernels.runtime.launches import KernelLaunch

CPU = torch.device("cpu")
PEAKS = Peaks(1e12, 1e14)
SMI = "#!/bin/sh\necho '580.65.06, 1980 MHz, 1980 MHz, 2619 MHz, 350.00 W, 31, 4, 16, Disabled'\n"


def work(size: float = 1.0, read: int = 0, flops: int = 0) -> Work:
    return Work(lambda: [torch.full((4,), size)], lambda: [torch.ones(4)], 1e-3, read=read, flops=flops)


def attention() -> Work:
    """Wrong in CUDA C++, right in Triton."""
    return work(1.5 if backends.choices("tree attention")[0] == "cuda" else 1.0)


def refused() -> Work:
    raise RuntimeError("CUDA driver error 209: no kernel image is available\nmore | of it")


SOUND = [Case("matmul", "Q4_K, 8 rows", lambda: work(read=1 << 20), "27B"), Case("commit", "24 rows", work)]
BROKEN = [Case("tree attention", "f16, 24 rows", attention, "27B"), Case("sampling", "greedy", refused)]


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    backends.reset()
    monkeypatch.setattr(kernel_report, "_gpu", lambda: CPU)
    monkeypatch.setattr(run, "peaks", lambda flush: PEAKS)
    monkeypatch.setattr(run, "flush_buffer", lambda device: torch.zeros(8))
    monkeypatch.setattr(run, "_seconds", lambda work, flush: 5e-6)
    monkeypatch.setattr(ahead, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(ahead, "kind_of", lambda device: "NVIDIA GeForce RTX 3090, 8.6, 82 SMs")
    monkeypatch.setattr(device, "kind_of", lambda device: "NVIDIA GeForce RTX 3090, 8.6, 82 SMs")
    monkeypatch.setattr(device, "card_of", lambda device: Card("sm_86", 82, 100 << 10, 99 << 10))
    monkeypatch.setattr(nvrtc, "architectures", lambda: ("sm_80", "sm_86"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (22 << 30, 25438126080))
    properties = SimpleNamespace(uuid="a-b-c")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    yield
    backends.reset()


def printed(monkeypatch: pytest.MonkeyPatch, capsys: Any, some: list[Case]) -> tuple[bool, str]:
    shapes: list[object] = []

    def once(each: object, device: object, sizes: object) -> list[Case]:
        shapes.append(each)
        return some if each.name == "27B" else []

    monkeypatch.setattr(cases, "cases_of", once)
    good = kernel_report.gpu_report(view.Screen(quiet=True))
    assert len(shapes) >= 3  # of all common models
    return good, capsys.readouterr().out


def test_a_page_to_paste(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good, page = printed(monkeypatch, capsys, SOUND)
    assert good and "All 2 variants that were tried are right on this GPU." in page
    for fact in (
        "* card: NVIDIA GeForce RTX 3090, 8.6, 82 SMs, compiled for sm_86",
        "* memory: 22.00 GiB of 23.69 GiB free",
        "* NVRTC compiles for: sm_80, sm_86",
        "* measured peak: 1,000 GB/s (copy), 100 TFLOP/s (matmul in 16 bits)",
        "* driver: 580.65.06",
        "* power limit: 350.00 W",
        "* PCIe lanes: 16",
    ):
        assert fact in page, fact
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) == 3 and {line.count("|") for line in page.splitlines() if line.startswith("|")} == {14}
    assert "| matmul | Q4_K, 8 rows | 27B |" in rows[1] and "21% memory | ok |" in rows[1]


def test_broken_rows_are_named_with_what_works_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, page = printed(monkeypatch, capsys, [*SOUND, *BROKEN])
    assert not good and "2 of 4 variants are broken." in page
    assert "broken: tree attention, f16, 24 rows, 27B: wrong numbers: error 5.0e-01, at most 1e-03" in page
    assert "broken: sampling, greedy: CUDA driver error 209: no kernel image is available" in page
    assert "tree attention in Triton: right in all 1 variants" in page
    assert "| **wrong numbers: error 5.0e-01, at most 1e-03** |" in page


def test_an_interrupt_prints_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(some: list[Case], flush: object) -> Iterator[run.Result]:
        yield run.measured(some[0], torch.zeros(8))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run_all", interrupted)
    good, page = printed(monkeypatch, capsys, SOUND)
    assert not good and "1 more were not tried: interrupted." in page and "| matmul |" in page


def test_a_lost_context_ends_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "context_lost", lambda: True)
    good, page = printed(monkeypatch, capsys, [*BROKEN, *SOUND])
    assert not good and "3 more were not tried: the GPU's context is lost." in page


def test_a_row_has_what_the_driver_says_of_a_kernel() -> None:
    kernels = (
        KernelLaunch("_matmul_kernel", "CUDA C++", 96, 8, 93696, 256, 1),
        KernelLaunch("pack", "Triton", 38, 0, 0, 128, 8),
    )
    result = run.Result(SOUND[0], "", 2e-4, 1e-3, 3e-6, 1 << 20, 0, kernels)
    row = kernel_report._row(result, PEAKS, 101376)
    assert row[3:8] == ["matmul_kernel (CUDA C++)", "96", "8", "93696 of 101376", "1"]
    assert row[8:] == ["2.0e-04", "1e-03", "3.0", "35% memory", "ok"]


def test_without_a_gpu_it_is_a_sentence(bough: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if not torch.cuda.is_available():
        result = bough("doctor", "--gpu")
        assert result.exit_code == 6 and "there is no NVIDIA GPU that PyTorch can use" in result.stderr


def test_the_gpu_that_is_meant_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from bough.memory import device as memory

    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(memory, "triton_version", lambda: None)
    with pytest.raises(ResourceError, match="a GPU needs Triton, which is not installed"):
        kernel_report._gpu()
