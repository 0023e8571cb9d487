"""`bough run` inside the test process."""

import errno
import io
import json
import os
import sys
import time
from pathlib import Path

import pyte
import pytest
import torch

from bough.bench.runner import ResultFile
from bough.cli import view
from bough.cli.footprint import on_cpu
from bough.cli.loading import LoadingBar, loaded_line
from bough.errors import ResourceError
from bough.gguf.reader import GGUFFile
from bough.hub import catalog
from bough.kernels.native import library as native_library
from bough.memory import device as memory
from bough.models.spec import ModelSpec
from tests.images.files import encoded, png, quarters
from tests.kernels.native_library import needs_native


@pytest.fixture
def model(tiny_model) -> Path:
    return tiny_model()


def test_only_the_answer_goes_to_standard_output(bough, model):
    plain = bough("run", model, "-p", "hello", "-n", 12, "--no-think")
    result = bough("run", model, "-p", "hello", "-n", 12, "--no-think", "--json")
    assert plain.exit_code == result.exit_code == 0
    answer = json.loads(result.stdout)
    assert plain.stdout == answer["text"].removesuffix("\n") + "\n" and answer["reasoning"] == ""
    assert "12 tok · " in plain.stderr and "accept 1.00/step" in plain.stderr
    assert "seed" not in plain.stderr  # nothing was sampled
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1


def test_json_fields(bough, model):
    answer = json.loads(bough("run", model, "hello", "-n", 9, "--json").stdout)
    assert set(answer) == {"text", "reasoning", "tokens", "finish_reason", "model", "draft", "kv", "stats"}
    stats = answer["stats"]
    assert answer["finish_reason"] == "length" and answer["model"] == str(model)
    assert answer["draft"] is None and answer["kv"] == "f32"
    assert len(answer["tokens"]) == stats["generated_tokens"] == 9
    assert stats["steps"] == 8 and stats["acceptance_length"] == 1.0
    assert stats["prompt_tokens"] > 5 and stats["ttft_s"] > 0 and stats["decode_tok_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "stdin", "same_as"),
    [
        (["abc"], None, "abc"),
        (["-p", "abc"], "", "abc"),
        ([], "abc\n", "abc"),
        (["abc"], "def\n", "abc\n\ndef"),
        (["-p", "abc"], b"d\xffef", "abc\n\nd\ufffdef"),
    ],
)
def test_where_the_prompt_comes_from(bough, model, arguments, stdin, same_as):
    asked = json.loads(bough("run", model, *arguments, "-n", 4, "--json", stdin=stdin).stdout)
    wanted = json.loads(bough("run", model, "--prompt", same_as, "-n", 4, "--json").stdout)
    assert asked["tokens"] == wanted["tokens"]
    assert asked["stats"]["prompt_tokens"] == wanted["stats"]["prompt_tokens"]


def test_system_raw_and_thinking_change_the_prompt(bough, model):
    def tokens(*flags: str) -> int:
        result = bough("run", model, "hello", "-n", 1, "--json", *flags)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["stats"]["prompt_tokens"]

    chat = tokens()
    assert tokens("--raw") < chat < tokens("--system", "be brief")
    assert tokens("--think") == chat < tokens("--no-think")


def test_raw_text_is_taken_as_it_is(bough, model):
    results = [
        json.loads(bough("run", model, "--raw", "-n", 1, "--json", stdin=text).stdout)
        for text in ("ab", "ab\n")
    ]
    assert results[1]["stats"]["prompt_tokens"] == results[0]["stats"]["prompt_tokens"] + 1


def test_stop_strings_end_the_text(bough, model):
    # Stop texts apply to the answer; the reasoning that this model begins with ignores them.
    asked = ("run", model, "hello", "-n", 40, "--json", "--no-think")
    whole = json.loads(bough(*asked).stdout)["text"]
    stop = whole[10:13]
    cut = json.loads(bough(*asked, "--stop", "nowhere", "--stop", stop).stdout)
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_a_seed_repeats_the_text_and_is_shown(bough, model):
    def sample(*flags: object):
        sampling = ("-t", 1.5, "--top-k", 50, "--min-p", 0.01)
        return bough("run", model, "hello", "--no-think", "-n", 20, *sampling, *flags)

    first, second, other = sample("--seed", 7), sample("--seed", 7), sample("--seed", 8)
    assert first.stdout == second.stdout != other.stdout
    assert "seed 7" in first.stderr
    seeds = [json.loads(sample("--json").stdout)["stats"]["seed"] for _ in range(2)]
    assert seeds[0] != seeds[1]
    assert json.loads(sample("--json", "--seed", seeds[0]).stdout)["stats"]["seed"] == seeds[0]


