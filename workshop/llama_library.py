"""llama.cpp through its C API, for comparison: libllama and libggml from a folder, by ctypes.

The folder can be `package/bins/linux-x64` of the npm package @node-llama-cpp/linux-x64.
"""

import ctypes as c
import os
from collections.abc import Sequence
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


class _Tokens(c.Structure):
    """A `std::vector<int>`."""

    _fields_ = [(name, c.c_void_p) for name in ("begin", "end", "capacity")]


# common_ngram_simple_draft(config, tokens, sampled): its plain prompt lookup.
_LOOKUP = "_Z25common_ngram_simple_draftRK26common_ngram_simple_configRKSt6vectorIiSaIiEEi"
_SIZES = (12, 48)  # of the n-gram that is looked up and of the draft, as its command line has them
_LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
_silent = _LOG(lambda level, text, data: None)
_CHUNK = 512


class LlamaCpp:
    def __init__(
        self, libraries: Path, model: Path, *, threads: int, context: int = 4096, sequences: int = 1
    ):
        """`context` tokens, of all sequences together."""
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
        self._context = lib.llama_init_from_model(self._model, self._parameters(context, threads, sequences))
        assert self._context and lib.llama_n_threads(self._context) == threads
        lib.llama_decode.argtypes = [c.c_void_p, _Batch]
        lib.llama_get_logits_ith.argtypes = [c.c_void_p, c.c_int32]
        lib.llama_get_logits_ith.restype = c.POINTER(c.c_float)
        lib.llama_batch_init.argtypes, lib.llama_batch_init.restype = [c.c_int32] * 3, _Batch
        lib.llama_model_get_vocab.argtypes, lib.llama_model_get_vocab.restype = [c.c_void_p], c.c_void_p
        lib.llama_vocab_n_tokens.argtypes = [c.c_void_p]
        lib.llama_get_memory.argtypes, lib.llama_get_memory.restype = [c.c_void_p], c.c_void_p
        lib.llama_memory_clear.argtypes = [c.c_void_p, c.c_bool]
        lib.llama_memory_seq_rm.argtypes = [c.c_void_p, c.c_int32, c.c_int32, c.c_int32]
        lib.llama_memory_seq_rm.restype = c.c_bool
        self._common = c.CDLL(str(libraries / "libllama-common.so"))
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(_CHUNK, 0, 1)
        self._lengths = [0] * sequences

    @property
    def length(self) -> int:
        """Tokens of the first sequence."""
        return self._lengths[0]

    def _parameters(self, context: int, threads: int, sequences: int) -> _Parameters:
        """Set context, batch sizes and threads, whose two counts follow the sizes with equal defaults."""
        made = self._c.llama_context_default_params()
        words = made.words
        words[0], words[1], words[2], words[3] = context, _CHUNK, _CHUNK, sequences
        known = (2, 4, 8, os.cpu_count())
        place = next(i for i in range(4, 10) if words[i] == words[i + 1] and words[i] in known)
        words[place] = words[place + 1] = threads
        return made

    def clear(self) -> None:
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        self._lengths = [0] * len(self._lengths)

    def decode(self, tokens: list[int], *, every_logit: bool = False, sequence: int = 0) -> None:
        for start in range(0, len(tokens), _CHUNK):
            part = tokens[start : start + _CHUNK]
            last = start + len(part) == len(tokens)
            self._run(part, [sequence] * len(part), every_logit=every_logit, last_logit=last)

    def decode_each(self, tokens: list[int]) -> None:
        """Decode a token of each of the first sequences, and wait for its logits."""
        self._run(tokens, range(len(tokens)), every_logit=True)
        self._c.llama_get_logits_ith(self._context, len(tokens) - 1)

    def _run(
        self, tokens: list[int], sequences: Sequence[int], *, every_logit: bool, last_logit: bool = True
    ) -> None:
        batch = self._batch
        batch.count = len(tokens)
        for i, (token, sequence) in enumerate(zip(tokens, sequences, strict=True)):
            batch.tokens[i], batch.positions[i] = token, self._lengths[sequence]
            batch.sequences[i], batch.sequence_ids[i][0] = 1, sequence
            batch.logits[i] = every_logit or (last_logit and i == len(tokens) - 1)
            self._lengths[sequence] += 1
        assert self._c.llama_decode(self._context, batch) == 0

    def truncate(self, length: int) -> bool:
        """Forget all tokens from `length` on; return whether the model's memory can be cut there."""
        memory = self._c.llama_get_memory(self._context)
        cut = bool(self._c.llama_memory_seq_rm(memory, 0, length, -1))
        self._lengths[0] = length if cut else self.length
        return cut

    def look_up(self, tokens: list[int]) -> list[int]:
        """Return what its prompt lookup proposes after a text; nothing: no earlier place is like its end."""
        before = (c.c_int32 * len(tokens))(*tokens[:-1])
        begin = c.addressof(before)
        end = begin + 4 * (len(tokens) - 1)
        text, drafted, sizes = _Tokens(begin, end, end), _Tokens(), (c.c_uint16 * 2)(*_SIZES)
        self._common[_LOOKUP](c.byref(drafted), sizes, c.byref(text), c.c_int32(tokens[-1]))
        if not drafted.begin:
            return []
        count = (drafted.end - drafted.begin) // 4
        proposal = [*(c.c_int32 * count).from_address(drafted.begin)]
        c.CDLL(None).free(c.c_void_p(drafted.begin))
        return proposal

    def best(self, row: int = -1) -> int:
        """Return the likeliest token after the last one, or after a row of the last batch."""
        logits = self._c.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())

    def rows(self, count: int) -> np.ndarray:
        """Return the logits [count, vocabulary] after the last tokens of the last batch."""
        logits = (self._c.llama_get_logits_ith(self._context, row) for row in range(-count, 0))
        return np.stack([np.ctypeslib.as_array(row, (self._vocabulary,)).copy() for row in logits])
