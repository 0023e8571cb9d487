"""Other programs' spellings of our options: accepted, and shown in no help."""

from collections.abc import Container, Sequence
from itertools import islice

# Of Luce DFlash.
COMPRESS = {
    "--prefill-compression": "--compress",
    "--prefill-threshold": "--compress-above",
    "--prefill-keep-ratio": "--compress-to",
    "--prefill-drafter": "--compress-scorer",
}
# Of llama.cpp, Ollama and vLLM, by ours.
_OTHERS = {
    "--max-ctx": "-c --ctx-size --num-ctx --max-model-len",
    "--temperature": "--temp",
    "--n-gen": "--max-tokens --predict --n-predict --num-predict",
    "--repetition-penalty": "--repeat-penalty",
    "--system": "--system-prompt -sys",
    "--think": "--thinking",
    "--no-think": "--no-thinking",
    "--served-model-name": "--alias",
}
OPTIONS = {other: ours for ours, others in _OTHERS.items() for other in others.split()} | COMPRESS
# Of Luce DFlash.
SWITCHES = {
    "--kv-f16": "--kv=f16",
    "--kv-q8": "--kv=q8_0",
    "--kv-q4": "--kv=q4_0",
    "--kv-tq3": "--kv=tq3_0",
}
MODEL = ("-m", "--model", "-hf", "-hfr", "--hf-repo")


def spelled(arguments: Sequence[str], known: Container[str], valued: Container[str]) -> list[str]:
    """Return the arguments in our spelling; a model that was given as an option becomes the first argument.

    known: the options of the command; valued: those that take a value, which is never changed.
    """
    result: list[str] = []
    models: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            result += [argument, *rest]
            break
        name, equals, value = argument.partition("=") if argument.startswith("--") else (argument, "", "")
        if name in MODEL and name not in known:
            models += [value] if equals else islice(rest, 1)
            continue
        if argument in SWITCHES:
            argument = SWITCHES[argument]
        elif name not in known and OPTIONS.get(name, "") in known:
            name = OPTIONS[name]
            argument = f"{name}{equals}{value}"
        result.append(argument)
        if name in valued and not equals:
            result += islice(rest, 1)
    return [*models, *result]