def test_quiet(bough, model):
    assert bough("run", model, "hello", "-n", 2, "-q").stderr == ""


@pytest.mark.parametrize(
    ("arguments", "code", "message", "hint"),
    [
        ([], 2, "there is no prompt", "bough chat MODEL"),
        (["-p", "  "], 2, "the prompt is empty", "bough run MODEL TEXT"),
        (["x", "-n", "0"], 2, "--n-gen is 0, needed at least 1, or -1 for no limit", ""),
        (["one", "-p", "two"], 2, "both after the model and with --prompt", ""),
        (["x", "--top-p", "0"], 2, "--top-p is 0", "--temperature 0"),
        (["x", "--raw", "--system", "y"], 2, "--system and --raw exclude each other", ""),
        (["x", "--max-ctx", "8k"], 2, "--max-ctx is 8192", ""),
        (["x" * 5000], 2, "the prompt has 5", "shorten the prompt: the model was made for no more"),
        (["x" * 500, "--max-ctx", "100"], 2, "the prompt has 5", "raise --max-ctx"),
        (["x", "--draft", ""], 2, "the name of the draft is empty", "--no-draft"),
        (["x", "--device", "cuda:99"], 6, "--device is 'cuda:99'", "bough doctor"),
    ],
)
def test_what_cannot_be_honoured(bough, model, arguments, code, message, hint):
    result = bough("run", model, *arguments)
    assert result.exit_code == code
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: ") and message in lines[0]
    assert len(lines) == (2 if hint or len(lines) == 2 else 1) and hint in lines[-1]
    as_json = bough("run", model, *arguments, "--json")
    assert as_json.exit_code == code and as_json.stderr == ""
    error = json.loads(as_json.stdout)["error"]
    assert message in error["message"] and hint in error["hint"] and error["type"]


@pytest.mark.parametrize(
    "flags",
    [
        ["-n", "-2"],
        ["-t", "-1"],
        ["--max-ctx", "8q"],
        ["--device", "tpu"],
        ["--seed", "-1"],
        ["--nonsense"],
        ["--temperature"],
    ],
)
def test_usage_errors_come_before_any_work(bough, flags):
    result = bough("run", "nothing.gguf", "-p", "x", *flags)
    assert result.exit_code == 2
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: ") and flags[0] in error and hint == "hint: bough run --help"
    as_json = bough("run", "nothing.gguf", "-p", "x", *flags, "--json")
    assert as_json.exit_code == 2 and as_json.stderr == "" and as_json.stdout.count("\n") == 1
    error = json.loads(as_json.stdout)["error"]
    assert flags[0] in error["message"]
    assert error["type"] == "UsageError" and error["hint"].endswith(" run --help")


@pytest.mark.parametrize("arguments", [["rnu", "--json"], ["--nonsense", "run", "--json"]])
def test_usage_errors_before_the_command_as_json(bough, arguments):
    result = bough(*arguments)
    assert result.exit_code == 2 and result.stderr == ""
    assert arguments[0] in json.loads(result.stdout)["error"]["message"]
    assert bough(*arguments[:-1]).stderr.splitlines()[1] == "hint: bough --help"


def test_an_empty_name_is_no_model(bough):
    for arguments in (["run", "", "-p", "hello"], ["show", ""], ["pull", ""], ["rm", ""]):
        result = bough(*arguments)
        assert result.exit_code == 2, arguments
        assert result.stderr == "error: the name of the model is empty\nhint: is a variable unset?\n"


def test_weights_that_do_not_fit_expanded(bough, monkeypatch, tiny_model):
    model = tiny_model("qwen35", mtp=True, width=256, mix="q4_k_m")
    with GGUFFile.open(model) as file:
        expanded = on_cpu(file, ModelSpec.from_gguf(file)).weights
    free = int(1.1 * expanded)
    monkeypatch.setattr(memory, "available_memory", lambda device: free)
    torch = ("--max-ctx", 64, "--cpu-backend", "torch", "--draft", "lookup")
    result = bough("run", model, "hello", "-n", 4, *torch)
    assert result.exit_code == 0, result.stderr
    warning, hint, *_ = result.stderr.splitlines()
    assert warning.startswith(f"warning: the weights need {view.amount(expanded)} expanded")
    assert f"{view.amount(free)} are free on this CPU" in warning and "very slowly" in warning
    assert hint.startswith("hint: close other programs, take a model with fewer parameters")
    assert bough("run", model, "hello", "-n", 4, *torch, "-q").stderr == ""


