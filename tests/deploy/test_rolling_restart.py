"""A rolling restart lets answers finish, and health checks replace a failed engine. Starts Ray."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

# Deploys the application again, with another setting, while two streams run; then an engine fails.
PROGRAM = """
import json, os, socket, sys, threading, time
from bough.config import set_ray_environment
set_ray_environment()
import httpx2, ray
from ray import serve
from bough.deploy import app, application
from bough.deploy.replica import Replica

class Failing(Replica):
    def fail(self):
        self._worker._give_up(RuntimeError("CUDA error: an illegal memory access"))
        return os.getpid()

with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
url = f"http://127.0.0.1:{port}"
ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=128 << 20)
serve.start(http_options={"host": "127.0.0.1", "port": port})
settings = {"device": "cpu", "threads": 1, "max_ctx": 1024, "replicas": 2}
replicas = lambda: {each["pid"] for each in httpx2.get(f"{url}/health", timeout=30).json()["replicas"]}
body = {"messages": [{"role": "user", "content": "Write a long story."}], "stream": True, "temperature": 0,
        "ignore_eos": True, "bough": {"budget": 0}}
ends, begun = [], threading.Barrier(3)

def read():
    with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=300) as answer:
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        begun.wait()
        last = [line for line in lines][-1]
    ends.append(last["choices"][0]["finish_reason"] if "choices" in last else last["error"])

try:
    serve.run(app(settings), name="bough")
    before = replicas()
    readers = [threading.Thread(target=read) for _ in range(2)]
    for each in readers:
        each.start()
    begun.wait()
    application.Replica = Failing
    serve.run(app(settings | {"prefill_chunk": 512}), name="bough")
    for each in readers:
        each.join()
    after = replicas()
    failed = serve.get_deployment_handle("replica", "bough").fail.remote().result()
    asked = body | {"stream": False, "max_tokens": 4}
    codes = [httpx2.post(f"{url}/v1/chat/completions", json=asked, timeout=300).status_code for _ in range(4)]
    while failed in replicas() or len(replicas()) < 2:
        time.sleep(0.2)
    found = {"ends": ends, "before": sorted(before), "after": sorted(after), "codes": codes}
    print(json.dumps(found | {"failed": failed, "last": sorted(replicas())}), flush=True)
finally:
    ray.shutdown()
"""


def test_a_rolling_restart_and_a_failed_engine(tmp_path: Path):
    source = str(Path(__file__).parents[2] / "src")
    own = {"HOME": str(tmp_path), "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=500,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"ends"')]
    assert lines, result.stderr
    found = json.loads(lines[0])
    assert found["ends"] == ["length", "length"]
    assert len(found["after"]) == 2 and not set(found["before"]) & set(found["after"])
    assert found["codes"] == [200] * 4
    assert found["failed"] in found["after"] and found["failed"] not in found["last"]
