import math
import random

import torch

from bough.spec.calibration import Calibration
from bough.spec.tree import Proposal


def taught(claim: float, right: float, rounds: int = 600) -> Calibration:
    """A proposer that claims `claim` at six depths and is right `right` of the time."""
    calibration, choose = Calibration(), random.Random(3)
    ids, scores = torch.tensor([[1, 2]] * 6), torch.tensor([[claim, (1 - claim) / 2]] * 6).log()
    for _ in range(rounds):
        followed = []
        for _ in range(6):
            followed.append(1 if choose.random() < right else 9)
            if followed[-1] == 9:
                break
        calibration.observe(Proposal.of(ids, scores), followed)
    return calibration


def corrected(calibration: Calibration, claim: float, depth: int) -> float:
    scores = torch.full((6, 1), math.log(claim))
    return math.exp(float(calibration.correction().applied(scores)[depth - 1, 0]))


def test_a_fresh_table_changes_nothing() -> None:
    scores = torch.rand(15, 8).log()
    assert torch.allclose(Calibration().correction().applied(scores), scores, atol=1e-6)


def test_boasting_is_deflated_and_modesty_rewarded() -> None:
    assert abs(corrected(taught(0.95, 0.5), 0.95, 1) - 0.5) < 0.08
    assert abs(corrected(taught(0.5, 0.85), 0.5, 1) - 0.85) < 0.12
    # Claims of another size have not been tested and stay as they are.
    assert abs(corrected(taught(0.95, 0.5), 0.3, 1) - 0.3) < 1e-5


def test_scores_stay_probabilities() -> None:
    calibration = taught(0.7, 1.0)
    assert bool((calibration.correction().applied(torch.rand(15, 8).log()) <= 0).all())
