"""Weaver's head in float64 numpy, from its published formulas: one whole path at a time, no caches."""

from collections.abc import Mapping
from typing import Any

import numpy as np


class PlainWeaver:
    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]):
        self._config, self._tensors = config, tensors
        self._learned = "pos_emb" in tensors

    def added(self, last: np.ndarray, rows: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
        """What is added to the logits of any head: its query [width] after the last of a path's tokens.

        last [width]: the target's hidden state before the anchor; rows [K, width]: the draft's; embeddings
        [n, width]: of the anchor and the tokens after it.
        """
        hidden = self._linear(self._norm(np.concatenate([last[None], rows]), "output_norm"), "proposal_in")
        nodes = self._linear(self._norm(embeddings, "embed_norm"), "token_in")
        prefix, count = len(hidden), len(nodes)
        places = np.concatenate([np.arange(prefix), np.arange(count) + 1])
        if self._learned:
            table = self._tensors["pos_emb"]
            hidden[1:] += table[: prefix - 1]
            nodes += table[:count]
        x = np.concatenate([hidden, nodes])
        seen = np.tril(np.ones((prefix + count, prefix + count), dtype=bool))
        for layer in range(self._config["num_layers"]):
            x = self._block(x, f"blocks.{layer}.", places, seen)
        return self._norm(x[-1:], "out_norm")[0] @ self._tensors["lm_head_query_in.weight"].T

    def _block(self, x: np.ndarray, block: str, places: np.ndarray, seen: np.ndarray) -> np.ndarray:
        heads, h = self._config["num_heads"], self._norm(x, f"{block}norm_attn")
        if self._learned:
            q, k, v = (h @ self._tensors[f"{block}{name}_proj.weight"].T for name in "qkv")
        else:
            q, k, v = np.split(h @ self._tensors[f"{block}qkv_proj.weight"].T, 3, -1)
        q, k, v = (part.reshape(len(x), heads, -1).transpose(1, 0, 2) for part in (q, k, v))
        if not self._learned:
            q, k = self._rope(q, places), self._rope(k, places)
        scores = np.where(seen, q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = (weights / weights.sum(-1, keepdims=True)) @ v
        x = x + out.transpose(1, 0, 2).reshape(len(x), -1) @ self._tensors[f"{block}o_proj.weight"].T
        h = self._norm(x, f"{block}norm_mlp")
        if self._learned:
            up = self._linear(h, f"{block}fc1")
            gelu = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
            return x + self._linear(gelu, f"{block}fc2")
        gate, up = np.split(self._linear(h, f"{block}gate_up_proj"), 2, -1)
        return x + self._linear(gate / (1 + np.exp(-gate)) * up, f"{block}down_proj")

    def _rope(self, x: np.ndarray, places: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        angles = places[:, None] * self._config["rope_base"] ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1
        )

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        return x / scale * self._tensors[f"{name}.weight"] + self._tensors[f"{name}.bias"]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self._tensors[f"{name}.weight"].T + self._tensors[f"{name}.bias"]
