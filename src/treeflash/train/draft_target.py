"""The frozen target of a training run: loaded as for serving, asked for features, embeddings and its head."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treeflash.config import EngineConfig
from treeflash.errors import UsageError
from treeflash.gguf.reader import GGUFFile
from treeflash.memory.device import pick_device
from treeflash.memory.estimate import compute_dtype
from treeflash.memory.planner import plan_memory
from treeflash.models.decoder import Decoder
from treeflash.models.spec import ModelSpec
from treeflash.models.step import Step
from treeflash.models.weights import Progress
from treeflash.state.sequences import SequenceStates
from treeflash.text.template import ChatTemplate
from treeflash.text.tokenizer import KEY, Tokenizer, TokenType

MASK_TOKEN = "<|mask|>"
_CHUNK = 512  # tokens a pass, as the engine reads prompts


@dataclass(frozen=True, slots=True)
class Target:
    path: Path
    size: int  # bytes of the file
    decoder: Decoder
    tokenizer: Tokenizer
    template: ChatTemplate
    metadata: Mapping[str, Any]

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    @property
    def device(self) -> torch.device:
        return self.decoder.device


def load_target(path: Path, *, device: str = "auto", progress: Progress | None = None) -> Target:
    where = pick_device(device)
    # The types of serving: the draft learns from the features that it will see.
    dtype = compute_dtype(where.type)
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file)
        plan = plan_memory(file, spec, EngineConfig(), where)
        return Target(
            path=file.path,
            size=file.size_bytes,
            decoder=Decoder.load(file, device=where, dtype=dtype, expand=plan.expanded, progress=progress),
            tokenizer=Tokenizer.from_metadata(file.metadata, source=str(path)),
            template=ChatTemplate.from_metadata(file.metadata, source=str(path)),
            metadata=dict(file.metadata),
        )


def mask_token(target: Target, wanted: int | None = None) -> int:
    """The row of the target's embedding that stands for a token to be guessed: one that no text has."""
    rows = target.spec.vocab_size
    if wanted is not None:
        if not 0 <= wanted < rows:
            raise UsageError(f"--mask-token is {wanted}, needed a row of the embedding, 0 to {rows - 1}")
        return wanted
    if (known := target.tokenizer.id_of(MASK_TOKEN)) is not None:
        return known
    types = target.metadata[f"{KEY}token_type"]
    unused = [token for token, kind in enumerate(types) if kind == TokenType.UNUSED]
    # An embedding may have more rows than the vocabulary has names.
    free = [*unused, *range(len(types), rows)]
    if not free:
        raise UsageError(
            f"{target.path.name} has neither a token {MASK_TOKEN} nor an unused one that could be the mask",
            "--mask-token ID names one that does not occur in text",
        )
    return free[0]


class FeatureReader:
    """The residual stream behind the tapped layers, by the code that serves."""

    def __init__(self, decoder: Decoder, taps: tuple[int, ...]):
        self._decoder, self._taps = decoder, taps

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [B, n], each a text from its beginning, to [B, n, taps * width]."""
        decoder, (batch, length) = self._decoder, tokens.shape
        states = SequenceStates(
            decoder.spec, max_ctx=length, slots=batch, device=decoder.device, input_dtype=decoder.dtype
        )
        slots = torch.tensor([states.open() for _ in range(batch)], device=decoder.device)
        parts = []
        for part in tokens.split(_CHUNK, 1):
            for slot in range(batch):
                states.reserve(slot, part.shape[1])
            step = Step.chunk(slots, part, states.buffers.lengths[slots])
            parts.append(decoder.forward(step, states.buffers, taps=self._taps).features)
            states.advance(step)
        return torch.cat(parts, 1)


class Frozen:
    """The target's embedding and head, for blocks of a draft."""

    def __init__(self, decoder: Decoder, mask_id: int, block_size: int):
        self._decoder, self._size = decoder, block_size
        with torch.no_grad():
            # Through the head's own product, whatever form its weights are held in.
            unit = torch.eye(decoder.spec.width, device=decoder.device)
            self.head = decoder.logits(unit).T.contiguous().to(decoder.dtype)  # [V, width]
            self._mask = decoder.embed(torch.tensor([mask_id], device=decoder.device))[0]
        if not self._mask.any():
            raise UsageError(
                f"token {mask_id}, the mask, has an embedding of zeros: its rows would be all alike",
                "--mask-token ID names another one",
            )

    @torch.no_grad()
    def embeddings(self, tokens: Tensor) -> Tensor:
        """Anchors' tokens [B, M] to the blocks' rows [B, M, T, width]: the anchor, then masks."""
        rows = self._mask.expand(*tokens.shape, self._size, -1).clone()
        rows[:, :, 0] = self._decoder.embed(tokens)
        return rows
