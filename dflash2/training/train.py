"""Train a drafter: ``python -m dflash2.training.train --config run.yaml --set lr=6e-4``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash2.command import run_command
from dflash2.conv import GroupedConv
from dflash2.drafter import DFlash2Drafter
from dflash2.model import MLP, RMSNorm
from dflash2.provenance import provenance
from dflash2.training.anchors import Blocks, make_blocks, sample_anchors
from dflash2.training.checkpoint import load_resume, publish, save_resume, start_from
from dflash2.training.config import TrainConfig, drafter_config, help_text, load_config, to_json
from dflash2.training.data import PackedRows, Plan, load_shards, pack
from dflash2.training.initial import initialise
from dflash2.training.loss import BlockLoss, block_loss, block_targets, draft_states
from dflash2.training.optimizer import MasterAdamW, learning_rate
from dflash2.training.replay import Replay, replay
from dflash2.training.target import FrozenTarget

__all__ = ["Trainer", "main", "train"]

#: Settings that may change between a run and its continuation: they do not change what a step computes.
FREE = {"out", "target", "device", "compile", "init_from", "pause_seconds", "val_documents"}
FREE |= {"log_seconds", "eval_seconds", "save_seconds", "save_steps"}


class Trainer:
    """One run. `run` trains to the end of the schedule; `step` does one step.

    Args:
        config: the settings.
        target: the target, if it is loaded already.
    """

    def __init__(self, config: TrainConfig, target: FrozenTarget | None = None):
        self.config, self.out = config, Path(config.out)
        dtype = getattr(torch, config.dtype)
        if target is None:
            target = FrozenTarget.from_pretrained(config.target, (), dtype=dtype, device=config.device)
        self.target = target
        shape = drafter_config(target.model.config, config.drafter)
        target.layer_ids = shape.target_layer_ids
        documents = load_shards(config.shards)
        self.documents, held_out = documents.split(config.val_permille)
        self.validation = held_out.select(np.flatnonzero(held_out.temps == 0)[: config.val_documents])
        torch.manual_seed(config.seed)
        self.plan = Plan(self.documents, config.row_tokens, config.rows_per_step, config.seed)
        self.step_count, self.seconds = 0, 0.0
        # Drawn on the CPU, so that a seed means the same on every device.
        self.drafter = DFlash2Drafter(shape, dtype=torch.float32).to(config.device)
        self.drafter.bind_target(target.embedding, target.head)
        if config.init_from:
            start_from(self.drafter, config.init_from)
        else:
            initialise(self.drafter, target, layers=config.init_layers, sample=self._device_rows(self._rows(0)))
        self.drafter.to(dtype)
        self.optimizer = MasterAdamW(
            self.drafter, betas=config.betas, weight_decay=config.weight_decay, clip=config.clip, ema=config.ema
        )
        if config.compile:
            _compile(self.drafter)
        self._resume()

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
        """One update. Returns losses, gradient norm (both on the device) and the learning rate."""
        c = self.config
        packed = self._rows(self.step_count)
        anchors = sample_anchors(packed, c.anchors_per_step, np.random.default_rng((c.seed, 2, self.step_count)))
        blocks = make_blocks(packed, anchors, c.anchors_per_step, c.tile, self.drafter.config.retention).to(c.device)
        taps, states = self.target(*self._device_rows(packed))
        loss = self.loss(blocks, taps, states)
        loss.total.backward()
        lr = learning_rate(self.progress, peak=c.lr, warmup=c.warmup, floor=c.lr_floor)
        norm = self.optimizer.step(lr)
        self.step_count += 1
        return loss, norm, lr

    def loss(self, blocks: Blocks, taps: Tensor, states: Tensor) -> BlockLoss:
        """Forward pass of the drafter and its losses on the blocks of one step."""
        c = self.config
        return block_loss(
            self.drafter,
            draft_states(self.drafter, blocks, taps),
            self.target.head,
            block_targets(blocks, states, self.drafter.config.block_size, c.gamma),
            hard_weight=c.hard_weight,
            selector_weight=c.selector_weight,
            use_argmax=c.gold == "argmax",
            chunk=c.head_chunk,
        )

    def run(self) -> Replay | None:
        """Train until the schedule ends, logging, evaluating and saving on the way. Returns the last evaluation."""
        c = self.config
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "train.json").write_text(to_json(c, provenance(c.device)))
        size = f"{len(self.documents)} documents, {self.documents.lens.sum()} tokens"
        _say(f"{self.parameters / 1e6:.1f} M parameters, {size}, {len(self.validation)} held-out greedy documents")
        last = now = time.monotonic()
        logged = evaluated = saved = self.seconds
        first = self.step_count
        pause = self.seconds + c.pause_seconds if c.pause_seconds else float("inf")
        unheard = True
        while self.progress < 1 and self.seconds < pause:
            loss, norm, lr = self.step()
            if c.max_seconds and self.config.device != "cpu" and self.step_count % 8 == 0:
                torch.cuda.synchronize()  # else the clock runs ahead of the device by everything that is queued
            now = time.monotonic()
            self.seconds += now - last
            last = now
            if self.seconds - logged >= c.log_seconds or unheard:
                unheard = False
                self._log(loss, norm, lr, (self.step_count - first) / max(self.seconds - logged, 1e-9))
                logged, first = self.seconds, self.step_count
            by_steps = c.save_steps and self.step_count % c.save_steps == 0
            if by_steps or (c.save_seconds and self.seconds - saved >= c.save_seconds):
                self.save()
                saved = self.seconds
            if c.eval_seconds and self.seconds - evaluated >= c.eval_seconds:
                self.evaluate()
                evaluated = self.seconds
            # Saving and evaluating count as part of the run: a lease ends by the clock.
            self.seconds += time.monotonic() - last
            last = time.monotonic()
        self.save()
        _say(f"step {self.step_count}: saved to {self.out}")
        return self.evaluate() if self.progress >= 1 else None

    def evaluate(self) -> Replay | None:
        """Replay the held-out greedy documents with the weights that would be saved."""
        if not len(self.validation):
            return None
        c = self.config
        self.optimizer.show(averaged=True)
        result = replay(
            self.drafter,
            self.target,
            self.validation,
            row_tokens=c.row_tokens,
            rows_per_step=c.rows_per_step,
            blocks_per_step=c.anchors_per_step,
            tile=c.tile,
            chunk=c.head_chunk,
        )
        self.optimizer.show(averaged=False)
        self._write({"step": self.step_count, "seconds": round(self.seconds, 1), "validation": asdict(result)})
        rows = " ".join(f"{r:.2f}" for r in result.by_row)
        _say(
            f"step {self.step_count}: acceptance length {result.rounds:.3f} in rounds, {result.anchors:.3f} at every "
            f"position, {result.unary:.3f} without selector; accepted by row {rows}"
        )
        return result

    def save(self) -> None:
        """Write weights and resume state."""
        publish(self.drafter, self.optimizer.weights(), self.out)
        state = {"step": self.step_count, "seconds": self.seconds, "settings": self._fixed()}
        state |= {"optimizer": self.optimizer.state_dict(), "mask_embedding": self.drafter.mask_embedding}
        save_resume(self.out, state)

    def _resume(self) -> None:
        state = load_resume(self.out, self._fixed())
        if state is not None:
            self.step_count, self.seconds = state["step"], state["seconds"]
            self.optimizer.load_state_dict(state["optimizer"])
            row = state.get("mask_embedding")
            self.drafter.mask_embedding = None if row is None else row.to(self.drafter.device)
            _say(f"resumed at step {self.step_count}, after {self.seconds:.0f} s")

    def _fixed(self) -> dict[str, Any]:
        return {k: v for k, v in json.loads(json.dumps(asdict(self.config))).items() if k not in FREE}

    def _rows(self, step: int) -> PackedRows:
        """Data of a step, from its number alone: nothing about the data has to be stored to resume."""
        return pack(self.documents, self.plan[step], self.config.row_tokens)

    def _device_rows(self, packed: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
        arrays = (packed.tokens, packed.positions, packed.document)
        tokens, positions, document = (torch.from_numpy(x).to(self.config.device, non_blocking=True) for x in arrays)
        return tokens, positions, document

    def _log(self, loss: BlockLoss, norm: Tensor, lr: float, rate: float) -> None:
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
        if torch.device(self.config.device).type == "cuda":
            line["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        self._write(line)
        _say(
            f"step {self.step_count} {100 * self.progress:.1f} % loss {line['loss']:.3f} base {line['base']:.3f} "
            f"selector {line['selector']:.3f} top-1 {line['top1'][0]:.3f}..{line['top1'][-1]:.3f} expected length "
            f"{line['expected_length']:.2f} {rate:.2f} steps/s lr {lr:.1e} norm {line['grad_norm']:.2f} "
            f"{line.get('peak_gib', '')}"
        )

    def _write(self, line: dict[str, Any]) -> None:
        with (self.out / "metrics.jsonl").open("a") as f:
            f.write(json.dumps(line) + "\n")


def _compile(drafter: DFlash2Drafter) -> None:
    """Compile what is bound by memory traffic; attention and matrix products stay as they are."""
    import torch._dynamo

    # One graph per module and kind of call, where dynamo expects few per function.
    torch._dynamo.config.cache_size_limit = 64
    for module in drafter.modules():
        if isinstance(module, RMSNorm | MLP):
            module.compile()
        elif isinstance(module, GroupedConv):
            for name in ("before", "after"):
                setattr(module, name, torch.compile(getattr(module, name)))


def _say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


def train(config: TrainConfig) -> Replay | None:
    """Train to the end. Returns the last evaluation, if there were validation documents."""
    # cuDNN's attention is planned anew for every shape, and here slabs have many lengths.
    torch.backends.cuda.enable_cudnn_sdp(False)
    return Trainer(config).run()


def main(argv: Sequence[str] | None = None) -> None:
    """Train with the settings of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m dflash2.training.train",
        description="Train a drafter on token shards.",
        epilog="settings (default):\n" + help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", help="JSON or YAML file of settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="change a setting (drafter.FIELD=VALUE: one of the drafter's); repeatable",
    )  # fmt: skip
    args = parser.parse_args(argv)
    train(load_config(args.config, args.set))


if __name__ == "__main__":
    raise SystemExit(run_command("dflash2.training.train", main))
