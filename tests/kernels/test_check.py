"""The registry of operations against the kernels there are, and what happens to a kernel that fails."""

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import bough.kernels
from bough.errors import ResourceError, UsageError
from bough.kernels.check.cases import Case, Work, cases_of
from bough.kernels.check.first_start import Verdict, decide
from bough.kernels.check.run import check, error_of
from bough.kernels.check.shapes import COMMON
from bough.kernels.runtime import backends
from bough.kernels.runtime.device import compiled_for
from bough.kernels.runtime.dry_run import DryRun
from bough.kernels.runtime.nvrtc import CompileFailed, architectures, compile_cubin
from bough.session.self_check import SelfCheck, shapes_of
from tests.gpu.texts import embedded_pair
from tests.kernels.cards import CARDS
from tests.session.fake_gpu import GPU, H200, fake_gpu

SOURCES = Path(bough.kernels.__path__[0])
CPU = torch.device("cpu")
# Their rows are packed for a matmul with tiles, which a CPU has not.
GPU_ALONE = {"norms", "experts", "expert routing", "int8 matmul"}


@pytest.fixture(autouse=True)
def nothing_replaced() -> Iterator[None]:
    backends.reset()
    yield
    backends.reset()


def cuda_entries() -> set[str]:
    """Return the names of all __global__ functions."""
    text = "\n".join(path.read_text() for path in SOURCES.rglob("*.cu"))
    return set(re.findall(r'extern "C" __global__[^;{]*?(\w+)\s*\(\s*const', text))


def triton_kernels() -> set[tuple[str, str]]:
    """Return (module, name) of all jitted functions that a launch names; the others are inlined in those."""
    jitted, launched = set(), set()
    for path in SOURCES.rglob("*.py"):
        module = ".".join(("bough.kernels", *path.relative_to(SOURCES).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                decorators = " ".join(map(ast.unparse, node.decorator_list))
                jitted |= {(module, node.name)} if "triton.jit" in decorators else set()
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value).split(".")[-1])
    return {each for each in jitted if each[1] in launched}


def launched(
    monkeypatch: pytest.MonkeyPatch, choice: str, card=H200
) -> tuple[set[str], set[tuple[str, str]]]:
    """Return the CUDA C++ entries and the Triton kernels that all cases launch."""
    monkeypatch.setenv("BOUGH_KERNELS", choice)
    with fake_gpu(card), DryRun(GPU) as found:
        for shapes in COMMON:
            for case in cases_of(shapes, GPU):
                work = case.make()
                work.run(*work.fresh())
    entries = {name for module in found.modules for name in module._most_shared}
    return entries, {(each.kernel.fn.__module__, each.name) for each in found.launches}


