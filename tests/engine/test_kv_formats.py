"""Text over quantised keys and values, and with a window: the same with every tree, and named where lossy."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.engine.engine import Done, Engine, Request, Tokens
from bough.engine.sampler import SamplingParams
from bough.errors import UsageError
from bough.gguf.reader import GGUFFile
from bough.hub.catalog import named
from bough.kernels.kv_cache.format import FORMATS
from bough.memory.device import kv_formats
from bough.models.decoder import Decoder
from bough.session.loading import load_session
from bough.session.session import Finished, TextRequest
from bough.spec.drafter import Drafter
from bough.state.sequences import CacheConfig
from tests.engine.oracles import Oracle, RandomTrees
from tests.engine.test_embedded_pair import PROMPTS

COUNT = 160
PROMPT = [72, 101, 108, 108, 111, 32, 119, 111] * 9
PAIRS = [
    ("f16", "f16"),
    ("bf16", "bf16"),
    ("q8_0", "q8_0"),
    ("q5_0", "q5_0"),
    ("q4_0", "q4_0"),
    ("tq3_0", "tq3_0"),
    ("q8_0", "tq3_0"),
    ("q4_0", "f32"),
]


@pytest.fixture(scope="module")
def target(tiny_model: Callable[..., Path]) -> Decoder:
    with GGUFFile.open(tiny_model(layers=4)) as file:
        return Decoder.load(file)


def run(
    target: Decoder,
    kv: tuple[str, str],
    window: int | None,
    sampling: SamplingParams,
    drafter: Drafter | None,
) -> tuple[list[int], Done]:
    engine = Engine(
        target,
        max_ctx=512,
        drafter=drafter,
        max_rows=64,
        cache=CacheConfig(FORMATS[kv[0]], FORMATS[kv[1]], window),
    )
    tokens: list[int] = []
    for event in engine.generate(Request(prompt=PROMPT, max_tokens=COUNT, sampling=sampling)):
        if isinstance(event, Tokens):
            tokens += event.ids
        elif isinstance(event, Done):
            return tokens, event
    raise AssertionError("no end")


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("kv", PAIRS, ids="-".join)
def test_same_text_with_every_tree(target: Decoder, kv: tuple[str, str], window: int | None) -> None:
    vocabulary, sampling = target.spec.vocab_size, SamplingParams(temperature=0.8, seed=3)
    expected, _ = run(target, kv, window, sampling, None)
    assert len(expected) == COUNT
    for drafter in (
        Oracle(len(PROMPT), expected, budget=22, vocabulary=vocabulary),
        RandomTrees(len(PROMPT), expected, vocabulary=vocabulary),
    ):
        tokens, done = run(target, kv, window, sampling, drafter)
        assert tokens == expected
        assert done.stats.acceptance_length > 1.2
        lossy = any(name in ("q5_0", "q4_0", "tq3_0") for name in kv)
        assert bool(done.stats.approximate) == (lossy or window is not None)
        assert done.stats.as_dict()["approximate"] == list(done.stats.approximate)


def test_a_window_changes_text_only_when_there_is_more(target: Decoder) -> None:
    """Otherwise an option that does nothing would pass."""
    sampling, kv = SamplingParams(seed=1), ("f32", "f32")
    everything, narrow, wide = (
        run(target, kv, window, sampling, None)[0] for window in (None, 8, len(PROMPT) + COUNT)
    )
    assert wide == everything and narrow != everything


def answers(kv: tuple[str, str], speculation: SpecConfig | None) -> list[Finished]:
    card = named("bough-40m")
    assert card is not None and card[0].pair is not None
    pair = card[0].pair
    config = EngineConfig(
        device="cpu",
        max_ctx=512,
        kv_k=kv[0],
        kv_v=kv[1],
        speculation=speculation,
        draft=DraftConfig(pair.draft) if speculation else None,
    )
    session, found = load_session(pair.target, config), []
    assert [format.name for format in session.plan.kv] == list(kv)
    for prompt in PROMPTS:
        request = TextRequest(messages=[{"role": "user", "content": prompt}], max_tokens=48)
        *_, last = session.generate(request)
        assert isinstance(last, Finished)
        found.append(last)
    return found


@pytest.mark.parametrize("kv", [("q8_0", "q8_0"), ("q4_0", "q4_0"), ("tq3_0", "tq3_0")], ids="-".join)
def test_the_embedded_pair_writes_the_text_of_plain_decoding(kv: tuple[str, str]) -> None:
    plain, tree = answers(kv, None), answers(kv, SpecConfig(adaptive=False))
    assert [each.tokens for each in tree] == [each.tokens for each in plain]
    assert sum(each.stats.step_tokens for each in tree) > 2 * sum(each.stats.steps for each in tree)


def test_heads_that_no_block_fits_are_refused_at_load(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("qwen2")
    with pytest.raises(
        UsageError, match="head size of 16, a KV cache in q4_0 needs a multiple of 32"
    ) as error:
        load_session(path, EngineConfig(device="cpu", max_ctx=64, kv_v="q4_0"))
    assert "`kv` f16" in error.value.hint
    with pytest.raises(UsageError, match=r"'q9'.* needed one of f32, f16"):
        load_session(path, EngineConfig(device="cpu", max_ctx=64, kv_k="q9"))
    assert load_session(path, EngineConfig(device="cpu", max_ctx=64, kv_k="f16")).plan.kv_per_token


def test_a_gpu_has_its_own_default(target: Decoder) -> None:
    gpu = torch.device("cuda")
    names = [
        format.name for format in (*kv_formats(target.spec, gpu), *kv_formats(target.spec, target.device))
    ]
    assert names == ["f16", "f16", "f32", "f32"]
    with pytest.raises(UsageError, match="f32 is for a CPU"):
        kv_formats(target.spec, gpu, ("f32", "auto"))
