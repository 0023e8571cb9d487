"""The frozen target of a training run, loaded as for serving: its features, embeddings and head."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bough.config import EngineConfig
from bough.errors import UsageError
from bough.gguf.reader import GGUFFile
from bough.memory.device import pick_device
from bough.memory.estimate import compute_dtype
from bough.memory.planner import plan_memory
from bough.models.decoder import Decoder
from bough.models.spec import ModelSpec
from bough.models.step import Step
from bough.models.weights import Progress, WeightLoader
from bough.state.sequences import SequenceStates
from bough.text.template import ChatTemplate
from bough.text.tokenizer import KEY, Tokenizer, TokenType

MASK_TOKEN = "<|mask|>"
_CHUNK = 512  # tokens per forward pass; prompts are prefilled in chunks too


@dataclass(frozen=True, slots=True)
class TrainingTarget:
    path: Path
    size: int  # bytes of the file
    decoder: Decoder
    tokenizer: Tokenizer
    template: ChatTemplate
    metadata: Mapping[str, Any]
    final_norm: Tensor  # [width]: the weights of the norm before the head

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    def keep_head_rows(self) -> None:
        """Hold the head's rows by token, as drafts need that refine rows by the token before them."""
        with GGUFFile.open(self.path) as file:
            self.decoder.keep_head_rows(WeightLoader(file, device=self.device, host_embedding=True))


def load_target(path: Path, *, device: str = "auto", progress: Progress | None = None) -> TrainingTarget:
    """Load a target with the weight layouts of serving."""
    where = pick_device(device)
    # The dtype of serving: the draft is trained on the features it gets at inference.
    dtype = compute_dtype(where.type)
    with GGUFFile.open(path) as file:
        spec = ModelSpec.from_gguf(file)
        plan = plan_memory(file, spec, EngineConfig(), where)
        return TrainingTarget(
            path=file.path,
            size=file.size_bytes,
            decoder=Decoder.load(file, device=where, dtype=dtype, expand=plan.expanded, progress=progress),
            tokenizer=Tokenizer.from_metadata(file.metadata, source=str(path)),
            template=ChatTemplate.from_metadata(file.metadata, source=str(path)),
            metadata=dict(file.metadata),
            final_norm=torch.from_numpy(file.raw("output_norm.weight").copy()).view(torch.float32).to(where),
        )


def mask_token(target: TrainingTarget, id: int | None = None) -> int:
    """Return the mask token's id: `wanted`, else <|mask|>, else a token that occurs in no text."""
    rows = target.spec.vocab_size
    if id is not None:
        if not 0 <= id < rows:
            raise UsageError(f"`mask_token` is {id}, needed a row of the embedding, 0 to {rows - 1}")
        return id
    if (token := target.tokenizer.id_of(MASK_TOKEN)) is not None:
        return token
    types = target.metadata[f"{KEY}token_type"]
    unused = [token for token, kind in enumerate(types) if kind == TokenType.UNUSED]
    # An embedding may have more rows than the vocabulary has tokens.
    free = [*unused, *range(len(types), rows)]
    if not free:
        raise UsageError(
            f"{target.path.name} has neither a token {MASK_TOKEN} nor an unused one that could be the mask",
            "set `mask_token` to the id of a token that does not occur in text",
        )
    return free[0]


class FeatureReader:
    """Computes the residual stream after the tapped layers with the inference code."""

    def __init__(self, decoder: Decoder, taps: tuple[int, ...]):
        self._decoder, self._taps = decoder, taps
        self.device, self.width = decoder.device, len(taps) * decoder.spec.width

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the features [B, n, taps * width] of tokens [B, n], each row a text from its beginning."""
        decoder, (batch, length) = self._decoder, tokens.shape
        states = SequenceStates(
            decoder.spec,
            max_ctx=length,
            slots=batch,
            device=decoder.device,
            input_dtype=decoder.dtype,
        )
        slots = torch.tensor([states.open() for _ in range(batch)], device=decoder.device)
        features = []
        for chunk in tokens.split(_CHUNK, 1):
            for slot in range(batch):
                states.reserve(slot, chunk.shape[1])
            step = Step.chunk(slots, chunk, states.buffers.lengths[slots])
            features.append(decoder.forward(step, states.buffers, taps=self._taps).features)
            states.advance(step)
        return torch.cat(features, 1)


class Frozen:
    """The target's embedding and head, shared by the draft."""

    def __init__(self, decoder: Decoder, mask_id: int, block_size: int):
        self._decoder, self._size = decoder, block_size
        with torch.no_grad():
            # Apply the head to the identity: independent of its weights' quantisation and layout.
            unit = torch.eye(decoder.spec.width, device=decoder.device)
            # In float16 on a GPU: in float32 the loss's matmuls were 1.4 s of a step of 1.9 s.
            half = torch.float16 if decoder.device.type == "cuda" else decoder.dtype
            self.head = decoder.logits(unit).T.contiguous().to(half)  # [V, width]
            self._mask = decoder.embed(torch.tensor([mask_id], device=decoder.device))[0]
        if not self._mask.any():
            raise UsageError(
                f"token {mask_id}, the mask, has an all-zero embedding: a draft cannot be trained with it",
                "set `mask_token` to another id",
            )

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., width] of tokens [...]."""
        return self._decoder.embed(tokens)

    @torch.no_grad()
    def embeddings(self, tokens: Tensor) -> Tensor:
        """Return the blocks' input rows [B, M, T, width] for anchor tokens [B, M]: the anchor, then masks."""
        rows = self._mask.expand(*tokens.shape, self._size, -1).clone()
        rows[:, :, 0] = self._decoder.embed(tokens)
        return rows
