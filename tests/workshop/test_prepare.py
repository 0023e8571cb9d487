"""The training data: generated text is correct, files are as the trainer and the converter expect them."""

import argparse
import ast
import gzip
import json
import lzma
import random
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from bough.convert.checkpoint import HFConfig
from bough.convert.hf_vocab import read_vocabulary
from bough.gguf.reader import GGUFFile
from bough.text.template import ChatTemplate
from bough.text.tokenizer import Tokenizer
from workshop.training import algebra, corpus, drills, prepare, python_code, stories
from workshop.training.compose import composed_task
from workshop.training.documents import SPECIAL_TOKENS, Dialogue, chat_text
from workshop.training.heads import head_dialogue
from workshop.training.mathematics import mathematics_dialogue
from workshop.training.overlap import BENCHMARKS, benchmark_runs
from workshop.training.python_tasks import compile_function, solve, templates
from workshop.training.shards import Job, loops, make_shard, start_worker
from workshop.training.talk import talk_dialogue
from workshop.training.task_documents import DOCSTRINGS, function, task_dialogue, task_source
from workshop.training.tokenizer import from_model, pieces, save, train

ENTRIES = 600
PAIR = Path(__file__).parents[2] / "src" / "bough" / "pair" / "target.gguf"
DIALOGUES = {
    "code_io": (
        "How can we add one?",
        "```python\n# main function\ndef main_solution(x):\n    return x + 1\n```",
    ),
    "gsm8k": ("House{n} has {n} dogs and 2 cats: how many pets?", "There are {n} + 2 = {m} pets.\n#### {m}"),
    "math": ("Compute $x{n} + 1$.", r"It is $\boxed{4}$."),
    "mbpp": (
        "Write a function to add {n}.\nYour code should pass: assert f(1) == 2",
        "```python\ndef f(x):return x+{n}\n```",
    ),
    "chatter": ("How are you, number {n}?", "I am fine."),
    "wordnet": ('Define "entity {n}".', "entity (noun): that which is perceived."),
}


def _numbered(text: str, n: int) -> str:
    return text.replace("{n}", str(n)).replace("{m}", str(n + 2))


def records(count: int) -> list[dict[str, object]]:
    """A corpus with every kind of record in it, in the real one's order."""
    novels = [{"t": f"Chapter {n}. It was a dark and stormy night, and the rain fell."} for n in range(count)]
    dialogues = [
        {"m": [["user", asked.replace("{n}", str(n))], ["assistant", _numbered(answer, n)]]}
        for asked, answer in DIALOGUES.values()
        for n in range(count)
    ]
    about = "Return the sine of *x*, as :func:`cos` would for another angle.\n   The value is a float.\n"
    manual = [{"t": f".. function:: sin{n}(x)\n\n   {about}"} for n in range(count)]
    command = "{{[-f|--file]}} {{path}}"
    pages = [
        {"t": f"# tool{n}\n\n> Does things.\n\n- Run it with a file:\n\n`tool{n} {command}`\n"}
        for n in range(count)
    ]
    turns = ["Hi!", "Hello.", "Do you like tea?", "Yes, I do.", "Bye!"]
    chats = [
        {"m": [["user" if i % 2 == 0 else "assistant", f"{n}: {turn}"] for i, turn in enumerate(turns)]}
        for n in range(count)
    ]
    return [*novels, *dialogues, *manual, *pages, *chats]


LONG = " ".join(f"Part {n} is long." for n in range(30))
SOURCE = '''
"""{long} Number {n}."""


def documented_{n}(values, start=0):
    """Return the sum of the values and of {n}, beginning with start.

    {many}
    """
    total = start + {n}
    for value in values:
        total += value
    return total


def plain_{n}(x):
    y = x + {n}
    return y * {n}


def stub_{n}(x):
    """Not written yet."""
    raise NotImplementedError
'''


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    rng = random.Random(0)
    texts = [task_dialogue(rng).text() for _ in range(150)]
    return train(pieces(texts), ENTRIES)


