"""Every way to propose tokens for a tiny target with an MTP block: drafts of each kind, alone or together."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bough.config import DraftConfig, EngineConfig, SpecConfig
from bough.gguf.reader import GGUFFile
from bough.models.spec import ModelSpec
from bough.session.loading import load_session
from bough.session.session import Session
from tests.tiny_draft import SECOND, draft_config, save_draft
from tests.tiny_weaver import save_weaver, weaver_config
from workshop.tiny import make_tiny

METHODS: dict[str, dict[str, Any]] = {
    "dflash": {"block_size": 16},
    "dflash2": {**SECOND, "block_size": 8, "selector_rank": 32, "selector_top_k": 16},
    "dspark": {"markov_rank": 24, "block_size": 6},
    "mlp": {"ar_approximation": "swiglu", "block_size": 8},
    "dspine": {"transfer_rank": 24, "message_size": 16, "block_size": 10},
    "dspark of 90 tokens": {"markov_rank": 24, "block_size": 6, "draft_vocab_size": 90},
}


# Whole models: of another family, smaller, and the target's own file, most of whose tokens are accepted.
SMALL, ITSELF = "small model", "target as its own draft"


@dataclass(frozen=True)
class Proposers:
    draft: str | None = None  # one of METHODS, or a whole model
    mtp: Literal["auto", "on", "off"] = "off"
    lookup: bool = True
    head: str | None = None  # a generation of Weaver's over the draft


# Each alone, and all that can stand in one tree.
PROPOSERS = {
    "lookup": Proposers(),
    "mtp": Proposers(mtp="auto", lookup=False),
    **{kind: Proposers(kind, lookup=False) for kind in METHODS},
    SMALL: Proposers(SMALL, lookup=False),
    ITSELF: Proposers(ITSELF, lookup=False),
    f"{ITSELF} and lookup": Proposers(ITSELF),
    **{f"{kind}, mtp, lookup": Proposers(kind, "on") for kind in METHODS if "of" not in kind},
    "first weaver": Proposers("dflash", lookup=False, head="first"),
    "weaver, lookup": Proposers("dflash", head="second"),
}


class EveryDraft:
    """Sessions of a target, whose drafts lie in a folder."""

    def __init__(self, target: Path, folder: Path, *, device: str = "cpu"):
        self._target, self._folder, self._device = target, folder, device
        with GGUFFile.open(target) as file:
            spec = ModelSpec.from_gguf(file)
            images = "<|vision_start|>" in file.metadata["tokenizer.ggml.tokens"]
        for seed, (kind, method) in enumerate(METHODS.items()):
            config = draft_config(spec, nested=True, method=method)
            if "markov_rank" in method:
                config["architectures"] = ["Qwen3DSparkModel"]
            save_draft(folder / kind, config, seed=seed)
        # It has no recurrent states.
        small = make_tiny(folder / "small.gguf", family="qwen3", layers=2, width=32, seed=9, images=images)
        self._models = {SMALL: small, ITSELF: target}
        for generation in ("first", "second"):
            config = weaver_config(spec.width, depth=METHODS["dflash"]["block_size"] - 1)
            save_weaver(folder / f"weaver-{generation}", config, learned=generation == "first")

    def plain(self, **settings: Any) -> Session:
        return load_session(self._target, self._config(None, None, **settings))

    def session(
        self,
        proposers: str,
        *,
        graphs: bool = True,
        parallel: int = 1,
        cpu_backend: Literal["auto", "torch"] = "auto",
        **settings: Any,
    ) -> Session:
        """`settings` of the speculation; not adaptive: every step has a whole tree of all proposers."""
        engine: dict[str, Any] = {"parallel": parallel, "cpu_backend": cpu_backend}
        return load_session(self._target, self.config(proposers, engine, **settings), graphs=graphs)

    def config(
        self, proposers: str, engine: Mapping[str, Any] | None = None, **settings: Any
    ) -> EngineConfig:
        chosen = PROPOSERS[proposers]
        own: dict[str, Any] = {"adaptive": False, "mtp": chosen.mtp, "lookup": chosen.lookup}
        path = self._models.get(chosen.draft or "", self._folder / (chosen.draft or ""))
        head = self._folder / f"weaver-{chosen.head}" / "weaver.pth" if chosen.head else None
        draft = DraftConfig(path, head=head) if chosen.draft else None
        return self._config(SpecConfig(**{**own, **settings}), draft, **(engine or {}))

    def _config(
        self, speculation: SpecConfig | None, draft: DraftConfig | None, **settings: Any
    ) -> EngineConfig:
        return EngineConfig(
            self._device, 2048, speculation=speculation, draft=draft, prefix_cache=0, **settings
        )
