"""The program and the hub together, as a user has them."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.hub.fake_hub import FakeHub

PROGRAM = [sys.executable, "-m", "bough.cli.main"]


def test_a_name_on_the_hub_is_downloaded_and_loaded(tiny_model, tmp_path):
    with contextlib.closing(FakeHub()) as hub:
        hub.repos["me/Tiny-GGUF"] = {"tiny-Q8_0.gguf": tiny_model().read_bytes(), "tiny-Q4_K_M.gguf": b"x"}
        hub.break_off = [300_000]
        environment = os.environ | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path),
            "NO_PROXY": "127.0.0.1,localhost",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        }
        environment.pop("HF_HUB_OFFLINE", None)

        def bough(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*PROGRAM, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
            )

        fetched = bough("run", "me/Tiny-GGUF:q8_0", "hello", "-n", "3", "--json")
        assert fetched.returncode == 0, fetched.stderr
        path = Path(json.loads(fetched.stdout)["model"])
        assert path.is_relative_to(tmp_path / "hub/models--me--Tiny-GGUF")
        assert [headers["Range"] for headers in hub.downloads()] == ["bytes=0-", "bytes=300000-"]

        wrong = bough("run", "me/Tiny-GGUF:q5_0", "hello")
        assert wrong.returncode == 3
        assert wrong.stderr.startswith(
            "error: me/Tiny-GGUF has no q5_0; it has Q4_K_M (0.0 MB), Q8_0 (1.8 MB)\nhint: "
        )
    shown = bough("show", "me/Tiny-GGUF:Q8_0", "--json")
    assert json.loads(shown.stdout)["path"] == str(path)
    unreachable = bough("run", "me/Other-GGUF", "hello")
    assert unreachable.returncode == 3 and "cannot be reached" in unreachable.stderr
