"""The attention scorer against attention written out, and what it keeps between questions."""

from collections.abc import Callable
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.compress.scorer import Query, ScoringFailed
from bough.errors import Cancelled
from bough.gguf.reader import GGUFFile
from bough.kernels.attention import prefill
from bough.kernels.norm_rope.reference import rope, rope_angles
from bough.kernels.runtime.dry_run import DryRun
from bough.models import scoring
from bough.models.decoder import Decoder
from bough.models.scoring import attention_mass, scoring_layers
from bough.models.spec import ModelSpec
from bough.models.step import Step
from bough.session import attention_scorer
from bough.session.attention_scorer import AttentionScorer
from bough.state.sequences import SequenceStates
from bough.text.template import ChatTemplate
from bough.text.tokenizer import Tokenizer
from tests.session.fake_gpu import GPU, fake_gpu

CPU = torch.device("cpu")
UNITS = [
    "The captain and the harbour.",
    " In the winter one is at sea.",
    " Nothing else is in it.\n",
    "- an item\n",
]
QUERIES = [Query("Where is the captain?"), Query("the sea", 0.5)]


def spec_of(path: Path) -> ModelSpec:
    with GGUFFile.open(path) as file:
        return ModelSpec.from_gguf(file)


def scorer(path: Path, **options) -> AttentionScorer:
    return AttentionScorer.load(path, device=CPU, **options)


def test_the_middle_third_scores_unless_a_layer_was_measured(tiny_model: Callable[..., Path]) -> None:
    assert scoring_layers(spec_of(tiny_model("qwen3", layers=12))) == (4, 5, 6, 7)
    assert scoring_layers(spec_of(tiny_model("qwen35", layers=12))) == (7,)
    assert scoring_layers(spec_of(tiny_model("qwen35"))) == (3,)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen35"])
