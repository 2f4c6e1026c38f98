"""One training run: steps, evaluation by replay, checkpoints from which a killed run goes on."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash2.drafter import DFlash2Drafter
from dflash2.provenance import provenance
from dflash2.training.anchors import Blocks
from dflash2.training.batches import Batch, Batches
from dflash2.training.checkpoint import load_resume, publish, save_resume, start_from
from dflash2.training.checks import check_fit, check_split, freeze
from dflash2.training.config import TrainConfig, drafter_config
from dflash2.training.config_file import to_json
from dflash2.training.data import load_shards, pack
from dflash2.training.initial import initialise
from dflash2.training.loss import BlockLoss, supervision
from dflash2.training.metrics import Metrics
from dflash2.training.optimizer import MasterAdamW, learning_rate
from dflash2.training.parallel import Processes
from dflash2.training.replay import Replay, replay
from dflash2.training.step_loss import StepLoss
from dflash2.training.target import FrozenTarget

__all__ = ["Trainer", "train"]

#: Settings that may change between a run and its continuation: they do not change what a step computes.
FREE = {"out", "target", "device", "sharding", "fast", "tensorboard", "init_from", "pause_seconds", "val_documents"}
FREE |= {"log_seconds", "eval_seconds", "eval_steps", "save_seconds", "save_steps"}
#: Packed rows that initial scales are measured on.
SAMPLE_ROWS = 4


class Trainer:
    """One run. `run` trains to the end of the schedule; `step` does one step.

    Args:
        config: the settings.
        target: the target, if it is loaded already.

    Raises:
        ConfigError: settings, shards, target and drafter do not fit together.
        CheckpointError: the folder holds a run of other settings.
    """

    def __init__(self, config: TrainConfig, target: FrozenTarget | None = None):
        self.config, self.out = config, Path(config.out)
        self.processes = Processes(config.device, config.sharding)
        self.device = self.processes.device
        check_split(config, self.processes.count)
        dtype = getattr(torch, config.dtype)
        documents = load_shards(config.shards)
        if target is None:
            target = FrozenTarget.from_pretrained(config.target, (), dtype=dtype, device=str(self.device))
        self.target = target
        shape = drafter_config(target.model.config, config.drafter)
        check_fit(shape, target, documents)
        target.layer_ids = shape.target_layer_ids
        self.documents, held_out = documents.split(config.val_permille)
        self.validation = held_out.select(np.flatnonzero(held_out.temps == 0)[: config.val_documents])
        torch.manual_seed(config.seed)
        self.batches = self._batches(shape.retention)
        self.step_count, self.seconds = 0, 0.0
        # Drawn on the CPU, so that a seed means the same on every device.
        self.drafter = DFlash2Drafter(shape, dtype=torch.float32).to(self.device)
        self.drafter.bind_target(target.embedding, target.head)
        self._set_weights()
        self.drafter.to(dtype)
        freeze(self.drafter, config.frozen)
        if config.fast:
            from dflash2.training.compiled import compile_modules

            compile_modules(self.drafter)
            target.speed_up(config.row_tokens * config.rows_per_step // (self.processes.count * config.accumulate))
        self.step_loss = self.processes.wrap(StepLoss(self.drafter, config, self.processes))
        self.optimizer = MasterAdamW(
            self.drafter, betas=config.betas, weight_decay=config.weight_decay, clip=config.clip, ema=config.ema
        )
        self._resume()

    def _batches(self, retention: int | None) -> Batches:
        processes = self.processes
        return Batches(self.config, self.documents, retention, processes.index, processes.count, self.device)

    def _set_weights(self) -> None:
        if self.config.init_from:
            start_from(self.drafter, self.config.init_from)
            return
        # The same rows in all processes and however a step is split.
        rows = pack(self.documents, self.batches.plan[0][:SAMPLE_ROWS], self.config.row_tokens)
        tokens, positions, document = (
            torch.from_numpy(x).to(self.device) for x in (rows.tokens, rows.positions, rows.document)
        )
        sample = (tokens, positions, document)
        initialise(self.drafter, self.target, layers=self.config.init_layers, sample=sample)

    @property
    def parameters(self) -> int:
        """How many weights the drafter has."""
        return sum(p.numel() for p in self.drafter.parameters())

    @property
    def progress(self) -> float:
        """Share of the run that is done, by steps or by the clock."""
        c = self.config
        by_steps = self.step_count / c.max_steps if c.max_steps else 0.0
        by_clock = self.seconds / c.max_seconds if c.max_seconds else 0.0
        return max(by_steps, by_clock)

    def step(self) -> tuple[BlockLoss, Tensor, float]:
        """One update. Returns this process's losses, the gradient norm (both on the device) and the learning rate."""
        c, processes = self.config, self.processes
        batches = self.batches[self.step_count]
        moved = [batch.blocks.to(self.device) for batch in batches]
        weights = [supervision(b, self.drafter.config.block_size, c.gamma).sum() for b in moved]
        norm = processes.add_up(torch.stack(weights).sum())
        losses = []
        for i, (batch, blocks) in enumerate(zip(batches, moved, strict=True)):
            with processes.accumulating(self.step_loss, more=i + 1 < len(batches)):
                losses.append(self._part(batch, blocks, norm))
        lr = learning_rate(self.progress, peak=c.lr, warmup=c.warmup, floor=c.lr_floor)
        grad_norm = self.optimizer.step(lr)
        self.step_count += 1
        return BlockLoss(*(torch.stack(x).sum(0) for x in zip(*losses, strict=True))), grad_norm, lr

    def _part(self, batch: Batch, blocks: Blocks, norm: Tensor) -> BlockLoss:
        taps, states = self.target(*batch.inputs(blocks))
        loss: BlockLoss = self.step_loss(blocks, taps, states, self.target.head, norm)
        # Gradients are averaged over processes; what each has is its share of a sum.
        (loss.total * self.processes.count).backward()
        return loss._replace(total=loss.total.detach())

    def run(self) -> Replay | None:
        """Train until the schedule ends, logging, evaluating and saving on the way. Returns the last evaluation."""
        c = self.config
        self._begin()
        last = now = time.monotonic()
        logged = evaluated = saved = self.seconds
        first = self.step_count
        pause = self.seconds + c.pause_seconds if c.pause_seconds else float("inf")
        unheard = True
        while self.progress < 1 and self.seconds < pause:
            loss, norm, lr = self.step()
            if c.max_seconds and self.device.type == "cuda" and self.step_count % 8 == 0:
                torch.cuda.synchronize()  # else the clock runs ahead of the device by everything that is queued
            now = time.monotonic()
            self.seconds = self.processes.agree(self.seconds + now - last)
            last = now
            if self.seconds - logged >= c.log_seconds or unheard:
                unheard = False
                self._log(loss, norm, lr, (self.step_count - first) / max(self.seconds - logged, 1e-9))
                logged, first = self.seconds, self.step_count
            if self._due(saved, c.save_seconds, c.save_steps):
                self.save()
                saved = self.seconds
            if self.progress < 1 and self._due(evaluated, c.eval_seconds, c.eval_steps):
                self.evaluate()
                evaluated = self.seconds
            # Saving and evaluating count as part of the run: borrowed machines end by the clock.
            self.seconds = self.processes.agree(self.seconds + time.monotonic() - last)
            last = time.monotonic()
        self.save()
        self._say(f"step {self.step_count}: saved to {self.out}")
        result = self.evaluate() if self.progress >= 1 else None
        self.close()
        return result

    def _due(self, last: float, seconds: float, steps: int) -> bool:
        """Whether something that happens every so many seconds, and steps, is due; 0 is never."""
        by_clock = seconds and self.seconds - last >= seconds
        return bool(by_clock or (steps and self.step_count % steps == 0))

    def _begin(self) -> None:
        if not self.processes.is_first:
            return
        self.metrics = Metrics(self.out, self.step_count, self.config.tensorboard)
        (self.out / "train.json").write_text(to_json(self.config, provenance(str(self.device))))
        size = f"{len(self.documents)} documents, {self.documents.lens.sum()} tokens"
        parts = f", {self.processes.count} processes" if self.processes.count > 1 else ""
        self._say(
            f"{self.parameters / 1e6:.1f} M parameters, {size}, {len(self.validation)} held-out greedy documents{parts}"
        )

    def close(self) -> None:
        """Let go of the background thread and the files."""
        self.batches.close()
        if self.processes.is_first and hasattr(self, "metrics"):
            self.metrics.close()

    def evaluate(self) -> Replay | None:
        """Replay the held-out greedy documents with the weights that would be saved."""
        if not len(self.validation):
            return None
        c = self.config
        rows = c.rows_per_step // (self.processes.count * c.accumulate)
        self.optimizer.show(averaged=True)
        with self.processes.gathered(self.step_loss):
            result = replay(
                self.drafter,
                self.target,
                self.validation,
                row_tokens=c.row_tokens,
                rows_per_step=rows,
                blocks_per_step=c.anchors_per_row * rows,
                tile=c.tile,
                chunk=c.head_chunk,
            )
        self.optimizer.show(averaged=False)
        self._write({"step": self.step_count, "seconds": round(self.seconds, 1), "validation": asdict(result)})
        by_row = " ".join(f"{r:.2f}" for r in result.by_row)
        self._say(
            f"step {self.step_count}: acceptance length {result.rounds:.3f} in rounds, {result.anchors:.3f} at every "
            f"position, {result.unary:.3f} without selector; accepted by row {by_row}"
        )
        return result

    def save(self) -> None:
        """Write weights and resume state."""
        weights, optimizer = self.optimizer.weights(), self.optimizer.state_dict()
        if self.processes.is_first:
            publish(self.drafter, weights, self.out)
            state = {"step": self.step_count, "seconds": self.seconds, "settings": self._fixed()}
            state |= {"optimizer": optimizer, "mask_embedding": self.drafter.mask_embedding}
            save_resume(self.out, state)
        self.processes.wait()

    def _resume(self) -> None:
        state = load_resume(self.out, self._fixed())
        if state is not None:
            self.step_count, self.seconds = state["step"], state["seconds"]
            self.optimizer.load_state_dict(state["optimizer"])
            row = state.get("mask_embedding")
            self.drafter.mask_embedding = None if row is None else row.to(self.device)
            self._say(f"resumed at step {self.step_count}, after {self.seconds:.0f} s")

    def _fixed(self) -> dict[str, Any]:
        return {k: v for k, v in json.loads(json.dumps(asdict(self.config))).items() if k not in FREE}

    def _log(self, loss: BlockLoss, norm: Tensor, lr: float, rate: float) -> None:
        loss = BlockLoss(*(self.processes.add_up(x) for x in loss))
        line: dict[str, Any] = {
            "step": self.step_count,
            "seconds": round(self.seconds, 1),
            "progress": round(self.progress, 4),
            "lr": lr,
        }
        line |= {"loss": loss.total.item(), "base": loss.base.item(), "selector": loss.selector.item()}
        line |= {"grad_norm": norm.item(), "steps_per_second": rate}
        for name in ("top1", "recall", "choice"):
            line[name] = [round(x, 4) for x in getattr(loss, name).tolist()]
        # As if rows were independent: a running estimate, the replay gives the true one.
        line["expected_length"] = 1 + float(np.cumprod(line["choice"]).sum())
        if self.device.type == "cuda":
            line["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        self._write(line)
        self._say(
            f"step {self.step_count} {100 * self.progress:.1f} % loss {line['loss']:.3f} base {line['base']:.3f} "
            f"selector {line['selector']:.3f} top-1 {line['top1'][0]:.3f}..{line['top1'][-1]:.3f} expected length "
            f"{line['expected_length']:.2f} {rate:.2f} steps/s lr {lr:.1e} norm {line['grad_norm']:.2f} "
            f"{line.get('peak_gib', '')}"
        )

    def _write(self, line: dict[str, Any]) -> None:
        if self.processes.is_first:
            self.metrics.write(line)

    def _say(self, text: str) -> None:
        if self.processes.is_first:
            print(time.strftime("%H:%M:%S"), text, flush=True)


def train(config: TrainConfig) -> Replay | None:
    """Train to the end. Returns the last evaluation, if there were validation documents."""
    # cuDNN's attention is planned anew for every shape, and slabs have many lengths.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return Trainer(config).run()
