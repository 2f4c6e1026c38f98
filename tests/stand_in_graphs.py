"""CUDA graphs without a GPU: a stand-in calls again what it recorded, into the same memory."""

from __future__ import annotations

import torch

from dflash2.append import append_rows_on_device
from dflash2.capture import CapturedDrafting, _Graph


class Again:
    """Replays by calling, and counts it."""

    replays = 0

    def __init__(self, call, inputs, outputs):
        self.call, self.inputs, self.outputs = call, inputs, outputs

    def replay(self):
        Again.replays += 1
        new = self.call(**self.inputs)
        if new is not None:
            for name in ("tokens", "candidates", "q", "valid"):
                if getattr(new, name) is not None:
                    getattr(self.outputs, name).copy_(getattr(new, name))


def capture(monkeypatch, drafter, kv, sizes, k):
    """What `DFlash2Drafter.capture` does on a GPU."""

    def recorded(self, call, **inputs):
        outputs = call(**inputs)
        return _Graph(Again(call, inputs, outputs), outputs)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(CapturedDrafting, "_capture", recorded)
    width = len(drafter.config.target_layer_ids) * drafter.config.hidden_size
    with torch.no_grad():
        kv.captured = CapturedDrafting(
            drafter._captured_weights(),
            lambda **inputs: drafter._draft(kv, k, drafter._most_context(kv), **inputs),
            lambda **inputs: append_rows_on_device(drafter, kv, **inputs),
            sizes, k, drafter.norm.weight.new_empty(0, width), kv.padding_slot,
        )  # fmt: skip