@pytest.mark.parametrize("way", ["native", "torch"])
def test_queries_and_keys_are_those_of_the_whole_model(
    tiny_model: Callable[..., Path], family: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The residual stream before the layer, from the whole decoder, times the weights in the file."""
    if way == "torch":
        monkeypatch.setattr(scoring, "native_gap", lambda *_: "a test")
    path = tiny_model(family)
    tokens = torch.randint(0, 300, (1, 21), generator=torch.Generator().manual_seed(1))
    with GGUFFile.open(path) as file:
        whole, part = Decoder.load(file), scoring.load_scoring(file, device=CPU)
        assert isinstance(part, scoring.NativeScoringDecoder if way == "native" else scoring.ScoringDecoder)
        (layer,) = part.layers[-1:]
        block = f"blk.{layer}"
        weights = {
            name: _weight(file, f"{block}.{name}")
            for name in ("attn_norm.weight", "attn_q.weight", "attn_k.weight")
        }
        extra = {
            name: _weight(file, f"{block}.{name}")
            for name in ("attn_q_norm.weight", "attn_k_norm.weight", "attn_q.bias", "attn_k.bias")
            if f"{block}.{name}" in file.tensors
        }
    spec = whole.spec
    states = SequenceStates(spec, max_ctx=64)
    states.reserve(states.open(), 21)
    step = Step.chunk(torch.tensor([0]), tokens, torch.tensor([0]))
    x = whole.forward(step, states.buffers, taps=[layer - 1]).features
    x = torch.nn.functional.rms_norm(x, x.shape[-1:], weights["attn_norm.weight"].flatten(), spec.eps)
    cos, sin = rope_angles(step.positions, part._frequencies[spec.rope_theta])

    def expected(name: str, heads: int) -> torch.Tensor:
        out = x @ weights[f"attn_{name}.weight"].T + extra.get(f"attn_{name}.bias", torch.zeros(1)).flatten()
        out = out.unflatten(-1, (heads, -1))[..., : spec.head_dim]
        if f"attn_{name}_norm.weight" in extra:
            scale = extra[f"attn_{name}_norm.weight"].flatten()
            out = torch.nn.functional.rms_norm(out, scale.shape, scale, spec.eps)
        return rope(out, cos, sin, interleaved=spec.family.rope_interleaved)[0]

    fresh = SequenceStates(part.spec, max_ctx=64)
    fresh.reserve(fresh.open(), 21)
    found = part.heads(step, fresh.buffers)[-1]
    tolerance = {"rtol": 1e-4, "atol": 1e-4 if way == "torch" else 2e-3}  # activations of 16 bits
    torch.testing.assert_close(found.queries, expected("q", spec.heads), **tolerance)
    torch.testing.assert_close(found.keys, expected("k", spec.kv_heads), **tolerance)


def _weight(file: GGUFFile, name: str) -> torch.Tensor:
    from bough.gguf.quants import dequantise

    info = file.tensors[name]
    return dequantise(torch.from_numpy(file.raw(name).copy()), info.type).reshape(info.shape)


def test_mass_is_the_mean_of_causal_softmax() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(37, 6, 8, generator=generator), torch.randn(90, 2, 8, generator=generator)
    expected = torch.zeros(53)
    for row in range(37):
        for head in range(6):
            logits = k[: 53 + row + 1, head // 3] @ q[row, head] / 8**0.5
            expected += logits.softmax(0)[:53]
    torch.testing.assert_close(attention_mass(q, k), expected / (37 * 6), rtol=1e-5, atol=1e-7)


def test_what_a_unit_gets_from_neutral_questions_does_not_count(tiny_model: Callable[..., Path]) -> None:
    kept = scorer(tiny_model("qwen3"))
    found = kept.score(UNITS, QUERIES[:1])
    lengths = [len(ids) for ids in kept.tokenizer.encode_all(UNITS)]
    tokens = kept._tokens[len(kept._before) :]
    counted = torch.tensor([bool(kept.tokenizer.token_bytes(id).strip()) for id in tokens])
    counted[: attention_scorer.SINKS] = False

    @torch.inference_mode()
    def mass(text: str) -> torch.Tensor:
        return kept._ask(kept._question(text))[len(kept._before) :] * counted

    asked = mass(QUERIES[0].text)
    one, other = (mass(text) / mass(text).sum() * asked.sum() for text in attention_scorer.NEUTRAL)
    parts = zip(asked.split(lengths), torch.maximum(one, other).split(lengths), lengths, strict=True)
    expected = [
        float(max(attention_scorer.LEAST * got.sum(), got.sum() - anyway.sum())) / (length + 16)
        for got, anyway, length in parts
    ]
    assert found == pytest.approx(expected, rel=1e-3)
    # No unit has more to do with a neutral question than others: a little of its attention still ranks them.
    neutral = kept.score(UNITS, [Query(attention_scorer.NEUTRAL[0])])
    got = [float(part.sum()) for part in mass(attention_scorer.NEUTRAL[0]).split(lengths)]
    least = [attention_scorer.LEAST * each / (length + 16) for each, length in zip(got, lengths, strict=True)]
    assert neutral == pytest.approx(least, rel=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "qwen35"])
def test_a_second_question_costs_its_own_tokens_and_scores_the_same(
    tiny_model: Callable[..., Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model(family)
    kept = scorer(path)
    first = kept.score(UNITS, QUERIES[:1])
    rows: list[int] = []
    run = kept._run
    monkeypatch.setattr(kept, "_run", lambda tokens, **how: rows.append(len(tokens)) or run(tokens, **how))
    second = kept.score(UNITS, QUERIES[1:])
    assert rows == [len(kept.tokenizer.encode("\n\nthe sea"))]
    assert second == pytest.approx(scorer(path).score(UNITS, QUERIES[1:]), rel=1e-4)
    assert kept.score(UNITS, QUERIES[:1]) == pytest.approx(first, rel=1e-4)
    # A longer text goes on from the one that was read, another begins anew.
    longer = [*UNITS, " And more of it."]
    assert kept.score(longer, QUERIES) == pytest.approx(scorer(path).score(longer, QUERIES), rel=1e-4)
    other = [UNITS[0], " Another thing.", *UNITS[2:]]
    assert kept.score(other, QUERIES) == pytest.approx(scorer(path).score(other, QUERIES), rel=1e-4)


def test_a_failure_leaves_no_trace(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention_scorer.CHUNKS, "cpu", 16)
    kept = scorer(tiny_model("qwen35"))
    expected = kept.score(UNITS, QUERIES)
    run, calls = kept._run, [0]

    def failing(tokens: list[int], **how: bool):
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("out of memory")
        return run(tokens, **how)

    monkeypatch.setattr(kept, "_run", failing)
    with pytest.raises(RuntimeError):
        kept.score([*UNITS[1:], *UNITS], QUERIES)
    with pytest.raises(Cancelled):
        kept.score(UNITS, QUERIES, lambda: True)
    assert kept.score(UNITS, QUERIES) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen35"])
def test_chunks_do_not_change_the_scores(
    tiny_model: Callable[..., Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, text = tiny_model(family), UNITS * 5
    whole = scorer(path).score(text, QUERIES)
    monkeypatch.setitem(attention_scorer.CHUNKS, "cpu", 7)
    assert scorer(path).score(text, QUERIES) == pytest.approx(whole, rel=1e-3)
    assert all(score >= 0 for score in whole) and any(whole)


def test_a_text_beyond_the_trained_length_is_scored_in_windows(tiny_model: Callable[..., Path]) -> None:
    kept = scorer(tiny_model("qwen3"))
    kept._limit = 120
    text = UNITS * 8
    lengths = [len(ids) for ids in kept.tokenizer.encode_all(text)]
    windows = kept._windows(lengths)
    assert len(windows) > 2 and windows[0][0] == 0 and windows[-1][1] == sum(lengths)
    assert all(b - a + len(kept._before) <= 120 for a, b in windows)
    assert {end for _, end in windows} <= set(accumulate(lengths))
    assert all(end == start for (_, end), (start, _) in pairwise(windows))
    assert len(kept.score(text, QUERIES)) == len(text)
    with pytest.raises(ScoringFailed):
        kept.score(["word " * 400], QUERIES)


def test_no_window_is_short(tiny_model: Callable[..., Path]) -> None:
    """Its tokens would get more attention than others. Here whole units need a window more than tokens do."""
    kept = scorer(tiny_model("qwen3"))
    kept._limit = 3270 + len(kept._before)
    windows = kept._windows([100] * 65)
    assert len(windows) == 3 and {end - start for start, end in windows} <= {2100, 2200, 2300}


@pytest.mark.parametrize("family", ["qwen3", "qwen35"])
def test_chunks_do_not_depend_on_what_was_read_before(
    tiny_model: Callable[..., Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's kernels are chosen by the number of rows: other chunks could have other bits."""
    monkeypatch.setitem(attention_scorer.CHUNKS, "cpu", 16)
    path, rows = tiny_model(family), []
    kept, alone = scorer(path), scorer(path)
    for each in (kept, alone):

        def seen(tokens, *, run=each._run, **how):
            rows.append(tuple(tokens))
            return run(tokens, **how)

        monkeypatch.setattr(each, "_run", seen)
    texts = [UNITS, [*UNITS, " And more of it."], [*UNITS[:2], " Another end."], [" Another thing.", *UNITS]]
    for text in texts:
        rows.clear()
        found, own = kept.score(text, QUERIES), set(rows)
        rows.clear()
        alone._shorten(0)
        assert alone.score(text, QUERIES) == found and own <= set(rows)


class Watched(DryRun):
    """Records what would have to wait for the GPU."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.waits: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__index__", "__float__"):
            self.waits += [name] * bool(args and isinstance(args[0], torch.Tensor) and args[0].is_meta)
        return super().__torch_function__(func, types, args, kwargs)


def unloaded(path: Path, work: Callable[[AttentionScorer], object]) -> Watched:
    """Return what a scorer without weights launches on a GPU that is not there."""
    with fake_gpu(), GGUFFile.open(path) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
        template = ChatTemplate.from_metadata(file.metadata)
        with torch.inference_mode(), Watched(GPU) as found:
            made = AttentionScorer(scoring.unloaded_scoring(file, GPU), tokenizer, template, name="x")
            work(made)
    return found


@pytest.mark.parametrize("family", ["qwen3", "qwen35"])
def test_a_dry_run_finds_every_kernel_of_a_scorer(
    tiny_model: Callable[..., Path], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were compiled at the first text of a length, which took seconds."""
    monkeypatch.setattr(prefill, "SLICE_BYTES", 1 << 18)
    path = tiny_model(family, layers=12, context=8192)

    def every(scorer: AttentionScorer) -> None:
        for rows in (1, 2, 7, 16, 20, 31, 40, 57, 64, 65, 100, 1000, 4096, 6001):
            scorer._window([0] * rows, [(1.0, [0] * min(rows, 64)), (0.5, [0] * max(1, rows % 64))])

    found, needed = unloaded(path, AttentionScorer.rehearse), unloaded(path, every)
    assert set(needed.launches) <= set(found.launches) and len(needed.modules) == len(found.modules)
    options = [dict(each.options) for each in found.launches if each.name == "_chunk_attention_kernel"]
    assert {(each["BEGIN"], each["END"]) for each in options} == set(product([True, False], repeat=2))


@pytest.mark.parametrize("family", ["qwen3", "qwen35"])
def test_nothing_of_a_window_waits_for_the_gpu(tiny_model: Callable[..., Path], family: str) -> None:
    path = tiny_model(family, layers=12, context=8192)
    assert not unloaded(path, lambda scorer: scorer._window([0] * 5000, [(1.0, [0] * 20)])).waits
