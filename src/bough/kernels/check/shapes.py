"""Which kernels a model uses: the shapes and formats that decide on their variants."""

from dataclasses import dataclass

from bough.gguf.types import QuantType

Q = QuantType


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work a check does; it does not change which kernels run."""

    matrix: tuple[int, int]  # rows and columns
    context: int  # tokens in the KV cache
    chunk: int  # tokens of a prompt chunk
    vocabulary: int


QUICK = Sizes((384, 1024), 200, 130, 4096)
REAL = Sizes((17408, 5120), 4096, 1024, 248_320)


@dataclass(frozen=True, slots=True)
class Shapes:
    name: str
    width: int
    feed_forward: int
    heads: tuple[int, int, int]  # query heads, KV heads, dims
    rope_dim: int
    delta: tuple[int, int, int, int] | None  # key heads, value heads, dims, taps of the convolution
    experts: tuple[int, int, int] | None  # how many, of which used, their width
    types: tuple[QuantType, ...]  # of the matrices, those that tiles hold
    expert_types: tuple[QuantType, ...] = ()
    embedding: QuantType | None = Q.Q4_K
    kv: tuple[tuple[str, str], ...] = (("f16", "f16"),)
    rows: tuple[int, ...] = (1, 24)  # of a step
    draft: tuple[int, int, int] | None = None  # the same as `heads`, of a draft with a KV ring
    interleaved: bool = False  # rope
    head_norms: bool = True  # of queries and keys
    int8: bool = False
    eps: float = 1e-6
    window: int | None = None
    sliding: int | None = None  # the same of layers that were trained with it
    host_embedding: bool = False
    cached_experts: bool = False  # all are in host memory, and some have a place on the device
    rotation: int | None = None  # columns of a block of weights in a rotated basis
    sequences: int = 1


_MIX = (Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q8_0)
_KV = (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q5_0"), ("q4_0", "q4_0"))
_TREES = (1, 8, 24, 48)
# A 27B in the Q4_K_M mix with its draft, a 35B with 3B active, and a small model with 2 KV heads.
COMMON = (
    Shapes(
        "27B", 5120, 17408, (24, 4, 256), 64, (16, 48, 128, 4), None, _MIX, kv=_KV, rows=_TREES,
        draft=(32, 8, 128), int8=True, host_embedding=True, rotation=1024, sequences=2,
    ),
    Shapes(
        "35B-A3B", 2048, 512, (16, 2, 256), 64, (16, 32, 128, 4), (256, 8, 512), (), (Q.Q4_K, Q.Q6_K),
        kv=_KV[:2], rows=(1, 24), draft=(32, 8, 128), cached_experts=True,
    ),
    Shapes("0.8B", 1024, 3584, (8, 2, 256), 64, (16, 16, 128, 4), None, (), kv=_KV[:1], rows=(1, 24)),
)  # fmt: skip
