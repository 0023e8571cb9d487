"""The MTP block in plain numpy and float64, written from the description of the format; nothing is cached."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from bough.gguf.quants import dequantise
from bough.gguf.reader import GGUFFile
from bough.models.spec import ModelSpec

Array = np.ndarray


def read_arrays(path: Path) -> tuple[ModelSpec, dict[str, Array]]:
    with GGUFFile.open(path) as file:
        tensors = {
            name: dequantise(torch.from_numpy(file.raw(name).copy()), info.type).double().numpy()
            for name, info in file.tensors.items()
        }
        return ModelSpec.from_gguf(file), tensors


class PlainMTP:
    """Predictions after a text and a path of drafted tokens."""

    def __init__(self, spec: ModelSpec, tensors: Mapping[str, Array], *, context: int | None = None):
        self._spec, self._tensors, self._context = spec, tensors, context
        self._block = f"blk.{len(spec.layers)}."

    def _of(self, name: str) -> Array:
        return self._tensors[f"{self._block}{name}.weight"]

    def _rms(self, x: Array, weight: Array) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self._spec.eps) * weight

    def _rope(self, heads: Array, position: int) -> Array:
        half = self._spec.rope_dim // 2
        angle = position * self._spec.rope_theta ** (-2 * np.arange(half) / self._spec.rope_dim)
        a, b, rest = heads[:, :half], heads[:, half : 2 * half], heads[:, 2 * half :]
        turned = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
        return np.concatenate([*turned, rest], 1)

    def log_probabilities(self, text: list[int], hidden: Array, drafted: list[int]) -> list[Array]:
        """Of the token after the text, and after each token drafted behind it.

        The last token of the text is the anchor: hidden [len(text) - 1, width] is the target's hidden state
        of the tokens before it, after its final norm.
        """
        spec, tokens = self._spec, [*text, *drafted]
        states = {p: hidden[p] for p in range(len(hidden))}
        keys: dict[int, Array] = {}
        values: dict[int, Array] = {}
        first = 1 if self._context is None else max(1, len(hidden) - self._context)
        found = []
        for p in range(1, len(tokens)):
            token = self._rms(self._tensors["token_embd.weight"][tokens[p]], self._of("nextn.enorm"))
            before = self._rms(states[p - 1], self._of("nextn.hnorm"))
            x = self._of("nextn.eh_proj") @ np.concatenate([token, before])
            h = self._rms(x, self._of("attn_norm"))
            k = (self._of("attn_k") @ h).reshape(spec.kv_heads, -1)
            keys[p] = self._rope(self._rms(k, self._of("attn_k_norm")), p)
            values[p] = (self._of("attn_v") @ h).reshape(spec.kv_heads, -1)
            if p < len(hidden):
                continue
            x = x + self._of("attn_output") @ self._attend(h, p, keys, values, first)
            x = x + self._feed_forward(self._rms(x, self._of("post_attention_norm")))
            states[p] = self._rms(x, self._of("nextn.shared_head_norm"))
            head = "token_embd.weight" if spec.tied_head else "output.weight"
            logits = self._tensors[head] @ states[p]
            found.append(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
        return found

    def _attend(
        self, h: Array, p: int, keys: dict[int, Array], values: dict[int, Array], first: int
    ) -> Array:
        spec = self._spec
        both = (self._of("attn_q") @ h).reshape(spec.heads, 2 * spec.head_dim)
        q, gate = both[:, : spec.head_dim], both[:, spec.head_dim :]
        q = self._rope(self._rms(q, self._of("attn_q_norm")), p)
        out = []
        for head in range(spec.heads):
            group = head // (spec.heads // spec.kv_heads)
            seen = range(first, p + 1)
            scores = np.array([q[head] @ keys[at][group] for at in seen]) / np.sqrt(spec.head_dim)
            weights = np.exp(scores - scores.max())
            row = (weights / weights.sum()) @ np.stack([values[at][group] for at in seen])
            out.append(row / (1 + np.exp(-gate[head])))
        return np.concatenate(out)

    def _feed_forward(self, h: Array) -> Array:
        if self._spec.experts is None:
            return self._swiglu(h, self._of("ffn_gate"), self._of("ffn_up"), self._of("ffn_down"))
        router = np.exp(self._of("ffn_gate_inp") @ h)
        router /= router.sum()
        used = np.argsort(-router)[: self._spec.experts.used]
        stacks = [self._of(f"ffn_{part}_exps") for part in ("gate", "up", "down")]
        routed: Callable[[int], Array] = lambda e: self._swiglu(h, *(stack[e] for stack in stacks))  # noqa: E731
        out = sum(router[e] / router[used].sum() * routed(e) for e in used)
        shared = self._swiglu(h, *(self._of(f"ffn_{part}_shexp") for part in ("gate", "up", "down")))
        return out + shared / (1 + np.exp(-(self._of("ffn_gate_inp_shexp").reshape(-1) @ h)))

    @staticmethod
    def _swiglu(h: Array, gate: Array, up: Array, down: Array) -> Array:
        g = gate @ h
        return down @ (g / (1 + np.exp(-g)) * (up @ h))
