"""The package installs what the folders hold, imports quickly, and its modules import one way."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
AT_TOP_LEVEL = {"dflash2.kernels": "kernels", "dflash2.checkpoints": "checkpoints"}

# A module may import modules of lower layers and of its own. Modules not named here are the core.
CORE = 2
LAYERS = {
    "dflash2.errors": 0,
    "dflash2.cache_folder": 0,
    "dflash2.kernels": 0,
    "dflash2.rope": 0,
    "dflash2.ops": 1,
    "dflash2.decoding": 3,
    "dflash2.generation": 3,
    "dflash2.adapters": 4,
    "dflash2.bench": 4,
    "dflash2.evaluation": 4,
    "dflash2.serving": 4,
    "dflash2.training": 4,
    "dflash2.demo": 4,
    "dflash2.doctor": 4,
    "dflash2.cli": 5,
    "dflash2.__main__": 6,
    "dflash2": 3,  # the public names, for those who build on them
}
# Parts that must not know each other: module -> what it never imports, not even inside a function.
MUST_NOT_KNOW = {
    "dflash2.config": ("torch",),
    "dflash2.drafter": ("transformers",),
    "dflash2.decoding": ("dflash2.kernels",),
    "dflash2.generation": ("dflash2.kernels",),
    "dflash2.kernels": ("dflash2",),
    "dflash2.verification": ("dflash2.drafter", "dflash2.window_kv"),
    "dflash2.window_kv": ("dflash2.model", "dflash2.drafter"),
}
SHARED_BY_ADAPTERS = (
    "dflash2.adapters.base",
    "dflash2.adapters.chunks",
    "dflash2.adapters.contexts",
    "dflash2.adapters.guard",
    "dflash2.adapters.opening",
    "dflash2.adapters.settings",
    "dflash2.adapters.versions",
)
# Loaded by those who use them: at the top of a module only in these parts.
HEAVY = {
    "transformers": ("dflash2.adapters.transformers",),
    "triton": ("dflash2.kernels",),
    "vllm": ("dflash2.adapters.vllm",),
    "sglang": ("dflash2.adapters.sglang",),
    "datasets": (),
    "matplotlib": (),
    "dflash2.kernels": ("dflash2.kernels",),
}


def modules() -> dict[str, Path]:
    found = {}
    for folder in ("dflash2", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[:2] in (("dflash2", "kernels"), ("dflash2", "checkpoints")):
                continue  # the links, on Pythons whose rglob follows them
            name = ".".join(("dflash2", *parts) if folder == "kernels" else parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def layer(name: str) -> int:
    named = [part for part in LAYERS if within(name, part) and part != "dflash2"]
    if named:
        return LAYERS[max(named, key=len)]
    return LAYERS["dflash2"] if name == "dflash2" else CORE


def guarded_by_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree: ast.AST, package: str, *, lazy: bool) -> set[str]:
    """Names that the code imports; those inside functions only when ``lazy``. Imports for types do not count."""
    names: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if guarded_by_type_checking(node):
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], base]).rstrip(".")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                names.add(full if full in MODULES or full in AT_TOP_LEVEL else base)
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names |= imports(node, package, lazy=lazy)
    return names


def imports_of(name: str, *, lazy: bool) -> set[str]:
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return imports(ast.parse(path.read_text(encoding="utf-8")), package, lazy=lazy)


def test_package_list_is_the_folders():
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "dflash2").rglob("*.py")
        if not set(path.relative_to(ROOT).parts[1:2]) & {"kernels", "checkpoints"}
    }
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(folders | set(AT_TOP_LEVEL)), "add the folder to [tool.setuptools] packages"
    mapped = PROJECT["tool"]["setuptools"]["package-dir"]
    assert mapped == {"dflash2": "dflash2", **AT_TOP_LEVEL}


def test_packages_have_an_init():
    for name in PROJECT["tool"]["setuptools"]["packages"]:
        if name not in AT_TOP_LEVEL:
            assert (ROOT / name.replace(".", "/") / "__init__.py").is_file(), name


@pytest.mark.parametrize("folder", AT_TOP_LEVEL.values())
def test_links_are_relative_and_resolve(folder):
    link = ROOT / "dflash2" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder
    assert link.resolve() == (ROOT / folder).resolve()
    # With one, a checkout on sys.path would hide the published packages of these names.
    assert not (ROOT / folder / "__init__.py").exists()


def test_extras():
    assert set(PROJECT["project"]["optional-dependencies"]) == {
        "vllm",
        "sglang",
        "train",
        "eval",
        "notebooks",
        "dev",
    }


def test_nothing_is_pinned():
    extras = PROJECT["project"]["optional-dependencies"].values()
    for requirement in [*PROJECT["project"]["dependencies"], *(one for extra in extras for one in extra)]:
        assert "==" not in requirement.partition(";")[0], requirement


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name):
    for imported in imports_of(name, lazy=False):
        if within(imported, "dflash2"):
            assert layer(imported) <= layer(name), (
                f"{name} imports {imported} of a higher layer (dflash2 itself is the highest)"
            )


@pytest.mark.parametrize("name", MODULES)
def test_parts_do_not_know_each_other(name):
    for part, unknown in MUST_NOT_KNOW.items():
        if within(name, part):
            for imported in imports_of(name, lazy=True):
                bad = [u for u in unknown if within(imported, u) and not within(imported, part)]
                assert not bad, f"{name} imports {imported}"


@pytest.mark.parametrize("name", MODULES)
def test_adapters_do_not_know_each_other(name):
    if not name.startswith("dflash2.adapters."):
        return
    own = {".".join(name.split(".")[:3]), *SHARED_BY_ADAPTERS}
    others = {i for i in imports_of(name, lazy=True) if i.startswith("dflash2.adapters.")}
    assert not {i for i in others if not any(within(i, part) for part in own)}


@pytest.mark.parametrize("name", MODULES)
def test_heavy_packages_are_loaded_on_use(name):
    for imported in imports_of(name, lazy=False):
        for heavy, allowed in HEAVY.items():
            if within(imported, heavy):
                assert any(within(name, part) for part in allowed), f"{name} imports {imported} at its top"


IMPORT_PROBE = """
import json, sys, time
import torch
before, started = set(sys.modules), time.perf_counter()
import dflash2
names = [name for name in getattr(dflash2, "__all__", [])]
seconds = time.perf_counter() - started
new = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"seconds": seconds, "new": new}))
"""


def test_import_in_a_fresh_process_is_light():
    result = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE], capture_output=True, text=True, cwd=ROOT, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    probe = json.loads(result.stdout.splitlines()[-1])
    heavy = {"transformers", "triton", "vllm", "sglang", "datasets", "matplotlib", "gguf", "accelerate"}
    assert not heavy & set(probe["new"])
    assert probe["seconds"] < 1.0


def test_public_names_exist_and_load_nothing_heavy():
    code = (
        "import sys, dflash2\n"
        "for name in dflash2.__all__: getattr(dflash2, name)\n"
        "print([m for m in ('transformers', 'triton', 'vllm', 'sglang') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_version_is_stated_once():
    import dflash2

    assert dflash2.__version__ == PROJECT["project"]["version"]
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_test_modules_have_names_of_their_own():
    """pytest imports them by name alone: two of one name are an error, but only when both are collected."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
