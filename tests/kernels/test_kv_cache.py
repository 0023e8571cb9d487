"""KV formats against ggml's blocks written out in numpy, against the gguf package, and by their errors."""

from collections.abc import Callable
from itertools import product

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.strategies import floats, lists

from bough.kernels.attention import PagedContext, paged_attention
from bough.kernels.kv_cache.format import FORMATS, HeadPool, approximations
from bough.kernels.kv_cache.reference import decode, encode
from bough.kernels.kv_cache.rotation import group_size, rotate, rotate_back
from bough.kernels.norm_rope import cache_heads, rope_angles

QUANTISED = ["q8_0", "q5_0", "q4_0", "tq3_0"]
DIM = 256


def blocks_q8_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [n, 32] to ggml's bytes [n, 34] and their values."""
    d = np.abs(x).max(1) / np.float32(127)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d > 0)
    scaled = (x * inverse[:, None]).astype(np.float64)
    q = (np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)).astype(np.int8)
    half = d.astype(np.float16)
    return np.concatenate([half[:, None].view(np.uint8), q.view(np.uint8)], 1), q


def _signed(x: np.ndarray, half: int) -> tuple[np.ndarray, np.ndarray]:
    largest = np.array([row[np.argmax(np.abs(row))] for row in x])
    d = largest / np.float32(-half)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    q = np.clip(np.floor(x * inverse[:, None] + np.float32(half + 0.5)), 0, 2 * half - 1).astype(np.uint8)
    return q, d.astype(np.float16)[:, None].view(np.uint8)


def blocks_q4_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [n, 18]: byte j has element j below and element j + 16 above."""
    q, d = _signed(x, 8)
    return np.concatenate([d, q[:, :16] | q[:, 16:] << 4], 1), q


def blocks_q5_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [n, 22]: the fifth bits are a 32-bit mask before the nibbles."""
    q, d = _signed(x, 16)
    mask = np.array([sum(int(bit) << j for j, bit in enumerate(row >> 4)) for row in q], np.uint32)
    nibbles = q & 15
    return np.concatenate([d, mask[:, None].view(np.uint8), nibbles[:, :16] | nibbles[:, 16:] << 4], 1), q


BLOCKS: dict[str, Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    "q8_0": blocks_q8_0,
    "q5_0": blocks_q5_0,
    "q4_0": blocks_q4_0,
}
LEVELS = np.float32([-0.190685, -0.117832, -0.065717, -0.021460, 0.021460, 0.065717, 0.117832, 0.190685])
EDGES = np.float32([-0.154259, -0.091775, -0.043589, 0, 0.043589, 0.091775, 0.154259])


