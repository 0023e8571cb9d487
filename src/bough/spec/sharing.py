"""How several texts share the rows of one step: which are asked for a draft, and who gets how many rows.

A row's expected gain is the probability of its path times what trees of its text have kept of their
promises. Trees are in order of worth, and a child never weighs more than its parent, so the best rows of all
trees are a prefix of each. How many rows there are in all follows from measured costs: the number with the
most expected tokens a second, down to one row for each text and no draft call at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from bough.kernels.tree import MAX_ROWS
from bough.kernels.tree.share import share_rows
from bough.spec.costs import StepCosts
from bough.spec.draft_call import TREE_WORDS, word_floats
from bough.spec.policy import MARGIN, PROBE_INTERVAL, PROBE_SHARE
from bough.spec.tree import SharedTrees, Tree
from bough.state.graphs import CapturedFunction, StagedNumbers

GAINS_RATE = 0.1  # of the average gains of the best rows, a step
REPLAN = 4  # steps after which it is decided anew which texts are asked: 0.4 ms for 8 of them


class BatchCosts:
    """Measured seconds of steps by texts and rows in all, and of draft calls by texts asked."""

    def __init__(self, alone: StepCosts):
        """`alone`: the costs of steps of one text, used where nothing was measured yet."""
        self._alone = alone
        self._steps: dict[int, StepCosts] = {}  # by texts; each by rows
        self._drafts: dict[int, StepCosts] = {}  # by mix; each by texts asked

    def observe_step(self, texts: int, rows: int, seconds: float) -> None:
        self._steps.setdefault(texts, StepCosts()).observe_step(rows, seconds)

    def observe_draft(self, asked: int, seconds: float, mix: int = 0) -> None:
        if asked:
            self._drafts.setdefault(mix, StepCosts()).observe_step(asked, seconds)

    def step(self, texts: int, rows: int) -> float:
        """Return the cost of a step; where this number of texts was not measured, that of the nearest one."""
        return self.steps(texts, [rows])[0]

    def steps(self, texts: int, sizes: Sequence[int]) -> list[float]:
        """Return the costs of steps of several sizes."""
        nearest = min(self._steps, key=lambda known: abs(known - texts), default=None)
        table = self._alone if nearest is None else self._steps[nearest]
        return [table.of(rows) for rows in sizes]

    def draft(self, asked: int, mix: int = 0) -> float:
        if not asked:
            return 0.0
        return self._drafts[mix].of(asked) if mix in self._drafts else self._alone.draft_call(mix)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one text could gain from rows below its root."""

    expected: list[float]  # tokens accepted of a draft call, by size; []: not known yet
    copied: int  # tokens that prompt lookup found
    probability: float  # that each of them is right
    max_rows: int
    since_draft: int  # steps since it was last asked
    slot: int = 0


