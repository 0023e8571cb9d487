"""The attention scorer: how much a question's tokens attend to each unit, in the middle of a small model."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from treeflash.compress.scorer import Query, ScoringFailed, never
from treeflash.errors import Cancelled
from treeflash.gguf.reader import GGUFFile
from treeflash.kernels.kv_cache.format import FORMATS
from treeflash.kernels.quant_matmul import prepare
from treeflash.memory.estimate import compute_dtype
from treeflash.models.scoring import Scoring, attention_mass, load_scoring
from treeflash.models.step import Step
from treeflash.models.weights import Progress
from treeflash.state.sequences import CacheConfig, SequenceStates
from treeflash.text.template import ChatTemplate
from treeflash.text.tokenizer import Tokenizer

CHUNKS = {"cpu": 512, "cuda": 4096}  # tokens of a forward pass
QUESTION = 64  # tokens: the last ones of a query
SINKS = 4  # tokens at the beginning of the text, which get attention whatever they say
SMOOTHING = 16  # tokens added to a unit's length: a mean alone favours short units
MAX_CONTEXT = 128 << 10  # tokens of a window, where the model was made for more
MARK = "\x00"


class AttentionScorer:
    """Reads the text once; a further question costs only its own tokens."""

    def __init__(self, decoder: Scoring, tokenizer: Tokenizer, template: ChatTemplate, *, name: str):
        self.name = name
        self._cancelled: Callable[[], bool] = never
        self._decoder, self.tokenizer = decoder, tokenizer
        self._before = tokenizer.encode(_opening(template))
        device = decoder.device
        # A GPU's work is in the order of one thread; on a CPU other requests go on meanwhile.
        self.any_thread = device.type == "cpu"
        context = min(decoder.context_length, MAX_CONTEXT)
        self._limit = context - QUESTION
        format = FORMATS["f16" if device.type == "cuda" else "f32"]
        self._states = SequenceStates(
            decoder.spec,
            max_ctx=context,
            device=device,
            cache=CacheConfig(format, format),
            static=device.type == "cuda",  # so that its memory is in the plan of the target's
        )
        self._slots = torch.zeros(1, dtype=torch.int64, device=device)
        self._states.open()
        self._last: tuple[Sequence[str], list[list[int]]] | None = None
        self._tokens: list[int] = []  # read so far
        self._keys: list[Tensor] = []  # [N, KV, D] of each scoring layer
        self._saved: list[Tensor] = []  # of `_recurrent`, after these tokens

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        device: torch.device,
        layers: Sequence[int] | None = None,
        native: bool = True,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> "AttentionScorer":
        """Load the layers that are needed of any supported model; `native`, `threads`: on a CPU."""
        with GGUFFile.open(path) as file:
            tokenizer = Tokenizer.from_metadata(file.metadata, source=str(path))
            template = ChatTemplate.from_metadata(file.metadata, source=str(path))
            decoder = load_scoring(
                file,
                device=device,
                dtype=compute_dtype(device.type),
                layers=layers,
                native=native,
                threads=threads,
                progress=progress,
            )
        prepare(decoder.layouts, device)
        return cls(decoder, tokenizer, template, name=path.stem)

    @torch.inference_mode()
    def score(
        self, units: Sequence[str], queries: Sequence[Query], cancelled: Callable[[], bool] = never
    ) -> list[float]:
        """Return the attention mass of each unit over its tokens and 16 more."""
        self._cancelled = cancelled
        tokens = self._encoded(units)
        asked = [
            (query.weight, ids)
            for query in queries
            if (ids := self.tokenizer.encode(f"\n\n{query.text}", special=False)[-QUESTION:])
        ]
        if not asked:
            raise ScoringFailed("there is no question")
        scores: list[float] = []
        try:
            for start, end in self._windows([len(each) for each in tokens]):
                scores += self._window(tokens[start:end], asked)
        except BaseException:
            self._shorten(0)  # its tokens and its state may differ
            raise
        return scores

    def _encoded(self, units: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each unit; those of the last text are remembered."""
        if self._last is None or self._last[0] != units:
            self._last = units, self.tokenizer.encode_all(units)
        return self._last[1]

    @cached_property
    def _blank(self) -> Tensor:
        """Return [vocabulary] bool: tokens of white space, which get attention whatever is around them."""
        size = self.tokenizer.vocab_size
        return torch.tensor([not self.tokenizer.token_bytes(id).strip() for id in range(size)])

    def _windows(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Return runs of units of about equal length that the model was trained to read at once."""
        room = self._limit - len(self._before)
        total = sum(lengths)
        if max(lengths, default=0) > room:
            raise ScoringFailed(f"a unit has more tokens than the {self._limit} that {self.name} reads")
        share = -(-total // -(-total // room)) if total else 0
        found, start, held = [], 0, 0
        for index, length in enumerate(lengths):
            if held and (held + length > room or held >= share):
                found.append((start, index))
                start, held = index, 0
            held += length
        return [*found, (start, len(lengths))]

    def _window(
        self, units: Sequence[Sequence[int]], asked: Sequence[tuple[float, list[int]]]
    ) -> list[float]:
        ids = [id for unit in units for id in unit]
        self._read([*self._before, *ids])
        mass = torch.zeros(len(self._tokens), device=self._decoder.device)
        for weight, question in asked:
            mass += weight * self._ask(question)
        mass = mass[len(self._before) :]
        mass[:SINKS] = 0
        mass[self._blank[torch.tensor(ids)].to(mass.device)] = 0
        sums = _sums(mass, [len(unit) for unit in units])
        return [total / (len(unit) + SMOOTHING) for total, unit in zip(sums, units, strict=True)]

    def _read(self, tokens: list[int]) -> None:
        """Bring the state to exactly these tokens; what it has in common with them is not read again."""
        common = _common(self._tokens, tokens)
        if common < len(self._tokens):
            # A recurrent state cannot go back.
            self._shorten(0 if self._decoder.spec.delta_layers else common)
        size = CHUNKS[self._decoder.device.type]
        fresh: list[list[Tensor]] = [[] for _ in self._decoder.layers]
        for start in range(len(self._tokens), len(tokens), size):
            if self._cancelled():
                raise Cancelled("the request was cancelled while its prompt was scored")
            for parts, heads in zip(fresh, self._run(tokens[start : start + size]), strict=True):
                parts.append(heads.keys)
        if fresh[0]:
            old = self._keys or [None] * len(fresh)
            self._keys = [
                torch.cat([*([] if before is None else [before]), *parts])
                for before, parts in zip(old, fresh, strict=True)
            ]
        self._tokens = list(tokens)
        self._saved = [part.clone() for part in self._recurrent()]

    def _ask(self, question: list[int]) -> Tensor:
        """Return the attention [N] that the tokens read so far get from a question."""
        found = self._run(question)
        masses = [
            attention_mass(heads.queries, torch.cat([keys, heads.keys]))
            for heads, keys in zip(found, self._keys, strict=True)
        ]
        self._set_length(len(self._tokens))
        for part, saved in zip(self._recurrent(), self._saved, strict=True):
            part.copy_(saved)
        return torch.stack(masses).mean(0)

    def _run(self, tokens: Sequence[int]):
        states = self._states
        states.reserve(0, len(tokens))
        row = torch.tensor([tokens], device=self._decoder.device)
        step = Step.chunk(self._slots, row, states.buffers.lengths[self._slots])
        found = self._decoder.heads(step, states.buffers)
        states.advance(step)
        return found

    def _shorten(self, length: int) -> None:
        if length == 0:
            self._states.close(0)
            self._states.open()
        self._set_length(length)
        self._tokens = self._tokens[:length]
        self._keys = [keys[:length] for keys in self._keys] if length else []

    def _set_length(self, length: int) -> None:
        self._states.lengths[0] = length
        self._states.buffers.lengths[0] = length

    def _recurrent(self) -> list[Tensor]:
        """Return the states and windows of all delta layers."""
        whole = self._states.recurrent
        return [] if whole is None else [whole.state, whole.window]


def _opening(template: ChatTemplate) -> str:
    """Return what the template writes before a user's text."""
    return template.render([{"role": "user", "content": MARK}]).text.partition(MARK)[0]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _sums(values: Tensor, lengths: Sequence[int]) -> list[float]:
    """Return the sums of consecutive runs of values."""
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    total = torch.zeros(len(lengths), dtype=torch.float64)
    return total.index_add_(0, index, values.double().cpu()).tolist()
