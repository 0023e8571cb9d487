"""The trainable draft: attention masks, and parity with the inference draft."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from bough.errors import UsageError
from bough.models.dflash import DFlashDraft
from bough.models.draft_spec import DraftSpec
from bough.state.draft_ring import draft_buffers
from bough.train.draft_export import draft_config
from bough.train.draft_model import TrainedDraft, new_spec
from bough.train.draft_target import Frozen, TrainingTarget
from tests.tiny_draft import draft_config as config_of
from tests.tiny_draft import draft_tensors

BLOCK, LENGTH = 8, 40
ANCHORS = torch.tensor([[3, 11, 12, 30], [1, 6, 20, 32]])
KINDS = {
    "full": ((("full", False), ("full", False)), 0),
    "causal": ((("full", True), ("full", True)), 0),
    "sliding": ((("sliding", True), ("full", False)), 6),
    "all sliding": ((("sliding", True), ("sliding", True)), 6),
    "bidirectional sliding": ((("sliding", False), ("sliding", False)), 6),
    "dflash2": ((("sliding", False), ("sliding", False)), 6),
    "mlp": ((("sliding", True), ("full", False)), 6),
}
RANK = 24


def spec_of(target: TrainingTarget, kind: str = "full") -> DraftSpec:
    layers, window = KINDS[kind]
    heads = {"dflash2": {"rank": RANK}, "mlp": {"inner": RANK}}.get(kind, {})
    base = new_spec(target.spec, mask_id=target.spec.vocab_size - 1, layers=2, block_size=BLOCK, **heads)
    kinds, causal = zip(*layers, strict=True)
    return replace(base, layers=kinds, causal=causal, window=window)


def model_of(spec: DraftSpec) -> TrainedDraft:
    """Return a model with norms other than one and weights large enough to matter."""
    model = TrainedDraft(spec, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim != 2 or not parameter.any():
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            else:
                parameter *= 5
    return model


def inputs(spec: DraftSpec) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(2, LENGTH, len(spec.taps) * spec.width, generator=generator)
    embeddings = torch.randn(2, ANCHORS.shape[1], BLOCK, spec.width, generator=generator)
    return features.requires_grad_(), embeddings.requires_grad_()


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_attends_to_features_before_its_anchor_and_to_itself(tiny_target, kind):
    spec = spec_of(tiny_target, kind)
    model = model_of(spec)
    features, embeddings = inputs(spec)
    hidden = model(features, embeddings, ANCHORS)
    for text in range(2):
        for block, anchor in enumerate(ANCHORS[text].tolist()):
            loss = hidden[text, block].square().sum()
            seen, rows = torch.autograd.grad(loss, [features, embeddings], retain_graph=True)
            reached = seen.abs().amax(-1) > 0  # [2, n]
            # Context positions do not mix between layers, so no row attends further back than one window.
            first = max(0, anchor - spec.window + 1) if "full" not in spec.layers else 0
            expected = torch.zeros(2, LENGTH, dtype=torch.bool)
            expected[text, first:anchor] = True
            assert torch.equal(reached, expected)
            assert torch.equal(seen[~expected], torch.zeros_like(seen[~expected]))
            others = rows.clone()
            others[text, block] = 0
            assert torch.equal(others, torch.zeros_like(others))
            assert (rows[text, block].abs().amax(-1) > 0).all()


def test_rows_of_a_causal_block_attend_only_to_earlier_rows(tiny_target):
    spec = spec_of(tiny_target, "causal")
    features, embeddings = inputs(spec)
    hidden = model_of(spec)(features, embeddings, ANCHORS)
    rows = torch.autograd.grad(hidden[0, 1, 3].square().sum(), embeddings)[0][0, 1]
    assert (rows[:4].abs().amax(-1) > 0).all() and torch.equal(rows[4:], torch.zeros_like(rows[4:]))


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_equal_the_inference_draft(tiny_target, kind, tmp_path):
    spec = spec_of(tiny_target, kind)
    model = model_of(spec)
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    config = draft_config(spec, tiny_target.spec, tiny_target.tokenizer, torch.float32)
    # Against the rule that sliding layers are causal.
    if kind in ("causal", "bidirectional sliding", "dflash2"):
        config["is_causal"] = spec.causal[0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    served = DFlashDraft.load(tmp_path, tiny_target.spec)
    assert replace(served.spec, source=spec.source) == spec
    features, embeddings = (each.detach() for each in inputs(spec))
    with torch.no_grad():
        residual = model(features, embeddings, ANCHORS)
        trained, readout = model.norm(residual), model.readout(Frozen(tiny_target.decoder, 1, BLOCK))
        for text in range(2):
            for block, anchor in enumerate(ANCHORS[text].tolist()):
                buffers, slot = draft_buffers(spec, max_ctx=64), torch.tensor([0])
                served.append(features[text : text + 1, :anchor], slot, buffers)
                rows = served.block(embeddings[text : text + 1, block], slot, buffers)[0]
                assert (rows - trained[text, block]).norm() < 1e-5 * rows.norm()
                if readout.logits is not None:
                    ids = torch.randint(tiny_target.spec.vocab_size, (BLOCK, 5))
                    marginals, before = torch.randn(BLOCK, 5), ids[:, :3]
                    whole = served.rows(embeddings[text : text + 1, block], slot, buffers)[0][0]
                    if served.refiner is not None:
                        scores = served.refiner(whole, rows, before, ids, tiny_target.decoder)
                    else:
                        assert served.selector is not None
                        scores = marginals[:, None] + served.selector(rows, before, ids)
                    ours = readout.logits(residual[text, block], trained[text, block], before, ids, marginals)
                    assert torch.allclose(ours, scores, atol=1e-4)
                    assert not torch.allclose(scores[:, 0], scores[:, 1], atol=1e-2)


def test_a_state_dict_is_a_checkpoint(tiny_target):
    spec = spec_of(tiny_target)
    theirs = draft_tensors(
        config_of(
            tiny_target.spec,
            layers=2,
            taps=spec.taps,
            intermediate_size=spec.feed_forward,
            num_attention_heads=spec.heads,
            num_key_value_heads=spec.kv_heads,
            head_dim=spec.head_dim,
        )
    )
    ours = TrainedDraft(spec).state_dict()
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in theirs.items()
    }


def test_recomputing_activations_changes_nothing(tiny_target):
    spec = spec_of(tiny_target)
    gradients = []
    for recompute in (False, True):
        model = model_of(spec)
        model.recompute = recompute
        features, embeddings = (each.detach() for each in inputs(spec))
        model.norm(model(features, embeddings, ANCHORS)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.equal(kept, recomputed)


@pytest.mark.parametrize(
    ("depth", "width", "heads", "feed_forward", "taps"),
    [
        (12, 512, (8, 2, 128), 1536, (1, 3, 5, 7, 9)),
        (64, 5120, (32, 8, 128), 15360, (1, 16, 31, 46, 61)),
        (32, 2560, (32, 8, 128), 7680, (1, 8, 15, 22, 29)),
        (4, 64, (4, 1, 32), 256, (0, 1, 2)),
        (1, 64, (4, 1, 32), 256, (0,)),
    ],
)
def test_sizes_follow_the_target(tiny_target, depth, width, heads, feed_forward, taps):
    target = replace(tiny_target.spec, width=width, layers=("attention",) * depth)
    spec = new_spec(target, mask_id=1)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == heads
    assert (spec.feed_forward, spec.taps) == (feed_forward, taps)
    spec.check_target(target)


def test_a_window_leaves_the_last_layer_with_full_attention(tiny_target):
    spec = new_spec(tiny_target.spec, mask_id=1, window=100)
    assert spec.layers == ("sliding", "sliding", "full") and spec.causal == (True, True, False)
    with pytest.raises(UsageError, match="`block` is 1, needed 2 to 64"):
        new_spec(tiny_target.spec, mask_id=1, block_size=1)
