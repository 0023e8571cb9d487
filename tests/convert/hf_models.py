"""Tiny random Hugging Face models of every convertible family, and their folders."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken as Added
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.muse_glimmer import (
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    MuseGlimmerTextConfig,
)
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

FAMILIES = ("qwen35", "qwen35moe", "qwen3moe", "qwen3", "qwen2", "llama", "llama3")

_COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
_HYBRID = {
    **_COMMON,
    "num_hidden_layers": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_DENSE = {**_COMMON, "num_hidden_layers": 3, "intermediate_size": 96}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def _plain_rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


_RECIPES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "qwen35": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, {**_HYBRID, "intermediate_size": 96}),
    "qwen35moe": (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig,
        {
            **_HYBRID,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**_DENSE, "rope_parameters": _plain_rope(1000000.0)}),
    "qwen3moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            **_DENSE,
            "rope_parameters": _plain_rope(1000000.0),
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    # Qwen2 has no head_dim of its own: 64 / 4 = 16.
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {
            **{key: value for key, value in _DENSE.items() if key != "head_dim"},
            "rope_parameters": _plain_rope(1000000.0),
        },
    ),
    "llama": (LlamaForCausalLM, LlamaConfig, {**_DENSE, "rope_parameters": _plain_rope(500000.0)}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {**_DENSE, "rope_parameters": _LLAMA3_ROPE}),
    "muse": (
        MuseGlimmerForConditionalGeneration,
        MuseGlimmerTextConfig,
        {
            **_DENSE,
            "num_hidden_layers": 8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": _plain_rope(500000.0),
            "sliding_window": 24,
            "output_multiplier": 3.0,  # as large as the cap: it bends most logits
            "final_logit_softcapping": 4.0,
        },
    ),
}
_VISION = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}


def randomise(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Random values for every parameter: the defaults (zero norms and biases, ones) would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: torch.Tensor) -> torch.Tensor:
        return torch.randn(parameter.shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.rand(parameter.shape, generator=generator) * 4.5 - 3)
            elif name.endswith("dt_bias"):
                parameter.copy_(normal(parameter))
            elif "norm" in name:
                parameter.copy_(parameter + 0.3 * normal(parameter))
            elif "conv1d" in name:
                parameter.copy_(0.5 * normal(parameter))
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * normal(parameter))
            else:
                parameter.copy_(normal(parameter) * parameter.shape[-1] ** -0.5)
    return model.float().eval()


def build_hf(family: str, *, seed: int = 0, tie: bool = False, **overrides: Any) -> tuple[Any, Any]:
    """A random float32 model of `family` with eager attention, and its configuration."""
    model_class, config_class, settings = _RECIPES[family]
    config = config_class(**{**settings, "tie_word_embeddings": tie, **overrides})
    if family == "muse":  # has no class for text alone
        sizes = {"out_hidden_size": 128, "projector_hidden_size": 32, "tie_word_embeddings": tie}
        config = MuseGlimmerConfig(text_config=config.to_dict(), vision_config=_VISION, **sizes)
    config._attn_implementation = "eager"
    return randomise(model_class(config), seed), config


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHITESPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
SPLIT_REGEX = {
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _WHITESPACE,
    "qwen35": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    + _WHITESPACE,
    "llama-bpe": _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    + _WHITESPACE,
    "llama4": "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{_CONTRACTIONS}?" for word in _CASED)
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    + _WHITESPACE,
}
PRE_TOKENISER = {
    "qwen35": "qwen35",
    "qwen35moe": "qwen35",
    "qwen3": "qwen2",
    "qwen3moe": "qwen2",
    "qwen2": "qwen2",
    "llama": "llama-bpe",
    "llama3": "llama-bpe",
    "muse": "llama4",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SENTENCES = (
    "the quick brown fox jumps over the lazy dog and then the other dog, too",
    "a model that reads the text and writes the text: 12 + 30 = 42, isn't it?",
    "def add(left, right):\n    return left + right\n",
)


def build_tokenizer(pre: str) -> Tokenizer:
    """A byte-level BPE with 30 merges, three special and two ordinary added tokens, split as `pre` says."""
    tokenizer = Tokenizer(models.BPE())
    if pre == "gpt-2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT_REGEX[pre]), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + 30, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.add_special_tokens(
        [Added(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    tokenizer.add_tokens([Added(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    return tokenizer


def save_tokenizer(pre: str, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja as the hub's folders have them."""
    build_tokenizer(pre).save(str(folder / "tokenizer.json"))
    settings = {
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def mtp_tensors(model: Any, config: Any, *, seed: int = 1) -> dict[str, torch.Tensor]:
    """A random prediction head in the checkpoints' own naming; transformers drops it when loading."""
    generator = torch.Generator().manual_seed(seed)
    width = config.hidden_size
    shapes = {
        "mtp.fc.weight": (width, 2 * width),
        "mtp.norm.weight": (width,),
        "mtp.pre_fc_norm_embedding.weight": (width,),
        "mtp.pre_fc_norm_hidden.weight": (width,),
    }
    prefix = f"model.layers.{config.layer_types.index('full_attention')}."
    for name, tensor in model.state_dict().items():
        if name.startswith(prefix):
            shapes["mtp.layers.0." + name.removeprefix(prefix)] = tuple(tensor.shape)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def checkpoint(model: Any, config: Any, *, mtp: bool = False) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of its safetensors file, without the tied head."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return {**tensors, **(mtp_tensors(model, config) if mtp else {})}


def _family(config: Any) -> str:
    if config.model_type == "llama":
        return "llama3" if config.rope_parameters["rope_type"] == "llama3" else "llama"
    if config.model_type == "muse_glimmer":
        return "muse"
    names = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_moe": "qwen3moe"}
    return names.get(config.model_type, config.model_type)


def _shards(tensors: dict[str, torch.Tensor], count: int) -> Iterator[dict[str, torch.Tensor]]:
    names = sorted(tensors)
    for index in range(count):
        yield {name: tensors[name] for name in names[index::count]}


def save_tensors(tensors: dict[str, torch.Tensor], folder: Path, *, shards: int = 1) -> None:
    """model.safetensors, or `shards` files with their index."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    where = {}
    for index, part in enumerate(_shards(tensors, shards)):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        where.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def save_hf(
    model: Any,
    config: Any,
    folder: Path,
    with_tokenizer: bool = True,
    *,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    mtp: bool = False,
    multimodal: bool = False,
) -> Path:
    """A folder as the hub has it; `multimodal` nests the text part and adds a vision tensor beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = config.to_dict()
    settings["architectures"] = [type(model).__name__]
    if mtp:
        settings["mtp_num_hidden_layers"] = 1
    tensors = {name: tensor.to(dtype) for name, tensor in checkpoint(model, config, mtp=mtp).items()}
    if multimodal:
        outer = settings["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
        settings = {
            "architectures": [outer],
            "model_type": settings["model_type"].removesuffix("_text"),
            "text_config": settings,
            "vision_config": {"hidden_size": 8},
            "tie_word_embeddings": config.tie_word_embeddings,
        }
        tensors = {
            name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
            for name, tensor in tensors.items()
        }
        tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(8, 3, dtype=dtype)
    (folder / "config.json").write_text(json.dumps(settings, default=str))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [288, 286]}))
    save_tensors(tensors, folder, shards=shards)
    if with_tokenizer:
        save_tokenizer(PRE_TOKENISER[_family(config)], folder)
    return folder
