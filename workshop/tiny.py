"""Tiny random models of every family, with vocabulary and chat template, for tests."""

import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bough.convert.checkpoint import HFConfig
from bough.convert.convert import write_model
from bough.convert.families import Entry, read_sizes
from bough.convert.hf_vocab import CONTROL, NORMAL, UNUSED, USER_DEFINED
from bough.convert.mixes import check_mix
from bough.convert.rules import Rule, tensor_rules
from bough.errors import UsageError
from bough.gguf.writer import ValueType

VOCABULARY = 320
# Standard deviation of printable tokens' logits; a tenth of it for all others. Greedy text is then printable,
# does not stop at once, and has no near-ties that rounding could flip.
_LOGIT_SPREAD = 4.0
# Merges: common pairs of English text, in merge order.
_MERGES = (
    "t h,h e,i n,e r,a n,r e,o n,a t,e n,n d,o r,e s,i s,i t,a r,o u,l l,a l,s t,Ġ t,Ġ a,Ġ i,Ġ o,Ġ w,Ġ s,Ġ b,"
    "th e,Ġ the,an d,Ġ and,in g,Ġo f,Ġt o,Ġ is,Ġ in,on e,Ġ c,ou r,e d,Ġ =,( )"
)
_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_WORDS = ("<think>", "</think>")
_HYBRID_SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_parameters": {"rope_theta": 10000000.0, "mrope_section": [2, 1, 1]},
}
_EXPERT_SIZES = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
# A window far below a test's prompt.
_MUSE_SIZES = {
    "num_key_value_heads": 1,
    "rope_theta": 500000.0,
    "sliding_window": 12,
    "output_multiplier": 0.5,
    "final_logit_softcapping": 20.0,
}
# class, pre-tokeniser, depth, overrides of the common sizes
_FAMILIES: Mapping[str, tuple[str, str, int, dict[str, Any]]] = {
    "qwen35": ("Qwen3_5ForCausalLM", "qwen35", 8, _HYBRID_SIZES),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen35", 4, {**_HYBRID_SIZES, **_EXPERT_SIZES}),
    "qwen3": ("Qwen3ForCausalLM", "qwen2", 4, {"rope_theta": 1000000.0}),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen2", 4, {**_EXPERT_SIZES, "norm_topk_prob": True}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", 4, {"rope_theta": 1000000.0, "head_dim": None}),
    "llama": ("LlamaForCausalLM", "llama-bpe", 4, {"rope_theta": 500000.0}),
    "muse-glimmer": ("MuseGlimmerForConditionalGeneration", "llama4", 8, _MUSE_SIZES),
}
FAMILIES = tuple(_FAMILIES)
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""


# As that of Qwen3.5: an image is a slot where its part is.
SEEING_TEMPLATE = CHAT_TEMPLATE.replace("message.content +", "text(message.content) +").replace(
    "{%- for message",
    """\
{%- macro text(content) %}
{%- if content is string %}{{- content }}{%- else %}
{%- for part in content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}
{{- part.text }}{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- for message""",
    1,
)


def make_tiny(
    path: Path,
    *,
    family: str = "qwen35",
    seed: int = 0,
    layers: int | None = None,
    mix: str = "f32",
    width: int = 64,
    tied: bool = False,
    mtp: bool = False,
    context: int = 4096,
    images: bool = False,
) -> Path:
    """Write a random model of `family`, deterministic in its arguments.

    images: its vocabulary and template have them. mtp adds a prediction layer (Qwen3.5 only); with a width of
    256 rows are long enough for K-quants.
    """
    check_mix(mix)
    if family not in _FAMILIES:
        raise UsageError(f"family is {family!r}, needed: one of {', '.join(_FAMILIES)}")
    model_class, pre, depth, special = _FAMILIES[family]
    config = HFConfig(
        {
            "architectures": [model_class],
            "num_hidden_layers": depth if layers is None else layers,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": context,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": tied,
            **special,
        },
        f"tiny {family}",
    )
    sizes = read_sizes(config, mtp_layers=int(mtp))
    rules = tensor_rules(sizes)
    checkpoint = _RandomCheckpoint(rules, seed=seed, tied=tied)
    # Greedy unless a request says otherwise: tests compare texts.
    entries = [*vocabulary(pre, images=images), ("general.sampling.temp", 0.0, ValueType.FLOAT32)]
    name = f"tiny random {family}"
    write_model(Path(path), sizes, checkpoint, name=name, entries=entries, mix=mix, rules=rules)
    return Path(path)