class RowSharing:
    def __init__(self, costs: BatchCosts, *, sizes: Sequence[int], max_rows: int, adaptive: bool = True):
        """`sizes` of steps that differ in cost; `max_rows` of one tree, of which estimates are by size."""
        self.costs = costs
        self._adaptive = adaptive
        self._step_sizes = [*(rows for rows in sizes if rows < MAX_ROWS), MAX_ROWS]
        # From tokens by size to tokens by row: what a row below the root adds.
        tree_sizes = [rows for rows in sizes if rows < max_rows] + [max_rows]
        by_rows = np.array(
            [np.interp(np.arange(1, max_rows + 1), tree_sizes, unit) for unit in np.eye(len(tree_sizes))]
        )
        self._by_row = np.diff(by_rows, axis=1)  # [sizes, max_rows - 1]
        self._since_probe = 0
        self._mix = 0  # of drafts, which is called
        self._gained: dict[int, np.ndarray] = {}  # by texts: gains of the best rows below the roots
        self._chosen: tuple[tuple[int, ...], int, list[int]] = ((), 0, [])  # texts, steps left, those to ask

    def asked(self, offers: Sequence[Offer], *, padded: bool, mix: int = 0) -> list[int]:
        """Return which texts a mix of drafts is called for; `padded`: steps have one of the sizes."""
        self._mix = mix
        askable = [index for index, offer in enumerate(offers) if offer.max_rows > 1]
        if not self._adaptive:
            return askable
        new = [index for index in askable if not offers[index].expected]
        known = [index for index in askable if offers[index].expected]
        if not known:
            return new
        asking = self._still_chosen(offers, known, padded=padded)
        return sorted({*new, *asking, *self._probed(offers, known, asking)})

    def due(self, slots: Sequence[int]) -> bool:
        """Return whether it has to be decided anew which of the texts in these slots are asked."""
        return not self._chosen[1] or not self._chosen[0][1:] or not {*self._chosen[0][1:]} <= {*slots}

    def _still_chosen(self, offers: Sequence[Offer], known: list[int], *, padded: bool) -> list[int]:
        """Return those to ask, chosen anew every few steps: estimates change slowly, the device waits."""
        texts = (len(offers), *(offers[index].slot for index in known))
        before, left, asking = self._chosen
        if before != texts or not left:
            left, asking = REPLAN, self._best_asked(offers, known, padded=padded)
        self._chosen = texts, left - 1, asking
        return asking

    def _best_asked(self, offers: Sequence[Offer], known: list[int], *, padded: bool) -> list[int]:
        """Return those to ask for the most tokens a second, as far as estimates tell."""
        gains = np.array([offers[index].expected for index in known]) @ self._by_row
        rows = np.array([offers[index].max_rows - 1 for index in known])
        gains = np.where(np.arange(gains.shape[1]) < rows[:, None], gains, 0.0)
        copies = [_copy_gains(offer) for offer in offers]
        alone = np.array([copies[index].sum() for index in known])
        order = np.argsort(alone - gains.sum(1), kind="stable")
        sizes = self._sizes(len(offers), padded=padded)
        step_s = np.array(self.costs.steps(len(offers), sizes))
        best, speed = 0, 0.0
        for count in _counts(len(known)):
            asking = {known[place] for place in order[:count]}
            pool = [gains[order[:count]].ravel(), *(c for i, c in enumerate(copies) if i not in asking)]
            tokens = len(offers) + _best_sums(np.concatenate(pool), [rows - len(offers) for rows in sizes])
            rate = float((tokens / (step_s + self.costs.draft(count, self._mix))).max()) / (
                MARGIN if count else 1.0
            )
            if rate > speed:
                best, speed = count, rate
        return [known[place] for place in order[:best]]

    def _probed(self, offers: Sequence[Offer], known: list[int], asking: list[int]) -> list[int]:
        """Return a text to ask although it does not pay, so seldom that it hardly costs anything."""
        left = [index for index in known if index not in asking]
        self._since_probe += 1
        if not left:
            return []
        count, mix = len(asking), self._mix
        more_s = self.costs.draft(count + 1, mix) - self.costs.draft(count, mix)
        lost = max(0.0, more_s) / self.costs.step(len(offers), len(offers))
        if self._since_probe < max(lost / PROBE_SHARE, PROBE_INTERVAL):
            return []
        self._since_probe = 0
        return [max(left, key=lambda index: offers[index].since_draft)]

    def shares(
        self, weights: Sequence[np.ndarray], *, padded: bool, prompts: Sequence[int] = ()
    ) -> list[int]:
        """Return the rows of each text, its root included, from the expected gains of its rows below that.

        prompts: rows of each prompt that the step reads, too.
        """
        texts = len(weights)
        # A row is in the tree only if all before it are, so it counts for no more than they do.
        falling = [np.minimum.accumulate(each) if len(each) else each for each in weights]
        pool = np.concatenate(falling)
        owners = np.repeat(np.arange(texts), [len(each) for each in weights])
        order = np.argsort(-pool, kind="stable")
        rows = self._best_size(pool[order], texts, prompts, padded=padded)
        shared = np.bincount(owners[order[: rows - texts - sum(prompts)]], minlength=texts)
        return (1 + shared).tolist()

    def planned_size(self, offers: Sequence[Offer], asked: Sequence[bool], prompts: Sequence[int]) -> int:
        """Return the rows in all of a padded step whose gains are not known yet: the device shares them.

        What the best rows of as many texts gained lately says most. From averages by text too few rows are
        chosen (16 texts, an H200's costs, recorded outcomes: 0.95 of the speed with known gains, not 1.00).
        """
        if len(offers) in self._gained:
            return self._best_size(self._gained[len(offers)], len(offers), prompts, padded=True)
        pool = [
            (np.array(offer.expected) @ self._by_row if drafted else _copy_gains(offer))[: offer.max_rows - 1]
            for offer, drafted in zip(offers, asked, strict=True)
        ]
        gains = -np.sort(-np.concatenate(pool))
        return self._best_size(gains, len(offers), prompts, padded=True)

    def observe_gains(self, texts: int, gains: np.ndarray) -> None:
        """Learn what the best rows of a step of `texts` texts were expected to gain, the best first."""
        old = self._gained.get(texts, gains)
        self._gained[texts] = old + GAINS_RATE * (gains - old)

    def _best_size(self, gains: np.ndarray, texts: int, prompts: Sequence[int], *, padded: bool) -> int:
        """Return the rows in all with the most tokens a second, from falling gains below the roots."""
        taken = texts + sum(prompts)  # rows that are not shared out
        sizes = self._sizes(taken, padded=padded)
        sums = texts + _best_sums(gains, [rows - taken for rows in sizes], ordered=True)
        step_s = np.array(self.costs.steps(texts + len(prompts), sizes))
        return sizes[int((sums / step_s).argmax())] if self._adaptive else sizes[-1]

    def _sizes(self, least: int, *, padded: bool) -> list[int]:
        """Return the rows in all to choose from."""
        enough = [rows for rows in self._step_sizes if rows >= least]
        return enough if padded or least in enough else [least, *enough]


