"""Mathematics as dialogues: word problems, plain sums and LaTeX exercises."""

import random
from dataclasses import replace

from workshop.training.algebra import algebra_problem
from workshop.training.documents import Dialogue, dialogue
from workshop.training.drills import drill
from workshop.training.steps import as_steps
from workshop.training.stories import Problem, story_problem

KINDS = (("story", story_problem, 0.62), ("drill", drill, 0.18), ("algebra", algebra_problem, 0.2))
PREFIXES = ("Solve this problem step by step. ", "Solve the problem. ", "Please solve this: ")


def mathematics_dialogue(rng: random.Random) -> Dialogue:
    """Return a dialogue with one problem, or with several short sums."""
    (kind, make, _) = rng.choices(KINDS, [share for *_, share in KINDS])[0]
    problem = make(rng)
    if kind == "story":
        # A few scenarios have their last step in words only: these keep their solution.
        steps = as_steps(problem.question, problem.solution)
        problem = replace(
            problem, solution=steps or f"{problem.solution.replace('#### ', 'The answer is ')}."
        )
    if kind != "drill":
        question = rng.choice(PREFIXES) + problem.question if rng.random() < 0.06 else problem.question
        return dialogue(kind, question, problem.solution, key=problem.question)
    problems = [problem, *(make(rng) for _ in range(rng.choice((0, 0, 0, 1, 2))))]
    return Dialogue(kind, tuple(turn for each in problems for turn in _turns(each)), problem.question)


def _turns(problem: Problem) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("user", problem.question), ("assistant", problem.solution)
