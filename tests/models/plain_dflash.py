"""A DFlash draft in numpy, one number at a time almost: all context is kept, everything is recomputed.

Written from the description of the method alone; shares nothing with the package.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]
Half = Callable[[list[np.ndarray]], list[np.ndarray]]


class PlainDraft:
    """`causal` overrides the config; `context`: positions that full layers attend to, None: all."""

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Tensors,
        *,
        causal: bool | None = None,
        context: int | None = None,
    ):
        self._config = {**config, **config.get("dflash_config", {})}
        self._tensors = {name: np.asarray(tensor, dtype=np.float64) for name, tensor in tensors.items()}
        self._causal, self._context = causal, context
        self._depth = config["num_hidden_layers"]
        self._heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._dim = config["head_dim"]
        self._theta = (
            config["rope_parameters"]["rope_theta"] if "rope_parameters" in config else config["rope_theta"]
        )
        self._features: list[np.ndarray] = []

    def append(self, features: np.ndarray) -> None:
        """features [n, taps * width] of the positions that come next."""
        self._features += list(np.asarray(features, dtype=np.float64))

    def block(self, embeddings: np.ndarray) -> np.ndarray:
        """embeddings [T, width] of anchor and masks to hidden rows [T, width]."""
        context = [
            self._rms(self._tensors["fc.weight"] @ feature, "hidden_norm.weight")
            for feature in self._features
        ]
        scale = self._config.get("input_embedding_scale", 1.0)
        rows = [scale * row for row in np.asarray(embeddings, dtype=np.float64)]
        for layer in range(self._depth):
            rows = self._layer(layer, rows, context)
        return np.stack([self._rms(row, "norm.weight") for row in rows])

    def logits(self, hidden: np.ndarray, head: np.ndarray) -> np.ndarray:
        logits = hidden @ np.asarray(head, dtype=np.float64).T * self._config.get("output_multiplier", 1.0)
        cap = self._config.get("final_logit_softcapping")
        return cap * np.tanh(logits / cap) if cap else logits

    def own_ids(self) -> list[int] | None:
        """The target's ids of a reduced vocabulary, one for each row of the draft's own head."""
        table = self._tensors.get("d2t")
        return None if table is None else [row + int(distance) for row, distance in enumerate(table)]

    def own_logits(self, hidden: np.ndarray) -> np.ndarray:
        """Logits of the target's tokens by the draft's own head; those that it does not know are -inf."""
        own, found = self.own_ids(), self.logits(hidden, self._tensors["lm_head.weight"])
        assert own is not None
        every = np.full((len(hidden), len(self._tensors["markov_head.markov_w1.weight"])), -np.inf)
        for row, id in enumerate(own):
            every[:, id] = found[:, row]
        return every

    def pair_score(self, row: np.ndarray, before: int, candidate: int) -> float:
        """What the head of DFlash2 or DSpark adds to a candidate's logit after another token; row: hidden."""
        if "markov_head.markov_w1.weight" in self._tensors:
            first, second = (self._tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
            own = self.own_ids()
            return float(first[before] @ second[candidate if own is None else own.index(candidate)])
        gate = self._tensors["candidate_selector.hidden_projection.weight"] @ row
        left = self._tensors["candidate_selector.predecessor_codebook"][before]
        return float((left * gate) @ self._tensors["candidate_selector.successor_codebook"][candidate])

    def confidence(self, row: np.ndarray, before: int) -> float:
        """DSpark's probability that the next token is accepted after another one; row: hidden [width]."""
        inputs = np.concatenate([row, self._tensors["markov_head.markov_w1.weight"][before]])
        logit = self._tensors["confidence_head.proj.weight"][0] @ inputs
        return float(1 / (1 + np.exp(-logit - self._tensors["confidence_head.proj.bias"][0])))

    def _layer(self, layer: int, rows: list[np.ndarray], context: list[np.ndarray]) -> list[np.ndarray]:
        normed = [self._rms(row, f"layers.{layer}.input_layernorm.weight") for row in rows]
        mixed = self._around(layer, "attention", normed, lambda h: self._attention(layer, h, context))
        rows = [row + out for row, out in zip(rows, mixed, strict=True)]
        normed = [self._rms(row, f"layers.{layer}.post_attention_layernorm.weight") for row in rows]
        done = self._around(layer, "mlp", normed, lambda h: [self._feed_forward(layer, row) for row in h])
        return [row + out for row, out in zip(rows, done, strict=True)]

    def _around(self, layer: int, part: str, rows: list[np.ndarray], half: Half) -> list[np.ndarray]:
        """Half a layer, between the convolutions of DFlash2 where there are any."""
        base = self._tensors.get(f"layers.{layer}.{part}_conv.base_kernel")
        if base is None:
            return half(rows)
        _, taps, width = base.shape
        project = self._weight(layer, f"{part}_conv.kernel_projection")
        dynamic = [(project @ row).reshape(2, taps, -1) for row in rows]
        group = width // dynamic[0].shape[-1]

        def convolved(inputs: list[np.ndarray], side: int) -> list[np.ndarray]:
            out = []
            for t in range(len(inputs)):
                total = np.zeros(width)
                for o in range(taps):
                    for channel in range(width) if t >= o else ():
                        weight = base[side, o, channel] + dynamic[t][side, o, channel // group]
                        total[channel] += weight * inputs[t - o][channel]
                out.append(total)
            return out

        return convolved(half(convolved(rows, 0)), 1)

    def _feed_forward(self, layer: int, h: np.ndarray) -> np.ndarray:
        gate, up = self._weight(layer, "mlp.gate_proj") @ h, self._weight(layer, "mlp.up_proj") @ h
        return self._weight(layer, "mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * up)

    def _attention(self, layer: int, normed: list[np.ndarray], context: list[np.ndarray]) -> list[np.ndarray]:
        start = len(context)
        sources = context + normed
        keys = [self._heads_of(layer, "k", source, position) for position, source in enumerate(sources)]
        values = [self._heads_of(layer, "v", source, None) for source in sources]
        done = []
        for index, row in enumerate(normed):
            query = start + index
            seen = [key for key in range(len(sources)) if self._sees(layer, query, key, start)]
            mixed = []
            for head, q in enumerate(self._heads_of(layer, "q", row, query)):
                group = head // (self._heads // self._kv_heads)
                scores = np.array([q @ keys[key][group] for key in seen]) / math.sqrt(self._dim)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                mixed.append(sum(w * values[key][group] for w, key in zip(weights, seen, strict=True)))
            done.append(self._weight(layer, "self_attn.o_proj") @ np.concatenate(mixed))
        return done

    def _sees(self, layer: int, query: int, key: int, start: int) -> bool:
        kinds = self._config.get("layer_types") or ["full_attention"] * self._depth
        sliding = kinds[layer] == "sliding_attention"
        causal = self._causal
        if causal is None:
            spellings = ("is_causal", "causal", "causal_head")
            causal = next((self._config[key] for key in spellings if key in self._config), None)
        if causal is None:
            causal = sliding
        if causal and key > query:
            return False
        if sliding:
            return abs(key - query) < self._config["sliding_window"]
        return self._context is None or key >= start - self._context

    def _heads_of(self, layer: int, part: str, x: np.ndarray, position: int | None) -> list[np.ndarray]:
        """Query, key or value heads of one row; turned to `position` where there is one."""
        y = self._weight(layer, f"self_attn.{part}_proj") @ x
        heads = [y[i : i + self._dim] for i in range(0, len(y), self._dim)]
        if position is None:
            return heads
        return [
            self._turned(self._rms(h, f"layers.{layer}.self_attn.{part}_norm.weight"), position)
            for h in heads
        ]

    def _turned(self, x: np.ndarray, position: int) -> np.ndarray:
        half = self._dim // 2
        out = np.empty_like(x)
        for pair in range(half):
            angle = position * self._theta ** (-2 * pair / self._dim)
            a, b = x[pair], x[pair + half]
            out[pair] = a * math.cos(angle) - b * math.sin(angle)
            out[pair + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def _rms(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x) + self._config["rms_norm_eps"]) * self._tensors[name]

    def _weight(self, layer: int, name: str) -> np.ndarray:
        return self._tensors[f"layers.{layer}.{name}.weight"]
