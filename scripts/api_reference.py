"""Write docs/api.md from the docstrings of the public names: ``python scripts/api_reference.py``.

A test holds the file to what this would write (tests/test_docs_pages.py).
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "docs/api.md"
INTRODUCTION = """# API reference

Written by `scripts/api_reference.py` from the docstrings; change those, then run it. R is requests, S tokens of a
prompt, k drafts, B rows of a block (the anchor and at most B-1 drafts), H hidden, T tapped layers, V vocabulary, C
candidates, W window. Examples: [propose](propose.md). Commands explain themselves: `dflash2 COMMAND --help`.
"""
#: What is documented, in the order in which one meets it: heading -> "module:name", several.
SECTIONS = {
    "A drafter": ["config:DFlash2Config", "drafter:DFlash2Drafter", "proposal:Proposal"],
    "Its context": ["window_kv:WindowKV", "sequence_state:SequenceState"],
    "Verification": ["verification:verify", "verification:Verification", "lm_head:Int8LMHead"],
    "Decoding": ["generation:generate", "generation:Generation", "decoding:GenerationStats"],
    "Transformers": ["adapters.transformers:generate", "adapters.transformers:register"],
    "Targets and prompts": ["targets:embedded_target", "targets:resolve_target", "prompts:load_prompts"],
    "Measuring": ["evaluation.trace:Trace", "evaluation.evaluate:replay_trace", "evaluation.evaluate:rows"],
    "Errors": [f"errors:{name}" for name in ("ConfigError", "PositionError", "CapacityError", "CheckpointError")],
}
#: Of these classes only what users call; the rest is for the parts of the package that work together.
MEMBERS = {
    "DFlash2Config": "from_pretrained to_dict to_json max_draft_tokens windows causal retention window_pages",
    "DFlash2Drafter": "from_pretrained save_pretrained bind_target new_kv append propose append_and_propose capture "
    "quantize_linears is_bound dtype device",
    "WindowKV": "open close reset truncate skip_to reserve span spans pages_needed pages_in_use nbytes open_sequences "
    "export_state import_state",
    "Int8LMHead": "from_linear forward",
    "GenerationStats": "acceptance_length drafts_per_pass",
}
HEADING = re.compile(r"^(Args|Returns|Yields|Raises|Attributes):(?: (.*))?$")


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for heading, names in SECTIONS.items():
        parts.append(f"## {heading}\n")
        for name in names:
            module, _, attribute = name.partition(":")
            parts += entry(getattr(importlib.import_module(f"dflash2.{module}"), attribute), module, attribute)
    return "\n".join(parts)


def entry(thing: Any, module: str, name: str) -> list[str]:
    """A function, or a class with its `MEMBERS`."""
    import dflash2

    place = "dflash2" if getattr(dflash2, name, None) is thing else f"dflash2.{module}"
    made = [f"### `{place}.{name}`\n", *signature(thing, name), text(inspect.getdoc(thing) or "")]
    if inspect.isclass(thing):
        for key in MEMBERS.get(name, "").split():
            member = inspect.getattr_static(thing, key)
            call = member.__func__ if isinstance(member, classmethod) else member
            made.append(f"#### `{name}.{key}`\n")
            made += [] if isinstance(call, property) else signature(call, key)
            made.append(text(inspect.getdoc(call) or ""))
    return made


def signature(thing: Any, name: str) -> list[str]:
    """As one writes a call; without the types, which the text explains with shapes and units."""
    if inspect.isclass(thing) and (issubclass(thing, Exception) or "__init__" not in vars(thing)):
        return []
    shown = []
    star = False
    for p in inspect.signature(thing).parameters.values():
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and not star:
            shown.append("*")
        star |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        mark = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        shown.append(f"{mark}{p.name}" + ("" if p.default is p.empty else f"={default(p.default)}"))
    flat = f"{name}({', '.join(shown)})"
    return [f"```text\n{flat if len(flat) < 110 else wrapped(name, shown)}\n```\n"]


def default(value: Any) -> str:
    """A default as one would write it; one that is made anew for each object only by its kind."""
    return "..." if " object at " in repr(value) or "factory" in repr(value) else repr(value)


def wrapped(name: str, shown: list[str]) -> str:
    """One argument a line."""
    return "\n".join([f"{name}(", *(f"    {s}," for s in shown), ")"])


def text(doc: str) -> str:
    """A Google docstring as Markdown: its sections become lists."""
    out: list[str] = []
    inside = False
    for line in doc.splitlines():
        found = HEADING.match(line)
        if found:
            inside = True
            out += [f"**{found[1]}**" + (f" {found[2]}" if found[2] else ""), ""]
        elif inside and re.match(r"^    \S", line):
            name, colon, rest = line.strip().partition(": ")
            listed = colon and re.fullmatch(r"\*{0,2}\w+(, \*{0,2}\w+)*", name)
            out.append(f"- `{name}`: {rest}" if listed else f"  {line.strip()}" if out[-1] else line.strip())
        elif inside and line.startswith("    "):
            out.append(f"  {line.strip()}")
        else:
            inside = inside and not line.strip()
            out.append(line)
    return re.sub(r"``(.+?)``", r"`\1`", "\n".join(out)) + "\n"


if __name__ == "__main__":
    FILE.write_text(reference(), encoding="utf-8")
