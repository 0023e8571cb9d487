"""States saved after answers: `usage` says when one was used, an exact cache ignores them."""

from pathlib import Path
from typing import Any

from bough.engine.sampler import SamplingParams
from bough.session.session import Session
from tests.prefix_cache.test_cache import turns
from tests.session.test_many import session as pair_session

WARM = SamplingParams(temperature=0.7, seed=4)
QUESTIONS = ["Write a Python function that counts the vowels in a string.", "Explain it.", "Make it shorter."]


def load(folder: Path | None = None, *, exact: bool = False, cache: int = 1 << 28) -> Session:
    options: dict[str, Any] = {"prefix_cache": cache, "prefix_cache_dir": folder}
    return pair_session(1, prefill_chunk=64, prefix_cache_exact=exact, **options)


def evict(session: Session, kind: str) -> None:
    cache = session.engine.prefixes
    for snapshot in [each for each in cache._snapshots if each.kind == kind]:
        cache._remove(snapshot)


def test_usage_says_when_a_state_after_an_answer_was_used(tmp_path: Path) -> None:
    kept = turns(load(tmp_path), QUESTIONS)
    assert [last.stats.cached_after_answer for last in kept] == [False, True, True]
    # A prompt's state that continues such a state is one, too, also from disk and after evictions.
    for session in (load(tmp_path), load()):
        if not len(session.engine.prefixes):
            turns(session, QUESTIONS)
        evict(session, "answer")
        again = turns(session, QUESTIONS)[-1]
        assert again.stats.cached_tokens and again.stats.cached_after_answer


def test_an_exact_cache_gives_the_states_of_prompts_alone(tmp_path: Path) -> None:
    cold = turns(load(cache=0), QUESTIONS, sampling=WARM)
    load_kept = load(tmp_path)
    turns(load_kept, QUESTIONS, sampling=WARM)  # leaves states after answers on disk
    load_kept.engine.prefixes.clear()
    session = load(tmp_path, exact=True)
    for kind in (None, "turn", "question"):
        if kind is not None:
            evict(session, kind)
        found = turns(session, QUESTIONS, sampling=WARM)
        assert [last.tokens for last in found] == [last.tokens for last in cold]
        assert not any(last.stats.cached_after_answer for last in found)
    assert all(last.stats.cached_tokens for last in found)
    assert not any(each.after_answer for each in session.engine.prefixes._snapshots)