def test_no_kernel_is_missing_from_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a launch in this package names runs in some case: in CUDA C++, or where Triton replaces it."""
    ours, usual = launched(monkeypatch, "cuda")
    none, replacing = launched(monkeypatch, "triton")
    assert len(cuda_entries()) == 8 and cuda_entries() == ours and not none
    assert len(triton_kernels()) > 40 and triton_kernels() == usual | replacing


@pytest.mark.parametrize("name", ["RTX 3090", "RTX 5090"])
def test_every_case_can_be_launched_on_other_cards(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert len(launched(monkeypatch, "cuda", CARDS[name])[0]) == 8


def test_a_models_own_kernels_are_among_its_cases() -> None:
    """By name: the cases' pointers are aligned otherwise than some of a step's."""
    from bough.config import DraftConfig, EngineConfig
    from bough.gguf.reader import GGUFFile
    from tests.session.fake_gpu import dry_run, gpu_plan

    target, draft = embedded_pair()
    config = EngineConfig("cuda", draft=DraftConfig(draft))
    plan, real = gpu_plan(target, config), dry_run(target, config)
    with fake_gpu(), GGUFFile.open(target) as file, DryRun(GPU) as found:
        shapes = shapes_of(file, config, plan)
        verdict = Path("never-written.checked")
        self_check = SelfCheck(lambda: shapes, GPU)
        self_check.begin(verdict)
        self_check.rehearse()
    assert {each.name for each in real.launches} <= {each.name for each in found.launches}
    assert len(real.modules) <= len(found.modules) <= len(real.modules) + 2 and not verdict.exists()


@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3.5-0.8b", "qwen3.6-27b", "qwen3.6-35b-a3b"])
def test_a_first_start_of_a_catalogue_model_can_launch_its_cases(tmp_path: Path, name: str) -> None:
    from bough.config import EngineConfig
    from bough.convert.header import write_target
    from bough.gguf.reader import GGUFFile
    from bough.hub.catalog import named
    from tests.session.fake_gpu import gpu_plan

    known, config = named(name), EngineConfig("cuda")
    assert known is not None and known[0].shape is not None
    path = write_target(known[0], known[0].shape, tmp_path / "target.gguf")
    plan = gpu_plan(path, config)
    with fake_gpu(), GGUFFile.open(path) as file, DryRun(GPU) as found:
        [shapes] = shapes_of(file, config, plan)
        cases = cases_of(shapes, GPU)
        for case in cases:
            work = case.make()
            work.run(*work.fresh())
    assert 25 < len(cases) < 80 and found.modules and found.launches


def test_kernels_that_do_not_compile_are_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are compiled again where they are launched: in the self-check, which replaces them."""
    from types import SimpleNamespace

    from bough.kernels.runtime import ahead

    def fail() -> None:
        raise CompileFailed("--gpu-architecture=sm_86\nbough.cu(7): error: expected a ';'")

    monkeypatch.setattr(ahead, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(ahead, "kind_of", lambda device: "a card")
    failing = [SimpleNamespace(names=name, load=fail) for name in ("tree_delta", "rows")]

    class Recorded:
        launches, modules = (), failing

        def __init__(self, device: torch.device): ...
        def __enter__(self) -> "Recorded":
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(ahead, "DryRun", Recorded)
    with ahead.CompileAhead(lambda: None, CPU, facts="") as compiling:
        compiling.wait()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("the CUDA C++ kernel ") and line.endswith(", nor could 1 others")
    assert "could not be compiled: CompileFailed: bough.cu(7): error: expected a ';'" in line
    assert not list(tmp_path.iterdir())  # the next start lists them again


def test_every_case_is_right_on_a_cpu() -> None:
    """Where the reference runs against itself in float64: the inputs are of the right shapes and sizes."""
    cases = [case for case in cases_of(COMMON[0], CPU) if case.operation not in GPU_ALONE]
    operations = {case.operation for case in cases}
    assert operations | GPU_ALONE == set(backends.OPERATIONS)
    results = [check(case) for case in cases if "48 rows" not in case.variant]
    assert [(result.case.name, result.failure) for result in results if result.failure] == []


def test_errors_of_all_kinds_are_seen() -> None:
    one = torch.ones(3)
    assert error_of([one], [one.double()]) == 0
    assert error_of([one * 1.01], [one]) == pytest.approx(0.01)
    assert error_of([one * torch.nan], [one]) == float("inf")
    assert error_of([torch.tensor([1, 2])], [torch.tensor([1, 3])]) == float("inf")
    low = torch.tensor([1.0, -torch.inf])
    assert error_of([low], [low]) == 0 and error_of([one[:2]], [low]) == float("inf")


class Fault:
    """An operation whose first implementation fails in one way, and whose others are right."""

    def __init__(self, kind: str, operation: str, broken: tuple[str, ...] = ("cuda",)):
        self.kind, self.operation, self.broken = kind, operation, broken

    def make(self) -> Work:
        if self.backend in self.broken and self.kind == "does not compile":
            raise CompileFailed("--gpu-architecture=sm_86 -DD=128\nbough.cu(7): error: expected a ';'")
        return Work(self.run, lambda: [torch.ones(4)], 1e-3)

    @property
    def backend(self) -> str:
        return backends.choices(self.operation)[0]

    def run(self) -> list[Tensor]:
        if self.backend in self.broken:
            if self.kind == "too much shared memory":
                raise RuntimeError(f"{self.operation} needs 102144 bytes of shared memory, limit 101376")
            if self.kind == "driver error":
                raise RuntimeError("CUDA driver error 209: no kernel image is available for execution")
            return [torch.full((4,), 1.5)]
        return [torch.ones(4)]

    @property
    def case(self) -> Case:
        return Case(self.operation, "24 rows", self.make)


FAULTS = {
    "wrong numbers": "wrong numbers: error 5.0e-01, at most 1e-03",
    "does not compile": "CompileFailed: bough.cu(7): error: expected a ';'",
    "too much shared memory": "tree attention needs 102144 bytes of shared memory, limit 101376",
    "driver error": "CUDA driver error 209: no kernel image is available for execution",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_found_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """Once: later starts take the verdict, without running anything."""
    path, fault = tmp_path / "x.checked", Fault(kind, "tree attention")
    decide(Verdict.load(path), [fault.case, Fault("", "commit").case])
    assert backends.replaced() == {"tree attention": "triton"}
    (line,) = [record.getMessage() for record in caplog.records]
    why = f"tree attention runs in Triton (CUDA C++: 24 rows: {FAULTS[kind]}): slower"
    assert line.startswith(why) and "bough doctor" in line
    assert backends.identity() == ", tree attention in Triton"
    backends.reset()
    caplog.clear()
    later = Verdict.load(path)
    later.apply()
    assert later.complete and backends.replaced() == {"tree attention": "triton"}
    assert caplog.records[0].getMessage() == line


def test_the_last_implementation_is_pytorch(tmp_path: Path) -> None:
    path = tmp_path / "x.checked"
    decide(Verdict.load(path), [Fault("wrong numbers", "tree attention", ("cuda", "triton")).case])
    assert backends.replaced() == {"tree attention": "torch"}
    broken = Fault("wrong numbers", "matmul", ("cuda", "triton"))
    with pytest.raises(ResourceError, match="matmul does not work on this GPU in Triton, the last impl"):
        decide(Verdict.load(tmp_path / "y.checked"), [broken.case])


def test_a_kernel_that_ended_the_process_is_replaced_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "x.checked"
    Verdict(path, testing=("experts", "cuda")).save()  # as a segmentation fault would leave it
    assert not Verdict.load(path).complete and Verdict.load(path).testing == ("experts", "cuda")
    decide(Verdict.load(path), [Fault("", "experts").case])
    assert backends.replaced() == {"experts": "triton"}
    assert "the process ended while it was tried" in json.loads(path.read_text())["replaced"]["experts"][1]


def test_what_ctrl_c_ended_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "x.checked"

    def interrupted() -> Work:
        raise KeyboardInterrupt

    cases = [Case("commit", "a", Fault("", "commit").make), Case("experts", "b", interrupted)]
    with pytest.raises(KeyboardInterrupt):
        decide(Verdict.load(path), cases)
    assert not Verdict.load(path).complete and Verdict.load(path).testing is None
    decide(Verdict.load(path), [Fault("", "experts", ()).case])
    assert Verdict.load(path).complete and backends.replaced() == {}


@pytest.mark.skipif(sys.platform == "win32", reason="another process cannot be asked for there")
def test_another_process_that_tries_its_kernels_has_not_crashed(tmp_path: Path) -> None:
    path = tmp_path / "x.checked"
    Verdict(path, testing=("experts", "cuda")).save()
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"process": os.getppid()}))
    assert Verdict.load(path).testing is None
    path.write_text(json.dumps(content | {"process": 2**22 + 1}))  # none has it
    assert Verdict.load(path).testing == ("experts", "cuda")