def vocabulary(pre: str, *, images: bool = False) -> list[Entry]:
    """Return a vocabulary of 256 bytes, some merges, ChatML's control tokens and padding up to VOCABULARY."""
    merges = _MERGES.split(",")
    tokens = _text_tokens()
    types = [NORMAL] * len(tokens)
    tokens += [*_CONTROLS, *_WORDS]
    types += [CONTROL] * len(_CONTROLS) + [USER_DEFINED] * len(_WORDS)
    tokens += _VISION if images else ()
    types += [CONTROL] * len(_VISION) if images else []
    unused = range(len(tokens), VOCABULARY)
    tokens += [f"[PAD{i}]" for i in unused]
    types += [UNUSED] * len(unused)
    end_of_text, end_of_turn = tokens.index("<|endoftext|>"), tokens.index("<|im_end|>")
    return [
        ("tokenizer.ggml.model", "gpt2", None),
        ("tokenizer.ggml.pre", pre, None),
        ("tokenizer.ggml.tokens", tokens, ValueType.STRING),
        ("tokenizer.ggml.token_type", types, ValueType.INT32),
        ("tokenizer.ggml.merges", merges, ValueType.STRING),
        ("tokenizer.ggml.eos_token_id", end_of_turn, None),
        ("tokenizer.ggml.padding_token_id", end_of_text, None),
        ("tokenizer.ggml.add_bos_token", False, None),
        ("tokenizer.ggml.eos_token_ids", [end_of_turn, end_of_text], ValueType.UINT32),
        ("tokenizer.chat_template", SEEING_TEMPLATE if images else CHAT_TEMPLATE, None),
    ]


class _RandomCheckpoint:
    """Random tensors under the checkpoint's names; each depends on the seed and its own name only."""

    def __init__(self, rules: Iterable[Rule], *, seed: int, tied: bool):
        self.shapes = {name: shape for rule in rules for name, shape in rule.sources}
        self._seed = seed
        self._tied = tied
        self._head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        self._offset_norms = "model.layers.0.linear_attn.A_log" in self.shapes
        self._offset_in_blocks = "model.layers.0.self_attn.gate_proj.weight" in self.shapes

    def load(self, name: str) -> torch.Tensor:
        # numpy's random stream is the same on every processor, torch's is not
        generator = np.random.default_rng(zlib.crc32(f"{self._seed} {name}".encode()))
        shape = self.shapes[name]
        if name.endswith("A_log"):
            # decays over a fraction of a token to some dozens of tokens
            return torch.from_numpy(generator.uniform(-3, 1, shape).astype(np.float32))
        noise = torch.from_numpy(generator.standard_normal(shape, np.float32))
        if name.endswith("conv1d.weight"):
            return noise * 0.5
        if name == "model.norm.weight" and self._tied:
            # factors of either sign, otherwise every token would predict itself
            return noise - 1 if self._offset_norms else noise
        if len(shape) == 1:
            return noise * 0.2 + self._centre(name)
        if name == self._head:
            spread = [_LOGIT_SPREAD if printable else _LOGIT_SPREAD / 10 for printable in _printable()]
            return noise * torch.tensor(spread)[:, None] / math.sqrt(shape[-1])
        # only the embedding has unit variance, so that layers contribute without dominating it
        return noise if name == "model.embed_tokens.weight" else noise / math.sqrt(shape[-1])

    def where(self, name: str) -> str:
        return f"tensor {name}"

    def _centre(self, name: str) -> float:
        is_norm = name.endswith("norm.weight") or ".pre_fc_norm" in name
        offset = self._offset_norms or (self._offset_in_blocks and name.endswith("layernorm.weight"))
        is_factor = is_norm and (not offset or name.endswith("linear_attn.norm.weight"))
        return 1.0 if is_factor else 0.0


def _printable() -> list[bool]:
    """Return for each token id whether it is printable text."""
    shown = [all("!" <= letter <= "~" or letter in "ĠĊ" for letter in token) for token in _text_tokens()]
    return shown + [False] * (VOCABULARY - len(shown))


def _text_tokens() -> list[str]:
    return [*_byte_tokens(), *(merge.replace(" ", "") for merge in _MERGES.split(","))]


def _byte_tokens() -> list[str]:
    """Return GPT-2's character for every byte: itself if printable, else the next one from U+0100 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    letters = [chr(byte) for byte in sorted(visible)]
    return letters + [chr(256 + i) for i in range(256 - len(visible))]