def test_approximate_keys_and_values_are_told_of(bough, model):
    result = bough("run", model, "hello", "-n", 2, "--kv", "q4_0", "--max-ctx", 128)
    assert result.exit_code == 0
    notice, line, *_ = result.stderr.splitlines()
    assert notice == "Approximate: keys and values in q4_0. docs/long-context.md has the cost."
    assert line.startswith("KV cache in q4_0 (as requested), context 128 tokens, 0.0")
    exact = bough("run", model, "hello", "-n", 2, "--kv", "q8_0")
    assert exact.exit_code == 0 and "Keys and values" not in exact.stderr
    refused = bough("run", model, "hello", "--vram-limit", "24g", "--device", "cpu")
    assert refused.exit_code == 2 and "--vram-limit is for a GPU" in refused.stderr


def test_a_bar_for_bytes_then_for_kernels_and_graphs(monkeypatch):
    monkeypatch.setattr(view, "PATIENCE_S", 0.0)
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    with LoadingBar("model.gguf", view.Screen()) as bar:
        bar.reading(1 << 20, 2 << 20)
        time.sleep(0.3)
        for step, total in ((bar.compiling, 7), (bar.warming, 9)):
            for done in range(1, total + 1):
                step(done, total)
                time.sleep(0.05)
    shown = screen.getvalue()
    assert all(
        part in shown for part in ("Loading model.gguf", "Compiling kernels", "/7", "Capturing CUDA", "/9")
    )
    assert shown.index("Loading") < shown.index("Compiling") < shown.index("Capturing")


def test_a_warning_stands_above_the_bar(monkeypatch):
    monkeypatch.setattr(view, "PATIENCE_S", 0.0)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with LoadingBar("model.gguf", view.Screen()) as bar:
        bar.reading(1 << 20, 2 << 20)
        time.sleep(0.3)
        view.Screen().warning("the machine is busy", "")
        time.sleep(0.3)
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed(terminal.getvalue().replace("\n", "\r\n"))
    assert [line.rstrip() for line in screen.display if line.strip()] == ["warning: the machine is busy"]
    assert terminal.getvalue().count("Loading model.gguf") > 1


def test_a_line_says_how_long_loading_took():
    seconds = {"planning": 0.41, "reading": 3.14, "compiling": 0.01, "capturing": 2.0}
    assert loaded_line(seconds) == "Loaded in 5.6 s: planning 0.4, reading 3.1, capturing 2.0"


