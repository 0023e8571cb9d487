"""`bough show`: what a model file holds and needs, without loading it. Only --fit imports torch."""

import contextlib
import math
import tempfile
from collections.abc import Generator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bough.cli import fit as shown
from bough.cli import view
from bough.cli.flags import with_flags
from bough.cli.footprint import in_mtp_block, in_native_code, on_cpu, on_gpu, stored
from bough.cli.inventory import Proposer, inventory, proposers
from bough.cli.options import Draft, MaxContext, Model, Parallel, VramLimit, grouped, option
from bough.config import DraftConfig, EngineConfig, SpecConfig, environment
from bough.errors import BoughError, DownloadFailed, ModelFileError, ModelNotFound, ResourceError, UsageError
from bough.gguf.types import NATIVE_TYPES
from bough.hub.catalog import EMBEDDED, FROM_CARD, MODES, ModelCard, Sampling
from bough.hub.download import fetch_heads, gguf_files
from bough.hub.drafts import draft_head
from bough.hub.recommended import recommended
from bough.hub.resolve import Meaning, meaning, resolve, resolve_draft
from bough.session.pairing import (
    AUTO,
    DraftPlan,
    NamedDraft,
    card_of,
    draft_at_hand,
    plan_draft,
    with_encoder,
)

if TYPE_CHECKING:
    from bough.gguf.reader import GGUFFile
    from bough.models.spec import ModelSpec

CONTEXTS = (4096, 32768, 131072)
HEADERS = (16 << 20, 64 << 20)  # bytes of a file on the hub that are tried


@grouped
def show(
    *,
    model: Model = None,
    fit: bool = option(
        "Show what would be loaded on a GPU, part by part, and which contexts fit in which formats.",
        default=False,
    ),
    vram_limit: VramLimit = None,
    max_ctx: MaxContext = None,
    parallel: Parallel = None,
    draft: Draft = None,
    as_json: bool = option("Print one JSON object.", "--json", default=False),
) -> None:
    """Show what a model is, how much memory it needs, its draft and what is recommended for it.

    Nothing is downloaded: `bough pull` does that. Of a model that is not here the hub is asked for the
    beginning of its files, some megabytes, which are not kept.

    bough show model.gguf

    bough show model.gguf --fit --vram-limit 24g
    """
    name = model if model is not None else environment().target or EMBEDDED
    if not fit and any(value is not None for value in (vram_limit, max_ctx, parallel, draft)):
        raise UsageError(
            "--vram-limit, --max-ctx, --parallel and --draft belong to --fit", "bough show MODEL --fit"
        )
    meant = meaning(name)
    with _file(meant) as (file, source):
        facts = describe(file, source)
        card = meant.card
        if card is None and facts["model"] is not None:
            card = card_of(file, meant.repo.repo if meant.repo else None)
        facts |= _card(card, file.metadata) | {"draft": _draft(file.path, card)}
        facts["small_models"] = [] if facts["draft"] or not facts["supported"] else _small_models(file)
        if fit:
            config = EngineConfig(max_ctx=max_ctx, vram_limit=vram_limit, parallel=parallel)
            facts["fit"] = _fit(file, facts, card, config, draft)
    if as_json:
        view.print_json(facts)
    elif fit:
        shown.show(facts["fit"])
    else:
        _print(facts)
    if fit and facts["fit"]["plan"] is None:
        raise typer.Exit(ResourceError.exit_code)


@contextlib.contextmanager
def _file(meant: Meaning) -> "Generator[tuple[GGUFFile, str]]":
    """Open a model that is here, else one that has its header and holes instead of weights; say which."""
    from bough.gguf.reader import GGUFFile

    try:
        path = resolve(meant, offline=True)
    except ModelNotFound as missing:
        with (
            tempfile.TemporaryDirectory(prefix="bough-show-") as folder,
            _header(meant, Path(folder), missing) as file,
        ):
            yield file, f"not on this machine: bough pull {meant.card.name if meant.card else meant.fetched}"
        return
    with GGUFFile.open(path) as file:
        yield file, str(path)


