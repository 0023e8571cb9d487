"""Programming tasks as dialogues and as plain source files."""

import random
import re
from dataclasses import replace

from workshop.training.compose import composed_task
from workshop.training.documents import Dialogue, Document, dialogue, fenced
from workshop.training.python_tasks import Solution, indented, solve, templates

COMPOSED_SHARE = 0.25
SHOWN = 3  # examples in assertions and answers


def draw_solution(rng: random.Random) -> Solution:
    """Return a solved task from the templates or a composed one."""
    if rng.random() < COMPOSED_SHARE:
        return solve(composed_task(rng), rng)
    return solve(rng.choice(templates()).draw(rng), rng)


def task_dialogue(rng: random.Random) -> Dialogue:
    """Return a dialogue of one of several kinds."""
    solution = draw_solution(rng)
    (form,) = rng.choices(
        (request, completion, signature_only, explanation, prediction, two_turns), (54, 26, 6, 4, 4, 6)
    )
    return form(solution, rng)


def task_source(rng: random.Random) -> Document:
    """Return a source file of one to four functions, some with assertions or calls at the end."""
    solutions = [draw_solution(rng) for _ in range(rng.choice((1, 1, 1, 2, 3, 4)))]
    if len({solution.name for solution in solutions}) < len(solutions):
        solutions = solutions[:1]
    pieces = [function(solution, rng.choice(DOCSTRINGS), imports=False) for solution in solutions]
    imports = sorted({line for solution in solutions for line in solution.imports if "typing" not in line})
    typing = sorted(
        {name for s in solutions for line in s.imports if "typing" in line for name in line[19:].split(", ")}
    )
    if typing:
        imports.append(f"from typing import {', '.join(typing)}")
    if imports:
        pieces.insert(0, "\n".join(imports))
    if rng.random() < 0.35:
        pieces.append("\n".join(assertions(solution, rng) for solution in solutions))
    elif rng.random() < 0.3:
        calls = [f"    print({example.call})" for s in solutions for example in s.examples[:1]]
        pieces.append("\n".join(['if __name__ == "__main__":', *calls]))
    return Document("task_sources", "\n\n\n".join(pieces) + "\n", solution_key(solutions[0]))


def request(solution: Solution, rng: random.Random) -> Dialogue:
    """Return a request in words, answered with a fenced function."""
    docstring = rng.choice(("none", "none", "line", "line", "doctest"))
    return dialogue(
        "code", _wish(solution, rng), _answer(solution, docstring, rng), key=solution_key(solution)
    )


def completion(solution: Solution, rng: random.Random) -> Dialogue:
    """Return a function's head with its docstring, completed with the whole function."""
    docstring = rng.choice(("line", "doctest", "doctest", "tight", "tight", "arrow", "equal", "arguments"))
    code = function(solution, docstring)
    head = code[: len(code) - len(indented(solution.body))].rstrip("\n")
    return dialogue("completion", completion_request(head, rng), fenced(code), key=solution_key(solution))


def completion_request(head: str, rng: random.Random) -> str:
    """Return a completion request in one of several forms."""
    return rng.choice(
        (
            f"Complete this function:\n```python\n{head}\n```",
            f"Complete this function:\n```python\n{head}\n```",
            f"Complete the following Python function.\n\n```python\n{head}\n```",
            f"Complete the following Python code:\n\n{head}",
            f"Finish the function.\n```python\n{head}\n```",
            f"Write the body of this function:\n```python\n{head}\n```",
            f"```python\n{head}\n```",
            head,
        )
    )


def signature_only(solution: Solution, rng: random.Random) -> Dialogue:
    """Return a bare `def name(arguments):`, completed with the whole function."""
    if rng.random() < 0.5:
        untyped = tuple(line for line in solution.imports if "typing" not in line)
        solution = replace(solution, signature=solution.bare_signature, imports=untyped)
    code = function(solution, rng.choice(("none", "line")))
    head = rng.choice((solution.signature, solution.signature, f"```python\n{solution.signature}\n```"))
    return dialogue("completion", head, fenced(code), key=solution_key(solution))


def explanation(solution: Solution, rng: random.Random) -> Dialogue:
    """What does this function do?"""
    code = fenced(function(solution, "none"))
    asked = rng.choice(("What does this function do?", "Explain this function.", "What does this code do?"))
    answer = f"The function `{solution.name}` {third_person(solution.statement)}"
    if solution.examples:
        answer += f" For example, `{solution.examples[0].call}` returns `{solution.examples[0].value}`."
    return dialogue("explanation", f"{asked}\n{code}", answer, key=solution_key(solution))


def prediction(solution: Solution, rng: random.Random) -> Dialogue:
    """What does this call return?"""
    if not solution.examples:
        return explanation(solution, rng)
    example = rng.choice(solution.examples)
    code = fenced(function(solution, rng.choice(("none", "line"))))
    asked = rng.choice(
        (f"{code}\nWhat does `{example.call}` return?", f"What is the value of `{example.call}`?\n{code}")
    )
    return dialogue(
        "explanation", asked, f"`{example.call}` returns `{example.value}`.", key=solution_key(solution)
    )


