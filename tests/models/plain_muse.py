"""Muse-Glimmer in plain numpy and float64, written from the description of the format; nothing is cached.

It can make the mistakes that are easily made, so that a test can show that it would find them.
"""

from collections.abc import Mapping

import numpy as np

from bough.models.spec import ModelSpec

Array = np.ndarray
CLOSING_EPS = 1e-8
MISTAKES = (
    "rope on all layers",
    "no rope",
    "pairs as halves",
    "window of one more",
    "window of one less",
    "window on all layers",
    "eps of the closing norms",
    "no norm of the embedding",
    "no logit scale",
    "no cap",
    "gate before the values are summed",
    "gate after the output matrix",
    "no query scale",
    "closing norm after the sum",
)


def _rms(x: Array, eps: float, weight: Array | float = 1.0) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


class PlainMuse:
    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Array], *, period: int = 4, mistake: str = ""):
        """period: every such layer sees the whole text; mistake: one of MISTAKES, or none."""
        assert mistake in ("", *MISTAKES)
        self._spec, self._tensors, self._period, self._mistake = spec, tensors, period, mistake
        [self._window] = {layer.window for layer in spec.attention if layer.window is not None}

    def logits(self, tokens: list[int]) -> Array:
        """Return the logits [T, V]."""
        spec = self._spec
        x = self._tensors["token_embd.weight"][tokens]
        if self._mistake != "no norm of the embedding":
            x = _rms(x, spec.eps)
        for layer in range(len(spec.layers)):
            for half in (self._attention, self._feed_forward):
                x = half(x, layer)
        logits = _rms(x, spec.eps, self._tensors["output_norm.weight"]) @ self._tensors["output.weight"].T
        if self._mistake != "no logit scale":
            logits = logits * spec.logits.scale
        return logits if self._mistake == "no cap" else spec.logits.cap * np.tanh(logits / spec.logits.cap)

    def _of(self, layer: int, name: str) -> Array:
        return self._tensors[f"blk.{layer}.{name}.weight"]

    def _closed(self, x: Array, out: Array, layer: int, name: str) -> Array:
        eps = self._spec.eps if self._mistake == "eps of the closing norms" else CLOSING_EPS
        if self._mistake == "closing norm after the sum":
            return _rms(x + out, eps, self._of(layer, name))
        return x + _rms(out, eps, self._of(layer, name))

    def _attention(self, x: Array, layer: int) -> Array:
        spec, slides = self._spec, (layer + 1) % self._period != 0
        h = _rms(x, spec.eps, self._of(layer, "attn_norm"))
        q, k, v, gate = (
            (h @ self._of(layer, f"attn_{part}").T).reshape(len(x), -1, spec.head_dim)
            for part in ("q", "k", "v", "gate")
        )
        scale = 1.0 if self._mistake == "no query scale" else self._of(layer, "attn_q_norm")
        q, k = _rms(q, spec.eps, scale), _rms(k, spec.eps, self._of(layer, "attn_k_norm"))
        if (slides or self._mistake == "rope on all layers") and self._mistake != "no rope":
            q, k = self._turned(q), self._turned(k)
        group = spec.heads // spec.kv_heads
        k, v = k.repeat(group, 1), v.repeat(group, 1)
        if self._mistake == "gate before the values are summed":
            v, gate = v * _sigmoid(gate), np.full_like(gate, np.inf)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(spec.head_dim)
        before = np.arange(len(x))[:, None] - np.arange(len(x))
        window = {"window of one more": 1, "window of one less": -1}.get(self._mistake, 0) + self._window
        reach = window if slides or self._mistake == "window on all layers" else len(x)
        scores[:, (before < 0) | (before >= reach)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        out, opened = np.einsum("hqk,khd->qhd", shares, v).reshape(len(x), -1), _sigmoid(gate)
        opened = opened.reshape(out.shape)
        matrix = self._of(layer, "attn_output").T
        if self._mistake == "gate after the output matrix":
            out = (out @ matrix) * opened[:, : spec.width]
        else:
            out = (out * opened) @ matrix
        return self._closed(x, out, layer, "post_attention_norm")

    def _turned(self, heads: Array) -> Array:
        dim = self._spec.head_dim
        angles = np.arange(len(heads))[:, None] * self._spec.rope_theta ** (-np.arange(0, dim, 2) / dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        if self._mistake == "pairs as halves":
            a, b = heads[..., : dim // 2], heads[..., dim // 2 :]
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
        turned = np.empty_like(heads)
        a, b = heads[..., ::2], heads[..., 1::2]
        turned[..., ::2], turned[..., 1::2] = a * cos - b * sin, b * cos + a * sin
        return turned

    def _feed_forward(self, x: Array, layer: int) -> Array:
        h = _rms(x, self._spec.eps, self._of(layer, "ffn_norm"))
        gate, up = (h @ self._of(layer, f"ffn_{part}").T for part in ("gate", "up"))
        out = (gate * _sigmoid(gate) * up) @ self._of(layer, "ffn_down").T
        return self._closed(x, out, layer, "post_ffw_norm")
