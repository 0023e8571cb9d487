"""The tensor types of GGUF: ids, block sizes, names. Imports no torch."""

from enum import IntEnum

# Types of weights that native CPU code multiplies, in the order of its C enumerations.
NATIVE_TYPES = (
    *("Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q4_0", "IQ4_NL", "IQ4_XS", "Q2_0"),
    *("F16", "BF16", "F32", "PQ2_0", "PTQ1_0", "Q1_0"),
)


class QuantType(IntEnum):
    """ggml type ids as stored in a file; only the types Bough reads."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I64 = 27  # token ids, no weights
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40  # its matrices are multiplied by a tensor of their own, see models/weights.py
    Q1_0 = 41
    Q2_0 = 42  # in blocks of 64; older files have the same number for blocks of 128
    PQ2_0 = 142  # of PrismML, as the next; gguf/rotation.py says in which files
    PTQ1_0 = 143

    @property
    def block_elements(self) -> int:
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        return _BLOCKS[self][1]

    @property
    def bits_per_weight(self) -> float:
        return self.block_bytes * 8 / self.block_elements

    def row_bytes(self, elements: int) -> int:
        """Return the bytes of a row of `elements` weights, which must be whole blocks."""
        assert elements % self.block_elements == 0, (self.name, elements)
        return elements // self.block_elements * self.block_bytes


# Values of d times -1, 0, 1 or 2: native CPU code holds them in 2 bits with a float16 scale for each 32.
TWO_BITS = (QuantType.Q1_0, QuantType.Q2_0, QuantType.PQ2_0, QuantType.PTQ1_0)
TWO_BITS_PACKED = 2.5
# Types whose tiles on a GPU have the codes of their blocks.
TILE_TYPES = tuple(
    QuantType[name]
    for name in (
        *("Q4_K", "Q5_K", "Q6_K", "Q3_K", "IQ4_XS", "Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "MXFP4"),
        *("Q4_1", "Q5_1"),
    )
)


def tile_type(type: QuantType) -> QuantType:
    """Return the type as which a matrix of this one is multiplied on a GPU.

    Of 1 and 2 bits it is Q4_0, whose codes and scales hold the same values; of others without tiles float16.
    """
    return type if type in TILE_TYPES else QuantType.Q4_0 if type in TWO_BITS else QuantType.F16


# elements and bytes of one block
_BLOCKS = {
    QuantType.F32: (1, 4),
    QuantType.F16: (1, 2),
    QuantType.BF16: (1, 2),
    QuantType.Q4_0: (32, 18),
    QuantType.Q4_1: (32, 20),
    QuantType.Q5_0: (32, 22),
    QuantType.Q5_1: (32, 24),
    QuantType.Q8_0: (32, 34),
    QuantType.Q2_K: (256, 84),
    QuantType.Q3_K: (256, 110),
    QuantType.Q4_K: (256, 144),
    QuantType.Q5_K: (256, 176),
    QuantType.Q6_K: (256, 210),
    QuantType.IQ4_NL: (32, 18),
    QuantType.IQ4_XS: (256, 136),
    QuantType.IQ3_S: (256, 110),
    QuantType.IQ3_XXS: (256, 98),
    QuantType.IQ2_S: (256, 82),
    QuantType.IQ2_XS: (256, 74),
    QuantType.IQ2_XXS: (256, 66),
    QuantType.IQ1_S: (256, 50),
    QuantType.IQ1_M: (256, 56),
    QuantType.TQ1_0: (256, 54),
    QuantType.TQ2_0: (256, 66),
    QuantType.MXFP4: (32, 17),
    QuantType.NVFP4: (64, 36),
    QuantType.Q1_0: (128, 18),
    QuantType.Q2_0: (64, 18),
    QuantType.PQ2_0: (128, 34),
    QuantType.PTQ1_0: (128, 28),
    QuantType.I64: (1, 8),
}
