"""Drafts that refine rows by the token before them, in numpy, written from their description alone."""

import numpy as np

from tests.models.plain_dflash import PlainDraft


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class PlainRefined(PlainDraft):
    """An MLP over candidates, or DSpine's messages; `anchor`: the token of the block's first row."""

    def rows(self, embeddings: np.ndarray, anchor: int) -> tuple[list[np.ndarray], np.ndarray]:
        """What is refined, and the hidden rows of the marginal."""
        context = [self._rms(self._tensors["fc.weight"] @ f, "hidden_norm.weight") for f in self._features]
        scale = self._config.get("input_embedding_scale", 1.0)
        rows = before = [scale * row for row in np.asarray(embeddings, dtype=np.float64)]
        for layer in range(self._depth):
            rows = before = self._layer(layer, rows, context)
            if self._messages:
                rows = [before[0]] + [
                    self._written(
                        before[t], self._code(anchor) if t == 1 else self._phi(before[t - 1], layer), layer
                    )
                    for t in range(1, len(before))
                ]
        return before, np.stack([self._rms(row, "norm.weight") for row in rows])

    def refined(self, row: np.ndarray, token: int, embedding: np.ndarray) -> np.ndarray:
        """A row of `rows` after a token before it, normed; embedding: the target's, of that token."""
        if self._messages:
            return self._rms(self._written(row, self._code(token), self._depth - 1), "norm.weight")
        normed = embedding / np.sqrt(np.mean(embedding * embedding) + 1e-6)
        inputs = np.concatenate(
            [normed * self._tensors["ar_approximation.norm.weight"], self._rms(row, "norm.weight")]
        )
        both = self._tensors["ar_approximation.ug.weight"] @ inputs
        both = both + self._tensors["ar_approximation.ug.bias"]
        up, gate = both[: len(both) // 2], both[len(both) // 2 :]
        added = self._tensors["ar_approximation.d.weight"] @ (gate * _sigmoid(gate) * up)
        return self._rms(row + added, "norm.weight")

    @property
    def _messages(self) -> bool:
        return "transfer_codes" in self._tensors

    def _code(self, token: int) -> np.ndarray:
        code = self._tensors["transfer_codes"][token]
        return np.sqrt(len(code)) * code

    def _phi(self, row: np.ndarray, layer: int) -> np.ndarray:
        y = self._tensors[f"injection.readouts.{layer}.weight"] @ row
        return np.sqrt(len(y)) * y / np.linalg.norm(y)

    def _written(self, row: np.ndarray, predecessor: np.ndarray, layer: int) -> np.ndarray:
        gate = _sigmoid(
            self._tensors["injection.receiver_gate.weight"] @ self._phi(row, layer)
            + self._tensors["injection.predecessor_gate.weight"] @ predecessor
            + self._tensors["injection.bias"]
        )
        message = gate * (self._tensors["injection.message.weight"] @ predecessor)
        length = np.linalg.norm(row) / np.sqrt(len(row))
        return row + length * (self._tensors[f"injection.writes.{layer}.weight"] @ message)