@pytest.mark.parametrize("number", range(20))
def test_every_task_passes_its_examples(number: int) -> None:
    rng = random.Random(number)
    for template in templates()[number::20]:
        for body in range(2 * len(template.task.bodies)):
            solution = solve(template.draw(rng), rng)
            code = function(solution, DOCSTRINGS[body % len(DOCSTRINGS)])
            assert solution.examples, solution.name
            scope = {solution.name: compile_function(code, solution.name)}
            for example in solution.examples:
                assert eval(example.call, scope) == eval(example.value), code


def test_composed_tasks_are_correct_and_many() -> None:
    rng = random.Random(1)
    tasks = {composed_task(rng) for _ in range(400)}
    assert len(tasks) > 300
    for task in list(tasks)[:100]:
        solution = solve(task, rng)
        written = compile_function(function(solution, "doctest"), solution.name)
        for example in solution.examples:
            assert eval(example.call, {solution.name: written}) == eval(example.value)


def test_heads_are_copied_verbatim_and_their_functions_are_correct() -> None:
    rng = random.Random(6)
    drawn = [head_dialogue(rng) for _ in range(300)]
    for item in drawn:
        (_, asked), (_, answer) = item.messages
        code = answer.removeprefix("```python\n").removesuffix("\n```")
        tree = ast.parse(code)
        written = tree.body[-1]
        assert isinstance(written, ast.FunctionDef)
        docstring = ast.get_docstring(written, clean=False) or ""
        head = code[: code.index(docstring) + len(docstring) + 3]
        assert head in asked and code.removeprefix(head).strip()
        scope = {"__name__": "module"}
        exec(compile(tree, "<head>", "exec"), scope)
        for call, value in re.findall(
            rf">>> ({written.name}\(.*\))\n +(\S.*?)(?:  # .*)?$", code, re.MULTILINE
        ):
            assert eval(call.split("  # ")[0], dict(scope)) == eval(value), code
    assert len({item.messages[0][1] for item in drawn}) == len(drawn)


def test_loops_and_benchmark_overlaps_are_dropped(tokenizer: tokenizers.Tokenizer, tmp_path: Path) -> None:
    turn = tokenizer.token_to_id("<|im_start|>")
    run = np.arange(20, 32, dtype=np.uint16)

    def turns(*texts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.concatenate([[turn], *text]) for text in texts]).astype(np.uint16)

    other = np.arange(40, 60, dtype=np.uint16)
    assert loops(turns([other], [run, other, run, run]), turn)
    assert loops(np.full(14, 7, np.uint16), turn) and not loops(np.full(13, 7, np.uint16), turn)
    assert not loops(turns([run, other], [run, other, run]), turn)

    question = "How many of the seven grey geese that live on the old farm can swim across the lake today?"
    for name, fields in BENCHMARKS.items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_bytes(gzip.compress(json.dumps({"task_id": 7, fields[0]: question}).encode()))
    save(tokenizer, tmp_path)
    start_worker(str(tmp_path / "tokenizer.json"), tmp_path)
    texts = (question, "Tell me: " + question.upper(), "How many geese can swim?", "round and " * 20)
    asked = tuple(("chatter", {"m": [["user", text], ["assistant", "Four."]]}) for text in texts)
    shard = make_shard(Job("corpus", "a", records=asked))
    start_worker(str(tmp_path / "tokenizer.json"))
    assert shard.dropped == {"chatter: overlap": 2, "chatter: loop": 1, "prompts: overlap": 2}
    assert len(shard.parts["chatter"].lengths) == 1
    with pytest.raises(SystemExit, match="is missing"):
        benchmark_runs(tmp_path / "nowhere")


def test_a_vocabulary_is_extracted_from_a_model(tmp_path: Path) -> None:
    found = from_model(PAIR)
    save(found, tmp_path)
    with GGUFFile.open(PAIR) as file:
        shipped = Tokenizer.from_metadata(file.metadata)
    rng = random.Random(7)
    for text in (head_dialogue(rng).text() + "<|endoftext|><|mask|>é→" for _ in range(20)):
        assert found.encode(text).ids == shipped.encode(text)


def test_source_files_run() -> None:
    rng = random.Random(2)
    for _ in range(60):
        exec(compile(task_source(rng).text, "<source>", "exec"), {"__name__": "module"})


