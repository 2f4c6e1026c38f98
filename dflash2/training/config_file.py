"""Settings of a training run from a file and the command line, and files of them that explain each."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from dflash2.errors import ConfigError
from dflash2.training.config import TrainConfig

__all__ = ["config_yaml", "help_text", "load_config", "to_json"]

PROVENANCE = "provenance"
REQUIRED = ("target", "shards", "out")


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """A JSON or YAML file (the ``train.json`` of a run, too), then ``key=value``; values are JSON or bare words.

    Raises:
        ConfigError: an unknown or missing key, or a value out of its range.
    """
    raw = {} if path is None else _read(Path(path))
    for setting in overrides:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting!r}: expected key=value.")
        outer, _, inner = key.partition(".")
        if inner:
            raw.setdefault(outer, {})[inner] = _value(value)
        else:
            raw[key] = _value(value)
    raw.pop(PROVENANCE, None)  # of a train.json: how that run was made, not how this one is to be
    known = {f.name for f in fields(TrainConfig)}
    if unknown := sorted(set(raw) - known):
        raise ConfigError(f"unknown training settings {unknown}. Known: {sorted(known)}.")
    if missing := sorted(set(REQUIRED) - set(raw)):
        raise ConfigError(f"training settings {missing} are missing. Set them in the file or with --set.")
    for name in ("shards", "frozen"):
        if isinstance(raw.get(name), str):
            raw[name] = [raw[name]]
    return TrainConfig(**raw)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def to_json(config: TrainConfig, provenance: dict[str, Any]) -> str:
    """All settings, and what the run was made with, as the text of a ``train.json``, which `load_config` reads back."""
    return json.dumps({**asdict(config), PROVENANCE: provenance}, indent=2) + "\n"


def help_text() -> str:
    """Every setting with its default and what the docstring of `TrainConfig` says of it."""
    lines = []
    for name, default, meaning in _documented():
        shown = "required" if default is MISSING else json.dumps(default)
        lines += textwrap.wrap(f"{name} ({shown}): {meaning}", 110, subsequent_indent="    ")
    return "\n".join(lines)


def config_yaml() -> str:
    """A file of all settings with their defaults, each explained; the required ones are examples."""
    examples = {"target": "smollm2-135m", "shards": ["tokens/*.npz"], "out": "run", "drafter": {"mask_token_id": 16}}
    lines = ["# Settings of dflash2 train. Those that stay as they are can be left out."]
    for name, default, meaning in _documented():
        lines += ["", *textwrap.wrap(meaning, 110, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"{name}: {json.dumps(examples.get(name, default))}")
    return "\n".join(lines) + "\n"


def _documented() -> list[tuple[str, Any, str]]:
    """Name, default (`MISSING` for none) and meaning of every setting."""
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.cleandoc(TrainConfig.__doc__ or ""), re.MULTILINE)
    meaning = {name: " ".join(text.replace("``", "").replace("`", "").split()) for name, text in entries}
    return [
        (f.name, f.default if f.default_factory is MISSING else f.default_factory(), meaning.get(f.name, ""))
        for f in fields(TrainConfig)
    ]


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except OSError as e:
        raise ConfigError(f"--config {path} cannot be read: {e.strerror}.") from e
    raw = _json(path, text) if path.suffix == ".json" else _yaml(path, text)
    if not isinstance(raw, dict):
        raise ConfigError(f"--config {path} holds a {type(raw).__name__}: expected settings by name.")
    return raw


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as e:
        raise ConfigError(f"--config {path} is no JSON: {e}.") from e


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError as e:
        raise ConfigError("YAML settings need PyYAML: pip install 'dflash2[train]', or use a .json file.") from e
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as e:
        raise ConfigError(f"--config {path} is no YAML: {e}") from e
