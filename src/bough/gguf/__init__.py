"""The GGUF container: reading, writing and the tensor types. Importing it loads no torch."""

from bough.gguf.header import TensorInfo, ValueType
from bough.gguf.reader import GGUFFile
from bough.gguf.types import QuantType
from bough.gguf.writer import GGUFWriter

__all__ = ["GGUFFile", "GGUFWriter", "QuantType", "TensorInfo", "ValueType"]