def test_worked_solutions_have_true_sums() -> None:
    rng = random.Random(3)
    sums = 0
    for _ in range(2000):
        problem = stories.story_problem(rng)
        assert problem.solution.endswith(f"\n#### {problem.answer}") and int(problem.answer) >= 0
        assert not re.search(r"[{}\[\]<>|]", problem.question + problem.solution), problem
        for left, right in re.findall(r"([\d(][\d\s+*/()$.-]*[\d)]) = \$?(\d+)", problem.solution):
            sums += 1
            assert eval(left.replace("$", "")) == int(right), problem.solution
    assert sums > 3000
    assert len(stories.stories()) >= 60


@pytest.mark.parametrize("kind", [*dict.fromkeys(drills.DRILLS), *dict.fromkeys(algebra.KINDS)])
def test_every_drill_and_exercise_is_filled_in(kind) -> None:
    rng = random.Random(4)
    for _ in range(50):
        asked, answer, *boxed = kind(rng)
        assert asked and answer
        assert not boxed or ("BOX" in answer and answer.count("$") % 2 == 0)
        for left, right in re.findall(r"^(\d[\d +*-]*) = (\d+)$", answer):
            assert eval(left) == int(right)


def test_the_same_seed_gives_the_same_text() -> None:
    for make in (task_dialogue, head_dialogue, mathematics_dialogue, talk_dialogue):
        first, second = ([make(rng) for _ in range(30)] for rng in (random.Random(5), random.Random(5)))
        assert first == second
        assert len({item.text() for item in first}) > 20


def test_the_converter_reads_the_vocabulary(tokenizer: tokenizers.Tokenizer, tmp_path: Path) -> None:
    save(tokenizer, tmp_path)
    metadata = {
        key: value for key, value, _ in read_vocabulary(tmp_path, HFConfig({}, "test"), {}, size=ENTRIES)
    }
    assert metadata["tokenizer.ggml.pre"] == "qwen35"
    assert metadata["tokenizer.ggml.tokens"][-len(SPECIAL_TOKENS) :] == list(SPECIAL_TOKENS)
    assert metadata["tokenizer.ggml.token_type"][-len(SPECIAL_TOKENS) :] == [3, 3, 3, 4, 4, 4, 4, 3]
    ours = Tokenizer.from_metadata(metadata)
    text = "def f(x):\n    return x ** 2  # naïve\n\nIt's 12345!"
    assert ours.encode(text) == tokenizer.encode(text).ids
    assert ours.eos_id == tokenizer.token_to_id("<|im_end|>")
    messages = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye")]
    sent = [{"role": role, "content": content} for role, content in messages]
    template = ChatTemplate.from_metadata(metadata)
    assert template.render(sent, add_generation_prompt=False).text == chat_text(messages)
    assert template.render(sent).text == chat_text(messages) + "<|im_start|>assistant\n"
    assert template.render(sent, thinking=True).text.endswith("assistant\n<think>\n")


def test_library_functions_are_cut_out_whole() -> None:
    text = SOURCE.format(n=7, long="A long text. " * 30, many="Further words.\n\n    " * 12)
    found = {}
    for seed in range(8):  # a function is either read or asked for
        for item in python_code.items(text, random.Random(seed)):
            found[item.kind if isinstance(item, Dialogue) else item.part] = item
    assert set(found) == {"prose", "library", "library_completions", "library_dialogues", "library_plain"}
    code = found["library"].text
    assert compile_function(code, "documented_7")([1, 2]) == 10
    assert '"""Return the sum of the values and of 7, beginning with start."""' in code
    asked, answer = (content for _, content in found["library_dialogues"].messages)
    assert "documented_7" in asked and code.strip() in answer
    asked, answer = (content for _, content in found["library_completions"].messages)
    assert asked.endswith('start."""\n```') and answer == f"```python\n{code.strip()}\n```"
    assert "stub" not in found["library_plain"].text


