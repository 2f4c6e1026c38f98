"""SGLang's server arguments under ``--speculative-algorithm DFLASH2``: what is refused, and what is filled in."""

from __future__ import annotations

import logging
from typing import Any

from dflash2.adapters.sglang.settings import Settings
from dflash2.checkpoint_files import find
from dflash2.config import DFlash2Config
from dflash2.errors import ConfigError

__all__ = ["problems", "resolve"]

_log = logging.getLogger("sglang.dflash2")

#: As for SGLang's own algorithms, where the user says nothing.
RUNNING_REQUESTS = 48
#: argument: (what it may be, why)
ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "tp_size": ((1,), "the drafter runs on one GPU so far"),
    "pp_size": ((1,), "the drafter runs on one GPU so far"),
    "enable_dp_attention": ((False, None), "the drafter runs on one GPU so far"),
    "disaggregation_mode": (("null", None), "the taps of a prompt stay where it was computed"),
    "enable_hierarchical_cache": ((False, None), "it would look for the drafter's KV in SGLang's pools"),
    "enable_deterministic_inference": ((False, None), "draws from a request's seed are those of one token at a time"),
    "speculative_adaptive": ((False, None), "it is for algorithms that draft step by step"),
    "speculative_draft_window_size": ((None,), "the drafter's window is in its checkpoint"),
    "speculative_num_steps": ((None, 1), "a block is drafted in one step"),
    "speculative_eagle_topk": ((None, 1), "drafts are a chain, not a tree"),
}


def problems(args: Any) -> list[str]:
    """Why these arguments do not go with DFLASH2; empty if they do.

    Args:
        args: SGLang's ``ServerArgs``, or what stands for them.
    """
    found = [
        f"{name}={getattr(args, name)!r}: must be {allowed[0]!r}, since {why}"
        for name, (allowed, why) in ONLY.items()
        if getattr(args, name, allowed[0]) not in allowed
    ]
    if not args.speculative_draft_model_path:
        found.append("speculative_draft_model_path: must name the drafter")
    return found


def resolve(args: Any) -> dict[str, Any]:
    """Arguments that follow from those given.

    Args:
        args: SGLang's ``ServerArgs``, or what stands for them.

    Returns:
        new values, by name.

    Raises:
        ConfigError: what was asked for is not there.
    """
    if found := problems(args):
        raise ConfigError(f"--speculative-algorithm DFLASH2: {'; '.join(found)}.")
    Settings.of_environment()  # a mistake in it is told now, not by a worker
    path = str(find(args.speculative_draft_model_path))
    most = DFlash2Config.from_pretrained(path).max_draft_tokens + 1
    tokens = args.speculative_num_draft_tokens or most
    if not 2 <= tokens <= most:
        raise ConfigError(
            f"speculative_num_draft_tokens={tokens}: must be 2 to {most}. SGLang counts the token before the drafts "
            f"too: {most} means {most - 1} drafts, which is all that this drafter's block has room for."
        )
    new = {
        "speculative_draft_model_path": path,
        "speculative_num_draft_tokens": tokens,
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
    }
    if args.max_running_requests is None:
        new["max_running_requests"] = RUNNING_REQUESTS
        _log.warning("dflash2: --max-running-requests is %d unless it is given", RUNNING_REQUESTS)
    if args.enable_mixed_chunk:
        new["enable_mixed_chunk"] = False
        _log.warning("dflash2: --enable-mixed-chunk is off: a step prefills or verifies")
    if args.device == "cpu" and not args.disable_overlap_schedule:
        new["disable_overlap_schedule"] = True
        _log.warning("dflash2: the overlap schedule is off: on CPUs SGLang has none with drafts")
    return new
