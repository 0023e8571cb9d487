"""What the documents say about the command line: it is what the program says, and it runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.chat_server import ChatServer, echo
from tests.convert.hf_models import build_hf, save_hf
from tests.gguf_edit import edited
from tests.hub.fake_pairs import make_draft
from tests.server.live import scripted

ROOT = Path(__file__).parents[2]
# Lines that need more than this test has: a package index, and half an hour for all other tests.
ELSEWHERE = [
    'pip install . && bough run -p "def fibonacci(n):"',
    "pip install -e '.[test,ray]' && pytest -n 2",
]
SHORT = ["-n", "3"]
QUICK = shlex.split("--steps 1 --layers 1 --batch 2 --anchors 2 --seq 48 -n 8 -t 0 --device cpu")


def command_lines() -> list[str]:
    """Every line of a code block that starts a program of ours, without its remark."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S):
            if kind not in ("python", "yaml"):
                found += [line.split("  #")[0].strip() for line in block.splitlines()]
    return [line for line in dict.fromkeys(found) if re.search(r"\b(bough|pytest|pip) ", line)]


LINES = [line for line in command_lines() if line not in ELSEWHERE]


def test_the_page_is_up_to_date():
    check = [sys.executable, str(ROOT / ".ci/make_cli_docs.py"), "--check"]
    result = subprocess.run(check, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT / "src")})
    assert result.returncode == 0, result.stderr


def test_the_lines_that_are_not_run_here_are_known():
    assert [line for line in command_lines() if not re.match(r"(git diff \| )?bough ", line)] == ELSEWHERE
    assert len(LINES) > 12


@pytest.fixture
def workplace(tmp_path, monkeypatch, hub, bough, tiny_model) -> Path:
    """A folder with what the documents' lines name, and a hub that has the models they name."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "model.gguf").symlink_to(tiny_model())
    (folder / "small.gguf").symlink_to(tiny_model("qwen3"))
    hub.repos["Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"] = {
        "qwen2.5-q4_k_m.gguf": tiny_model("qwen2").read_bytes()
    }
    embedding = folder / "Qwen3-Embedding-0.6B-Q8_0.gguf"
    edited(tiny_model("qwen3"), embedding, keys={"qwen3.pooling_type": 3})
    make_draft(tiny_model(), folder / "draft")
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    save_hf(*build_hf("qwen35"), folder)
    return folder


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_documents(line, workplace, bough, request):
    before, _, command = line.rpartition("|")
    program, *arguments = shlex.split(command)
    assert program == "bough" and before.strip() in ("", "git diff")
    stdin = "- old\n+ new\n" if before else ""
    if arguments[0] == "convert":
        (workplace / arguments[1]).symlink_to(request.getfixturevalue("checkpoint"))
    elif arguments[0] in ("rm", "show"):
        assert bough("pull", "qwen3.6-27b").exit_code == 0
        stdin = "y\n"
    elif arguments[0] == "run":
        stdin = stdin or ("hello" if len(arguments) == 2 else "")  # on a terminal this is a chat
        arguments += SHORT
    elif arguments[0] == "bench":
        arguments += ["--prompts", "1", "--n-gen", "4"]
    elif arguments[0] == "serve":
        arguments += ["--print-config"]
    elif arguments[0] == "chat":
        arguments += [*SHORT, "--no-think"]
        stdin = "hello\n"
    elif arguments[0] == "train":
        (workplace / "prompts.jsonl").write_text('{"prompt": "the"}\n{"prompt": "and"}\n')
        arguments += QUICK
    with scripted() if arguments[0] == "ps" else ChatServer(echo) as server:
        if "--url" in arguments:
            arguments[arguments.index("--url") + 1] = server.url
        result = bough(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.output
    # Three tokens of a model that thinks are no answer.
    assert result.stdout or "tokens were spent on reasoning" in result.stderr
