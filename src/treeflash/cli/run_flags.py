"""The arguments and options of `treeflash run`: names, limits and help. Decides nothing."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from treeflash.cli.options import amount, device, memory, size

MODEL_HELP = "A .gguf file, a folder that holds one, a short name (`treeflash list`), or USER/REPO[:QUANT]"


class DraftQuant(StrEnum):
    auto = "auto"
    q8_0 = "q8_0"
    q4_k = "q4_k"
    none = "none"


def _prompt(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Prompt", **options)


def _sampling(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Sampling", **options)


def _speculation(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Speculation", **options)


def _engine(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Engine", **options)


def _output(*names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Output", **options)


Model = Annotated[str | None, typer.Argument(metavar="MODEL", help=f"{MODEL_HELP}; else DFLASH_TARGET.")]
PromptArgument = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The same as --prompt.", show_default=False)
]

Prompt = Annotated[
    str | None,
    _prompt(
        "--prompt",
        "-p",
        help="What to answer. Standard input, unless it is a terminal, is added to it: "
        "in a loop that reads a file, write `</dev/null` behind the command.",
    ),
]
System = Annotated[str | None, _prompt("--system", "-s", help="Instructions that come before the prompt.")]
Raw = Annotated[bool, _prompt("--raw", help="Continue the prompt as it is, without the chat template.")]
Think = Annotated[
    bool | None,
    _prompt(
        "--think/--no-think",
        help="Reason before answering; else as the model's template decides.",
        show_default=False,
    ),
]

MaxTokens = Annotated[int, _sampling("--n-gen", "-n", min=1, metavar="N", help="Most tokens to write.")]
Temperature = Annotated[
    float,
    _sampling(
        "--temperature", "-t", min=0, max=100, metavar="X", help="0 takes the likeliest token each time."
    ),
]
TopP = Annotated[
    float,
    _sampling(
        "--top-p", min=0, max=1, metavar="X", help="Draw from the likeliest tokens that add up to this."
    ),
]
TopK = Annotated[int, _sampling("--top-k", min=0, metavar="N", help="Draw from this many tokens; 0: all.")]
MinP = Annotated[
    float,
    _sampling(
        "--min-p", min=0, max=1, metavar="X", help="Leave out tokens below this share of the likeliest."
    ),
]
RepetitionPenalty = Annotated[
    float,
    _sampling(
        "--repetition-penalty",
        min=0.01,
        max=100,
        metavar="X",
        help="Above 1: tokens of the prompt and the answer become less likely.",
    ),
]
PresencePenalty = Annotated[
    float,
    _sampling(
        "--presence-penalty", min=-100, max=100, metavar="X", help="Off the logits of the answer's tokens."
    ),
]
FrequencyPenalty = Annotated[
    float,
    _sampling(
        "--frequency-penalty",
        min=-100,
        max=100,
        metavar="X",
        help="The same for each time that they occur in it.",
    ),
]
LogitBias = Annotated[
    list[str] | None,
    _sampling(
        "--logit-bias",
        metavar="ID=VALUE",
        help="Added to a token's logit, -inf bans it; may be given several times.",
    ),
]
Seed = Annotated[
    int | None, _sampling("--seed", min=0, help="Same seed, same text. Random and shown when absent.")
]
Stop = Annotated[
    list[str] | None,
    _sampling("--stop", help=r"End before this text; may be given several times; \n is a new line."),
]

Draft = Annotated[
    str | None,
    _speculation(
        "--draft",
        metavar="PATH|REPO|none",
        help="The draft that proposes tokens; else DFLASH_DRAFT, else the one known for the model.",
    ),
]
DraftQuantisation = Annotated[
    DraftQuant,
    _speculation(
        "--draft-quant", help="Quantise the draft while it is loaded. auto: q8_0 on a GPU, none on a CPU."
    ),
]
DraftContext = Annotated[
    int | None,
    _speculation(
        "--draft-ctx",
        parser=size,
        metavar="TOKENS",
        help="How far back the draft's full-attention layers look. Default: 16k.",
    ),
]
DraftCausal = Annotated[
    bool | None,
    _speculation(
        "--draft-causal/--draft-bidirectional",
        help="Whether a row of the draft's block sees only rows before it; else as the checkpoint says.",
        show_default=False,
    ),
]
Budget = Annotated[
    int | None,
    _speculation(
        "--budget",
        min=1,
        max=63,
        metavar="N",
        help="Most proposed tokens in a tree. Default: as recommended for the model, else 22.",
    ),
]
Chain = Annotated[bool, _speculation("--chain", help="Propose one path, no branches.")]
NoDraft = Annotated[
    bool, _speculation("--no-draft", help="Propose nothing: plain decoding. The same as --draft none.")
]

MaxContext = Annotated[
    int | None,
    _engine(
        "--max-ctx",
        parser=size,
        metavar="TOKENS",
        help="Most tokens of the prompt, as the template writes it, and the answer together: 8192, 8k, 1m. "
        "Default: what the model was made for, up to 32k on a CPU and 256k on a GPU, as memory allows.",
    ),
]
VramLimit = Annotated[
    int | None,
    _engine(
        "--vram-limit",
        parser=memory,
        metavar="SIZE",
        help="Let no more of the GPU's memory be in use than this, other programs' included: 24g. "
        "Default: all of it.",
    ),
]
Where = Annotated[
    str, _engine("--device", parser=device, metavar="auto|cpu|cuda|cuda:N", help="Where to compute.")
]
PrefixCache = Annotated[
    int | None,
    _engine(
        "--prefix-cache",
        parser=amount,
        metavar="SIZE",
        help="Memory for states of earlier prompts, so that what a prompt repeats is not read again: "
        "512m, 8g; 0 turns it off. Default: a quarter of the memory that is free, up to 8g.",
    ),
]
PrefixCacheDir = Annotated[
    Path | None,
    _engine(
        "--prefix-cache-dir",
        metavar="PATH",
        help="Keep states of prompts in this folder, too: later runs need not read again what they repeat.",
    ),
]
PrefixCacheDirSize = Annotated[
    int,
    _engine(
        "--prefix-cache-dir-size",
        parser=memory,
        metavar="SIZE",
        help="Most bytes in that folder; what was used longest ago is deleted. Default: 32g.",
        show_default=False,
    ),
]
Offline = Annotated[bool, _engine("--offline", help="Use only what is on this machine.")]

AsJson = Annotated[bool, _output("--json", help="Print one JSON object, for errors too.")]
Logprobs = Annotated[
    int | None,
    _output(
        "--logprobs",
        min=0,
        max=100,
        metavar="N",
        help="With --json: each token's log probability and those of the N likeliest.",
    ),
]
Quiet = Annotated[bool, _output("--quiet", "-q", help="No progress, notices or statistics.")]
