"""The `bough` program: its commands and the options before them. Imports no torch."""

import io
import sys
from typing import Annotated

import typer

import bough
from bough.cli import grow, view
from bough.cli.bench import bench
from bough.cli.chat.command import chat
from bough.cli.command import BROKEN_PIPE, Command, Program, report_error
from bough.cli.convert import convert
from bough.cli.doctor import doctor
from bough.cli.launch import launch
from bough.cli.listing import list_models
from bough.cli.options import EngineCommand
from bough.cli.ps import ps
from bough.cli.pull import pull
from bough.cli.remove import remove
from bough.cli.run import run
from bough.cli.serve import serve, stop
from bough.cli.show import show
from bough.cli.step import share, step
from bough.cli.streams import OutputFailed, delivered, discard, reopen_closed
from bough.cli.train import train
from bough.cli.tune import tune

app = typer.Typer(
    name="bough",
    cls=Program,
    help="Fast, exact tree-speculative decoding of GGUF language models on one GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="A MODEL is a .gguf file, a folder that holds one, a short name (bough list), "
    "or USER/REPO[:QUANT] on huggingface.co.",
)


def _version(shown: bool) -> None:
    if shown:
        view.plain(f"bough {bough.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show Python's traceback when something fails.")
    ] = False,
) -> None:
    pass


app.command("run", cls=EngineCommand, rich_help_panel="Use a model")(run)
app.command("chat", cls=EngineCommand, rich_help_panel="Use a model")(chat)
app.command("serve", cls=EngineCommand, rich_help_panel="Use a model")(serve)
app.command("ps", cls=Command, rich_help_panel="Use a model")(ps)
app.command("stop", cls=Command, rich_help_panel="Use a model")(stop)
app.command("launch", cls=Command, rich_help_panel="Use a model")(launch)
app.command("show", cls=Command, rich_help_panel="Use a model")(show)
app.command("bench", cls=EngineCommand, rich_help_panel="Use a model")(bench)
app.command("step", cls=EngineCommand, rich_help_panel="Use a model")(step)
app.command("share", cls=EngineCommand, rich_help_panel="Use a model")(share)
app.command("list", cls=Command, rich_help_panel="Manage models")(list_models)
app.command("pull", cls=Command, rich_help_panel="Manage models")(pull)
app.command("rm", cls=Command, rich_help_panel="Manage models")(remove)
app.command("convert", cls=Command, rich_help_panel="Prepare")(convert)
_grow, _settings = grow.command()
app.command("grow", cls=Command, rich_help_panel="Prepare", context_settings=_settings)(_grow)
app.command("train", cls=Command, rich_help_panel="Prepare")(train)
app.command("tune", cls=Command, rich_help_panel="Prepare")(tune)
app.command("doctor", cls=Command, rich_help_panel="Prepare")(doctor)


def start() -> None:
    reopen_closed()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character shows `?` instead of ending the program.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        # Commands report their own errors; what is left is a help text that cannot be written.
        with delivered():
            try:
                app(prog_name="bough")
            finally:
                view.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        sys.exit(BROKEN_PIPE)
    except OutputFailed as error:
        sys.exit(report_error(error, as_json=False))
