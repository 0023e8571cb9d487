"""How many tokens of a question to the draft will come true, by rows, learnt from walks. Knows no costs.

Three things are kept apart. The level: what the text has been like of late. The usual: what the draft gives
over a longer time, to which the level returns while nobody asks. The share: where a tree ended the text is
hard, so a question asked there gets only a part of what one some plain steps later gets.
"""

from collections.abc import Sequence

# Plain steps since the last tree, from which on a share of its own is learnt; behind the last it is whole.
# The pair in the package, 16 rows: 1.7 tokens come true right behind a tree, 3.3 after 4 steps, 4.5 after 20.
WAITS = (0, 4, 16)
_FADE = 0.93  # of what a past step says about the next, for every step between
_LEAST_FADE = 0.4  # a single proposal never outweighs the past by more than this leaves
_USUAL_FADE, _LEAST_USUAL = 15 / 16, 0.8  # the same two for the usual
_HOLD = 0.97  # of how far the level is from the usual, for every step without a proposal
_NEW_TEXT = 32  # steps: another text is as far from the last one as that
_SHARE_FADE = 0.98  # of the shares' counts at each proposal
_SHARE_PRIOR = 20.0  # tokens that a fresh share is taken to have seen, all of them there


class Outlook:
    def __init__(self, buckets: Sequence[int]):
        """`buckets`: the numbers of rows that are asked about."""
        self._buckets = buckets
        # Tokens by bucket, of a question after a long wait, and as promised by the scores; [] until known.
        self._level: list[float] = []
        self._usual: list[float] = []
        self._promised: list[float] = []
        self._came = [0.0] * (len(WAITS) - 1)
        self._expected = [0.0] * (len(WAITS) - 1)
        self._proposals = 0
        self._age = 0  # steps since the last proposal that was learnt from

    @property
    def known(self) -> bool:
        return self._proposals > 0

    def step(self, *, new_text: bool) -> None:
        self._age += 1 + new_text * _NEW_TEXT

    def accepted(self, waited: int) -> list[float]:
        """Tokens by bucket, of a question so many plain steps behind the last tree."""
        share, held = self._share(_kind(waited)), _HOLD**self._age
        return [
            share * (usual + held * (level - usual))
            for level, usual in zip(self._level, self._usual, strict=True)
        ]

    def learn(self, weights: list[float], path: list[int], *, verified: int, waited: int) -> None:
        """Path probabilities of a tree's rows, the rows that came true, and how many rows were verified."""
        promised = [sum(weights[1:rows]) for rows in self._buckets]
        accepted = [float(sum(0 < row < rows for row in path)) for rows in self._buckets]
        if not self.known:
            self._level, self._usual, self._promised = promised[:], promised[:], promised[:]
        self._proposals += 1
        self._level = self.accepted(WAITS[-1])
        # A tree of fewer rows is all that a larger bucket would have had of it.
        whole = len(weights)
        kind, last = _kind(waited), sum(min(rows, whole) <= verified for rows in self._buckets) - 1
        if last == 0 and verified > 1:
            # Fewer rows than any bucket but the root: as much more as the scores promise for the next one.
            ratio = promised[1] / max(sum(weights[1:verified]), 1e-6)
            last, accepted[1] = 1, (len(path) - 1) * max(ratio, 1.0)
        share = self._share(kind)
        # All of them fade, so that one which kept the draft from being asked is put to the test again.
        self._came = [_SHARE_FADE * each for each in self._came]
        self._expected = [_SHARE_FADE * each for each in self._expected]
        if kind < len(self._came):
            self._came[kind] += accepted[last]
            self._expected[kind] += self._level[last]
        # At first every outcome counts the same, beside one for what the scores promise.
        equal = self._proposals / (self._proposals + 1)
        fade = min(max(_FADE ** max(1, self._age), _LEAST_FADE), equal)
        usual_fade = min(max(_USUAL_FADE ** max(1, self._age), _LEAST_USUAL), equal)
        self._age = 0
        for index, claim in enumerate(promised):
            self._promised[index] += (1 - fade) * (claim - self._promised[index])
            if index <= last:
                new = accepted[index] / share
                self._level[index] += (1 - fade) * (new - self._level[index])
            else:
                # A larger tree than was verified: as much more as the scores promise for it.
                ratio = self._promised[index] / max(self._promised[last], 1e-6)
                new = self._level[index] = self._level[last] * max(ratio, 1.0)
            self._usual[index] += (1 - usual_fade) * (new - self._usual[index])

    def _share(self, kind: int) -> float:
        if kind == len(self._came):
            return 1.0
        return (self._came[kind] + _SHARE_PRIOR) / (self._expected[kind] + _SHARE_PRIOR)


def _kind(waited: int) -> int:
    return sum(waited >= least for least in WAITS) - 1
