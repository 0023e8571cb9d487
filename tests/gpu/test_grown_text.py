"""Texts of the embedded pair grown to 27B: identical to the small pair's on a CPU, but for near ties."""

from pathlib import Path

import pytest

from tests.gpu.fresh_process import run_in_fresh_process
from tests.gpu.near_ties import PLAIN, compared, on_cpu, prompts_of, read_references, references
from tests.gpu.texts import assert_same_text, expected_texts, generate, load_session

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(1200)]

COUNT = 128
HUMANEVAL_PROMPTS, HUMANEVAL_TOKENS = 10, 256


def check_expected_texts(folder: Path) -> None:
    session = load_session(folder / "target.gguf", folder / "draft.gguf", max_ctx=8192)
    generate(session, expected_texts()[-1].prompt, max_tokens=16)  # compiles
    for budget in (0, None):
        for expected in expected_texts():
            found = generate(session, expected.prompt, max_tokens=COUNT, draft_budget=budget)
            assert_same_text(found.tokens, expected, COUNT)


def test_plain_and_speculative_texts_are_the_cpus(grown_27b: Path) -> None:
    run_in_fresh_process(check_expected_texts, grown_27b)


def check_humaneval(folder: Path, data: Path, cpu_texts: Path) -> None:
    session = load_session(folder / "target.gguf", folder / "draft.gguf", max_ctx=4096)
    engine, stops, count = session.engine, session.tokenizer.stop_ids, HUMANEVAL_TOKENS
    plain = references(engine, prompts_of(session, data, HUMANEVAL_PROMPTS), count, stops)
    cpu = read_references(cpu_texts)
    assert [text.prompt for text in cpu] == [text.prompt for text in plain]
    for found in (
        compared("tree against plain", engine, plain, count, stops, None),
        compared("plain against the CPU's", engine, cpu, count, stops, PLAIN),
        compared("tree against the CPU's", engine, cpu, count, stops, None),
    ):
        assert found["beyond_a_near_tie"] == 0, found


def test_humaneval_texts_diverge_at_near_ties_only(
    request: pytest.FixtureRequest, grown_27b: Path, tmp_path: Path
) -> None:
    """Every token is compared once: after a divergence the text goes on from the reference's token."""
    data = request.config.getoption("--humaneval")
    if data is None:
        pytest.skip("needs --humaneval")
    cpu_texts = tmp_path / "cpu.json"
    run_in_fresh_process(on_cpu, data, HUMANEVAL_PROMPTS, HUMANEVAL_TOKENS, cpu_texts, 4)
    run_in_fresh_process(check_humaneval, grown_27b, data, cpu_texts)
