"""Values that users write in their own way: sizes with a suffix, text with escapes, biases of tokens."""

import re

import typer

from bough.errors import UsageError

_SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_LEAST_MEMORY = 1 << 20  # bytes: less is a number whose unit was forgotten
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "e": "\x1b", "\\": "\\"}
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|([nrt0e\\]))")


def size(text: str | int) -> int:
    """Return a number of tokens: 8192, 8k, 32K or 1m; k is 1024."""
    return _whole(text, "tokens like 8192, 8k or 1m")


def kept(text: str | int) -> float:
    """Return how much of a prompt is kept: a share like 0.15 or 15%, or a number of tokens like 16k."""
    match = re.fullmatch(r"(0?\.[0-9]+|1(?:\.0*)?)|([0-9]+(?:\.[0-9]+)?)%", str(text).strip())
    if match is None:
        return float(_whole(text, "tokens like 16k, nor a share like 0.15"))
    share = float(match[1]) if match[1] else float(match[2]) / 100
    if not 0 < share <= 1:
        raise typer.BadParameter(f"{str(text)!r} is not a share above 0 and up to 1")
    return share


def byte_count(text: str | int) -> int:
    """Return a number of bytes: 65536, 64k or 32m; k is 1024."""
    return _whole(text, "bytes like 65536, 64k or 32m")


def _whole(text: str | int, meant: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmgKMG]?)", str(text).strip())
    number = float(match[1]) * _SUFFIXES[match[2].lower()] if match else 0.5
    if number < 1 or number != int(number):
        raise typer.BadParameter(f"{str(text)!r} is not a number of {meant}")
    return int(number)


def memory(text: str | int) -> int:
    """Return an amount of memory in bytes: 24g, 24GiB, 24gb or 24576m; g is 2^30."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg])(?:i?b)?|([0-9]+)b?", str(text).strip().lower())
    if match is None:
        raise typer.BadParameter(f"{str(text)!r} is not an amount of memory like 24g or 24576m")
    number = int(match[3]) if match[3] else int(float(match[1]) * _SUFFIXES[match[2]])
    if number < _LEAST_MEMORY:
        meant = f"; {match[3]}g are gigabytes" if match[3] and number else ""
        raise typer.BadParameter(f"{str(text)!r} means {number} bytes, needed at least 1m{meant}")
    return number


def memory_or_none(text: str | int) -> int:
    """Return an amount of memory in bytes; 0 is allowed, for none."""
    return 0 if str(text).strip() == "0" else memory(text)


def count_or_auto(text: str | int) -> int | None:
    """Return a number; None for auto."""
    if not re.fullmatch(r"auto|[0-9]{1,6}", str(text)):
        raise typer.BadParameter(f"{str(text)!r} is not auto or a number")
    return None if text == "auto" else int(text)


def device(text: str) -> str:
    """Return the name of a device: auto, cpu, cuda or cuda:N."""
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", text) is None:
        raise typer.BadParameter(f"{text!r} is not one of auto, cpu, cuda, cuda:N")
    return text


def unescape(text: str) -> str:
    r"""Return the text with \n, \t, \\, \x1b and \u2028 replaced by their characters; others stay."""

    def character(match: re.Match[str]) -> str:
        code = match[1] or match[2]
        return chr(int(code, 16)) if code else _ESCAPES[match[3]]

    return _ESCAPE.sub(character, text)


def bias(texts: list[str]) -> dict[int, float]:
    """Return logit biases by token, written as ID=VALUE; VALUE may be -inf."""
    biases: dict[int, float] = {}
    for text in texts:
        match = re.fullmatch(r"([0-9]+)=([+-]?(?:inf|[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?))", text.strip())
        if match is None:
            raise UsageError(f"--logit-bias is {text!r}, needed a token's number and a value: 1234=-5")
        if int(match[1]) in biases:
            raise UsageError(f"--logit-bias names token {match[1]} twice, needed once")
        biases[int(match[1])] = float(match[2])
    return biases