def _header(meant: Meaning, folder: Path, missing: ModelNotFound) -> "GGUFFile":
    """Return a model with its header alone; raise `missing` where the hub cannot be asked.

    Vocabularies of 250,000 tokens need some 11 MB.
    """
    from bough.gguf.reader import GGUFFile

    name = meant.fetched
    if name is None:
        raise missing
    if environment().offline:
        return _from_card(meant, folder, missing)
    for length in HEADERS:
        try:
            with view.Screen().waiting("Asking the hub"):
                paths = fetch_heads(name, gguf_files(name), folder, length=length)
        except DownloadFailed as unreachable:
            return _from_card(meant, folder, unreachable)
        try:
            return GGUFFile.open(paths[0])
        except ModelFileError:
            if length == HEADERS[-1]:
                raise
    raise AssertionError("HEADERS is empty")


def _from_card(meant: Meaning, folder: Path, problem: BoughError) -> "GGUFFile":
    """Return a catalogue name's target with a header made of its card; raise `problem` for other names."""
    from bough.convert.header import write_target
    from bough.gguf.reader import GGUFFile

    card = meant.card
    if card is None or card.shape is None or meant.fetched != card.target:
        raise problem
    view.Screen().note(f"The hub cannot be asked: figures of {card.name} that come with Bough.")
    return GGUFFile.open(write_target(card, card.shape, folder / f"{card.name}.gguf"))


def _fit(
    file: "GGUFFile", facts: dict[str, Any], card: ModelCard | None, config: EngineConfig, draft: str | None
) -> dict[str, Any]:
    from bough.models.spec import ModelSpec

    if facts["model"] is None:
        raise UsageError(f"{file.path.name} cannot be run: {facts['problems'][0]}")
    named = NamedDraft.read(draft or environment().draft or AUTO)
    plan = plan_draft(named, file.path, card, resolve=partial(resolve_draft, offline=True))
    with _draft_file(plan, card) as path:
        draft_config = None if path is None else DraftConfig(path)
        config = with_encoder(file, replace(config, speculation=plan.config, draft=draft_config))
        planned = shown.survey(file, ModelSpec.from_gguf(file), config)
    known = facts["draft"]["name"] if path is not None and facts["draft"] and named.name == AUTO else None
    return planned | {"draft": known or planned["draft"]}


@contextlib.contextmanager
def _draft_file(plan: DraftPlan, card: ModelCard | None) -> Generator[Path | None]:
    """Yield the draft that would be used; of one that is listed and not here, its shapes alone."""
    path = plan.path
    if plan.missing is None or card is None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="bough-show-") as folder:
        with contextlib.suppress(ModelNotFound, DownloadFailed):
            if not environment().offline:
                path = draft_head(plan.missing, Path(folder), length=HEADERS[0])
        if path is None and card.shape is not None and card.shape.draft is not None:
            from bough.convert.header import write_draft

            path = write_draft(card, card.shape, Path(folder))
        yield path


def describe(file: "GGUFFile", source: str) -> dict[str, Any]:
    """Return all facts about a file for JSON; `model` is null for architectures that are not supported.

    source: its path, or where it is.
    """
    from bough.models.pooling import VectorSpec
    from bough.models.spec import ModelSpec

    facts: dict[str, Any] = {
        "path": source,
        "size_bytes": file.size_bytes,
        "architecture": file.architecture,
        "name": file.get("general.name", str, "") or file.path.stem,
        "supported": True,
        "problems": [],
        "types": _types(file),
        "model": None,
        "vectors": None,
        "images": None,
        "stored_bytes": None,
        "memory": [],
    }
    try:
        spec = ModelSpec.from_gguf(file)
        facts["model"] = _model(spec) | {"parameters": _parameters(file, spec)}
        vectors = VectorSpec.from_gguf(file, spec.width)
        facts["vectors"] = vectors and {"kind": vectors.kind, "pooling": vectors.pooling.name}
        facts["stored_bytes"] = stored(file, spec)
        facts["memory"] = _memory(file, spec, native=not _not_native(facts))
        facts["images"] = _images(file, spec)
    except ModelFileError as error:
        facts["problems"].append(with_flags(error.message))
    facts["text"] = None
    try:
        if file.metadata.get(FROM_CARD) is None:
            facts["text"] = _text(file)
    except ModelFileError as error:
        facts["problems"].append(with_flags(error.message))
    facts["supported"] = not facts["problems"]
    return facts