@pytest.mark.parametrize(
    "content",
    [
        *("", "{}", "[1]", '{"replaced": {"x": ["triton"]}}', '{"replaced": 3}'),
        f'{{"replaced": {{}}, "testing": ["experts", "cuda"], "complete": false, "process": {10**30}}}',
    ],
)
def test_a_damaged_verdict_is_another_first_start(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.checked"
    path.write_text(content)
    verdict = Verdict.load(path)
    verdict.apply()
    assert not verdict.complete and backends.replaced() == {}


def test_nothing_is_replaced_while_a_model_runs() -> None:
    backends.settle()
    with pytest.raises(ResourceError, match="another model of this process"):
        backends.replace("experts", "triton")
    assert backends.replaced() == {}


def test_the_switch_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUGH_KERNELS", "Triton")
    assert backends.choices("tree attention") == ("triton", "torch")
    assert backends.choices("sampling") == ("triton",)
    assert "matmul in Triton" in backends.identity()
    backends.reset()
    monkeypatch.setenv("BOUGH_KERNELS", "rocm")
    with pytest.raises(UsageError, match="BOUGH_KERNELS is 'rocm', needed one of cuda, triton, torch"):
        backends.choices("matmul")


def test_without_nvrtc_all_is_triton_and_said(caplog: pytest.LogCaptureFixture) -> None:
    backends.leave_out_cuda()
    assert all(backends.choices(operation)[0] != "cuda" for operation in backends.OPERATIONS)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("matmul, norms, experts, ") and "run in Triton, slower" in line
    assert "matmul in Triton" in backends.identity()  # saved states of CUDA C++ kernels are others
    backends.leave_out_cuda()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("arch", "known", "target"),
    [
        ("sm_86", ("sm_80", "sm_86"), ""),
        ("sm_121", ("sm_90", "sm_100", "sm_120"), "sm_120"),  # NVRTC 12.8 on a GB10
        ("sm_103", ("sm_90", "sm_100"), "sm_100"),
        ("sm_120", ("sm_75", "sm_80", "sm_90"), "compute_90"),  # NVRTC 12.6 on an RTX 5090
        ("sm_90", ("sm_75",), "nothing"),
        ("sm_90", (), ""),  # it does not say
    ],
)
def test_a_card_newer_than_nvrtc_takes_the_nearest(arch: str, known: tuple[str, ...], target: str) -> None:
    assert compiled_for(arch, known) == target


def test_nvrtc_is_asked_what_it_knows() -> None:
    known = architectures()
    assert {"sm_80", "sm_90"} <= set(known)
    newer = compiled_for("sm_99", known)
    assert newer == "sm_90" and compile_cubin("__global__ void f() {}", defines={}, arch=newer, cached=False)


def test_a_chosen_kernel_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every dispatch asks the table."""
    answers: dict[str, set[str]] = {}
    for operation in ("tree attention", "tree delta rule", "tree convolution", "norms", "experts", "matmul"):
        with fake_gpu(), DryRun(GPU) as found:
            backends.replace(operation, "triton")
            for case in (*cases_of(COMMON[0], GPU), *cases_of(COMMON[1], GPU)):
                if case.operation == operation:
                    work = case.make()
                    work.run(*work.fresh())
        answers[operation] = {name for module in found.modules for name in module._most_shared}
        backends.reset()
    kernel = {"tree attention": "tree_attention", "tree delta rule": "tree_delta", "norms": "rows"}
    kernel |= {"tree convolution": "tree_conv", "experts": "experts", "matmul": "matmul"}
    assert [operation for operation, name in kernel.items() if name in answers[operation]] == []
