"""`bough convert`: a Hugging Face folder to one GGUF file."""

from dataclasses import MISSING
from enum import StrEnum
from pathlib import Path

from bough.cli import view
from bough.cli.interrupt import held
from bough.cli.options import argument, grouped, option
from bough.errors import UsageError

Mix = StrEnum("Mix", "q4_k_m q8_0 f16 f32")


@grouped
def convert(
    *,
    folder: Path = argument("Folder with config.json, safetensors and a tokenizer.", None, default=MISSING),
    output: Path | None = option("The file to write; else FOLDER-TYPE.gguf here.", "--output -o"),
    mix: Mix = option("How the weights are stored.", "--type", default=Mix.q4_k_m),
    force: bool = option("Write over an existing file.", "--force -f", default=False),
) -> None:
    """Convert a Hugging Face model folder to GGUF.

    bough convert Qwen3.5-4B -o qwen3.5-4b-q4_k_m.gguf
    """
    target = output or Path(f"{folder.resolve().name}-{mix}.gguf")
    if target.is_dir():
        target /= f"{folder.resolve().name}-{mix}.gguf"
    if target.exists() and not force:
        raise UsageError(f"{target} exists", "--force writes over it, --output names another file")
    screen = view.Screen()
    with screen.waiting("Starting PyTorch"), held():
        from bough.convert.convert import convert as write_gguf
    with screen.converting(f"Converting to {mix}") as bar:
        report = write_gguf(folder, target, mix=mix, progress=lambda _, done, total: bar.update(done, total))
    bits = report.bytes * 8 / max(1, report.parameters)
    rows = [
        ("file", str(report.output)),
        ("size", f"{view.amount(report.bytes)}, {bits:.2f} bits a weight"),
        ("architecture", report.architecture),
        ("parameters", f"{report.parameters:,} in {report.tensors} tensors"),
        ("types", ", ".join(f"{count} {kind.name}" for kind, count in sorted(report.types.items()))),
    ]
    if report.fallbacks:
        first = report.fallbacks[0]
        instead = f"such as {first.name}: {first.used.name} instead of {first.wanted.name}"
        text = f"{len(report.fallbacks)} tensors whose rows the type does not divide, {instead}"
        rows.append(("other types", text))
    if report.dropped:
        rows.append(("left out", f"{len(report.dropped)} tensors, such as {report.dropped[0]}"))
    view.sections(f"Converted {folder}", {"Result": rows})