def _card(card: ModelCard | None, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the card's name and what is recommended, by the card or without one."""
    advice = recommended(card, metadata)
    sampling = {mode: asdict(getattr(advice, mode)) for mode in MODES}
    return {
        "card": card and card.name,
        "recommended": {
            "budget": card.budget if card else SpecConfig().budget,
            "thinking": advice.thinks,
            "reasoning_effort": advice.effort or None,
            "sampling": sampling,
            "sentences": advice.sentences or None,
            "source": advice.source,
        },
    }


def _draft(target: Path, card: ModelCard | None) -> dict[str, Any] | None:
    """Return the draft that would be used, or is listed and not here."""
    path = draft_at_hand(target, card)
    if path is None and (card is None or card.draft is None):
        return None
    listed = card is not None and (card.draft or (card.pair and "comes with bough"))
    return {"name": str(listed or "beside the model"), "path": None if path is None else str(path)}


def _small_models(file: "GGUFFile") -> list[str]:
    """Return the models in the cache and beside a file that can propose tokens for it."""
    names = {path.resolve(): str(path) for path in sorted(file.path.parent.glob("*.gguf"))}
    names |= {target.files.path.resolve(): str(target.files) for target in inventory().targets}
    others = proposers((name, path) for path, name in names.items())
    return Proposer(file.path.name, file.size_bytes, file.metadata).small_models(others)


def _types(file: "GGUFFile") -> list[dict[str, Any]]:
    """Return the weights by type, largest first."""
    kinds = sorted({info.type for info in file.tensors.values()})
    rows = []
    for kind in kinds:
        tensors = [info for info in file.tensors.values() if info.type is kind]
        weights, size = sum(info.elements for info in tensors), sum(info.nbytes for info in tensors)
        rows.append({"type": kind.name, "tensors": len(tensors), "weights": weights, "bytes": size})
    return sorted(rows, key=lambda row: -row["bytes"])


def _model(spec: "ModelSpec") -> dict[str, Any]:
    shapes = asdict(spec)
    for key in ("architecture", "name", "family", "layers", "attention", "mtp_layers"):
        del shapes[key]
    layers = {"attention": spec.attention_layers, "delta": spec.delta_layers, "mtp": spec.mtp_layers}
    windows = [layer.window for layer in spec.attention if layer.window is not None]
    layers |= {"sliding": len(windows), "window": max(windows, default=0)}
    return {"layers": layers, **shapes}


def _images(file: "GGUFFile", spec: "ModelSpec") -> dict[str, Any] | None:
    """Return the image encoder beside a model; None: it takes no images."""
    if not spec.rope_sections:
        return None
    path = with_encoder(file, EngineConfig()).mmproj
    return {"encoder": path and str(path), "size_bytes": path and path.stat().st_size}


def _parameters(file: "GGUFFile", spec: "ModelSpec") -> dict[str, int]:
    """Return parameter counts. total: without prediction (MTP) blocks; active: used for one token."""
    total = active = mtp = 0
    for name, info in file.tensors.items():
        if in_mtp_block(name, spec):
            mtp += info.elements
            continue
        total += info.elements
        routed = spec.experts is not None and "_exps." in name
        active += info.elements * spec.experts.used // spec.experts.count if routed else info.elements
    return {"total": total, "active": active, "mtp": mtp}


def _memory(file: "GGUFFile", spec: "ModelSpec", *, native: bool) -> list[dict[str, Any]]:
    """Return the bytes of weights, state and KV cache at several contexts, without a draft."""
    needs = {"cpu": on_cpu(file, spec), "gpu": on_gpu(file, spec)}
    if native:
        needs["native"] = in_native_code(file, spec)
    contexts = [*(context for context in CONTEXTS if context < spec.context_length), spec.context_length]
    return [
        {"context": context, **{device: need.at(context) for device, need in needs.items()}}
        for context in contexts
    ]


def _text(file: "GGUFFile") -> dict[str, Any]:
    from bough.text.template import ChatTemplate
    from bough.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_metadata(file.metadata, source=str(file.path))
    template = ChatTemplate.from_metadata(file.metadata, source=str(file.path))
    stops = [
        {"id": id, "token": tokenizer.token_bytes(id).decode(errors="replace")}
        for id in sorted(tokenizer.stop_ids)
    ]
    return {
        "tokenizer": file.metadata.get("tokenizer.ggml.pre"),
        "tokens": tokenizer.vocab_size,
        "stop_tokens": stops,
        "adds_bos": tokenizer.bos_id is not None,
        "chat_template": not template.is_fallback,
        "thinking": template.supports_thinking,
        "fills_gaps": tokenizer.infill is not None,
    }


def _print(facts: dict[str, Any]) -> None:
    parts: dict[str, list[tuple[str, str]]] = {"File": _file_rows(facts)}
    if facts["model"]:
        parts["Model"] = [*_model_rows(facts["model"]), ("weights", _weights(facts)), *_image_rows(facts)]
    if facts["text"]:
        parts["Text"] = _text_rows(facts["text"])
    if facts["vectors"]:
        route = "/v1/rerank" if facts["vectors"]["pooling"] == "rank" else "/v1/embeddings"
        parts["Use"] = [(route, f"{facts['vectors']['kind']}, pooling {facts['vectors']['pooling']}")]
    elif facts["model"]:
        parts["Speculation"] = _speculation_rows(facts)
        parts["Recommended"] = _recommended_rows(facts)
    parts["Cannot be run"] = [("reason", problem) for problem in facts["problems"]]
    view.sections(facts["name"], parts)
    weights, size = (sum(row[key] for row in facts["types"]) for key in ("weights", "bytes"))
    view.table(
        "Weights by type",
        ["type", "tensors", "of weights", "of bytes", "size"],
        [
            [
                row["type"],
                str(row["tensors"]),
                f"{100 * row['weights'] / weights:.1f}%",
                f"{100 * row['bytes'] / size:.1f}%",
                view.amount(row["bytes"]),
            ]
            for row in facts["types"]
        ],
    )
    if facts["memory"]:
        devices = ("native" if "native" in facts["memory"][0] else "cpu", "gpu")
        rows = [
            [f"{row['context']:,}", *(view.amount(row[device]["total"]) for device in devices)]
            for row in facts["memory"]
        ]
        view.table("Memory needed, without a draft", ["context", "on a CPU", "on a GPU"], rows)


def _file_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("path", facts["path"]),
        ("size", view.amount(facts["size_bytes"])),
        ("architecture", facts["architecture"]),
    ]


