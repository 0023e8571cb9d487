"""The GGUF container: reading, writing and the tensor types. Importing it loads no torch."""

from treeflash.gguf.header import TensorInfo, ValueType
from treeflash.gguf.reader import GGUFFile
from treeflash.gguf.types import QuantType
from treeflash.gguf.writer import GGUFWriter

__all__ = ["GGUFFile", "GGUFWriter", "QuantType", "TensorInfo", "ValueType"]
