"""Groups of options: a dataclass in a command's signature becomes its options."""

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from bough.cli.options import (
    EngineOptions,
    KVType,
    Only,
    SpeculationOptions,
    check_remote,
    grouped,
    panel,
)
from bough.cli.program import app
from bough.config import EngineConfig
from bough.errors import UsageError


@dataclass(frozen=True, slots=True)
class Shape:
    width: int = panel("Shape")("Columns.", "-w 1..", default=3)
    height: int | None = panel("Shape")("Rows.")
    names: Annotated[list[str] | None, typer.Option("--name")] = None


def program(command) -> tuple[CliRunner, typer.Typer]:
    made = typer.Typer()
    made.command()(grouped(command))
    return CliRunner(), made


def test_fields_become_options_and_come_back_as_one_value() -> None:
    seen = []

    def command(*, first: Annotated[str, typer.Argument()] = "x", shape: Shape, last: bool = False) -> None:
        """Do it."""
        seen.append((first, shape, last))

    runner, made = program(command)
    assert runner.invoke(made, []).exit_code == 0
    assert runner.invoke(made, ["y", "-w", "5", "--name", "a", "--name", "b", "--last"]).exit_code == 0
    assert seen == [("x", Shape(), False), ("y", Shape(5, None, ["a", "b"]), True)]
    assert runner.invoke(made, ["--width", "0"]).exit_code == 2
    assert list(inspect.signature(grouped(command)).parameters) == [
        "first",
        "width",
        "height",
        "names",
        "last",
    ]
    assert "Do it." in runner.invoke(made, ["--help"]).output


def test_only_some_fields_become_options() -> None:
    seen = []

    def command(*, shape: Annotated[Shape, Only(("height",))]) -> None:
        seen.append(shape)

    runner, made = program(command)
    assert runner.invoke(made, ["--height", "2"]).exit_code == 0 and seen == [Shape(height=2)]
    assert runner.invoke(made, ["--width", "2"]).exit_code == 2


def test_a_field_without_a_default_is_required() -> None:
    @dataclass(frozen=True, slots=True)
    class Needed:
        path: Annotated[str, typer.Option("--path")]

    def command(*, needed: Needed) -> None: ...

    runner, made = program(command)
    assert runner.invoke(made, []).exit_code == 2
    assert runner.invoke(made, ["--path", "x"]).exit_code == 0


@pytest.mark.parametrize("name", ["run", "chat", "serve", "bench", "train"])
def test_a_command_takes_groups_and_few_parameters(name: str) -> None:
    (command,) = (each.callback for each in app.registered_commands if each.name == name)
    assert command is not None
    own = inspect.signature(command.__wrapped__, follow_wrapped=False)
    assert len(own.parameters) <= 8 and len(inspect.signature(command).parameters) > 20


def test_defaults_are_those_of_the_engine() -> None:
    assert EngineOptions().config() == EngineConfig()
    config = EngineOptions(max_ctx=8, kv=KVType.q8_0, kv_v=KVType.q5_0).config()
    assert config == EngineConfig(max_ctx=8, kv_k="q8_0", kv_v="q5_0")
    check_remote(EngineOptions(offline=True, kv_k=KVType.auto))
    with pytest.raises(UsageError, match="the server has its own"):
        check_remote(EngineOptions(device="cpu"))
    assert SpeculationOptions() == SpeculationOptions(draft=None, budget=None)