def test_without_a_chat_template_chatml_is_a_notice(bough, tmp_path, model):
    other = tmp_path / "other.gguf"
    other.write_bytes(model.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templatx"))
    chat = bough("run", other, "hi", "-n", 2)
    assert chat.stderr.startswith("There is no chat template in the file: plain ChatML is used. --raw")
    assert "ChatML" not in bough("run", other, "hi", "-n", 2, "--raw").stderr
    assert "ChatML" not in bough("run", model, "hi", "-n", 2).stderr
    assert bough("run", other, "hi", "-n", 2, "--json").stderr == ""


def test_missing_and_damaged_models(bough, tmp_path, model):
    missing = bough("run", tmp_path / "none.gguf", "hi")
    assert missing.exit_code == 3 and "no such file" in missing.stderr
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(model.read_bytes()[:5000])
    result = bough("run", damaged, "hi")
    assert result.exit_code == 4 and str(damaged) in result.stderr.replace("\n", "")


def test_thinking_needs_a_switch_in_the_template(bough, tmp_path, model):
    other = tmp_path / "other.gguf"
    other.write_bytes(model.read_bytes().replace(b"enable_thinking", b"unknown_setting"))
    result = bough("run", other, "hi", "--think")
    assert result.exit_code == 2 and "no switch for thinking" in result.stderr


def test_without_a_model_the_embedded_pair_answers(bough, tmp_path):
    result = bough("run", "-p", "def fibonacci(n):", "--greedy", "--json")
    answer = json.loads(result.stdout)
    assert answer["finish_reason"] == "stop"
    code = answer["text"].split("```python\n")[1].split("```")[0]
    namespace = {}
    exec(code, namespace)
    assert [namespace["fibonacci"](n) for n in range(1, 8)] == [1, 1, 2, 3, 5, 8, 13]
    assert answer["draft"]
    plain = json.loads(bough("run", "-p", "def fibonacci(n):", "--greedy", "--json", "--no-draft").stdout)
    assert plain["text"] == answer["text"]
    assert plain["stats"]["acceptance_length"] == 1
    assert answer["stats"]["steps"] < plain["stats"]["steps"]
    result = bough("run", "-p", "Hello", "-n", 3)
    assert result.stderr.startswith("No model given: using bough-40m")


def test_sampling_is_that_of_the_card_unless_given(bough):
    def tokens(*flags: object) -> list[int]:
        result = bough("run", "-p", "Hello", "-n", 40, "--seed", 3, "--json", *flags)
        return json.loads(result.stdout)["tokens"]

    recommended = tokens()
    plain = catalog.named("bough-40m")[0].sampling["plain"]
    values = ("-t", plain.temperature, "--top-p", plain.top_p, "--top-k", plain.top_k)
    assert recommended == tokens("--greedy", *values)
    assert recommended != tokens("--greedy") == tokens("-t", 0)
    assert tokens("-t", 1.5) == tokens("--greedy", *values, "-t", 1.5) != recommended


def test_reasoning_is_not_the_answer(bough, model):
    asked = ("run", model, "hello", "--think", "-n", 12)
    found = json.loads(bough(*asked, "--json").stdout)
    assert found["text"] == "" and found["reasoning"] and found["stats"]["reasoning_tokens"] == 12
    piped = bough(*asked)
    assert piped.stdout == "" and found["reasoning"][:8] not in piped.stderr
    assert (
        "All 12 tokens were spent on reasoning: -n 4000 allows more, --no-think answers at once\n"
        in piped.stderr
    )
    assert "spent" not in bough("run", model, "hello", "--no-think", "-n", 12).stderr


def test_without_a_limit_the_context_is_the_limit(bough, model):
    result = bough("run", model, "hello", "--max-ctx", 64)
    assert result.exit_code == 0 and " · length limit\n" in result.stderr
    assert (
        "tokens that the context had left were spent on reasoning: a larger --max-ctx allows more, --no-think"
        in result.stderr
    )
    stats = json.loads(bough("run", model, "hello", "--max-ctx", 64, "--json").stdout)["stats"]
    assert stats["prompt_tokens"] + stats["generated_tokens"] == 65  # the last token is not run again


def test_the_environment_names_the_default(bough, monkeypatch, model):
    monkeypatch.setenv("DFLASH_TARGET", str(model))
    result = bough("run", "-p", "hello", "-n", 2, "--json")
    assert json.loads(result.stdout)["model"] == str(model)
    assert "No model given" not in result.stderr


def test_a_model_in_the_hubs_cache_runs_offline(bough, tmp_path, model):
    snapshot = tmp_path / "hf/hub/models--me--tiny/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tiny-Q8_0.gguf").symlink_to(model)
    found = bough("run", "me/tiny", "hello", "-n", 2, "--offline")
    assert found.exit_code == 0
    missing = bough("run", "me/other", "hello", "--offline")
    assert missing.exit_code == 3 and "not in the cache" in missing.stderr