def blocks_tq3_0(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [n, 128], rotated, to bytes [n, 4, 14] and the codes [n, 128]."""
    length = np.sqrt((x.astype(np.float64) ** 2).sum(1)).astype(np.float32)
    some = length > 1e-10
    unit = np.where(some[:, None], x / np.where(some, length, 1)[:, None], 0).astype(np.float32)
    code = (unit[:, :, None] >= EDGES).sum(2).astype(np.uint8)
    norm = np.where(some, length / np.sqrt((LEVELS[code].astype(np.float64) ** 2).sum(1)), 0)
    blocks = np.zeros((len(x), 4, 14), np.uint8)
    blocks[:, :, :2] = norm.astype(np.float16)[:, None].view(np.uint8)[:, None]
    for element in range(128):
        block, j = divmod(element, 32)
        blocks[:, block, 2 + j // 4] |= (code[:, element] & 3) << 2 * (j % 4)
        blocks[:, block, 10 + j // 8] |= (code[:, element] >> 2) << j % 8
    return blocks, code


def numbers_of(codes: torch.Tensor, format: str, dim: int) -> np.ndarray:
    """What our planes hold, element by element, from the rule of their layout."""
    rows, found, start = codes.numpy(), np.zeros((len(codes), dim), np.int64), 0
    below = 0
    for bits in FORMATS[format].planes:
        size = dim * bits // 8
        for element in range(dim):
            byte = rows[:, start + element % size].astype(np.int64)
            found[:, element] |= (byte >> bits * (element // size) & (1 << bits) - 1) << below
        start, below = start + size, below + bits
    assert start == rows.shape[1] == FORMATS[format].code_bytes(dim)
    return found


def samples(dim: int = DIM) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(dim)
    normal = torch.randn(60, dim, generator=generator)
    steps = torch.randint(-16, 17, (40, dim), generator=generator)
    steps[:, ::32] = 16  # so that the halves between are ties, and both signs are the largest
    steps[:, 1::32] = -16
    return {
        "normal": normal,
        "of many sizes": normal * torch.logspace(-6, 3, 60)[:, None],
        "zeros": torch.zeros(2, dim),
        "one value": torch.zeros(3, dim).index_fill(1, torch.tensor([dim - 5]), -3.5),
        "scales below float16's normal": normal * 1e-4,
        "scales below float16": normal * 1e-9,
        "below float32's normal": normal * 1e-40,
        "ties": steps / 2,
    }


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_ggmls(name: str, dim: int) -> None:
    format = FORMATS[name]
    for kind, x in samples(dim).items():
        codes, scales = encode(x, format)
        assert codes.shape == (len(x), format.code_bytes(dim)) and codes.dtype == torch.uint8
        assert scales.shape == (len(x), dim // 32) and scales.dtype == torch.float16
        if kind != "below float32's normal":  # 1 / scale is infinite there: all is zero in ggml, too
            raw, wanted = BLOCKS[name](x.numpy().reshape(-1, 32))
            assert np.array_equal(scales.numpy().reshape(-1, 1).view(np.uint8), raw[:, :2]), kind
            wanted = wanted.reshape(len(x), dim).astype(np.int64) & 255
            assert np.array_equal(numbers_of(codes, name, dim), wanted), kind
            type = getattr(gguf.GGMLQuantizationType, name.upper())
            theirs = gguf.quantize(x.numpy(), type)
            assert np.array_equal(theirs.reshape(raw.shape), raw), kind
            decoded = gguf.dequantize(theirs, type)
        else:
            decoded = np.zeros(x.shape, np.float32)
        assert np.array_equal(decode(codes, scales, format, dim).numpy(), decoded), kind


@pytest.mark.parametrize(("name", "steps"), [("q8_0", 127), ("q5_0", 16), ("q4_0", 8)])
@given(values=lists(floats(-5e5, 5e5, width=32), min_size=32, max_size=32))
def test_no_value_is_off_by_more_than_a_step(name: str, steps: int, values: list[float]) -> None:
    x = torch.tensor([values])
    decoded = decode(*encode(x, FORMATS[name]), FORMATS[name], 32)
    # A whole step at the end that has one level fewer; and what rounding a scale to float16 adds.
    largest = float(x.abs().max())
    limit = largest / steps * (0.5 if name == "q8_0" else 1) * 1.001 + largest * 2**-11 + steps * 2**-25
    assert float((decoded - x).abs().max()) <= limit


@pytest.mark.parametrize("dim", [128, 256])
def test_tq3_0_is_that_of_the_blocks(dim: int) -> None:
    format = FORMATS["tq3_0"]
    cases = samples(dim)
    # The value of a threshold itself, as 0 is one, belongs to the level above.
    cases["halves of zeros"] = torch.cat([torch.zeros(4, dim // 2), torch.randn(4, dim // 2)], 1)
    for kind, x in cases.items():
        codes, scales = encode(x, format)
        assert codes.shape == (len(x), 3 * dim // 8) and scales.shape == (len(x), dim // 128)
        blocks, wanted = blocks_tq3_0(x.numpy().reshape(-1, 128))
        found = numbers_of(codes, "tq3_0", dim).reshape(-1, 128)
        # A length summed up in another order may move a value over a threshold.
        assert (found != wanted).mean() < 2e-4, kind
        same = (found == wanted).all(1)
        assert same.mean() > 0.95, kind
        raw = scales.numpy().reshape(-1, 1)
        theirs = blocks[:, 0, :2].copy().view(np.float16)
        assert np.allclose(raw[same], theirs[same], rtol=1e-3, atol=0), kind
        # From the bytes: two low bits of four elements in a byte, the high bits of eight in another.
        element = np.arange(32)
        low = blocks[:, :, 2 + element // 4] >> 2 * (element % 4) & 3
        high = blocks[:, :, 10 + element // 8] >> element % 8 & 1
        values = (LEVELS[low | high << 2] * theirs.astype(np.float32)[:, None]).reshape(-1, 128)
        decoded = decode(codes, scales, format, dim).numpy().reshape(-1, 128)
        assert np.allclose(decoded[same], values[same], rtol=1e-3, atol=0), kind


def test_tq3_0_keeps_lengths() -> None:
    x = torch.randn(50, 256)
    decoded = decode(*encode(x, FORMATS["tq3_0"]), FORMATS["tq3_0"], 256)
    lengths = [part.unflatten(-1, (2, 128)).norm(dim=-1) for part in (x, decoded)]
    assert torch.allclose(*lengths, rtol=6e-4)
    short = torch.randn(20, 64)
    decoded = decode(*encode(short, FORMATS["tq3_0"]), FORMATS["tq3_0"], 64)
    assert torch.allclose(short.norm(dim=-1), decoded.norm(dim=-1), rtol=6e-4)
    assert 0.02 < float((short - decoded).square().sum() / short.square().sum()) < 0.045
    tiny = torch.full((1, 128), 1e-12)
    assert not decode(*encode(tiny, FORMATS["tq3_0"]), FORMATS["tq3_0"], 128).any()


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("size", [1e6, 1e9, 1e30, 3e38])
def test_what_is_too_large_stays_finite(name: str, size: float) -> None:
    x = torch.randn(8, DIM).clamp(-1, 1) * size
    decoded = decode(*encode(x, FORMATS[name]), FORMATS[name], DIM)
    assert bool(decoded.isfinite().all())
    if size < 1e19:  # beyond, a length is not a float32
        assert torch.nn.functional.cosine_similarity(x.double(), decoded.double()).min() > 0.97


@pytest.mark.parametrize("dim", [8, 32, 64, 96, 128, 192, 256])
def test_rotation_is_the_matrix(dim: int) -> None:
    size = group_size(dim)
    assert dim % size == 0 and size & (size - 1) == 0 and (size == 128 or dim % (2 * size))
    hadamard = np.ones((1, 1))
    while len(hadamard) < size:
        hadamard = np.kron([[1, 1], [1, -1]], hadamard)
    flips = np.random.default_rng(42).integers(0, 2, 256) * 2.0 - 1
    first, second = flips[:size], flips[128 : 128 + size]
    matrix = second[:, None] * hadamard / size**0.5 * first
    assert np.allclose(matrix @ matrix.T, np.eye(size))
    x = torch.randn(5, 3, dim)
    wanted = np.einsum("ij,...j->...i", matrix, x.numpy().reshape(5, 3, -1, size)).reshape(x.shape)
    assert np.allclose(rotate(x).numpy(), wanted, atol=1e-5)
    assert torch.allclose(rotate_back(rotate(x)), x, atol=1e-5)
    other = torch.randn(5, 3, dim)
    assert torch.allclose((rotate(x) * rotate(other)).sum(-1), (x * other).sum(-1), atol=1e-4)
    # A row comes out the same however many there are.
    assert torch.equal(rotate(x)[2, 1], rotate(x[2, 1]))


def relative_error(x: torch.Tensor, name: str, *, rotated: bool) -> float:
    y = rotate(x) if rotated else x
    decoded = decode(*encode(y, FORMATS[name]), FORMATS[name], x.shape[-1])
    decoded = rotate_back(decoded) if rotated else decoded
    return float(((decoded - x).square().sum(-1) / x.square().sum(-1)).mean())


@pytest.mark.parametrize(
    ("name", "rotated", "gaussian", "offset"),
    [
        ("q8_0", False, 2.9e-5, 1.3e-4),
        ("q8_0", True, 2.9e-5, 2.1e-5),
        ("q5_0", True, 1.8e-3, 1.3e-3),
        ("q4_0", False, 7.4e-3, 2.6e-2),
        ("q4_0", True, 7.4e-3, 5.3e-3),
        ("tq3_0", True, 3.4e-2, 3.0e-2),
    ],
)
def test_vectors_are_off_by_as_much_as_expected(
    name: str, rotated: bool, gaussian: float, offset: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, DIM, generator=generator)
    assert relative_error(x, name, rotated=rotated) == pytest.approx(gaussian, rel=0.1)
    # Which six channels are large and by how much differs from head to head.
    errors = []
    for _ in range(40):
        channels = torch.randperm(DIM, generator=generator)[:6]
        sign = torch.randint(0, 2, (6,), generator=generator) * 2 - 1
        large = torch.zeros(DIM).index_copy(
            0, channels, sign * (10 + 20 * torch.rand(6, generator=generator))
        )
        noise = torch.randn(200, DIM, generator=generator)
        errors.append(relative_error(noise + large, name, rotated=rotated))
    assert np.mean(errors) == pytest.approx(offset, rel=0.1)


def written(k: torch.Tensor, v: torch.Tensor, names: tuple[str, str], page: int = 8) -> list[HeadPool]:
    """k, v [L, KV, D] in pools whose pages are filled from the last to the first."""
    length, heads, dim = k.shape
    pages = -(-length // page)
    pools = [HeadPool.empty(FORMATS[name], (pages, heads, page), dim, torch.device("cpu")) for name in names]
    index = torch.arange(length)
    # Angles of zero: what is written is what was given.
    cos, sin = rope_angles(torch.zeros(1, length), torch.zeros(dim // 2))
    cache_heads(
        k[None],
        k[None],
        v[None],
        (None, None),
        0.0,
        cos,
        sin,
        keys=pools[0],
        values=pools[1],
        pages=pages - 1 - index // page,
        offsets=index % page,
        interleaved=False,
    )
    return pools


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [H, D] over k, v [L, KV, D], written out."""
    queries = q.unflatten(0, (k.shape[1], -1))
    weights = (torch.einsum("ngd,lnd->ngl", queries, k) / q.shape[1] ** 0.5).softmax(-1)
    return torch.einsum("ngl,lnd->ngd", weights, v).flatten(0, 1)


@pytest.mark.parametrize("names", list(product(FORMATS, FORMATS)), ids="-".join)
def test_all_pairs_attend_to_what_they_hold(names: tuple[str, str]) -> None:
    """Rotations are each side's own: one that hangs on the other side's format gives noise."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(6, 64, generator=generator)
    k, v = torch.randn(2, 37, 2, 64, generator=generator)
    gate = torch.randn(1, 1, 6, 64, generator=generator)
    keys, values = written(k, v, names)
    table = torch.arange(4, -1, -1)[None]
    out = paged_attention(q[None, None], PagedContext(keys, values, table, torch.tensor([36])), gate=gate)

    def held(pool: HeadPool) -> torch.Tensor:
        codes, *scales = (plane.flip(0).transpose(1, 2).flatten(0, 1)[:37] for plane in pool.planes)
        if not scales:
            return codes.float()
        return rotate_back(decode(codes, scales[0], pool.format, 64))

    for pool, source in ((keys, k), (values, v)):
        error = float((held(pool) - source).norm() / source.norm())
        limit = {"f32": 0, "f16": 4e-4, "bf16": 4e-3, "q8_0": 7e-3, "q5_0": 0.06, "q4_0": 0.11, "tq3_0": 0.24}
        assert error <= limit[pool.format.name]
    wanted = attended(q, held(keys), held(values)) * gate[0, 0].sigmoid()
    assert torch.allclose(out[0, 0], wanted, atol=2e-5)


# Relative error of the output for logits of deviation 1, 2 and 4 over 16,384 keys. Over the 2,048 here fewer
# compete where they are sharp: 20% more or less.
ATTENTION_ERRORS = {
    ("q8_0", "q8_0"): (0.008, 0.011, 0.013),
    ("q5_0", "q5_0"): (0.06, 0.09, 0.10),
    ("q8_0", "q4_0"): (0.086, 0.087, 0.087),
    ("q8_0", "tq3_0"): (0.19, 0.18, 0.19),
    ("q4_0", "q4_0"): (0.12, 0.18, 0.21),
    ("tq3_0", "tq3_0"): (0.26, 0.39, 0.46),
    ("tq3_0", "q8_0"): (0.19, 0.36, 0.43),
}


@pytest.mark.parametrize("names", ATTENTION_ERRORS, ids="-".join)
def test_attention_is_off_by_as_much_as_expected(names: tuple[str, str]) -> None:
    generator = torch.Generator().manual_seed(3)
    length = 2048
    k, v = torch.randn(2, length, 1, DIM, generator=generator)
    q = torch.randn(96, DIM, generator=generator)
    keys, values = written(k, v, names, page=64)
    table = torch.arange(length // 64 - 1, -1, -1)[None]
    for spread, wanted in zip((1.0, 2.0, 4.0), ATTENTION_ERRORS[names], strict=True):
        # q . k / 16 of Gaussian vectors has deviation 1.
        asked = (spread * q)[None, None]
        out = paged_attention(asked, PagedContext(keys, values, table, torch.tensor([length - 1])))[0, 0]
        exact = attended(asked[0, 0], k, v)
        found = float((out - exact).norm() / exact.norm())
        assert found == pytest.approx(wanted, rel=0.2), spread


def test_what_is_approximate_is_named() -> None:
    f16, q8, q4, tq3 = (FORMATS[name] for name in ("f16", "q8_0", "q4_0", "tq3_0"))
    assert approximations(f16, q8, None) == ()
    assert approximations(q4, q4, None) == ("keys and values in q4_0",)
    assert approximations(q8, tq3, 2048) == ("values in tq3_0", "a window of 2,048 tokens")
    assert [FORMATS[name].row_bytes(256) for name in FORMATS] == [1024, 512, 512, 272, 176, 144, 100]
