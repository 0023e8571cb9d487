"""The training loop of a draft or an MTP block: schedule, steps, checkpoints, evaluation, export.

All randomness is a function of the seed and the step, so that an interrupted and resumed run gives the same
draft as an uninterrupted one.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import bough
from bough.errors import BoughError, ModelFileError, ResourceError, UsageError
from bough.memory.device import available_memory, device_name
from bough.models.draft_spec import DraftSpec
from bough.train.curves import CURVES, draw_curves
from bough.train.draft_data import TextBatch, TokenData, epoch_batches, make_batch
from bough.train.draft_eval import (
    BUDGET,
    Evaluation,
    block_rows,
    check_mtp_parity,
    check_parity,
    evaluate,
    held_out_batches,
    measure,
)
from bough.train.draft_export import GGUF, export_draft, export_gguf
from bough.train.draft_import import read_draft
from bough.train.draft_loss import Head, Tally, block_loss
from bough.train.draft_model import TrainedDraft, new_spec
from bough.train.draft_settings import Event, Saved, TrainConfig, TrainingProgress, TrainingResult
from bough.train.draft_target import FeatureReader, Frozen, TrainingTarget, mask_token
from bough.train.features import FeatureStore
from bough.train.files import write_json, write_whole
from bough.train.mtp_export import MTP_TARGET, export_mtp
from bough.train.mtp_model import MTPSpec, TrainedMTP
from bough.train.muon import optimisers
from bough.train.portable import read_portable, write_portable
from bough.train.ranks import Ranks

CHECKPOINT, REPORT = "checkpoint.pt", "training.json"
_FORMAT = 1
_EPOCHS = 6  # if neither steps nor minutes are given
_WARM_UP = 0.04  # share of the run
_RESTART_STEPS = 40  # over which the rate rises where the optimiser begins anew in the middle of a run
_CLIP = 1.0  # gradient norm
_RANK, _INNER = 64, 512  # of a DFlash2 draft's selector, of an MLP over candidates
_EVALUATIONS = 10  # per run
_MEMORY = 0.5  # share of the free memory that activations may take
_STORED = 0.4  # share of the free memory for the features of texts that were read
_EMA_DECAY = 0.95  # of the displayed averages, per step
_MOST_FAULTS = 20  # consecutive steps with a non-finite gradient
_PROMPTS, _OUTPUT = 8, 128  # held-out prompts decoded in the engine, and tokens per output


@dataclass(slots=True)
class _RunState:
    step: int = 0
    elapsed: float = 0.0  # seconds, over all resumed runs
    epoch: int = 0
    cursor: int = 0  # batches of the epoch that are done
    tokens: int = 0
    untrained: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    def __init__(
        self,
        target: TrainingTarget,
        data: TokenData,
        folder: Path,
        config: TrainConfig,
        *,
        continue_from: Path | None = None,
        resume: bool = False,
        ranks: Ranks | None = None,
        notify: Callable[[Event], None] = lambda event: None,
        cancelled: Callable[[], bool] = lambda: False,
    ):
        self._target, self._data, self._folder, self._config = target, data, folder, config
        self._ranks, self._notify, self._cancelled = ranks or Ranks(), notify, cancelled
        self._train, self._held_out = data.split(config.held_out)
        if not len(self._train) or not len(self._held_out):
            raise UsageError(
                f"{len(data)} texts of {len(set(data.prompts.tolist()))} prompts are too few to train on,"
                " needed training texts and held-out texts",
                "give more prompts",
            )
        self.model = new_model(target, config, folder).to(target.device)
        self.spec = self.model.spec
        self._continue_from = continue_from
        if continue_from is not None:
            # A DFlash draft may go on with a head that knows the token before, which begins without effect.
            assert isinstance(self.spec, DraftSpec)
            self.model.load_state_dict(read_draft(continue_from, self.spec, target.spec), strict=False)
            if config.head_only and isinstance(self.model, TrainedDraft):
                self.model.freeze_backbone()
        self._optimisers = optimisers(
            [each for each in self.model.parameters() if each.requires_grad],
            kind=config.optimiser,
            lr=config.rate,
            weight_decay=config.weight_decay,
            tables=self.model.tables,
        )
        self._state = _RunState()
        self._running = Tally.zero(self.spec.block_size - 1, target.device)  # of the last training steps
        self._restarted: int | None = None  # step at which the optimiser began anew
        check_folder(folder, resume=resume)
        if (folder / CHECKPOINT).exists():
            self._open()
        elif resume and config.portable is not None:
            self._open_portable(config.portable)
        self._features = self._feature_store()
        self._frozen = Frozen(target.decoder, self.spec.mask_id, self.spec.block_size)
        self._head = self._training_head()
        if config.batch % self._ranks.count:
            raise UsageError(f"`batch` is {config.batch}, needed a multiple of {self._ranks.count} processes")
        self._micro = self._micro_batch(config.batch // self._ranks.count)
        anchors = min(32, config.anchors)
        self._evaluated = held_out_batches(
            data,
            self._held_out[:: max(1, len(self._held_out) // 64)],
            size=self._micro,
            anchors=anchors,
            block=self.spec.block_size,
            device=target.device,
        )

    @property
    def _weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def _feature_store(self) -> FeatureStore:
        reader = FeatureReader(self._target.decoder, self.spec.taps)
        # A draft's first matmul rounds them on a GPU; an MTP block norms them before.
        rounded = self._target.device.type == "cuda" and isinstance(self.model, TrainedDraft)
        return FeatureStore(
            reader,
            self._data.lengths,
            dtype=torch.bfloat16 if rounded else torch.float32,
            room=int(_STORED * available_memory(self._target.device)),
        )

    def _training_head(self) -> Head:
        """Return the head that the training loss compares tokens by: all of it, or a part."""
        limit, vocabulary = self._config.head_tokens, self._target.spec.vocab_size
        if limit is None or limit >= vocabulary:
            return Head(self._frozen.head)
        used = np.unique(self._data.tokens)
        others = np.setdiff1d(np.arange(vocabulary), used)
        more = np.random.default_rng(self._config.seed).permutation(others)[: max(0, limit - len(used))]
        return Head.of(self._frozen.head, torch.from_numpy(np.sort(np.concatenate([used, more]))))

    def run(self) -> TrainingResult:
        self._ranks.wait()
        if self._state.step == 0 and self._ranks.first:
            self._state.untrained = self._untrained()
        finished = self._loop()
        self._save()
        if not finished:
            return TrainingResult(False, self._state.step, self._folder)
        result = None
        if self._ranks.first:
            result = self._finish()
        self._ranks.wait()
        return result or TrainingResult(True, self._state.step, self._folder)

    def _loop(self) -> bool:
        """Run the training steps; return False if the run was cancelled."""
        state, device = self._state, self._target.device
        begun, before = time.perf_counter(), state.elapsed
        saved = shown = text_at = begun
        running = self._running = Tally.zero(self.spec.block_size - 1, device)
        text = faults = 0
        evaluated = len(state.history)
        batches = self._epoch(state.epoch)
        while True:
            now = time.perf_counter()
            state.elapsed = before + now - begun
            due = now - saved > 60 * self._config.checkpoint_minutes
            share, stop, save = self._ranks.broadcast([self._share(), self._cancelled(), due], device)
            if share >= 1 or stop:
                return not stop
            if save:
                self._save()
                saved = time.perf_counter()
            if share * _EVALUATIONS >= evaluated + 1:
                evaluated += 1
                self._evaluate()
                text, text_at = 0, time.perf_counter()
            if state.cursor >= len(batches):
                state.epoch, state.cursor = state.epoch + 1, 0
                batches = self._epoch(state.epoch)
            batch = self._batch(batches[state.cursor])
            tally, sound = self._step(batch, share)
            running.merge(tally, keep=_EMA_DECAY)
            faults = 0 if sound else faults + 1
            if faults >= _MOST_FAULTS:
                raise BoughError(
                    f"the gradient was not finite in {faults} consecutive steps, at step {state.step}",
                    "lower `lr`, and continue from the last checkpoint with `resume`",
                )
            state.step, state.cursor = state.step + 1, state.cursor + 1
            state.tokens, text = state.tokens + batch.real, text + batch.real
            now = time.perf_counter()
            if now - shown > 1 or state.step in (1, self._steps):
                shown = now
                self._show(running, text / (now - text_at), before + now - begun)

    def _step(self, batch: TextBatch, share: float) -> tuple[Tally, bool]:
        config = self._config
        schedule = min(share / _WARM_UP, (1 - share) / (1 - _WARM_UP), 1.0)
        if self._restarted is not None:
            schedule *= min(1.0, (self._state.step + 1 - self._restarted) / _RESTART_STEPS)
        tally = Tally.zero(self.spec.block_size - 1, self._target.device)
        labels = max(1, int(batch.valid.sum()))
        for micro in batch.split(self._micro):
            share_of_labels = int(micro.valid.sum()) / labels
            micro = micro.to(self._target.device)
            rows = block_rows(self.model, self._features, self._frozen, micro)
            tally.merge(
                block_loss(
                    rows,
                    micro.labels,
                    micro.valid,
                    self._head,
                    kind=config.loss,
                    scale=share_of_labels,
                    readout=self.model.readout(self._frozen),
                    anchors=micro.tokens.gather(1, micro.anchors),
                )
            )
        parameters = list(self.model.parameters())
        self._ranks.average([each.grad for each in parameters if each.grad is not None])
        norm = torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
        sound = bool(norm.isfinite())
        for optimiser in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = config.rate * max(schedule, 1e-3)
            if sound:
                optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        return tally, sound

    def _share(self) -> float:
        config, state = self._config, self._state
        if config.minutes is not None:
            return min(1.0, state.elapsed / (60 * config.minutes))
        return min(1.0, state.step / self._steps)

    @property
    def _steps(self) -> int:
        return self._config.steps or max(1, _EPOCHS * len(self._train) // self._config.batch)

    def _epoch(self, number: int) -> list[Any]:
        """Return the batches of one epoch; every process computes the same list."""
        seed = 1_000_003 * self._config.seed + number
        return epoch_batches(self._data.lengths, self._train, batch=self._config.batch, seed=seed)

    def _batch(self, numbers: Any) -> TextBatch:
        """Return this process's share of the texts, with new anchors at every step."""
        ranks, config = self._ranks, self._config
        seed = (config.seed * 1_000_003 + self._state.step) * 1024 + ranks.rank
        return make_batch(
            self._data,
            numbers[ranks.rank :: ranks.count].tolist(),
            anchors=config.anchors,
            block=self.spec.block_size,
            seed=seed,
        )

    def _show(self, running: Tally, tokens_s: float, elapsed: float) -> None:
        if not self._ranks.first:
            return
        share = self._share()
        remaining = elapsed / share * (1 - share) if share else math.inf
        self._notify(
            TrainingProgress(
                step=self._state.step,
                share=share,
                loss=running.mean_loss,
                acceptance=running.acceptance,
                tokens_s=tokens_s * self._ranks.count,
                remaining_s=remaining,
            )
        )

    def _evaluate(self) -> Evaluation | None:
        if not self._ranks.first:
            return None
        state = self._state
        evaluation = evaluate(self.model, self._features, self._frozen, self._evaluated, step=state.step)
        seen = min(state.step * self._config.batch, len(self._train))
        place = {"answers": seen, "tokens": state.tokens, "seconds": round(state.elapsed, 1)}
        state.history.append(asdict(evaluation) | place | {"train_loss": self._running.mean_loss})
        self._notify(evaluation)
        return evaluation

    def _micro_batch(self, texts: int) -> int:
        """Return the number of texts whose activations fit in memory; may enable recomputation."""
        spec, config = self.spec, self._config
        # Float32 activations kept for the backward pass, per row and layer.
        values = 14 * spec.width + 8 * spec.heads * spec.head_dim + 4 * spec.feed_forward
        values += 2 * spec.heads * int(self._data.lengths.max())
        rows = config.anchors * spec.block_size
        size = 4 * rows * values * len(spec.layers)
        room = int(_MEMORY * available_memory(self._target.device))
        if size > room:
            self.model.recompute = True
            size //= len(spec.layers)
        if size > 2 * room:
            raise ResourceError(
                f"the blocks of one text take about {size / 2**30:.1f} GiB,"
                f" {room / 2**30:.1f} GiB may be used on {self._target.device}",
                "lower `anchors` or `seq`",
            )
        return max(1, min(texts, room // size))

    def _open(self) -> None:
        path = self._folder / CHECKPOINT
        state = _load(path, self._target.device)
        self._check_spec(state["spec"], path)
        if state["optimiser"] != self._config.optimiser:
            raise UsageError(
                f"{path}: was trained with `optimiser` {state['optimiser']}, not {self._config.optimiser}"
            )
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self._state = _RunState(**state["place"])

    def _open_portable(self, folder: Path) -> None:
        """Go on from a portable checkpoint, if there is one; the optimiser begins anew."""
        checkpoint = read_portable(folder)
        if checkpoint is not None:
            weights, facts = checkpoint
            self._check_spec(facts["spec"], folder)
            self.model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
            self._state = _RunState(**facts["place"])
            self._restarted = self._state.step

    def _check_spec(self, saved: dict[str, Any], path: Path) -> None:
        """Raise if a checkpoint's draft has another shape; in JSON tuples are lists."""
        needed = asdict(self.spec)
        for name in needed:
            if name != "source" and json.dumps(saved[name]) != json.dumps(needed[name]):
                raise UsageError(
                    f"{path}: its draft has {name} {saved[name]}, needed {needed[name]}",
                    "`resume` needs the settings of the first run; otherwise choose another `output`",
                )

    def _save(self) -> None:
        if not self._ranks.first:
            return
        state = {
            "format": _FORMAT,
            "spec": asdict(self.spec),
            "optimiser": self._config.optimiser,
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
            "place": asdict(self._state),
        }
        path = self._folder / CHECKPOINT
        needed = 12 * sum(each.numel() for each in self.model.parameters())
        write_whole(path, lambda file: torch.save(state, file), needed=needed)
        if self._config.portable is not None:
            facts = {"spec": state["spec"], "place": state["place"]}
            write_portable(self._config.portable, self._state.step, self._weights, facts)
        self._notify(Saved(self._state.step, path))

    def _export(self, folder: Path) -> Path:
        """Write the draft, or the target's file with its MTP block, and return its path."""
        target = self._target
        if isinstance(self.model, TrainedMTP):
            export_mtp(folder / MTP_TARGET, target.path, self.model)
            return folder / MTP_TARGET
        assert isinstance(self.spec, DraftSpec)
        dtype = torch.float32 if self._config.float32 else torch.bfloat16
        export_draft(folder, self.spec, self._weights, target.spec, target.tokenizer, dtype=dtype)
        if self._config.gguf:
            metadata = target.metadata if self._config.vocabulary else {}
            export_gguf(folder / GGUF, self.spec, self._weights, target.spec, metadata)
        return folder

    def _untrained(self) -> float:
        """Return the acceptance length in the engine before training, from a few steps."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            path = self._export(Path(folder))
            return measure(self._target, path, self._prompts()[:2], max_tokens=32).acceptance

    def _prompts(self) -> list[list[int]]:
        data = self._data
        first = {int(data.prompts[number]): int(number) for number in self._held_out[::-1]}
        numbers = list(first.values())[:_PROMPTS]
        return [data.text(number)[: data.boundaries[number]].tolist() for number in numbers]

    def _finish(self) -> TrainingResult:
        target, config, state = self._target, self._config, self._state
        evaluation = self._evaluate()
        path = self._export(self._folder)
        longest = int((self._data.lengths - self._data.boundaries).max())
        measured = measure(target, path, self._prompts(), max_tokens=min(_OUTPUT, longest))
        check = check_mtp_parity if path.name == MTP_TARGET else check_parity
        parity = check(target, self._folder, self._data, self._held_out.tolist())
        write_json(
            self._folder / REPORT,
            {
                "bough": bough.__version__,
                "torch": torch.__version__,
                "device": device_name(target.device),
                "target": target.path.name,
                "target_bytes": target.size,
                "continued_from": self._continue_from and self._continue_from.name,
                "config": asdict(config) | {"portable": config.portable and str(config.portable)},
                "texts": len(self._train),
                "held_out": len(self._held_out),
                "steps": state.step,
                "seconds": round(state.elapsed, 1),
                "tokens": state.tokens,
                "parameters": sum(each.numel() for each in self.model.parameters()),
                "parity": parity,
                "engine": {"budget": BUDGET, "untrained": state.untrained, **asdict(measured)},
                "history": state.history,
            },
        )
        draw_curves(state.history, self._folder / CURVES, title=f"{target.path.stem}: draft")
        return TrainingResult(True, state.step, self._folder, evaluation, state.untrained, measured, parity)


def check_folder(folder: Path, *, resume: bool) -> None:
    """Raise if an earlier run's checkpoint would be overwritten."""
    path = folder / CHECKPOINT
    if path.exists() and not resume:
        raise UsageError(
            f"{path} exists from an earlier run", "`resume` continues it; otherwise choose another `output`"
        )


def new_model(target: TrainingTarget, config: TrainConfig, folder: Path) -> TrainedDraft | TrainedMTP:
    """Return an untrained model of the kind asked for."""
    if config.kind == "mtp":
        return TrainedMTP(target.spec, target.final_norm, str(folder), seed=config.seed)
    return TrainedDraft(draft_spec(target, config, folder), seed=config.seed)


def check_settings(
    target: TrainingTarget, config: TrainConfig, folder: Path, continue_from: Path | None
) -> None:
    """Raise for settings that this target cannot be trained with, before any long work."""
    if config.kind == "mtp":
        MTPSpec.of(target.spec, str(folder))
        if continue_from is not None:
            raise UsageError("`continue_from` is set, but `kind` is mtp, which always begins anew")
        return
    spec = draft_spec(target, config, folder)
    if config.head_only and (continue_from is None or config.kind == "dflash"):
        raise UsageError(
            f"`head_only` is set with `kind` {config.kind} and `continue_from` {continue_from}",
            "it trains what dflash2 or mlp adds to the draft of `continue_from`",
        )
    if continue_from is not None:
        read_draft(continue_from, spec, target.spec)


def draft_spec(target: TrainingTarget, config: TrainConfig, folder: Path) -> DraftSpec:
    return new_spec(
        target.spec,
        mask_id=mask_token(target, config.mask_token),
        layers=config.layers,
        kv_heads=config.kv_heads,
        feed_forward=config.feed_forward,
        block_size=config.block,
        window=config.window,
        rank=(config.rank or _RANK) if config.kind == "dflash2" else 0,
        inner=(config.rank or _INNER) if config.kind == "mlp" else 0,
        source=str(folder),
    )


def _load(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch.load raises whatever its unpickler raises
        raise ModelFileError(
            f"{path}: not a readable checkpoint: {error}", "remove it to start over"
        ) from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise ModelFileError(f"{path}: not a checkpoint of this version", "remove it to start over")
    return state