def two_turns(solution: Solution, rng: random.Random) -> Dialogue:
    """Return a request, followed by a question about the answer."""
    first = request(solution, rng).messages
    if solution.other_bodies and rng.random() < 0.6:
        asked = rng.choice(
            (
                "Can you write it in another way?",
                "Show me a different solution.",
                "Is there another way to do it?",
            )
        )
        head = "\n".join(solution.imports) + "\n\n\n" if solution.imports else ""
        answer = fenced(f"{head}{solution.signature}\n{indented(solution.other_bodies[0])}")
        # the second body may need other imports than the first
        if re.search(r"\b(math|re|string)\.", solution.other_bodies[0]) or "import math" in head:
            return request(solution, rng)
    else:
        asked = rng.choice(("How do I call it?", "Give me an example.", "Show me how to use it."))
        lines = [f"{example.call}  # {example.value}" for example in solution.examples[:SHOWN]]
        answer = fenced("\n".join(lines))
    return Dialogue("code", (*first, ("user", asked), ("assistant", answer)), solution_key(solution))


def assertions(solution: Solution, rng: random.Random) -> str:
    return "\n".join(assertion(solution, index) for index in range(min(SHOWN, len(solution.examples))))


def assertion(solution: Solution, index: int) -> str:
    example = solution.examples[index]
    match example.value:
        case "True":
            return f"assert {example.call}"
        case "None":
            return f"assert {example.call} is None"
        case value:
            return f"assert {example.call} == {value}"


DOCSTRINGS = ("none", "line", "line", "doctest", "tight", "arrow", "equal", "arguments")


def function(solution: Solution, docstring: str, *, imports: bool = True) -> str:
    """Return the function's source with a docstring of the named style."""
    head = "\n".join(solution.imports) + "\n\n\n" if imports and solution.imports else ""
    lines = [solution.signature, *_docstring(solution, docstring), indented(solution.body)]
    return head + "\n".join(lines)


def _docstring(solution: Solution, style: str) -> list[str]:
    examples = solution.examples[:2]
    shell = [f"    {line}" for example in examples for line in (f">>> {example.call}", example.value)]
    match style:
        case "none":
            return []
        case "line":
            return [f'    """{solution.statement}"""']
        case "doctest":
            return ['    """', f"    {solution.statement}", "", *shell, '    """']
        case "tight":
            return [f'    """ {solution.statement}', *shell, '    """']
        case "arguments":
            notes = [f"        {name}: {note}." for name, note in solution.parameter_notes]
            return [
                f'    """{solution.statement}',
                "",
                "    Args:",
                *notes,
                "",
                "    Returns:",
                f"        {solution.returns}.",
                '    """',
            ]
    sign = "->" if style == "arrow" else "=="
    shown = [f"    {example.call} {sign} {example.value}" for example in examples]
    word = "    Examples:" if len(shown) > 1 else "    Example:"
    return ['    """', f"    {solution.statement}", word, *shown, '    """']


def third_person(statement: str) -> str:
    """ "Return the sum." becomes "returns the sum."."""
    verb, _, rest = statement.partition(" ")
    verb = verb.lower()
    if verb.endswith("y") and verb[-2] not in "aeiou":
        verb = verb[:-1] + "ies"
    elif verb.endswith(("ch", "sh", "s", "x")):
        verb += "es"
    else:
        verb += "s"
    return f"{verb} {rest}"


def _wish(solution: Solution, rng: random.Random) -> str:
    call = solution.bare_signature.removeprefix("def ").removesuffix(":")
    named = third_person(solution.statement)
    forms = [
        f"Write a Python function `{call}` that {named}",
        f"Write a function {call} that {named}",
        f"Implement `{call}` in Python. {solution.statement}",
        f"Implement the function `{solution.name}`. {solution.statement}\n{fenced(solution.signature)}",
    ]
    if solution.spoken is not None:
        spoken = third_person(solution.spoken)
        imperative = solution.spoken[0].lower() + solution.spoken[1:]
        forms += [
            f"Write a Python function that {spoken}",
            f"Write a Python function that {spoken}",
            f"Write a function that {spoken}",
            f"Write a function to {imperative}",
            f"Write a python function to {imperative}",
            f"Write a Python function called {solution.name} that {spoken}",
            f"Can you write a Python function that {spoken[:-1]}?",
            f"I need a Python function that {spoken} Call it {solution.name}.",
        ]
        if not solution.spoken.startswith("Return"):
            forms.append(f"How do I {imperative[:-1]} in Python?")
    wish = rng.choice(forms)
    if solution.examples and rng.random() < 0.3:
        example = rng.choice(solution.examples)
        wish += rng.choice(
            (
                f"\nYour code should pass: assert {example.call} == {example.value}",
                f"\n\nFor example, `{example.call}` should return `{example.value}`.",
                f"\n\n>>> {example.call}\n{example.value}",
            )
        )
    return wish


def _answer(solution: Solution, docstring: str, rng: random.Random) -> str:
    answer = fenced(function(solution, docstring))
    if rng.random() < 0.25:
        answer = f"Here is a function that {third_person(solution.statement)[:-1]}:\n\n{answer}"
    if solution.examples and rng.random() < 0.25:
        example = rng.choice(solution.examples)
        answer += f"\n\nFor example, `{example.call}` returns `{example.value}`."
    return answer


def solution_key(solution: Solution) -> str:
    """Return a solution's identity, independent of the text around it."""
    return f"{solution.name}\n{solution.body}"
