"""llama.cpp through its C API, for comparison: libllama and libggml from a folder, by ctypes.

The folder can be `package/bins/linux-x64` of the npm package @node-llama-cpp/linux-x64.
"""

import ctypes as c
import os
from pathlib import Path

import numpy as np


class _Parameters(c.Structure):
    """Larger than any of its parameter structures: passed on the stack, the callee reads its head."""

    _fields_ = [("words", c.c_uint32 * 128)]


class _Batch(c.Structure):
    _fields_ = [
        ("count", c.c_int32),
        ("tokens", c.POINTER(c.c_int32)),
        ("embeddings", c.c_void_p),
        ("positions", c.POINTER(c.c_int32)),
        ("sequences", c.POINTER(c.c_int32)),
        ("sequence_ids", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    ]


_LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
_silent = _LOG(lambda level, text, data: None)
_CHUNK = 512


class LlamaCpp:
    def __init__(self, libraries: Path, model: Path, *, threads: int, context: int = 4096):
        c.CDLL(str(libraries / "libggml-base.so"), mode=c.RTLD_GLOBAL)
        ggml, self._c = (
            c.CDLL(str(next(libraries.glob(f"lib{name}.*so*"))), mode=c.RTLD_GLOBAL)
            for name in ("ggml", "llama")
        )
        lib = self._c
        lib.llama_log_set(_silent, None)
        ggml.ggml_backend_load_all_from_path.argtypes = [c.c_char_p]
        ggml.ggml_backend_load_all_from_path(str(libraries).encode())
        lib.llama_backend_init()
        lib.llama_model_default_params.restype = lib.llama_context_default_params.restype = _Parameters
        lib.llama_model_load_from_file.argtypes = [c.c_char_p, _Parameters]
        lib.llama_model_load_from_file.restype = c.c_void_p
        self._model = lib.llama_model_load_from_file(str(model).encode(), lib.llama_model_default_params())
        assert self._model, f"llama.cpp does not load {model}"
        lib.llama_init_from_model.argtypes = [c.c_void_p, _Parameters]
        lib.llama_init_from_model.restype = c.c_void_p
        lib.llama_n_threads.argtypes = [c.c_void_p]
        self._context = lib.llama_init_from_model(self._model, self._parameters(context, threads))
        assert self._context and lib.llama_n_threads(self._context) == threads
        lib.llama_decode.argtypes = [c.c_void_p, _Batch]
        lib.llama_get_logits_ith.argtypes = [c.c_void_p, c.c_int32]
        lib.llama_get_logits_ith.restype = c.POINTER(c.c_float)
        lib.llama_batch_init.argtypes, lib.llama_batch_init.restype = [c.c_int32] * 3, _Batch
        lib.llama_model_get_vocab.argtypes, lib.llama_model_get_vocab.restype = [c.c_void_p], c.c_void_p
        lib.llama_vocab_n_tokens.argtypes = [c.c_void_p]
        lib.llama_get_memory.argtypes, lib.llama_get_memory.restype = [c.c_void_p], c.c_void_p
        lib.llama_memory_clear.argtypes = [c.c_void_p, c.c_bool]
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(_CHUNK, 0, 1)
        self.length = 0

    def _parameters(self, context: int, threads: int) -> _Parameters:
        """Set context, batch sizes and threads, whose two counts follow the sizes with equal defaults."""
        made = self._c.llama_context_default_params()
        words = made.words
        words[0], words[1], words[2] = context, _CHUNK, _CHUNK
        known = (2, 4, 8, os.cpu_count())
        place = next(i for i in range(3, 10) if words[i] == words[i + 1] and words[i] in known)
        words[place] = words[place + 1] = threads
        return made

    def clear(self) -> None:
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        self.length = 0

    def decode(self, tokens: list[int], *, every_logit: bool = False) -> None:
        for start in range(0, len(tokens), _CHUNK):
            part, batch = tokens[start : start + _CHUNK], self._batch
            batch.count = len(part)
            for i, token in enumerate(part):
                batch.tokens[i], batch.positions[i] = token, self.length + i
                batch.sequences[i], batch.sequence_ids[i][0] = 1, 0
                batch.logits[i] = every_logit or start + i == len(tokens) - 1
            assert self._c.llama_decode(self._context, batch) == 0
            self.length += len(part)

    def best(self) -> int:
        """Return the likeliest token after the last one."""
        logits = self._c.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())