def test_records_are_sorted_and_cleaned() -> None:
    labelled = corpus.label(records(2))
    assert [part for part, _ in labelled[::2]] == ["novels", *DIALOGUES, "manual", "tldr", "topical"]
    items = {
        item.kind if isinstance(item, Dialogue) else item.part: item
        for part, record in labelled
        for item in corpus.items(part, record, random.Random(0))
    }
    assert items["code_io"].messages[1][1] == "```python\ndef solution(x):\n    return x + 1\n```"
    assert items["mbpp"].messages[1][1] == "```python\ndef f(x):\n    return x + 1\n```"
    assert items["manual_dialogues"].messages[1][1].startswith("Return the sine of x, as `cos` would")
    assert items["tldr"].messages[1][1] == "`tool1 --file path`"
    assert items["gsm8k"].messages[1][1] == "Step 1: 1 + 2 = 3\nThe answer is 3."
    assert items["math"].messages[1][1] == r"For $x1 + 1$ my best guess is $\boxed{4}$."
    assert items["worked"].text == "Compute $x1 + 1$.\n\nIt is $\\boxed{4}$.\n"
    assert items["topical"].messages[-1] == ("assistant", "1: Yes, I do.")


def test_the_trainer_reads_the_files(tokenizer: tokenizers.Tokenizer, tmp_path: Path) -> None:
    save(tokenizer, tmp_path)
    with lzma.open(tmp_path / "text.jsonl.xz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records(300))
    sources = []
    for n in range(300):
        sources.append(tmp_path / f"module{n}.py")
        sources[-1].write_text(SOURCE.format(n=n, long=LONG, many="Further words."))
    start_worker(str(tmp_path / "tokenizer.json"))
    labelled = tuple(corpus.label(corpus.read_records(tmp_path / "text.jsonl.xz")))
    jobs = [Job("corpus", "a", records=labelled), Job("code", "b", files=tuple(sources))]
    jobs += [Job(name, name, tokens=20_000, prompts=200) for name in prepare.GENERATED]
    shards = [make_shard(job) for job in jobs]
    options = argparse.Namespace(
        work=tmp_path,
        corpus=tmp_path / "text.jsonl.xz",
        budget_tokens=100_000,
        instruct_tokens=0.12,
        prompts=500,
        seed=1,
    )
    record = prepare.write(options, shards, tokenizer)
    assert prepare.write(options, shards, tokenizer) == record
    assert prepare.inputs(options, shards, jobs)["code_bytes"] > 100_000

    end = tokenizer.token_to_id("<|endoftext|>")
    assert set(record["parts"]) == set(prepare.WEIGHTS)
    assert sum(part["weight"] for part in record["parts"].values()) == pytest.approx(1)
    for part in record["parts"].values():
        ids = np.fromfile(tmp_path / part["file"], "<u2")
        assert len(ids) == part["tokens"] > 100 and ids[-1] == end and ids.max() < ENTRIES
        assert int((ids == end).sum()) == part["documents"]

    ids, mask = (
        np.fromfile(tmp_path / "instruct.bin", "<u2"),
        np.fromfile(tmp_path / "instruct.mask", np.uint8),
    )
    assert len(ids) == len(mask) and set(np.unique(mask)) == {0, 1}
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    answers = "".join(re.findall(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.DOTALL))
    assert tokenizer.decode(ids[mask == 1].tolist(), skip_special_tokens=False) == answers

    held = tokenizer.decode(np.fromfile(tmp_path / "heldout.bin", "<u2").tolist(), skip_special_tokens=False)
    assert record["heldout"]["tokens"] == sum(record["heldout"]["tokens_of_part_in_order"].values()) > 0
    lines = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert record["prompts"]["count"] == len(lines) > 300
    assert {line["kind"] for line in lines} == set(prepare.PROMPTS)
    assert all(line["messages"][-1]["role"] == "user" for line in lines)
    untrained = set(held.split("<|endoftext|>")[:-1])
    trained = {
        text
        for part in record["parts"].values()
        for text in tokenizer.decode(
            np.fromfile(tmp_path / part["file"], "<u2").tolist(), skip_special_tokens=False
        ).split("<|endoftext|>")[:-1]
    }
    assert untrained and untrained.isdisjoint(trained)
    # a first request is held out together with its answer
    asked = {line["messages"][0]["content"] for line in lines if line["kind"] in ("gsm8k", "math", "story")}
    assert not any(f"user\n{request}<|im_end|>" in text for request in asked for text in untrained)
