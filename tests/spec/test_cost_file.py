from pathlib import Path

import pytest

from bough.spec.cost_file import CostFile
from bough.spec.costs import StepCosts


def test_costs_survive_and_keep_apart(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "costs.json"
    first, second = CostFile(path, "card / model"), CostFile(path, "card / other")
    assert first.load() == StepCosts()
    first.save(StepCosts({1: 0.004, 24: 0.006}, {0: 0.001, 2: 0.002}))
    second.save(StepCosts({1: 0.5}))
    assert first.load() == StepCosts({1: 0.004, 24: 0.006}, {0: 0.001, 2: 0.002})
    assert second.load() == StepCosts({1: 0.5})
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"card / model": 3}',
        '{"card / model": {}}',
        '{"card / model": {"step": {"x": 1}, "draft": 0}}',
        '{"card / model": {"step": {"1": -1}, "draft": 0}}',
        '{"card / model": {"step": [1], "draft": 0}}',
    ],
)
def test_a_damaged_file_is_measured_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    file = CostFile(path, "card / model")
    assert file.load() == StepCosts()
    file.save(StepCosts({1: 1.0}))
    assert file.load() == StepCosts({1: 1.0})


def test_a_place_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    for file in (CostFile(blocker / "costs.json", "key"), CostFile(None, "key")):
        file.save(StepCosts({1: 1.0}))
        assert file.load() == StepCosts()
    assert blocker.read_text() == "in the way" and list(tmp_path.iterdir()) == [blocker]
