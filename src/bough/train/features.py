"""Features of the training data's texts: the target need not read a text again in every epoch."""

import numpy as np
import torch
from torch import Tensor

from bough.train.draft_data import TextBatch
from bough.train.draft_target import FeatureReader


class FeatureStore:
    """Features of the texts of the training data, computed once and kept on the device as far as they fit."""

    def __init__(self, reader: FeatureReader, lengths: np.ndarray, *, dtype: torch.dtype, room: int):
        """lengths [N] of the texts; `room`: bytes that the features may take."""
        self._reader, device = reader, reader.device
        ends = lengths.cumsum()
        fitting = int((ends * reader.width * dtype.itemsize <= room).sum())
        self._rows = torch.empty(
            int(ends[fitting - 1]) if fitting else 0, reader.width, dtype=dtype, device=device
        )
        self._lengths, self._starts = lengths, ends - lengths
        self._fits, self._known = np.arange(len(lengths)) < fitting, np.zeros(len(lengths), dtype=bool)

    @torch.no_grad()
    def __call__(self, batch: TextBatch) -> Tensor:
        """Return the features [B, n, taps * width] of the batch's texts; after a text they are any."""
        known = self._known[batch.texts]
        if known.all():
            return self._stored(batch.texts, batch.tokens.shape[1])
        missing = torch.from_numpy(np.flatnonzero(~known)).to(batch.tokens.device)
        fresh = self._reader(batch.tokens[missing]).to(self._rows.dtype)
        for features, text in zip(fresh, batch.texts[~known], strict=True):
            if self._fits[text]:
                start, length = self._starts[text], self._lengths[text]
                self._rows[start : start + length] = features[:length]
                self._known[text] = True
        if not known.any():
            return fresh
        features = fresh.new_empty(len(batch), *fresh.shape[1:])
        features[missing] = fresh
        stored = torch.from_numpy(np.flatnonzero(known)).to(missing.device)
        features[stored] = self._stored(batch.texts[known], fresh.shape[1])
        return features

    def _stored(self, texts: np.ndarray, length: int) -> Tensor:
        places = np.minimum(np.arange(length), self._lengths[texts][:, None] - 1)
        return self._rows[torch.from_numpy(self._starts[texts][:, None] + places).to(self._rows.device)]
