"""Why a draft's tokens are not accepted: what was accepted of whom, and an experiment that names the cause.

Speculation is exact, so a draft that does not fit shows in the speed alone. When a few calls had nothing
accepted, the draft proposes once more for text that is already there, as it is configured and with one
setting changed at a time: what makes it right is what was wrong.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bough.kernels.kv_cache.format import FORMATS
from bough.models.decoder import Target
from bough.models.dflash import DFlashDraft
from bough.models.draft_spec import DraftSpec, default_taps
from bough.models.step import Step
from bough.spec.costs import StepCosts
from bough.spec.drafter import Shares
from bough.state.draft_ring import draft_buffers
from bough.state.sequences import CacheConfig, SequenceStates

log = logging.getLogger(__name__)

FEW_CALLS = 2  # without an accepted token: the planner makes hardly more
_MANY_CALLS, _LITTLE = 12, 0.1  # calls, and accepted tokens of one: too few
_LEAST_TEXT, _MOST_TEXT = 40, 256  # tokens of the experiment
_PLACES = 12  # in the text, at which the draft proposes
_WORKS = 0.25  # tokens of a call that are right: a draft that fits its target has more, of most texts
_GAIN, _BETTER = 6, 0.25  # tokens over all places, and share of them: less is luck
_SECONDS = 5.0  # for the experiment: a large draft on a CPU is not tried with all settings
# Of a first contact, which no text gave reason for; only where a step takes no longer than the other.
_FIRST_TEXT, _FIRST_SECONDS, _QUICK = 96, 2.0, 0.05
_AGREEING, _TEXTS = 2, 6  # texts that have to say the same, of at most so many
_MEASURED = " (in a test on this text: "
_OTHER = (
    "no other layers, mask, block size or causal flag make it right: it is the draft of another model, or"
    " of the model that this one was fine-tuned from; below 8 bits, try `draft_quant` none"
)
_BLOCKS = (16, 8, 32, 4)  # the usual first
_ALIKE = 0.9  # of two settings as good as that the usual one is named
# Masks of published drafts: of Qwen3.5 to 3.8, of Qwen3, of Gemma. Others take the last row of the embedding.
_MASKS = (248070, 151669, 4)


class DraftWatch:
    """What came of a draft's calls and of prompt lookup; finds out what is wrong with a draft.

    At a first contact, which the file of costs notes, other settings are tried on the first text; later only
    where nothing is accepted.
    """

    def __init__(
        self, draft: DFlashDraft | None = None, target: Target | None = None, costs: StepCosts | None = None
    ):
        """`draft` None: only shares are counted, or a kind of draft that no experiment is made with."""
        self._draft, self._target, self._costs = draft, target, costs or StepCosts()
        self._shares: dict[int, Shares] = {}  # by slot
        self._calls = self._accepted = 0  # of the draft, over all texts
        self._due = FEW_CALLS
        self.diagnosis: str | None = None

    def begin(self, slot: int) -> None:
        self._shares[slot] = Shares()

    def shares(self, slot: int) -> Shares:
        return self._shares.get(slot, Shares())

    def observe(self, slot: int, accepted: Sequence[int], copied: Sequence[int], *, drafted: bool) -> None:
        """Count the tokens accepted of a tree: those that prompt lookup had proposed, too, are its own.

        `drafted`: a draft was called; else the tree was a copy.
        """
        shares = self._shares.setdefault(slot, Shares())
        same = _common(accepted, copied) if drafted else len(accepted)
        shares.lookup += same
        shares.draft += len(accepted) - same
        if drafted and (len(accepted) > same or not same):
            self._calls += 1
            self._accepted += len(accepted) - same

    def look_into(self, tokens: Sequence[int]) -> str | None:
        """After an answer: return what is wrong with the draft; once."""
        if self.diagnosis or len(tokens) < _LEAST_TEXT:
            return None
        few = not self._accepted if self._calls < _MANY_CALLS else self._accepted <= _LITTLE * self._calls
        due, quick = few and self._calls >= self._due, self._costs.step.get(1, 1.0) <= _QUICK
        if not due and (self._draft is None or self._costs.checked or not quick):
            return None
        if due:
            # A draft that fits may have nothing to say about one text.
            self._due = 4 * self._calls
        cause: str | None = "is it the draft of this target?"
        try:
            if self._draft is not None:
                some, seconds = (tokens, _SECONDS) if due else (tokens[-_FIRST_TEXT:], _FIRST_SECONDS)
                cause = self.examine(some, seconds)
        except Exception as error:  # an experiment fails no answer
            log.debug("the draft cannot be tried with other settings", exc_info=True)
            cause = f"why could not be found out ({error!s:.80})" if due else None
        if not due and self._doubtful(cause):
            return None
        count = f"{self._accepted} tokens" if self._accepted else "not one token"
        seen = f"{count} of {self._calls} draft calls accepted" if due else "the draft does not fit"
        self._costs.checked, self.diagnosis = True, cause and f"{seen}: {cause}"
        return self.diagnosis

    def _doubtful(self, cause: str | None) -> bool:
        """Count what a text says at first contact; return whether others have to agree: it may be hard."""
        if cause is None:
            return False
        suspected, name = self._costs.suspected, _name(cause)
        suspected[name] = suspected.get(name, 0) + 1
        if sum(suspected.values()) >= _TEXTS:
            self._costs.checked = True
        return suspected[name] < (_AGREEING if name != _OTHER else _AGREEING + 1)

    @torch.inference_mode()
    def examine(self, tokens: Sequence[int], seconds: float = _SECONDS) -> str | None:
        """Return what is wrong with the draft, by trying other settings on a text; None: nothing.

        The halves of a long text have to agree.
        """
        if self._draft is None or self._target is None:
            return None
        tokens = tokens[-_MOST_TEXT:]
        half = len(tokens) // 2
        parts = [tokens[:half], tokens[half:]] if half >= 2 * _LEAST_TEXT else [tokens]
        causes = [diagnosis(self._draft, self._target, part, seconds / len(parts)) for part in parts]
        return causes[-1] if len({cause and _name(cause) for cause in causes}) == 1 else None


def _name(cause: str) -> str:
    """Return a diagnosis without its figures."""
    return cause.partition(_MEASURED)[0]


def diagnosis(
    draft: DFlashDraft, target: Target, tokens: Sequence[int], seconds: float = _SECONDS
) -> str | None:
    """Return what is wrong with a draft, in a sentence; None: on this text it is right often enough."""
    results = experiment(draft, target, list(tokens), seconds)
    configured = results.pop("")
    highest = max(results.values(), default=0.0)
    best = next((name for name, right in results.items() if right >= _ALIKE * highest), "")
    better = results.get(best, 0.0)
    if better >= _WORKS and _PLACES * (better - configured) >= max(_GAIN, _BETTER * _PLACES * configured):
        return f"{best}{_MEASURED}{configured:.2f} tokens a call, then {better:.2f})"
    if configured >= _WORKS:
        return None
    return _OTHER


def experiment(
    draft: DFlashDraft, target: Target, tokens: list[int], seconds: float = _SECONDS
) -> dict[str, float]:
    """Return the tokens of a call that follow in the text, as configured ("") and by what was changed."""
    variants = {"": draft.spec} | dict(_changed(draft.spec, target))
    taps = sorted({tap for spec in variants.values() for tap in spec.taps})
    features = _features(target, tokens, tuple(taps))
    width, results = target.spec.width, {}
    begin = time.perf_counter()
    for name, spec in variants.items():
        if results and time.perf_counter() - begin > seconds:
            break
        columns = [features[:, taps.index(tap) * width : (taps.index(tap) + 1) * width] for tap in spec.taps]
        results[name] = _accepted(_with_spec(draft, spec), target, tokens, torch.cat(columns, 1))
    return results


def _changed(spec: DraftSpec, target: Target) -> Iterator[tuple[str, DraftSpec]]:
    """Yield the draft's settings with one of them changed, and which."""
    flipped = tuple(not causal for causal in spec.causal)
    yield f"causal is {list(spec.causal)}, the opposite fits", replace(spec, causal=flipped)
    depth = len(target.spec.layers)
    shown = list(spec.taps)
    for taps in _other_taps(spec, depth):
        yield f"target_layer_ids is {shown}, {list(taps)} fits", replace(spec, taps=taps)
    for mask in dict.fromkeys((*_MASKS, target.spec.vocab_size - 1)):
        if mask != spec.mask_id and mask < target.spec.vocab_size:
            yield f"mask_token_id is {spec.mask_id}, {mask} fits", replace(spec, mask_id=mask)
    for size in _BLOCKS:
        if size != spec.block_size:
            yield f"block_size is {spec.block_size}, {size} fits", replace(spec, block_size=size)


