"""Values as users write them."""

import json
from math import inf

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from bough.cli.values import bias, byte_count, count_or_auto, device, memory, memory_or_none, size, unescape
from bough.errors import UsageError


@pytest.mark.parametrize(
    ("text", "number"),
    [("1", 1), ("8192", 8192), ("8k", 8192), ("32K", 32768), ("1m", 1 << 20), ("1.5k", 1536)],
)
def test_sizes(text, number):
    assert size(text) == byte_count(text) == number


@pytest.mark.parametrize("text", ["", "0", "-1", "k", "8kb", "1.0001k", "8 k", "1e3", "٣"])
def test_sizes_that_are_none(text):
    with pytest.raises(typer.BadParameter, match="not a number of tokens like 8192"):
        size(text)
    with pytest.raises(typer.BadParameter, match="not a number of bytes like 65536"):
        byte_count(text)


def test_the_largest_request_is_in_bytes(bough, tiny_model):
    refused = bough("serve", tiny_model(), "--max-body", "32 MB")
    assert refused.exit_code == 2 and "'32 MB' is not a number of bytes" in refused.stderr
    done = bough("serve", tiny_model(), "--print-config", "--max-body", "64k")
    assert json.loads(done.stdout)["server"]["max_body"] == 65536


@pytest.mark.parametrize("text", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_devices(text):
    assert device(text) == text


@pytest.mark.parametrize("text", ["", "tpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0", "CUDA", "cuda:0 "])
def test_devices_that_are_none(text):
    with pytest.raises(typer.BadParameter, match="auto, cpu, cuda, cuda:N"):
        device(text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (r"\n", "\n"),
        (r"a\tb", "a\tb"),
        (r"\\n", r"\n"),
        (r"\x41\u00e9", "Aé"),
        (r"\q", r"\q"),
        ("\\", "\\"),
        ("é\n", "é\n"),
    ],
)
def test_escapes(text, meant):
    assert unescape(text) == meant


@given(st.text())
def test_text_without_a_backslash_stays(text):
    plain = text.replace("\\", "/")
    assert unescape(plain) == plain
    assert unescape(text.replace("\\", "\\\\")) == text


def test_biases():
    assert bias(["3=1.5", "0=-inf", "12=+2", "7=-.5", "9=1e2"]) == {3: 1.5, 0: -inf, 12: 2, 7: -0.5, 9: 100}
    assert bias([]) == {}


@pytest.mark.parametrize("text", ["", "3", "3=", "=1", "3=x", "-3=1", "3=nan", "3=1=2", "3.5=1", "3=1,4=2"])
def test_biases_that_are_none(text):
    with pytest.raises(UsageError, match="needed a token's number and a value"):
        bias([text])


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("24g", 24 << 30), ("24GiB", 24 << 30), ("1.5gb", 3 << 29), ("512m", 512 << 20), ("2097152", 2 << 20)],
)
def test_amounts_of_memory(text, bytes_):
    assert memory(text) == memory_or_none(text) == bytes_


@pytest.mark.parametrize(("text", "count"), [("auto", None), ("0", 0), ("128", 128), (64, 64)])
def test_counts_or_auto(text, count):
    assert count_or_auto(text) == count
    for other in ("", "-1", "half", "1.5"):
        with pytest.raises(typer.BadParameter, match="is not auto or a number"):
            count_or_auto(other)


@pytest.mark.parametrize("text", ["", "g", "24t", "-1g", "24 g b", "1e9"])
def test_what_is_no_amount_of_memory(text):
    with pytest.raises(typer.BadParameter, match="24g"):
        memory(text)


@pytest.mark.parametrize(
    ("text", "message"), [("24", "24 bytes, .* 24g are"), ("1000", "1000 b"), ("0g", "0 b")]
)
def test_a_forgotten_unit_is_named(text, message):
    for parse in (memory, memory_or_none):
        with pytest.raises(typer.BadParameter, match=f"means {message}"):
            parse(text)
    assert memory_or_none("0") == 0
