"""What an int8 output head would change in a target: ``dflash2 head-report``.

Sharing one int8 head between target and drafter changes the target's logits, so it is opt-in. Here the target reads
real text once, its head and an int8 copy see the same hidden states, and whatever the target does to logits afterwards
(multiplier, softcap) happens to both. What remains is the head's own doing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dflash2
from dflash2.checkpoint_files import DEFAULT_DRAFTER, checkpoint_path
from dflash2.errors import ConfigError
from dflash2.loading import int8_head, load_target, pick_device
from dflash2.ops.top_candidates import top_candidates
from dflash2.prompts import prompt_ids, read_prompts
from dflash2.provenance import provenance

__all__ = ["HeadReport", "default_texts", "measure_head", "read_texts", "report", "table"]

#: Tokens per forward pass: bounds two sets of logits, 0.5 GB in 16 bits at a vocabulary of 248,320.
SEGMENT = 512
#: Rows compared at a time, in fp64.
CHUNK_ROWS = 64


@dataclass(frozen=True)
class HeadReport:
    """An int8 head beside the one it was made from, over positions of text.

    Attributes:
        tokens: positions compared.
        flips: where the most likely next token is another.
        flips_within_rounding: of those, where the target's two best logits were at most one 16-bit rounding step apart.
        widest_flip: largest distance of those two among the flips; None without one.
        kl_mean, kl_median, kl_p99, kl_max: KL(16-bit head || int8 head) over positions, in nats.
        max_logit_change: largest change of any logit.
        head_bytes, int8_bytes: size of the heads.
        tied: the 16-bit weight is the embedding too and stays: an int8 head then adds memory and saves only traffic.
        head_dtype: of the target's head.
    """

    tokens: int
    flips: int
    flips_within_rounding: int
    widest_flip: float | None
    kl_mean: float
    kl_median: float
    kl_p99: float
    kl_max: float
    max_logit_change: float
    head_bytes: int
    int8_bytes: int
    tied: bool
    head_dtype: str


def default_texts() -> list[Path]:
    """English and code that travel with the package: a model card and a module."""
    return [checkpoint_path(DEFAULT_DRAFTER) / "README.md", Path(dflash2.__file__).parent / "decoding.py"]


def read_texts(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Prompts of JSON lines (``.jsonl``, ``.jsonl.gz``; see `read_prompts`), and other files as one ``text`` each.

    Raises:
        ConfigError: a file cannot be read or holds nothing.
    """
    found: list[dict[str, Any]] = []
    for path in paths:
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            found += read_prompts([path])
            continue
        try:
            found.append({"text": path.read_text(encoding="utf-8")})
        except (OSError, ValueError) as e:
            raise ConfigError(f"--text {path} cannot be read as UTF-8 text ({e}).") from e
        if not found[-1]["text"].strip():
            raise ConfigError(f"--text {path} is empty. Give real text, of a few thousand tokens.")
    return found


