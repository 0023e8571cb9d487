"""The `treeflash` program: its commands and the options before them. Imports no torch."""

from typing import Annotated

import typer

import treeflash
from treeflash.cli import view
from treeflash.cli.bench import bench
from treeflash.cli.chat.command import chat
from treeflash.cli.command import Command, Program
from treeflash.cli.convert import convert
from treeflash.cli.doctor import doctor
from treeflash.cli.grow import grow
from treeflash.cli.launch import launch
from treeflash.cli.listing import list_models
from treeflash.cli.options import EngineCommand
from treeflash.cli.pull import pull
from treeflash.cli.remove import remove
from treeflash.cli.run import run
from treeflash.cli.serve import serve, stop
from treeflash.cli.show import show
from treeflash.cli.train import train
from treeflash.cli.tune import tune

app = typer.Typer(
    name="treeflash",
    cls=Program,
    help="Fast, exact tree-speculative decoding of GGUF language models on one GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="A MODEL is a .gguf file, a folder that holds one, a short name (treeflash list), "
    "or USER/REPO[:QUANT] on huggingface.co.",
)


def _version(wanted: bool) -> None:
    if wanted:
        view.plain(f"treeflash {treeflash.__version__}")
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
app.command("stop", cls=Command, rich_help_panel="Use a model")(stop)
app.command("launch", cls=Command, rich_help_panel="Use a model")(launch)
app.command("show", cls=Command, rich_help_panel="Use a model")(show)
app.command("bench", cls=EngineCommand, rich_help_panel="Use a model")(bench)
app.command("list", cls=Command, rich_help_panel="Manage models")(list_models)
app.command("pull", cls=Command, rich_help_panel="Manage models")(pull)
app.command("rm", cls=Command, rich_help_panel="Manage models")(remove)
app.command("convert", cls=Command, rich_help_panel="Prepare")(convert)
app.command("grow", cls=Command, rich_help_panel="Prepare")(grow)
app.command("train", cls=Command, rich_help_panel="Prepare")(train)
app.command("tune", cls=Command, rich_help_panel="Prepare")(tune)
app.command("doctor", cls=Command, rich_help_panel="Prepare")(doctor)