@pytest.mark.parametrize(
    ("problem", "code", "message"),
    [
        (RuntimeError("odd"), 70, "this should not have happened: RuntimeError: odd"),
        (MemoryError(), 6, "memory ran out"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried 3 GiB\nmore"),
            6,
            "memory ran out: CUDA out of memory.",
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 6, "memory ran out"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_unexpected_errors(bough, monkeypatch, model, problem, code, message):
    def fail(*_: object) -> None:
        raise problem

    monkeypatch.setattr(GGUFFile, "open", fail)
    result = bough("run", model, "hi")
    assert result.exit_code == code
    assert "Traceback" not in result.output and message in result.stderr
    as_json = bough("run", model, "hi", "--json")
    assert as_json.exit_code == code
    assert json.loads(as_json.stdout)["error"]["message"].startswith(message or "interrupted before")
    if code == 70:
        assert "bough doctor" in result.stderr
        shown = bough("--debug", "run", model, "hi")
        assert shown.exit_code == code and "Traceback" in shown.stderr and "RuntimeError" in shown.stderr


def test_int8_prefill_is_refused_on_a_cpu(bough, model):
    refused = bough("run", model, "-p", "hello", "--device", "cpu", "--prefill", "int8")
    assert refused.exit_code == 2
    assert "--prefill is int8, which a GPU computes, but the model runs on a CPU" in refused.stderr
    exact = bough("run", model, "-p", "hello", "-n", 2, "--prefill", "exact")
    assert exact.exit_code == 0 and "pproximate" not in exact.stderr


@needs_native
def test_native_code_and_threads(bough, model):
    ask = ("run", model, "hello", "-n", 8, "-t", 0, "--json")
    two = json.loads(bough(*ask, "--threads", len(os.sched_getaffinity(0))).stdout)
    one = json.loads(bough(*ask, "--threads", 1, "--cpu-backend", "native").stdout)
    assert one["tokens"] == two["tokens"] and len(one["tokens"]) == 8
    refused = bough("run", model, "hello", "--kv", "q4_0", "--cpu-backend", "native")
    assert refused.exit_code == 2 and "--cpu-backend is native, but the KV cache is in q4_0" in refused.stderr


def test_without_native_code(bough, monkeypatch):
    """The pair in the package is large enough for a word about it; a tiny model is not."""
    monkeypatch.setattr(native_library, "find_library", lambda: (None, "there is none"))
    result = bough("run", "-p", "hello", "-n", 2)
    assert result.exit_code == 0
    assert "The native CPU code is not used, there is none: PyTorch computes, more slowly" in result.stderr
    asked = bough("run", "-p", "hello", "-n", 2, "--cpu-backend", "torch")
    assert asked.exit_code == 0 and "native" not in asked.stderr


def test_a_file_that_is_no_text_is_refused(bough, tiny_model):
    result = bough("run", tiny_model(), "-p", "hi", "-f", tiny_model())
    assert result.exit_code == 2 and "is neither a text nor a picture" in result.stderr


def test_pictures_need_an_encoder_and_have_to_be_whole(bough, tiny_model, tmp_path):
    picture = tmp_path / "a.png"
    picture.write_bytes(encoded(quarters(), "PNG"))
    asking = ("run", tiny_model(), "-p", "hi", "-f", picture)
    blind = bough(*asking, "-f", picture)
    assert blind.exit_code == 2
    assert f"--file {picture} is an image, and the model was loaded without its image encoder" in blind.stderr
    raw = bough(*asking, "--raw")
    assert raw.exit_code == 2 and "a picture and --raw exclude each other" in raw.stderr
    picture.write_bytes(png(60_000, 60_000))
    bomb = bough("run", "no-such-model.gguf", "-p", "hi", "-f", picture)
    assert bomb.exit_code == 2 and f"--file {picture} has 60000 x 60000 pixels" in bomb.stderr


def test_several_text_files(bough, tiny_model, tmp_path):
    paths = [tmp_path / name for name in ("a.txt", "b.txt")]
    for path in paths:
        path.write_text(path.stem)
    ask = ("run", tiny_model(), "-n", 4, "-t", 0, "--json")
    together = bough(*ask, "-p", "hi", *(word for path in paths for word in ("-f", path)))
    assert together.exit_code == 0
    assert (
        json.loads(together.stdout)["tokens"]
        == json.loads(bough(*ask, "-p", "hi\n\na\n\nb").stdout)["tokens"]
    )


def test_greedy_is_one_flag_away(bough, tiny_model, monkeypatch):
    ask = ("run", "bough-40m", "-p", "Write a poem about rain and iron.", "-n", 40, "-q")
    assert len({bough(*ask).stdout for _ in range(4)}) > 1  # the card's temperature, another seed each time
    assert bough(*ask, "--greedy").stdout == bough(*ask, "--greedy").stdout == bough(*ask, "-t", 0).stdout


def test_a_full_disk_is_said(bough, tiny_model, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ResultFile, "add", full)
    result = bough("bench", "builtin", tiny_model(), "--prompts", 1, "-n", 4)
    assert result.exit_code == ResourceError.exit_code and "No space left on device" in result.stderr
    assert "should not have happened" not in result.stderr and "hint: free some space" in result.stderr