def _model_rows(model: dict[str, Any]) -> list[tuple[str, str]]:
    parameters, layers, delta, experts = (model[key] for key in ("parameters", "layers", "delta", "experts"))
    count = view.count(parameters["total"])
    if parameters["active"] != parameters["total"]:
        count += f", {view.count(parameters['active'])} of them active for a token"
    depth = layers["attention"] + layers["delta"]
    kinds = ", all attention"
    if delta:
        kinds = f": {layers['attention']} attention + {layers['delta']} Gated DeltaNet"
    elif layers["sliding"]:
        kinds += f", {layers['sliding']} of them to {layers['window']:,} tokens and alone with rope"
    feed_forward = f", feed-forward {model['feed_forward']}" if model["feed_forward"] else ""
    rows = [
        ("parameters", count),
        ("layers", f"{depth}{kinds}"),
        ("width", f"{model['width']}{feed_forward}"),
        ("attention", f"{model['heads']} query heads, {model['kv_heads']} KV heads of {model['head_dim']}"),
    ]
    if delta:
        rows.append(
            (
                "delta",
                f"{delta['key_heads']} key heads, {delta['value_heads']} value heads of {delta['head_dim']}, "
                f"convolution over {delta['conv_width']}",
            )
        )
    if experts:
        rows.append(("experts", f"{experts['used']} of {experts['count']}, width {experts['width']}"))
    scaled = f", positions divided by {model['rope_factor']:g}" if model["rope_factor"] != 1 else ""
    rows += [
        ("rope", f"{model['rope_dim']} of {model['head_dim']} dims, base {model['rope_theta']:g}{scaled}"),
        ("vocabulary", f"{model['vocab_size']:,}, head {'tied' if model['tied_head'] else 'separate'}"),
        ("context", f"{model['context_length']:,} tokens"),
    ]
    if layers["mtp"]:
        share = view.count(parameters["mtp"])
        rows.append(("prediction", f"{layers['mtp']} MTP block ({share} parameters), used without a draft"))
    return rows


