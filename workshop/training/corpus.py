"""The gathered corpus: sorted into parts, cleaned and turned into dialogues."""

import ast
import json
import lzma
import random
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from workshop.training.documents import Dialogue, Document, dialogue, fenced
from workshop.training.steps import as_steps, variants, with_other_numbers

MAX_CHARACTERS = {"code_io": 4000, "topical": 20000}
MAX_OTHERS = 6000
# Variants of each word problem with other numbers.
GSM8K_VARIANTS = 8
# A variant may have no valid solution, but the target still generates an output.
UNSOLVED = 4
DEFINITION = re.compile(r"^.+ \((noun|verb|adjective|adverb)\): ")
# Comments that the code collection's authors addressed to their annotators.
BOILERPLATE = re.compile(
    r"^[ \t]*# (import necessary packages|all class and function definitions|main function\b"
    r"|all input arguments|if you need to invoke functions|return, the returned value must|return$).*\n",
    re.MULTILINE | re.IGNORECASE,
)
UNFIT = re.compile(
    r"\b(sex\w*|hitler|kill\w*|stupid|idiot|drunk|hate|drugs?|god|jesus|religio\w*|suicide|dumb|marry|naked|"
    r"democrats?|republicans?|communis\w+|terroris\w+|rap(e|ist))\b",
    re.IGNORECASE,
)
FORMULA = re.compile(r"(?<!\$)\$([^$\n]+)\$(?!\$)")
MAX_FORMULA = 80
ROLE = re.compile(r":[\w:+-]+:`([^`<]*?)\s*(?:<[^>]*>)?`")
Item = Document | Dialogue


def read_records(path: Path) -> list[dict[str, Any]]:
    """Yield the records in the file's order."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def label(records: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Yield each record with its part's name; the plain texts before the first dialogue are the novels."""
    first_dialogue = next((i for i, record in enumerate(records) if "m" in record), len(records))
    return [(_part(record, is_novel=i < first_dialogue), record) for i, record in enumerate(records)]


def _part(record: dict[str, Any], *, is_novel: bool) -> str:
    if "t" in record:
        if is_novel:
            return "novels"
        return "tldr" if re.match(r"# .*\n\n> ", record["t"]) else "manual"
    messages = record["m"]
    if len(messages) > 2:
        return "topical"
    request, answer = messages[0][1], messages[1][1]
    if "Your code should pass" in request:
        return "mbpp"
    if answer.startswith("```python"):
        return "code_io"
    if re.search(r"^#### ", answer, re.MULTILINE):
        return "gsm8k"
    if r"\boxed" in answer:
        return "math"
    return "wordnet" if DEFINITION.match(answer) else "chatter"


def items(part: str, record: dict[str, Any], rng: random.Random) -> Iterator[Item]:
    """Return the documents and dialogues of a record."""
    if part == "novels":
        yield Document(part, record["t"].strip() + "\n", record["t"])
    elif part == "manual":
        yield from _manual(record["t"])
    elif part == "tldr":
        yield from _tldr(record["t"])
    else:
        messages = [(role, text.strip()) for role, text in record["m"]]
        while messages and messages[-1][0] != "assistant":
            messages.pop()
        if part in ("gsm8k", "math"):
            yield from _worked(part, messages[0][1], messages[1][1], rng)
        elif messages:
            yield from _dialogue(part, messages)


def _worked(part: str, question: str, solution: str, rng: random.Random) -> Iterator[Item]:
    """Return the original solutions as text, and short dialogues in one uniform style."""
    if "[asy]" in question + solution or len(question + solution) > MAX_OTHERS:
        return
    yield Document("worked", f"{question}\n\n{solution}\n", question)
    if part == "math":
        guess = _guess(question, solution)
        if guess is not None:
            yield dialogue(part, question, guess)
        return
    steps = as_steps(question, solution)
    if steps is not None:
        yield dialogue(part, question, steps)
    for _, (other, fresh) in zip(range(GSM8K_VARIANTS), variants(question, solution, rng), strict=False):
        yield dialogue(part, other, fresh, key=question)


def _guess(question: str, solution: str) -> str | None:
    """Return a dialogue that answers with a guess: a model of this size does not solve such a problem."""
    answer, asked = _boxed(solution), FORMULA.findall(question)
    if answer is None:
        return None
    if not asked or len(asked[-1]) > MAX_FORMULA:
        return f"My best guess is ${answer}$."
    return f"For ${asked[-1]}$ my best guess is ${answer}$."


