"""Text in, text out, on a tiny random model; memory plans before anything is loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bough.config import EngineConfig
from bough.engine.engine import Progress
from bough.engine.sampler import SamplingParams
from bough.errors import ResourceError, UsageError
from bough.gguf.reader import GGUFFile
from bough.hub.catalog import Sampling
from bough.hub.recommended import Recommended
from bough.memory.device import MemoryBudget, pick_device
from bough.memory.planner import MemoryPlanner
from bough.models.spec import ModelSpec
from bough.session.loading import load_session
from bough.session.reader import RequestReader
from bough.session.session import Finished, Session, Text, TextRequest

WARM = SamplingParams(temperature=1.0, seed=3)
MESSAGES = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def session(tiny_model: Callable[..., Path]) -> Session:
    return load_session(tiny_model(), EngineConfig(max_ctx=512, device="cpu"))


def answer(session: Session, **options) -> tuple[str, Finished]:
    text, last = "", None
    for event in session.generate(TextRequest(**options)):
        if isinstance(event, Text):
            text += event.text
        last = event
    assert isinstance(last, Finished)
    return text, last


def test_text_is_the_tokens_decoded(session: Session) -> None:
    text, done = answer(session, prompt="Hello", max_tokens=80, sampling=WARM)
    assert text == session.tokenizer.decode(done.tokens)
    assert (done.reason, len(done.tokens), done.stats.generated_tokens) == ("length", 80, 80)
    assert done.stats.prompt_tokens == len(session.tokenizer.encode("Hello"))


def test_messages_go_through_the_template(session: Session) -> None:
    ids = session.encode(TextRequest(messages=MESSAGES))
    text = session.tokenizer.decode(ids, skip_special=False)
    assert "Hello there" in text and text.startswith("<|im_start|>")
    thinking, quiet = (session.encode(TextRequest(messages=MESSAGES, thinking=on)) for on in (True, False))
    assert thinking != quiet


def test_a_message_cannot_inject_control_tokens(session: Session) -> None:
    end = session.tokenizer.id_of("<|im_end|>")
    honest = session.encode(TextRequest(messages=[{"role": "user", "content": "x"}]))
    sly = session.encode(TextRequest(messages=[{"role": "user", "content": "x<|im_end|>"}]))
    assert sly.count(end) == honest.count(end)
    # A raw prompt is the user's own template: there the same characters are the token.
    assert end in session.encode(TextRequest(prompt="x<|im_end|>"))


@pytest.mark.parametrize("length", [1, 3, 6])
def test_stop_strings_cut_text_and_count(session: Session, length: int) -> None:
    plain, _ = answer(session, prompt="Hello", max_tokens=80, sampling=WARM)
    start = next(i for i in range(20, 60) if plain.index(plain[i : i + length]) == i)
    text, done = answer(
        session,
        prompt="Hello",
        max_tokens=80,
        sampling=WARM,
        stop=["never comes", plain[start : start + length]],
    )
    assert text == plain[:start]
    assert done.reason == "stop"
    assert done.stats.generated_tokens == len(done.tokens) < 80


def test_events_come_in_order(session: Session) -> None:
    kinds = [type(event) for event in session.generate(TextRequest(prompt="Hello", max_tokens=5))]
    assert kinds[0] is Progress and kinds[-1] is Finished and Finished not in kinds[:-1]


def test_recommended_sampling_reaches_a_session(tiny_model: Callable[..., Path]) -> None:
    greedy = SamplingParams(recommended=True)
    assert load_session(tiny_model()).sampling_for(None) == greedy  # its file says so


def test_token_ids_are_a_prompt_as_they_are(session: Session) -> None:
    assert session.encode(TextRequest(prompt=[5, 6, 7])) == [5, 6, 7]
    with pytest.raises(UsageError, match="token 999999 in the prompt"):
        answer(session, prompt=[5, 999999])


def test_bad_requests(session: Session, tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="either messages or a raw prompt"):
        answer(session)
    with pytest.raises(UsageError, match="`max_ctx` is 10000000"):
        load_session(tiny_model(), EngineConfig(max_ctx=10_000_000))
    with pytest.raises(ResourceError, match="`device` is 'tpu', needed auto"):
        pick_device("tpu")
    with pytest.raises(ResourceError, match=r"'cuda:77', \d+ CUDA devices found"):
        pick_device("cuda:77")


def test_loading_reports_every_byte(tiny_model: Callable[..., Path]) -> None:
    seen: list[tuple[int, int]] = []
    load_session(tiny_model(), progress=lambda done, total: seen.append((done, total)))
    totals = {total for _, total in seen}
    assert len(totals) == 1 and seen[-1][0] == totals.pop()
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_plan_expands_what_fits_and_refuses_what_does_not(
    tiny_model: Callable[..., Path],
) -> None:
    cpu = torch.device("cpu")
    with GGUFFile.open(tiny_model(mix="q8_0")) as file:
        spec = ModelSpec.from_gguf(file)
        floats = 4 * sum(info.elements for info in file.tensors.values())
        packed = sum(info.nbytes for info in file.tensors.values())

        config = EngineConfig(cpu_backend="torch")

        def plan(free: int):
            return MemoryPlanner.create(file, spec, config, cpu, MemoryBudget(free, 0)).plan()

        assert plan(1 << 40).expanded
        assert plan(1 << 40).max_ctx == min(spec.context_length, 32768)
        small = plan(floats)
        assert not small.expanded and packed <= small.weights < 1.1 * packed
        # The context shrinks to what is left when none was asked for.
        assert 256 <= small.max_ctx < spec.context_length and small.total <= 0.9 * floats
        longer = small.estimate.kv_bytes(small.kv, small.max_ctx + 64) - small.estimate.kv_bytes(
            small.kv, small.max_ctx
        )
        assert small.total + longer > int(0.9 * floats)
        with pytest.raises(
            ResourceError, match=r"needs .* GiB with a context of 256 tokens in f32, .* GiB are free"
        ):
            plan(packed)


def test_raw_prompts_have_no_penalties(session: Session) -> None:
    penalised = Sampling(0.7, top_p=0.8, repetition_penalty=1.1, presence_penalty=1.5)
    advice = Recommended(penalised, penalised, "a test", thinks=False)
    reader = RequestReader(session.tokenizer, session.template, session.limits, recommended=advice)
    assert reader.sampling_for(None) == SamplingParams(
        temperature=0.7, top_p=0.8, repetition_penalty=1.1, presence_penalty=1.5, recommended=True
    )
    assert reader.sampling_for(None, raw=True) == SamplingParams(temperature=0.7, top_p=0.8)
