"""The attention scorer: how much a question's tokens attend to each unit, in the middle of a small model."""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from bough.compress.scorer import Query, ScoringFailed, never
from bough.errors import Cancelled
from bough.gguf.reader import GGUFFile
from bough.kernels.kv_cache.format import FORMATS
from bough.kernels.quant_matmul import BUCKETS, prepare
from bough.kernels.runtime.device import on_device
from bough.memory.estimate import compute_dtype
from bough.models.scoring import Scoring, attention_mass, load_scoring, unloaded_scoring
from bough.models.spec import ModelSpec
from bough.models.step import Step
from bough.models.weights import Progress
from bough.session.building import compile_found, tensor_kinds
from bough.state.sequences import CacheConfig, SequenceStates
from bough.text.template import ChatTemplate
from bough.text.tokenizer import Tokenizer

CHUNKS = {"cpu": 512, "cuda": 4096}  # tokens of a forward pass
QUESTION = 64  # tokens: the last ones of a query
NEUTRAL = ("N/A", "Which one is it?")  # what gets attention from these gets it from any question
LEAST = 0.01  # of its attention a unit keeps that gets no more of it than from those
SINKS = 4  # tokens at the beginning of the text, which get attention whatever they say
SMOOTHING = 16  # tokens added to a unit's length: a mean alone favours short units
MAX_CONTEXT = 128 << 10  # tokens of a window, where the model was made for more
MARK = "\x00"
TINY = 1e-30  # instead of no attention at all


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
        self._last: tuple[Sequence[str], list[int], list[int]] | None = None
        self._tokens: list[int] = []  # read so far
        # [context, KV, D] of each scoring layer: of these tokens, then of a question.
        shape = (context, decoder.spec.kv_heads, decoder.spec.head_dim)
        self._keys = [torch.empty(shape, device=device) for _ in decoder.layers]
        self._saved: list[Tensor] = []  # of `_recurrent`, after these tokens
        self._neutral: list[Tensor] = []  # [N], what these tokens get from each neutral question, once asked

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        device: torch.device,
        target: Tokenizer | None = None,
        layers: Sequence[int] | None = None,
        native: bool = True,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> "AttentionScorer":
        """Load the layers that are needed of any supported model; `native`, `threads`: on a CPU.

        target: another model's tokenizer, which is used if it is the same: units are then tokenised once.
        """
        with GGUFFile.open(path) as file:
            tokenizer = Tokenizer.from_metadata(file.metadata, source=str(path))
            if target is not None and target.encodes_like(tokenizer):
                tokenizer = target
            template = ChatTemplate.from_metadata(file.metadata, source=str(path))

            def rehearse(placed: torch.device) -> None:
                decoder = unloaded_scoring(file, placed, layers)
                cls(decoder, tokenizer, template, name=path.stem).rehearse()

            facts = repr(("scorer", ModelSpec.from_gguf(file), tensor_kinds(file), layers, CHUNKS))
            with compile_found(rehearse, device, facts=facts) as ahead:
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
                if ahead is not None:
                    ahead.wait()
        scorer = cls(decoder, tokenizer, template, name=path.stem)
        if device.type == "cuda":
            # Libraries load their own kernels at their first use. The memory is the target's.
            scorer.rehearse()
            scorer._blanks([0])
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        return scorer

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Read texts and ask, as scoring does, with all the numbers of rows that kernels differ in."""
        room = self._limit - len(self._before)
        for rows in (CHUNKS["cuda"], *BUCKETS, 1):
            self._window([0] * min(rows, room), [(1.0, [0] * min(rows, QUESTION))])
            self._shorten(0)

    @torch.inference_mode()
    def score(
        self, units: Sequence[str], queries: Sequence[Query], cancelled: Callable[[], bool] = never
    ) -> list[float]:
        """Return the attention of each unit, less what it gets anyway, over its tokens and 16 more."""
        self._cancelled = cancelled
        ids, lengths = self._encoded(units)
        asked = [(query.weight, question) for query in queries if (question := self._question(query.text))]
        if not asked:
            raise ScoringFailed("there is no question")
        try:
            windows = [ids[start:end] for start, end in self._windows(lengths)]
            masses = [self._window(window, asked) for window in windows]
            # On a GPU these are only enqueued: what the host has to do comes before their values are read.
            blank = [self._blanks(window) for window in windows]
            masses = [mass.cpu().masked_fill_(none, 0) for mass, none in zip(masses, blank, strict=True)]
        except BaseException:
            self._shorten(0)  # its tokens and its state may differ
            raise
        mass, anyway = torch.cat([_split(each) for each in masses], 1)
        parts = zip(_means(mass, lengths), _means(anyway, lengths), strict=True)
        return [max(LEAST * mean, mean - usual) for mean, usual in parts]

    def _question(self, text: str) -> list[int]:
        return self.tokenizer.encode(f"\n\n{text}", special=False)[-QUESTION:]

    def _encoded(self, units: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the tokens of all units and how many each has; those of the last text are remembered."""
        if self._last is None or self._last[0] != units:
            encoded = self.tokenizer.encode_all(units)
            self._last = units, list(chain.from_iterable(encoded)), [len(each) for each in encoded]
        return self._last[1:]

    @cached_property
    def _blank(self) -> Tensor:
        """Return [vocabulary] bool: tokens of white space, which get attention whatever is around them."""
        size = self.tokenizer.vocab_size
        return torch.tensor([not self.tokenizer.token_bytes(id).strip() for id in range(size)])

    def _windows(self, lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Return runs of tokens of whole units, of about equal length, that the model can read at once."""
        room = self._limit - len(self._before)
        total = sum(lengths)
        if max(lengths, default=0) > room:
            raise ScoringFailed(f"a unit has more tokens than the {self._limit} that {self.name} reads")
        count, windows = -(-total // room), []
        # Whole units may need a window more. Not a short one at the end: its tokens would get more attention.
        while not windows or len(windows) > max(1, count):
            count = max(count, len(windows))
            windows = _packed(lengths, room=room, share=-(-total // max(1, count)))
        return windows

    def _window(self, ids: Sequence[int], asked: Sequence[tuple[float, list[int]]]) -> Tensor:
        """Return the attention [1 + neutral questions, N] that these tokens get."""
        self._read([*self._before, *ids])
        if not self._neutral:
            self._neutral = [self._ask(self._question(text)) for text in NEUTRAL]
        mass = torch.zeros(len(self._tokens), device=self._decoder.device)
        for weight, question in asked:
            mass += weight * self._ask(question)
        return torch.stack([mass, *self._neutral])[:, len(self._before) :]

    def _blanks(self, ids: Sequence[int]) -> Tensor:
        """Return [N] bool: tokens of a window whose attention says nothing."""
        blanks = self._blank[torch.tensor(ids, dtype=torch.int64)]
        blanks[:SINKS] = True
        return blanks

    def _read(self, tokens: list[int]) -> None:
        """Bring the state to exactly these tokens; what it has in common with them is not read again."""
        size = CHUNKS[self._decoder.device.type]
        common = _common(self._tokens, tokens)
        if common < len(tokens):
            common -= common % size  # the chunks of a text do not depend on what was read before it
        if common < max(len(self._tokens), len(tokens)):
            self._neutral = []
        if common < len(self._tokens):
            # A recurrent state cannot go back.
            self._shorten(0 if self._decoder.spec.delta_layers else common)
        for start in range(len(self._tokens), len(tokens), size):
            self._run(tokens[start : start + size], queries=False)
            if self._cancelled():
                raise Cancelled("the request was cancelled while its prompt was scored")
        self._tokens = tokens
        self._saved = [part.clone() for part in self._recurrent()]

    def _ask(self, question: list[int]) -> Tensor:
        """Return the attention [N] that the tokens read so far get from a question."""
        asked = self._run(question, queries=True)
        end = len(self._tokens) + len(question)
        masses = [attention_mass(q, keys[:end]) for q, keys in zip(asked, self._keys, strict=True)]
        self._set_length(len(self._tokens))
        for part, saved in zip(self._recurrent(), self._saved, strict=True):
            part.copy_(saved)
        return torch.stack(masses).mean(0)

    def _run(self, tokens: Sequence[int], *, queries: bool) -> list[Tensor]:
        """Run a chunk, which a GPU only enqueues, and hold its keys; return its queries, if wanted."""
        states = self._states
        begin = states.lengths[0]
        end = begin + len(tokens)
        states.reserve(0, len(tokens))
        row = on_device([tokens], self._decoder.device)
        step = Step.chunk(self._slots, row, states.buffers.lengths[self._slots], span=end)
        attention = self._decoder.heads(step, states.buffers, queries=queries)
        for held, heads in zip(self._keys, attention, strict=True):
            held[begin:end] = heads.keys
        states.advance(step, [0])
        return [heads.queries for heads in attention if heads.queries is not None]

    def _shorten(self, length: int) -> None:
        if length == 0:
            self._states.close(0)
            self._states.open()
        self._set_length(length)
        self._tokens = self._tokens[:length]

    def _set_length(self, length: int) -> None:
        self._states.lengths[0] = length
        self._states.buffers.lengths[0] = length

    def _recurrent(self) -> list[Tensor]:
        whole = self._states.recurrent
        return [] if whole is None else [whole.state, whole.window]


def _opening(template: ChatTemplate) -> str:
    """Return what the template writes before a user's text."""
    return template.render([{"role": "user", "content": MARK}]).text.partition(MARK)[0]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    most = min(len(a), len(b))
    if a[:most] == b[:most]:  # a hundred times faster than to look for a difference
        return most
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def _packed(lengths: Sequence[int], *, room: int, share: int) -> list[tuple[int, int]]:
    """Return runs of whole units that have `share` tokens or a unit more, and at most `room`."""
    groups, start, end = [], 0, 0
    for length in lengths:
        if end > start and (end + length - start > room or end - start >= share):
            groups.append((start, end))
            start = end
        end += length
    return [*groups, (start, end)]


def _split(masses: Tensor) -> Tensor:
    """Return attention [2, N]: what tokens get, and as much of it as they get from any question.

    Of neutral questions only shares count: the longer a question, the more it attends to itself.
    """
    mass, neutral = masses[0], masses[1:]
    shares = neutral / neutral.sum(1, keepdim=True).clamp(min=TINY)
    return torch.stack([mass, mass.sum() * shares.amax(0)])


def _means(values: Tensor, lengths: Sequence[int]) -> list[float]:
    """Return the sums of consecutive runs of values, each over its length and `SMOOTHING`."""
    counts = torch.tensor(lengths, dtype=torch.int64)
    index = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    total = torch.zeros(len(lengths), dtype=torch.float64).index_add_(0, index, values.double())
    return (total / (counts + SMOOTHING)).tolist()
