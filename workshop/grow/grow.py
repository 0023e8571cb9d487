"""Growing a small target and draft to a larger shape that computes the same outputs.

`grow_shape` holds the shapes, `grow_plan` the layout of every tensor, `grow_bytes` encodes the tensors and
`grow_write` writes the files.
"""

import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.convert.families import Entry
from bough.convert.hf_vocab import UNUSED
from bough.convert.mixes import FILE_TYPES, QUANTISATION_VERSION
from bough.errors import ResourceError, UnsupportedModel, UsageError
from bough.gguf.reader import GGUFFile
from bough.gguf.rotation import require_usual_basis
from bough.gguf.writer import ValueType
from bough.hub import catalog
from bough.models.draft_spec import DraftSpec
from bough.models.safetensors_source import SafetensorsSource, find_checkpoint, read_config
from bough.models.spec import ModelSpec
from bough.models.weights import TensorSource
from workshop.grow.bytes import check_fit
from workshop.grow.plan import layer_indices, plan_draft, plan_target
from workshop.grow.shape import PairShape, check, like, preset
from workshop.grow.write import PlannedFile, Progress, write_files

TARGET, DRAFT = "target.gguf", "draft.gguf"
# Metadata whose GGUF type does not follow from the Python value.
_KINDS = {
    "tokenizer.ggml.token_type": ValueType.INT32,
    "tokenizer.ggml.eos_token_ids": ValueType.UINT32,
    "general.sampling.top_k": ValueType.INT32,
}
_PREDICTION = ("nextn_predict_layers", "attention.recurrent_layers")


@dataclass(frozen=True, slots=True)
class Growth:
    target: Path
    draft: Path | None
    shape: PairShape
    bytes: int
    parameters: int
    layer_indices: tuple[int, ...]  # the grown target's layer that holds each small layer
    taps: tuple[int, ...]  # the grown draft's