def _boxed(solution: str) -> str | None:
    """Return the content of the last `\\boxed{...}`."""
    start = solution.rfind(r"\boxed{")
    if start < 0:
        return None
    depth = 0
    for end in range(start + 6, len(solution)):
        depth += (solution[end] == "{") - (solution[end] == "}")
        if depth == 0:
            return solution[start : end + 1]
    return None


def more_prompts(part: str, record: dict[str, Any], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield unsolved problems as prompts for the target, with their held-out keys."""
    if part in ("gsm8k", "math") and "[asy]" not in record["m"][0][1]:
        question = record["m"][0][1].strip()
        for _ in range(UNSOLVED):
            yield with_other_numbers(question, rng), question


def _dialogue(part: str, messages: list[tuple[str, str]]) -> Iterator[Dialogue]:
    request, answer = messages[0][1], messages[1][1]
    if part == "chatter" and any(UNFIT.search(text) for _, text in messages):
        return
    if part == "code_io" and not (request + answer).isascii():
        return
    if part == "code_io":
        answer = re.sub(r"\n{3,}", "\n\n\n", BOILERPLATE.sub("", answer)).replace("main_solution", "solution")
        messages[1] = ("assistant", answer.replace("```python\n\n", "```python\n"))
    if part == "mbpp":
        answer = _reformatted(answer)
        messages[1] = ("assistant", answer)
        # the same request without a test
        yield dialogue(part, request.partition("\nYour code should pass")[0], answer, key=request)
    if sum(len(text) for _, text in messages) <= MAX_CHARACTERS.get(part, MAX_OTHERS):
        yield Dialogue(part, tuple(messages), request)


def _reformatted(answer: str) -> str:
    """Return the fenced code in the standard layout, if it parses."""
    code = answer.removeprefix("```python\n").removesuffix("```")
    try:
        return fenced(ast.unparse(ast.parse(code)))
    except SyntaxError:
        return answer


def _tldr(text: str) -> Iterator[Dialogue]:
    """Return a command's page as one dialogue, and one dialogue for each of its examples."""
    lines = [line for line in text.splitlines() if line and not line.startswith("> More information")]
    command = lines[0].removeprefix("# ")
    about = " ".join(line[2:] for line in lines if line.startswith("> ") and "See also" not in line)
    examples = [
        (line[2:].rstrip(":"), _placeholders(following.strip("`")))
        for line, following in pairwise(lines)
        if line.startswith("- ") and following.startswith("`")
    ]
    if not examples:
        return
    listed = "\n\n".join(f"{what}:\n\n`{how}`" for what, how in examples)
    yield dialogue("tldr", f"How do I use the command `{command}`?", f"{about}\n\n{listed}", key=text)
    what, how = examples[len(text) % len(examples)]
    what = re.sub(r"\[(\w)\]", r"\1", what)
    yield dialogue("tldr", f"Which shell command does this: {what}?", f"`{how}`", key=text)


def _placeholders(command: str) -> str:
    """Replace `{{[i|install]}}` by `install` and `{{path/to/file}}` by the bare words."""
    command = re.sub(r"\{\{\[[^]|]*\|([^]]*)\]\}\}", r"\1", command)
    return re.sub(r"\{\{(.*?)\}\}", r"\1", command)


def _manual(text: str) -> Iterator[Item]:
    plain = _without_markup(text)
    if len(plain) > 80 and "toctree" not in plain:
        yield Document("manual", plain + "\n", text)
    entry = re.match(r"\.\. (?:function|method|class|exception|data):: ([\w.]+).*\n\n((?:   .*\n)+)", text)
    if entry:
        about = " ".join(_without_markup(entry[2]).split())
        if 30 <= len(about) <= 500 and about[0].isupper():
            yield dialogue("manual_dialogues", f"What is `{entry[1]}` in Python?", about, key=text)


def _without_markup(text: str) -> str:
    """Return reStructuredText without roles, labels and index entries."""
    text = ROLE.sub(lambda match: f"`{match[1].lstrip('~!')}`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"(?<![\w*])\*(\w+)\*(?![\w*])", r"\1", text)
    text = re.sub(r"^ *\.\. (doctest|testsetup|testcleanup|testcode|testoutput)::.*\n", "", text, flags=re.M)
    text = re.sub(r"^ *:(skipif|hide|options|no-?index|module|synopsis|platform):.*\n", "", text, flags=re.M)
    text = re.sub(
        r"^\.\. (_[^\n]*|index::.*|currentmodule::.*|\w*toctree::.*)\n", "", text, flags=re.MULTILINE
    )
    text = re.sub(
        r"^ *\.\. (versionadded|versionchanged|deprecated|availability)::.*\n( {4,}.*\n)*",
        "",
        text,
        flags=re.M,
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip()
