"""The interpreter forgives what the compiler refuses: kernels compile here for the GPUs they are for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Shared memory of one program, in bytes.
LIMITS = {80: 163 << 10, 90: 227 << 10}
PRODUCTS = (
    "block_linear",
    "window_attention._window",
    "int8_head._top",
    "row_linear",
    "selector_walk",
    "decode_attention",
)


@pytest.mark.slow
@pytest.mark.parametrize("capability", LIMITS)
def test_kernels_compile(capability, tmp_path):
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, str(ROOT / "tests/ops/compile_kernels.py"), str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for line in done.stdout.splitlines():
        made = json.loads(line)
        assert made["shared"] <= (99 << 10 if made["kernel"].endswith("wide") else LIMITS[capability]), line
        assert made["mma"] or not made["kernel"].startswith(PRODUCTS), line
        assert made["strays"] == [], line
    assert len(done.stdout.splitlines()) > 10


LOOP = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x248] ;
        /*0010*/               @P0 BRA 0x50 ;
        /*0020*/                   UIADD3.64 UR8, UR4, 0x4, URZ ;
        /*0030*/                   UIADD3.64 UR10, UR8, 0x4, URZ ;
        /*0040*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0050*/                   UIADD3.X UR7, {base}, -0x7fffffe0, URZ, UP0, !UPT ;
        /*0060*/                   EXIT ;
"""


def test_what_only_a_loop_writes_is_found_behind_it():
    sass = pytest.importorskip("sass", reason="no Triton")
    assert [(a, strays) for a, _, strays in sass.unwritten(LOOP.format(base="UR9"))] == [("0050", [9])]
    assert sass.unwritten(LOOP.format(base="UR4")) == []
