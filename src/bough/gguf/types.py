"""The tensor types of GGUF: ids, block sizes, names. Imports no torch."""

from enum import IntEnum

# Types of weights that native CPU code multiplies, in the order of its C enumerations.
NATIVE_TYPES = (
    *("Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q4_0", "IQ4_NL", "IQ4_XS", "Q2_0"),
    *("F16", "BF16", "F32", "PQ2_0", "PTQ1_0", "Q1_0"),
)


class QuantType(IntEnum):
    """ggml type ids as stored in a file, only of the types Bough reads; elements and bytes of a block."""

    block_elements: int
    block_bytes: int

    def __new__(cls, number: int, elements: int, nbytes: int) -> "QuantType":
        member = int.__new__(cls, number)
        member._value_, member.block_elements, member.block_bytes = number, elements, nbytes
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I64 = 27, 1, 8  # token ids, no weights
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36  # its matrices are multiplied by a tensor of their own, see models/weights.py
    Q1_0 = 41, 128, 18
    Q2_0 = 42, 64, 18  # in blocks of 64; older files have the same number for blocks of 128
    PQ2_0 = 142, 128, 34  # of PrismML, as the next; gguf/rotation.py says in which files
    PTQ1_0 = 143, 128, 28

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
