"""The options of the prefix cache: their values, and that a second run finds the first one's snapshots."""

import json
import threading
from pathlib import Path


def test_sizes_are_read(bough, tiny_model, tmp_path: Path) -> None:
    flags = ["--prefix-cache", "1.5g", "--prefix-cache-dir", tmp_path, "--prefix-cache-dir-size", "2g"]
    done = bough("serve", tiny_model(), "--print-config", *flags)
    engine = json.loads(done.stdout)["engine"]
    assert (engine["prefix_cache"], engine["prefix_cache_dir_size"]) == (3 << 29, 2 << 30)
    assert engine["prefix_cache_dir"] == str(tmp_path)
    done = bough("serve", tiny_model(), "--print-config", "--prefix-cache", "0")
    assert json.loads(done.stdout)["engine"]["prefix_cache"] == 0
    done = bough("serve", tiny_model(), "--prefix-cache", "lots")
    assert done.exit_code == 2 and "'lots' is not an amount of memory" in done.stderr
    done = bough("serve", tiny_model(), "--prefix-cache-dir-size", "12")
    assert done.exit_code == 2 and "means 12 bytes" in done.stderr
    done = bough("serve", tiny_model(), "--prefix-cache", "0", "--prefix-cache-dir", tmp_path)
    assert done.exit_code == 2 and "--prefix-cache 0 turns off" in done.stderr


def wait() -> None:
    """For the threads that the end of a program waits for."""
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            thread.join()


def test_what_goes_wrong_with_files_is_a_warning(bough, tiny_model, tmp_path: Path) -> None:
    ask = ["run", tiny_model(), "-p", "hello", "-n", 2, "--prefix-cache-dir", tmp_path]
    assert "warning" not in bough(*ask).stderr
    wait()
    for file in tmp_path.glob("*.snapshot"):
        file.write_bytes(file.read_bytes()[:100])
    done = bough(*ask)
    assert done.exit_code == 0 and f"warning: 1 snapshots in {tmp_path} are ignored" in done.stderr
    wait()
    assert "warning" not in bough(*ask, "--quiet").stderr


def test_a_later_run_goes_on(bough, tiny_model, tmp_path: Path) -> None:
    prompt = "Count the words of this text. " + "the quick brown fox jumps over the lazy dog. " * 40
    found = []
    for _ in range(2):
        done = bough("run", tiny_model(), "-p", prompt, "-n", 6, "--json", "--prefix-cache-dir", tmp_path)
        assert done.exit_code == 0, done.stderr
        found.append(json.loads(done.stdout))
        wait()
    assert found[0]["tokens"] == found[1]["tokens"]
    cached = [each["stats"]["cached_tokens"] for each in found]
    assert cached[0] == 0 and cached[1] >= 512 and list(tmp_path.glob("*.snapshot"))