def _other_taps(spec: DraftSpec, depth: int) -> list[tuple[int, ...]]:
    count = len(spec.taps)
    others = [
        tuple(default_taps(depth, count)),
        *(tuple(tap + step for tap in spec.taps) for step in (-1, 1, -2, 2)),
        tuple(sorted(spec.taps)),
        tuple(reversed(spec.taps)),
    ]
    sound = [taps for taps in others if taps != spec.taps and all(0 <= tap < depth for tap in taps)]
    return list(dict.fromkeys(sound))


def _with_spec(draft: DFlashDraft, spec: DraftSpec) -> DFlashDraft:
    """Return the draft with other settings and the same weights."""
    changed = copy(draft)
    changed.spec = spec
    if hasattr(draft, "_layers"):
        layers: list[Any] = [copy(layer) for layer in draft._layers]
        for layer in layers:
            layer._spec = spec
        changed._layers = layers
    return changed


def _features(target: Target, tokens: list[int], taps: tuple[int, ...]) -> Tensor:
    """Return the target's hidden states [tokens, taps * width] of a text, from a state of its own."""
    device = target.device
    format = FORMATS["f16" if device.type == "cuda" else "f32"]
    states = SequenceStates(
        target.spec,
        max_ctx=len(tokens) + 64,
        max_rows=1,
        device=device,
        cache=CacheConfig(format, format),
        input_dtype=target.dtype,
    )
    slots = torch.tensor([states.open()], device=device)
    states.reserve(0, len(tokens))
    step = Step.chunk(slots, torch.tensor([tokens], device=device), states.buffers.lengths[slots])
    return target.forward(step, states.buffers, taps=taps).features[0]


