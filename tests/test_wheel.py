"""A wheel built from the sdist, as users get it, works from another folder."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.slow

USE = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import dflash2
from dflash2.checkpoint_files import checkpoint_path, packaged_checkpoints
site = Path(sys.argv[1]).resolve()
assert site in Path(dflash2.__file__).resolve().parents, dflash2.__file__
for name in packaged_checkpoints():
    assert site in checkpoint_path(name).parents
print("checkpoints", *packaged_checkpoints())

import os
os.environ.setdefault("TRITON_INTERPRET", "1")
import torch
from dflash2.ops.grouped_conv import grouped_conv
x, base, delta = torch.ones(1, 3, 4), torch.ones(2, 4), torch.zeros(1, 3, 2, 2)
backends = ["torch"]
try:
    import triton
except ImportError:
    pass
else:
    backends.append("triton")
for backend in backends:
    assert grouped_conv(x, base, delta, backend=backend)[0, :, 0].tolist() == [1.0, 2.0, 2.0]
    print("grouped_conv", backend)
"""


def run(*command: object, cwd: Path) -> str:
    result = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def copy_sources(destination: Path) -> None:
    """What a clone would hold: tracked and new files, links as links."""
    listing = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listing.split("\0")):
        source, copy = ROOT / name, destination / name
        if source.is_symlink() or source.is_file():  # neither: deleted and not committed yet
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout to know which files belong")
    folder = tmp_path_factory.mktemp("build")
    copy_sources(folder / "source")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", cwd=folder / "source")
    (found,) = (folder / "dist").glob("*.whl")
    return found


def test_wheel_holds_each_file_once(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        f"dflash2/{path.relative_to(ROOT)}"
        for folder, pattern in (("kernels", "*.py"), ("kernels", "configs/*.json"), ("checkpoints", "*/*"))
        for path in (ROOT / folder).glob(pattern)
    }
    expected |= {str(p.relative_to(ROOT)) for p in (ROOT / "dflash2").rglob("*.py")}
    assert expected <= set(names)
    assert {"dflash2/py.typed", "dflash2/builtin_prompts.jsonl"} <= set(names)
    assert len(names) == len(set(names))
    assert all(name.startswith(("dflash2/", "dflash2-")) for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_installed_wheel_works_elsewhere(wheel, tmp_path):
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    # -I: neither this checkout nor the user's settings may help; the site goes first on the path by hand.
    printed = run(sys.executable, "-I", "-c", USE, site, cwd=tmp_path)
    packaged = [config.parent.name for config in sorted((ROOT / "checkpoints").glob("*/config.json"))]
    assert f"checkpoints {' '.join(packaged)}".strip() in printed
    assert "grouped_conv torch" in printed
