"""What `dflash2 eval` does: a trace if there is none, every drafter over it, costs, a live check, the report."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash2.config import DFlash2Config
from dflash2.drafter import DFlash2Drafter
from dflash2.evaluation.costs import measure_costs, read_costs
from dflash2.evaluation.evaluate import Replayed, replay_trace
from dflash2.evaluation.live_check import LiveCheck, live_check
from dflash2.evaluation.report import about_drafter, make_report, write_report
from dflash2.evaluation.sources import trace_prompts
from dflash2.evaluation.trace import Tables, Trace
from dflash2.lm_head import Int8LMHead
from dflash2.loading import load_target, pick_device
from dflash2.targets import EMBEDDED_TARGET

__all__ = ["evaluate"]


def evaluate(args: Namespace, drafters: Mapping[str, str], settings: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Run `dflash2 eval` with the arguments of its parser, and write the report.

    Args:
        args: see `dflash2.evaluation.command`.
        drafters: folders, hub ids or names, by the name of their run.
        settings: of the trace, if one is to be made; see `trace_prompts`.

    Returns:
        The report; and False if a live check in float32 found another output or other rounds.
    """
    # cuDNN's attention is planned anew for every shape, and here shapes change all the time.
    torch.backends.cuda.enable_cudnn_sdp(False)
    device, dtype = pick_device(args.device, args.dtype)
    configs = {name: DFlash2Config.from_pretrained(path) for name, path in drafters.items()}
    target: Any = None
    if args.trace is None:
        target, tokenizer = load_target(args.target or EMBEDDED_TARGET, device, dtype)
        layers = [i for c in configs.values() for i in c.target_layer_ids]
        name, folder = args.target or EMBEDDED_TARGET, args.out / "trace"
        trace = trace_prompts(target, tokenizer, name, folder, layers, settings)
    else:
        trace = Trace(args.trace)
        dtype = trace.dtype if args.dtype == "auto" else dtype
    for config in configs.values():
        trace.check_fit(config)  # before anything is computed
    if target is None and (args.live_check or args.costs == "measure"):
        target, _ = load_target(args.target or trace.about["target"]["name"], device, dtype)
    costs = None if args.costs is None else dict[str, dict[int, float]]()
    runs, about, checks = dict[str, Replayed](), dict[str, dict[str, Any]](), dict[str, LiveCheck]()
    for name, path in drafters.items():
        drafter = _load(path, trace, device, dtype, args)
        most = drafter.config.max_draft_tokens
        widths = [most] if args.widest_only else list(range(1, most + 1))
        runs[name] = replay_trace(trace, drafter, widths)
        about[name] = about_drafter(path, drafter, runs[name])
        if costs is not None:
            costs[name] = _costs(args, target, drafter, trace)
        if args.live_check:
            checks[name] = live_check(target, drafter, trace, args.live_check)
    source = "measured here, one prompt at a time" if args.costs == "measure" else f"file {Path(args.costs or '').name}"
    report, table = make_report(trace, runs, about, device, costs, source, checks)
    write_report(args.out, report, table)
    exact = dtype != torch.float32 or all(c.same_rounds == c.prompts for c in checks.values())
    return report, exact


def _load(path: str, trace: Trace, device: torch.device, dtype: torch.dtype, args: Namespace) -> DFlash2Drafter:
    """A drafter with the trace's tables, quantised as asked for."""
    drafter = DFlash2Drafter.from_pretrained(path, dtype=dtype, device=device)
    if args.drafter_int8:
        drafter.quantize_linears()
    tables = trace.tables(device, dtype)
    return drafter.bind_target(tables.embedding, _int8(tables) if args.draft_int8_head else tables.head)


def _int8(tables: Tables) -> Int8LMHead:
    weight, bias = tables.head.weight, tables.head.bias
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return Int8LMHead.from_linear(linear)


def _costs(args: Namespace, target: Any, drafter: DFlash2Drafter, trace: Trace) -> dict[int, float]:
    if args.costs != "measure":
        return read_costs(Path(args.costs), drafter.config.max_draft_tokens)
    shard = next(trace.shards())
    return measure_costs(target, drafter, shard.tokens[None, : int(shard.prompt_lengths[0])].to(drafter.device))
