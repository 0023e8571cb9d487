"""Steps of several sequences on a GPU: rows shared there, the next step in flight, plain decoding's text."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from bough.config import SpecConfig
from bough.engine.engine import Engine, Request, Tokens
from bough.engine.pipeline import Batch, Pipeline
from bough.engine.sampler import SamplingParams
from bough.engine.sequence import Sequence
from bough.session.requests import TextRequest
from bough.session.session import Session
from bough.spec.tree import SharedTrees
from tests.gpu.numerics import nan_filled_memory
from tests.gpu.texts import embedded_pair, expected_texts, load_session

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    # Whether draft calls pay on this GPU does not matter.
    options = {"max_ctx": 512, "parallel": 5, "speculation": SpecConfig(adaptive=False), "prefix_cache": 0}
    yield load_session(*embedded_pair(), **options)


def requests(session: Session, **options) -> list[Request]:
    found = []
    for index, text in enumerate((expected_texts() * 3)[:9]):
        prompt = session.encode(TextRequest(messages=[{"role": "user", "content": text.prompt}]))
        sampling = SamplingParams(temperature=0.8 * (index % 2), top_p=0.95, seed=index)
        found.append(Request(prompt, 24 + 8 * index, sampling, **{"may_stop": False, **options}))
    return found


def answers(engine: Engine, requests: list[Request], *, cancelled: tuple[int, ...] = ()) -> list[list[int]]:
    """Answer requests, as many at a time as there are slots; `cancelled`: some after 12 tokens."""
    running = {engine.add(request): index for index, request in enumerate(requests)}
    texts: list[list[int]] = [[] for _ in requests]
    while any(not sequence.finished for sequence in running):
        for sequence, event in engine.step():
            if isinstance(event, Tokens):
                texts[running[sequence]] += event.ids
        for sequence, index in running.items():
            if index in cancelled and len(texts[index]) >= 12 and not sequence.finished:
                engine.cancel(sequence)
    engine.step()
    return texts


@pytest.fixture(scope="module")
def plain(session: Session) -> list[list[int]]:
    return [answers(session.engine, [each])[0] for each in requests(session, draft_budget=0)]


def test_the_text_of_plain_decoding(
    session: Session, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice: sizes are captured when they have been needed. Nothing that is launched waits for the device."""
    seen: Counter[str] = Counter()
    begin, launch = Pipeline._begin, Pipeline._launch
    prepare = session.engine.runner._prepare  # ty: ignore[unresolved-attribute]

    def begun(pipeline: Pipeline, sequences: list[Sequence], readers: list[Sequence]) -> Batch | None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            batch = begin(pipeline, sequences, readers)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seen["shared"] += batch is not None and isinstance(batch.trees, SharedTrees)
        return batch

    def launched(pipeline: Pipeline, *rest) -> None:
        launch(pipeline, *rest)
        seen["ahead"] += pipeline._launched is not None and len(pipeline._launched.sequences) > 1

    def prepared(*shape: int) -> None:
        torch.cuda.set_sync_debug_mode("default")
        prepare(*shape)

    while session.engine.use_idle_time():
        pass
    monkeypatch.setattr(Pipeline, "_begin", begun)
    monkeypatch.setattr(Pipeline, "_launch", launched)
    monkeypatch.setattr(session.engine.runner, "_prepare", prepared)
    for _ in range(2):
        assert answers(session.engine, requests(session)) == plain
    assert seen["shared"] > 10 and seen["ahead"] > 10


def test_some_end_while_the_next_step_is_in_flight(session: Session, plain: list[list[int]]) -> None:
    for _ in range(3):
        texts = answers(session.engine, requests(session), cancelled=(1, 4, 6))
        for text, expected in zip(texts, plain, strict=True):
            assert text == expected[: len(text)] and len(text) >= 12


def test_with_poisoned_memory(plain: list[list[int]]) -> None:
    options = {"max_ctx": 512, "parallel": 4, "speculation": SpecConfig(), "prefix_cache": 0}
    with nan_filled_memory():
        made = load_session(*embedded_pair(), graphs=False, **options)
        assert answers(made.engine, requests(made)) == plain


def test_plain_steps_follow_before_they_are_read(session: Session, plain: list[list[int]]) -> None:
    """Without a draft the next tokens of all sequences stay on the device."""
    made = load_session(embedded_pair()[0], None, max_ctx=512, parallel=5, prefix_cache=0)
    for _ in range(2):
        assert answers(made.engine, requests(made)) == plain