def _counts(most: int) -> list[int]:
    """Return how many texts to consider asking: every number up to 4, then fewer of them."""
    return sorted({0, *range(1, min(most, 4) + 1), *range(6, most, 2 + most // 8), most})


def _copy_gains(offer: Offer) -> np.ndarray:
    """Return the gains of rows that prompt lookup found: all before each must be right, too."""
    count = min(offer.copied, offer.max_rows - 1)
    return np.power(offer.probability, np.arange(1, count + 1)) if count else np.zeros(0)


def _best_sums(gains: np.ndarray, counts: Sequence[int], *, ordered: bool = False) -> np.ndarray:
    """Return the sums of the best `counts` gains."""
    sums = np.concatenate([[0.0], np.cumsum(gains if ordered else -np.sort(-gains))])
    return sums[np.minimum(counts, len(gains))]


@dataclass(frozen=True, slots=True)
class SharedPart:
    """One sequence's part of a step whose rows are shared on the device."""

    slot: int
    most: int  # rows, at most
    promise: float = 1.0  # tokens accepted for each that the weights of its tree promise
    # On the host: a tree, of which each row below the root has this log probability after the one before;
    # None: what the draft call gave the slot.
    tree: Tree | None = None
    score: float = 0.0
    given: bool = False  # a chain of a prompt's tokens, of which no row is left out


_FACTS = 6  # of each sequence: slot, 1, whether on the host, most rows, promise, whether given
_CAPACITIES = (4, 16, MAX_ROWS)  # sequences that one function shares between


class DeviceSharing:
    """Shares a step's rows on the device, as `RowSharing.shares` does for a size that is known before.

    So what the draft call gave is not read back: its step can be launched behind it.
    """

    def __init__(self, forest: Tensor):
        """`forest` [slots, TREE_WORDS]: the drafted trees."""
        self._forest = forest
        # Each row: the facts of a sequence, and its tree if it lies on the host; the last one: extra rows.
        self._staged = StagedNumbers(MAX_ROWS + 1, _FACTS + TREE_WORDS, device=forest.device)
        self._best = torch.zeros(MAX_ROWS, pin_memory=forest.is_cuda)
        self._texts = self._given = 0  # of the last step: texts, and rows of prompts below the first
        self._functions = {
            capacity: CapturedFunction(partial(self._share, capacity)) for capacity in _CAPACITIES
        }

    @property
    def functions(self) -> list[CapturedFunction]:
        return list(self._functions.values())

    def __call__(self, parts: Sequence[SharedPart], size: int) -> SharedTrees:
        """Launch the sharing of `size` rows; sequences without a given chain have any number of them."""
        capacity = next(capacity for capacity in _CAPACITIES if capacity >= len(parts))
        self._staged.wait()
        rows = self._staged.numbers
        rows[: capacity + 1, :_FACTS] = 0
        for row, part in zip(rows, parts, strict=False):
            on_host = part.tree is not None
            row[0], row[1], row[2], row[3], row[5] = part.slot, 1, on_host, part.most, part.given
            row[4:5].view(np.float64)[0] = part.promise
            if part.tree is not None:
                row[_FACTS : _FACTS + 4 * MAX_ROWS] = part.tree.packed.numpy().reshape(-1)
                weights = np.full(MAX_ROWS, -np.inf, np.float32)
                weights[: part.tree.size] = part.score * np.arange(part.tree.size)
                row[_FACTS + 4 * MAX_ROWS :] = weights.view(np.int32)
        rows[capacity, 0] = size - len(parts)
        self._staged.copy(slice(0, capacity + 1))
        shared, first, best = self._functions[capacity]()
        self._best.copy_(best, non_blocking=True)
        self._given = sum(part.most - 1 for part in parts if part.given)
        self._texts = sum(not part.given for part in parts)
        return SharedTrees(shared[:4], first, shared[4], size, max(part.most for part in parts))

    def gains(self) -> tuple[int, np.ndarray]:
        """Return the last step's texts and the gains of its best rows; the device must have shared them."""
        gains = np.zeros(MAX_ROWS)
        gains[: MAX_ROWS - self._given] = self._best.numpy()[self._given :]
        return self._texts, gains

    def _share(self, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows [5, 64], the fifth of which is what prompts have after each, `first`, best gains."""
        staged = self._staged.buffer[:capacity]
        slots, present, on_host, most, _, given = staged[:, :_FACTS].T.contiguous()[..., None].unbind()
        promise = staged[:, 4:5].contiguous().view(torch.float64).float()
        words = torch.where(on_host > 0, staged[:, _FACTS:], self._forest[slots[:, 0]])
        packed, weights = words[:, : 4 * MAX_ROWS].unflatten(1, (4, MAX_ROWS)), words[:, 4 * MAX_ROWS :]
        row = torch.arange(MAX_ROWS, device=words.device)
        gains = (word_floats(weights).exp() * promise).clamp(max=1).masked_fill(given > 0, 2)
        gains = gains.masked_fill((row >= most) | (present == 0), 0)
        tokens = packed[:, 0]
        after = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
        after = after.masked_fill((given == 0) | (row >= most - 1), -1)
        trees = torch.cat([packed, after[:, None]], 1)
        extra = self._staged.buffer[capacity, :1]
        return share_rows(trees, gains[:, 1:], present[:, 0], extra)