def _not_native(facts: dict[str, Any]) -> str:
    """Return which weights native CPU code does not run; nothing if it runs all."""
    if facts["model"]["experts"]:
        return "of experts"
    if facts["model"]["layers"]["sliding"]:
        return "of models with sliding layers"
    others = [row["type"] for row in facts["types"] if row["type"] not in NATIVE_TYPES]
    return f"of type {', '.join(others)}" if others else ""


def _weights(facts: dict[str, Any]) -> str:
    needs = facts["memory"][0]
    held = {device: view.amount(needs[device]["weights"]) for device in needs if device != "context"}
    stored = f"{view.amount(facts['stored_bytes'])} as stored, about {held['gpu']} on a GPU"
    if reason := _not_native(facts):
        return f"{stored}; on a CPU PyTorch runs weights {reason}, in {held['cpu']} (32 bits each)"
    return f"{stored}, {held['native']} in native CPU code; {held['cpu']} in PyTorch on a CPU (32 bits each)"


def _image_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    if facts["images"] is None:
        return []
    if (encoder := facts["images"]["encoder"]) is None:
        return [("images", "with its image encoder, a file of its own (mmproj), which is not beside it")]
    return [("images", f"{Path(encoder).name}, {view.amount(facts['images']['size_bytes'])}")]


def _text_rows(text: dict[str, Any]) -> list[tuple[str, str]]:
    stops = ", ".join(f"{stop['token']} ({stop['id']})" for stop in text["stop_tokens"])
    return [
        (
            "tokenizer",
            f"{text['tokenizer']}, {text['tokens']:,} tokens" + (", BOS first" if text["adds_bos"] else ""),
        ),
        ("ends with", stops or "nothing: it writes until --n-gen"),
        ("chat template", "yes" if text["chat_template"] else "none in the file, plain ChatML is used"),
        ("thinking", "can be switched: --think, --no-think" if text["thinking"] else "no switch"),
        ("gaps", "filled: /infill, suffix" if text["fills_gaps"] else "no tokens for them"),
    ]


def _speculation_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    draft = facts["draft"]
    if draft is None:
        rows = [("draft", "none listed: only prompt lookup proposes tokens; --draft names one")]
        if facts["small_models"]:
            rows += [
                ("small models", f"--draft {facts['small_models'][0]}"),
                *(("", name) for name in facts["small_models"][1:]),
                ("", "a draft that `bough train` makes for the model is faster"),
            ]
        return rows
    if draft["path"] is None:
        missing = f"not on this machine: bough pull {facts['card']} --draft-only"
        return [("draft", f"{draft['name']}, {missing}")]
    return [("draft", f"{draft['name']}, {view.amount(Path(draft['path']).stat().st_size)}")]


def _recommended_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    advice, switch = facts["recommended"], bool(facts["text"] and facts["text"]["thinking"])
    rows = [("tree", f"up to {advice['budget']} proposed tokens")]
    if switch or advice["thinking"]:
        effort = f", effort {advice['reasoning_effort']}" if advice["reasoning_effort"] else ""
        rows.append(("thinking", f"on{effort}" if advice["thinking"] else "off"))
    thinking, plain = (_flags(advice["sampling"][mode]) for mode in MODES)
    if switch and thinking != plain:
        rows += [("sampling", f"{thinking} with thinking"), ("", f"{plain} without")]
    else:
        rows.append(("sampling", thinking if advice["thinking"] else plain))
    rows.append(("", f"as recommended by {advice['source']}; --greedy: the likeliest token each time"))
    most = f", no sentence is said more than {advice['sentences']} times" if advice["sentences"] else ""
    return [*rows, ("in chats", f"answers that loop are ended{most}; --no-break-loops")]


def _flags(sampling: dict[str, Any]) -> str:
    """Return the flags that set these values, without those that change nothing."""
    neutral = asdict(Sampling(math.nan))
    changed = {name: value for name, value in sampling.items() if value != neutral[name]}
    return " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in changed.items())