def report(
    target: str, paths: Sequence[Path], max_tokens: int, device: str = "auto", dtype: str = "auto"
) -> dict[str, Any]:
    """`measure_head` of a target by name, over files, with where the numbers come from; ready for JSON.

    Args:
        target: name, folder or hub id.
        paths: see `read_texts`. Prompts go into the chat template.
        max_tokens: stop after so many.
        device, dtype: see `pick_device`.
    """
    texts = read_texts(paths)  # before a large target is loaded
    model, tokenizer = load_target(target, *pick_device(device, dtype))
    return {
        "target": Path(target).name,
        **asdict(measure_head(model, _encode(tokenizer, texts, max_tokens))),
        "texts": [{"file": p.name, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for p in paths],
        "max_tokens": max_tokens,
        "context": SEGMENT,
        "provenance": provenance(model.device),
    }


def _encode(tokenizer: Any, texts: Sequence[dict[str, Any]], most: int) -> Iterator[list[int]]:
    """Segments of token ids, each read by itself, ``most`` tokens in all."""
    for text in texts:
        raw = "text" in text
        ids = prompt_ids(tokenizer, text["text"] if raw else text["turns"][0], text.get("system"), raw)
        for at in range(0, len(ids), SEGMENT):
            part = ids[at : at + min(SEGMENT, most)]
            most -= len(part)
            if part:
                yield part


@torch.no_grad()
def measure_head(target: Any, segments: Iterator[list[int]] | Sequence[list[int]]) -> HeadReport:
    """Compare the target's next-token distributions under its own head and under an int8 copy of it.

    Args:
        target: a Transformers causal LM with a 16- or 32-bit head.
        segments: token ids, each list read from its own beginning.

    Raises:
        ConfigError: there is no such head, the text has no tokens, or logits are not finite.
    """
    copy, head = int8_head(target), target.get_output_embeddings()

    def both(_module: Any, args: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        return torch.cat((logits, copy(args[0])))

    hook = head.register_forward_hook(both)
    try:
        parts = [_compare(*_logits(target, ids), head.weight.dtype) for ids in segments]
    finally:
        hook.remove()
    if not parts:
        raise ConfigError("the text has no tokens. Give real text, of a few thousand tokens.")
    kl, flipped, gap, step, change = (torch.cat(column) for column in zip(*parts, strict=True))
    if not bool(kl.isfinite().all()):
        raise ConfigError("the target's logits are not finite on this text: try --dtype bfloat16 or float32.")
    gaps = gap[flipped]
    return HeadReport(
        tokens=len(kl),
        flips=len(gaps),
        flips_within_rounding=int((gaps <= step[flipped]).sum()),
        widest_flip=float(gaps.max()) if len(gaps) else None,
        kl_mean=float(kl.mean()),
        kl_median=float(kl.quantile(0.5)),
        kl_p99=float(kl.quantile(0.99)),
        kl_max=float(kl.max()),
        max_logit_change=float(change.max()),
        head_bytes=sum(p.nbytes for p in head.parameters()),
        int8_bytes=sum(b.nbytes for b in copy.buffers()),
        tied=head.weight is target.get_input_embeddings().weight,
        head_dtype=str(head.weight.dtype).removeprefix("torch."),
    )


def _logits(target: Any, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Of the target's head and of the int8 copy, ``[n, V]``, after all that the target does to logits."""
    logits = target(input_ids=torch.tensor([ids], device=target.device), use_cache=False).logits
    if logits.shape[0] != 2:
        raise ConfigError(f"{type(target).__name__} does not call its head as a module: it cannot be measured.")
    return logits[0], logits[1]


def _compare(own: Tensor, int8: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Per row of ``[n, V]``, on the CPU: KL, whether the argmax differs, gap of the best two, rounding step, change."""
    parts = []
    for a, b in zip(own.split(CHUNK_ROWS), int8.split(CHUNK_ROWS), strict=True):
        (best, values), (other, _) = top_candidates(a, min(2, a.shape[1])), top_candidates(b, 1)
        a, b = a.double(), b.double()
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        same = a == b  # so that tokens ruled out by -inf count as unchanged
        kl = (p.exp() * (p - q)).masked_fill(same & a.isneginf(), 0.0).sum(-1)
        change = (a - b).masked_fill(same, 0.0).abs().amax(-1)
        row = (kl, best[:, 0] != other[:, 0], values[:, 0] - values[:, -1], _step(values[:, 0], dtype), change)
        parts.append([x.cpu() for x in row])
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _step(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance to the next number of a 16-bit dtype; of bfloat16 for a head in fp32, which it would be rounded to."""
    kind = dtype if dtype.itemsize == 2 else torch.bfloat16
    _, exponent = torch.frexp(values)
    return torch.ldexp(torch.full_like(values, torch.finfo(kind).eps), exponent - 1)


def table(r: dict[str, Any]) -> str:
    """What `report` found, for people."""
    within = f"{r['flips_within_rounding']} of them within one 16-bit rounding step of the runner-up"
    widest = f"; widest gap {r['widest_flip']:.2g}" if r["flips"] else ""
    spread = {"mean": r["kl_mean"], "median": r["kl_median"], "99 %": r["kl_p99"], "max": r["kl_max"]}
    files = ", ".join(text["file"] for text in r["texts"])
    lines = {
        "next token differs": f"{r['flips']} ({r['flips'] / r['tokens']:.2%}), {within}{widest}",
        "KL, nats": ", ".join(f"{label} {value:.2g}" for label, value in spread.items()),
        "largest change of a logit": f"{r['max_logit_change']:.2g}",
        "bytes": f"{r['head_bytes']:,} -> {r['int8_bytes']:,}"
        + (" (tied to the embedding: the first stays)" if r["tied"] else " (the first can be freed)"),
    }
    title = f"{r['target']}: int8 head beside its own ({r['head_dtype']}), {r['tokens']:,} positions of {files}"
    return "\n".join([title, *(f"  {label:<27}{text}" for label, text in lines.items())])
