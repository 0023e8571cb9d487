"""Muse-Glimmer against transformers and an independent float64 forward pass, and with every tree."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.cache_utils import DFlashCache
from transformers.models.muse_glimmer_assistant import (
    MuseGlimmerAssistantConfig,
    MuseGlimmerAssistantModel,
)

from bough.convert.convert import convert
from bough.engine.engine import Engine, Request, Tokens
from bough.engine.sampler import SamplingParams
from bough.errors import UnsupportedModel
from bough.gguf.reader import GGUFFile
from bough.models.decoder import Decoder
from bough.models.dflash import DFlashDraft
from bough.models.native import native_gap
from bough.models.spec import LayerAttention, ModelSpec
from bough.models.step import Step
from bough.spec.drafter import Drafter
from bough.state.sequences import SequenceStates
from tests.convert.hf_models import build_hf, randomise, save_hf
from tests.engine.oracles import Oracle, RandomTrees
from tests.gguf_edit import edited
from tests.models.plain_mtp import read_arrays
from tests.models.plain_muse import MISTAKES, PlainMuse
from tests.tiny_draft import poisoned, random_rows
from workshop.steps import commit

TEXT = 90  # tokens, more than three windows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    """transformers' model and the file that our converter makes of it.

    What layers return is small, so that the eps of the norms after it counts. Queries are scaled by 1.5:
    with the published 3.87 eight random layers make 5e-5 of the rounding in float32, and transformers' norms,
    which are always in float32, 2e-5 in float64.
    """
    folder = tmp_path_factory.mktemp("muse")
    hf, config = build_hf("muse", seed=3, qk_scale_factor=1.5)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(0.01)
    save_hf(hf, config, folder / "hf")
    convert(folder / "hf", folder / "model.gguf", mix="f32")
    return hf.double(), folder / "model.gguf"


def text(count: int = TEXT, seed: int = 0) -> list[int]:
    return [random.Random(seed + i).randrange(320) for i in range(count)]


@torch.inference_mode()
def logits_of(decoder: Decoder, ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Return the logits [T, V] of a prompt in chunks of such sizes; of 0 rows: a tree of the next 5."""
    states, rows = SequenceStates(decoder.spec, max_ctx=128, max_rows=5), []
    slot = states.open()
    slots = torch.tensor([slot])
    for size in chunks:
        at, count = states.lengths[slot], size or 5
        states.reserve(slot, count)
        tokens, length = torch.tensor([ids[at : at + count]]), states.buffers.lengths[slots]
        if size:
            step = Step.chunk(slots, tokens, length)
            rows.append(decoder.logits(decoder.forward(step, states.buffers).hidden[0]))
            states.advance(step)
        else:
            step = Step.tree(slots, tokens, torch.arange(-1, 4)[None], length)
            rows.append(decoder.verify(step, states.buffers)[1][0])
            commit(states, step, torch.tensor([4]))
    return torch.cat(rows)


def error(ours: torch.Tensor | np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(np.asarray(ours) - exact).max() / np.abs(exact).max())


def test_logits_are_those_of_transformers_and_of_the_plain_forward_pass(model) -> None:
    hf, path = model
    exact = PlainMuse(*read_arrays(path)).logits(text())
    with torch.no_grad():
        assert error(hf(torch.tensor([text()]), use_cache=False).logits[0], exact) <= 1e-5
    with GGUFFile.open(path) as file:
        decoder = Decoder.load(file)
    for chunks in ([TEXT], [1, 24, 40, 25], [30, *[0] * 12]):
        assert error(logits_of(decoder, text(), chunks), exact) <= 1e-5, chunks


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_finds_a_mistake(model, mistake: str) -> None:
    spec, tensors = read_arrays(model[1])
    exact = PlainMuse(spec, tensors).logits(text())
    assert error(PlainMuse(spec, tensors, mistake=mistake).logits(text()), exact) > 1e-3


def test_layers_are_read_from_a_period_or_from_flags(model, tmp_path: Path) -> None:
    with GGUFFile.open(model[1]) as file:
        flags = ModelSpec.from_gguf(file)
    near, far = LayerAttention(500000.0, 24), LayerAttention(0.0)
    assert flags.attention == (near, near, near, far) * 2
    key = "muse-glimmer.attention.sliding_window_pattern"
    for value, attention in ((4, flags.attention), (None, flags.attention), (2, (near, far) * 4)):
        with GGUFFile.open(edited(model[1], tmp_path / "period.gguf", keys={key: value})) as file:
            assert ModelSpec.from_gguf(file) == replace(flags, attention=attention)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.sliding_window_pattern": 0}, "sliding_window_pattern is 0, needed a positive number"),
        ({"attention.sliding_window_pattern": [True] * 7}, "needed a flag for each of 8 layers"),
        ({"attention.sliding_window": None}, "sliding_window"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1.0, needed a positive number"),
        ({"logit_scale": 0.0}, "logit_scale is 0.0, needed a positive number"),
    ],
)
def test_what_cannot_be_run_is_named(model, tmp_path: Path, changes: dict, message: str) -> None:
    changed = {f"muse-glimmer.{key}": value for key, value in changes.items()}
    path = edited(model[1], tmp_path / "odd.gguf", keys=changed)
    with GGUFFile.open(path) as file, pytest.raises(Exception, match=message):
        ModelSpec.from_gguf(file)


