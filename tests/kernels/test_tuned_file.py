"""What was measured is kept by kind of GPU, and a file that is no good costs nothing but a warning."""

import json
import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.kernels.quant_matmul.tiling import Tiling
from bough.kernels.quant_matmul.tuned import TunedFile

KIND, OTHER = "NVIDIA H200, 9.0, 132 SMs", "NVIDIA H200, 9.0, 114 SMs"
FOUND = {8: Tiling(5, halfway=False), 64: Tiling(2, halfway=True)}


def test_tilings_survive_and_keep_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TunedFile(tmp_path / "cache" / "tilings.json")
    assert file.load(KIND) == {}
    file.save(KIND, FOUND)
    assert TunedFile(file.path).load(KIND) == FOUND
    assert file.load(OTHER) == {}
    file.save(OTHER, {24: FOUND[8]})
    assert file.load(KIND) == FOUND and file.load(OTHER) == {24: FOUND[8]}
    assert [each.name for each in file.path.parent.iterdir()] == ["tilings.json"]
    assert not caplog.records


def test_what_is_no_longer_better_is_forgotten(tmp_path: Path) -> None:
    file = TunedFile(tmp_path / "tilings.json")
    file.save(KIND, {})
    assert not file.path.exists()
    file.save(KIND, FOUND)
    file.save(OTHER, FOUND)
    file.save(KIND, {})
    assert file.load(KIND) == {} and file.load(OTHER) == FOUND
    file.save(OTHER, {})
    assert not file.path.exists()


def entry(**changes: object) -> str:
    values = {"stages": 4, "halfway": True} | changes
    return json.dumps({"version": 2, "kinds": {KIND: {"8": values}}})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "\x00\xff",
        '{"version": 1, "kinds": {}}',
        '{"kinds": {}}',
        '{"version": 2}',
        '{"version": 2, "kinds": 3}',
        json.dumps({"version": 2, "kinds": {KIND: 3}}),
        json.dumps({"version": 2, "kinds": {KIND: {"8": 3}}}),
        json.dumps({"version": 2, "kinds": {KIND: {"8": {"stages": 4}}}}),
        entry().replace('"8"', '"9"'),
        entry(stages=1),
        entry(stages=9),
        entry(stages=True),
        entry(stages=3.0),
        entry(stages="4"),
        entry(wide=True),
        entry(halfway=None),
        entry(depth=3),
        "[" * 100_000,
    ],
)
def test_a_file_that_is_no_good_is_not_used(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = TunedFile(tmp_path / "tilings.json")
    file.path.write_text(text, encoding="latin-1")
    assert file.load(KIND) == {}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and str(file.path) in record.getMessage()
    assert "bough tune --reset" in record.getMessage()
    file.save(KIND, FOUND)
    assert file.load(KIND) == FOUND and len(caplog.records) == 1


def test_a_sound_entry_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TunedFile(tmp_path / "tilings.json")
    file.path.write_text(entry())
    assert file.load(KIND) == {8: Tiling(4, halfway=True)} and not caplog.records


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["8", "64", "stages", KIND]), inner),
    max_leaves=8,
)


@given(value=VALUES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_value_is_an_error(value: object, tmp_path: Path) -> None:
    file = TunedFile(tmp_path / "tilings.json")
    for kinds in (value, {KIND: value}, {KIND: {"8": value}}):
        file.path.write_text(json.dumps({"version": 2, "kinds": kinds}))
        assert all(isinstance(tiling, Tiling) for tiling in file.load(KIND).values())


def test_a_place_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    file = TunedFile(blocker / "tilings.json")
    assert file.load(KIND) == {} and len(caplog.records) == 1
    with pytest.raises(OSError):
        file.save(KIND, FOUND)
    assert blocker.read_text() == "in the way" and list(tmp_path.iterdir()) == [blocker]