def grow(
    folder: Path,
    shape: PairShape | str | None = None,
    *,
    target: Path | None = None,
    draft: Path | None = None,
    as_file: Path | None = None,
    random: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Growth:
    """Write target.gguf and draft.gguf of `shape` (or a preset's name, 27b by default) to `folder`.

    target, draft: the small pair, by default the one in the package; a target without a draft is grown alone.
    as_file: a GGUF file whose shape and types are used. random: random weights, for timing.
    """
    folder = Path(folder)
    if target is None:
        found = catalog.named("bough-40m")
        assert found is not None and found[0].pair is not None, "the package has a pair"
        target, draft = found[0].pair.target, draft or found[0].pair.draft
    with ExitStack() as stack:
        small = stack.enter_context(GGUFFile.open(target))
        spec = ModelSpec.from_gguf(small)
        require_usual_basis(small, small.tensors)
        draft_spec, draft_source = None, None
        if draft is not None:
            draft_spec, draft_source = _open_draft(Path(draft), spec, stack)
        if as_file is not None:
            shape = like(as_file, spec)
        elif not isinstance(shape, PairShape):
            shape = preset(shape or "27b", spec, draft_spec)
        check(shape, spec, draft_spec, random=random)
        title = f"random {shape.name}" if random else f"{spec.name} grown to {shape.name}"
        metadata = _target_metadata(small, spec, shape, title)
        plans = plan_target(spec, small, shape, random=random)
        files = [PlannedFile(folder / TARGET, _architecture(spec, shape), metadata, plans, small)]
        layers = layer_indices(spec, shape.target.layers)
        taps: tuple[int, ...] = ()
        if draft_spec is not None and draft_source is not None:
            taps = tuple(layers[tap] for tap in draft_spec.taps)
            plans = plan_draft(draft_spec, draft_source, shape.draft, shape.target.width, random=random)
            keys = _draft_metadata(draft_spec, shape, taps, metadata, f"{title} DFlash")
            files.append(PlannedFile(folder / DRAFT, "dflash", keys, plans, draft_source))
        for file in files:
            for plan in file.plans:
                check_fit(plan, file.source)
        _check_folder(folder, files, force=force)
        write_files(files, progress)
    return Growth(
        target=files[0].path,
        draft=files[1].path if len(files) > 1 else None,
        shape=shape,
        bytes=sum(file.path.stat().st_size for file in files),
        parameters=sum(plan.info.elements for file in files for plan in file.plans),
        layer_indices=tuple(layers),
        taps=taps,
    )


def _open_draft(path: Path, target: ModelSpec, stack: ExitStack) -> tuple[DraftSpec, TensorSource]:
    if path.suffix == ".gguf":
        file = stack.enter_context(GGUFFile.open(path))
        spec, source = DraftSpec.from_gguf(file), file
    else:
        weights, config = find_checkpoint(path)
        depth = len(target.layers)
        spec = DraftSpec.from_config(read_config(config), source=str(config), target_depth=depth)
        source = SafetensorsSource(weights)
    spec = spec.with_heads(source.tensors)
    if spec.second is not None or spec.markov is not None:
        raise UnsupportedModel(f"{path}: DFlash2 and DSpark drafts cannot be grown, needed a DFlash draft")
    spec.check_target(target)
    spec.check_tensors(source.tensors, target, str(path))
    return spec, source


def _check_folder(folder: Path, files: list[PlannedFile], *, force: bool) -> None:
    """Create the folder; raise if files would be overwritten or the disk is too full."""
    existing = [str(file.path) for file in files if file.path.exists()]
    if existing and not force:
        raise UsageError(
            f"{' and '.join(existing)} exist{'s' if len(existing) == 1 else ''}",
            "`force` overwrites them; otherwise choose another `output`",
        )
    needed = sum(file.data_bytes + file.header_bytes for file in files)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise UsageError(f"{folder} cannot be used as a folder: {error.strerror or error}") from error
    if free < needed:
        raise ResourceError(
            f"{folder}: growing needs {needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free on its disk",
            "free some space, or set `output` to a folder on another disk",
        )


def _architecture(spec: ModelSpec, shape: PairShape) -> str:
    return spec.architecture if shape.target.experts is None else f"{spec.architecture}moe"


def _target_metadata(small: GGUFFile, spec: ModelSpec, shape: PairShape, title: str) -> list[Entry]:
    large, delta, prefix = shape.target, spec.delta, f"{spec.architecture}."
    assert delta is not None
    changed: dict[str, Any] = {
        "general.name": title,
        "general.file_type": FILE_TYPES["q4_k_m"],
        f"{prefix}block_count": large.layers,
        f"{prefix}context_length": large.context_length or spec.context_length,
        f"{prefix}embedding_length": large.width,
        f"{prefix}feed_forward_length": large.feed_forward,
        f"{prefix}attention.head_count": large.heads,
        f"{prefix}attention.head_count_kv": large.kv_heads,
        f"{prefix}ssm.group_count": large.key_heads,
        f"{prefix}ssm.time_step_rank": large.value_heads,
        f"{prefix}ssm.inner_size": large.value_heads * delta.head_dim,
    }
    if f"{prefix}vocab_size" in small.metadata:
        changed[f"{prefix}vocab_size"] = large.vocab_size
    omitted = {"general.architecture", "general.alignment", *(prefix + key for key in _PREDICTION)}
    if large.experts is not None:
        del changed[f"{prefix}feed_forward_length"]
        omitted.add(f"{prefix}feed_forward_length")
        changed |= {
            f"{prefix}expert_count": large.experts.count,
            f"{prefix}expert_used_count": large.experts.used,
            f"{prefix}expert_feed_forward_length": large.experts.width,
            f"{prefix}expert_shared_feed_forward_length": large.experts.shared_width,
        }
    kept = {key: value for key, value in small.metadata.items() if key not in omitted}
    entries = _entries(prefix, _with_filler(kept | changed, spec.vocab_size, large.vocab_size))
    named = f"{_architecture(spec, shape)}."
    return [(re.sub(f"^{prefix}", named, key), value, kind) for key, value, kind in entries]


def _draft_metadata(
    spec: DraftSpec, shape: PairShape, taps: Iterable[int], target: list[Entry], title: str
) -> list[Entry]:
    """Return the metadata of a `dflash` file; vocabulary and context are the target's."""
    large = shape.draft
    context = next(value for key, value, _ in target if key.endswith(".context_length"))
    keys: dict[str, Any] = {
        "general.type": "model",
        "general.name": title,
        "general.quantization_version": QUANTISATION_VERSION,
        "dflash.block_count": large.layers,
        "dflash.vocab_size": shape.target.vocab_size,
        "dflash.context_length": context,
        "dflash.embedding_length": shape.target.width,
        "dflash.feed_forward_length": large.feed_forward,
        "dflash.attention.head_count": large.heads,
        "dflash.attention.head_count_kv": large.kv_heads,
        "dflash.attention.key_length": spec.head_dim,
        "dflash.attention.value_length": spec.head_dim,
        "dflash.attention.layer_norm_rms_epsilon": float(spec.eps),
        "dflash.rope.freq_base": float(spec.rope_theta),
        "dflash.block_size": spec.block_size,
    }
    sliding = [kind == "sliding" for kind in spec.layers]
    if any(sliding):
        keys["dflash.attention.sliding_window"] = spec.window
        keys["dflash.attention.sliding_window_pattern"] = sliding + [False] * (large.layers - len(sliding))
    if list(spec.causal) != sliding:
        if len(set(spec.causal)) > 1:
            raise UnsupportedModel(
                f"{spec.source}: causal layers are {list(spec.causal)}, needed: all, none or the sliding ones"
            )
        keys["dflash.attention.causal"] = spec.causal[0]
    entries: list[Entry] = [(key, value, None) for key, value in keys.items()]
    entries.append(("dflash.target_layers", [tap + 1 for tap in taps], ValueType.INT32))
    entries += [entry for entry in target if entry[0].startswith("tokenizer.")]
    return [*entries, ("tokenizer.ggml.mask_token_id", spec.mask_id, None)]


def _with_filler(metadata: Mapping[str, Any], small: int, large: int) -> dict[str, Any]:
    """Pad the vocabulary with unused tokens."""
    new = range(small, large)
    filler: dict[str, list[Any]] = {
        "tokenizer.ggml.tokens": [f"[PAD{token}]" for token in new],
        "tokenizer.ggml.token_type": [UNUSED] * len(new),
        "tokenizer.ggml.scores": [0.0] * len(new),
    }
    return {
        key: [*value, *filler[key]] if key in filler and len(value) == small else value
        for key, value in metadata.items()
    }


def _entries(prefix: str, metadata: Mapping[str, Any]) -> list[Entry]:
    kinds = {**_KINDS, f"{prefix}rope.dimension_sections": ValueType.INT32}
    return [(key, value, kinds.get(key)) for key, value in metadata.items() if value != []]