def answer(
    target: Decoder, prompt: list[int], sampling: SamplingParams, drafter: Drafter | None, *, chunk: int
) -> list[int]:
    engine = Engine(target, max_ctx=256, drafter=drafter, max_rows=32, prefill_chunk=chunk)
    events = engine.generate(Request(prompt=prompt, max_tokens=100, sampling=sampling))
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(seed=1), SamplingParams(temperature=1.0, seed=2), SamplingParams(
        temperature=0.8, top_p=0.95, top_k=64, repetition_penalty=1.1, seed=3)],
    ids=["greedy", "sampled", "filtered"],
)  # fmt: skip
def test_the_same_text_with_every_tree_and_prompt_cut(model, sampling: SamplingParams) -> None:
    with GGUFFile.open(model[1]) as file:
        target = Decoder.load(file)
    prompt, vocabulary = text(70, seed=5), target.spec.vocab_size
    plain = answer(target, prompt, sampling, None, chunk=512)
    assert len(plain) == 100 and len(set(plain)) > 10
    drafters: list[Drafter] = [
        Oracle(70, plain, budget=31, vocabulary=vocabulary),
        Oracle(70, plain, budget=15, candidates=1, vocabulary=vocabulary),
        RandomTrees(70, plain, vocabulary=vocabulary),
    ]
    for drafter, chunk in zip(drafters, (512, 7, 33), strict=True):
        assert answer(target, prompt, sampling, drafter, chunk=chunk) == plain, chunk


def test_native_code_says_why_it_does_not_run_it(model) -> None:
    with GGUFFile.open(model[1]) as file:
        reason = native_gap(file, ModelSpec.from_gguf(file), ())
    assert reason is not None and "sliding layers" in reason


def test_another_eps_of_the_closing_norms_is_not_converted(tmp_path: Path) -> None:
    hf, config = build_hf("muse", post_norm_eps=1e-6)
    save_hf(hf, config, tmp_path / "hf")
    with pytest.raises(UnsupportedModel, match="post_norm_eps 1e-06, needed: 1e-08"):
        convert(tmp_path / "hf", tmp_path / "model.gguf")


@pytest.mark.parametrize("context", [5, 40])
def test_the_official_draft_is_as_transformers_has_it(model, tmp_path: Path, context: int) -> None:
    """Rows of a block see each other in both directions, and a window of the text before."""
    with GGUFFile.open(model[1]) as file:
        target = ModelSpec.from_gguf(file)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 12, "block_size": 6}
    config = MuseGlimmerAssistantConfig(**sizes, mask_token_id=3, target_layer_ids=[1, 4, 6])
    config._attn_implementation = "eager"
    theirs = randomise(MuseGlimmerAssistantModel(config), 1)
    settings = {**config.to_dict(), "architectures": [type(theirs).__name__]}
    # transformers' window in both directions includes its end, llama.cpp's does not, and ours.
    settings["sliding_window"] += 1
    (tmp_path / "config.json").write_text(json.dumps(settings, default=str))
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    ours = DFlashDraft.load(tmp_path, target)
    assert (ours.spec.taps, ours.spec.mask_id, ours.spec.rope_theta) == ((1, 4, 6), 3, 500000.0)
    assert (ours.spec.output_multiplier, ours.spec.softcap) == (target.logits.scale, target.logits.cap)
    rows, features = random_rows(1, 6, 64, seed=1), random_rows(1, context, 3 * 64, seed=2)
    cache = DFlashCache(config=config)
    cache.set_previous_accepted_tokens(context)
    with torch.no_grad():
        expected = theirs(noise_embeds=rows, context_hidden_states=features, past_key_values=cache)
    buffers, slot = poisoned(ours), torch.zeros(1, dtype=torch.int64)
    ours.append(features, slot, buffers)
    assert error(ours.block(rows, slot, buffers)[0], expected.last_hidden_state[0].numpy()) <= 1e-5