def _accepted(draft: DFlashDraft, target: Target, tokens: list[int], features: Tensor) -> float:
    """Return how many of a call's likeliest tokens follow in the text, on average over some places."""
    spec, device, slots = draft.spec, draft.device, torch.zeros(1, dtype=torch.int64, device=draft.device)
    kind = torch.float32 if device.type == "cpu" else torch.float16
    buffers = draft_buffers(spec, max_ctx=len(tokens), slots=1, device=device, dtype=kind)
    begin, last = len(tokens) // 3, len(tokens) - 2
    places = sorted({begin + (last - begin) * n // _PLACES for n in range(_PLACES)})
    done = total = 0
    for place in places:
        draft.append(features[None, done:place], slots, buffers)
        done = place
        ids = [tokens[place], *[spec.mask_id] * (spec.block_size - 1)]
        rows = target.embed(torch.tensor([ids], device=device))
        anchor = torch.tensor(ids[:1], device=device)
        hidden = draft.block(rows, slots, buffers, anchor)[:, -spec.depth :]
        proposed = draft.logits(hidden, target.draft_logits)[0].argmax(-1).tolist()
        total += _common(proposed, tokens[place + 1 :])
    return total / len(places)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with in common."""
    pairs = list(zip(one, other, strict=False))
    return next((n for n, (left, right) in enumerate(pairs) if left != right), len(pairs))
