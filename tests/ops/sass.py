"""Registers that machine code reads where some path has not written them: what a faulty assembler leaves behind.

Only uniform registers are looked at: addresses of matrix products in shared memory are put together in them.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton

INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;")
PREDICATED = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+@")
UNIFORM = re.compile(r"(gdesc|desc)?\[?\bUR(\d+)\b(\.64)?")
WRITERS = ("U", "R2UR", "S2UR", "REDUX", "VOTEU")
#: Begin like these, and write none.
NO_WRITERS = ("UISETP", "UPLOP", "UP2UR", "USETMAXREG")


def disassembled(cubin):
    """SASS of a compiled kernel, or None where Triton brings no disassembler."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def effects(text):
    """(read, written) numbers of uniform registers of one instruction."""
    name, _, rest = text.partition(" ")
    writes = name.startswith(WRITERS) and not name.startswith(NO_WRITERS)
    read, written = set(), set()
    for operand in rest.split(","):
        found = list(UNIFORM.finditer(operand))
        for kind, number, pair in (m.groups() for m in found):
            first = int(number)
            if writes and not written and kind is None:
                wide = ".64" in name or ".WIDE" in name
                written = set(range(first, first + (4 if ".128" in name else 2 if wide else 1)))
            else:
                count = 4 if kind == "gdesc" else 2 if pair or (writes and ".64" in name) else 1
                read |= set(range(first, first + count))
        if writes and not written and not re.fullmatch(r"\s*U?P\w+\s*", operand):
            writes = False
    return read, written


def unwritten(sass):
    """Instructions that read what is not written on all paths to them: (address, text, register numbers)."""
    lines = [line for line in sass.splitlines() if INSTRUCTION.match(line)]
    code = [INSTRUCTION.match(line).groups() for line in lines]
    place = {int(address, 16): i for i, (address, _) in enumerate(code)}
    known = [effects(text) for _, text in code]
    arrives = [None] * len(code)
    arrives[0] = frozenset()
    work = [0]
    while work:
        i = work.pop()
        text, goes_on = code[i][1], bool(PREDICATED.match(lines[i]))
        jump = re.match(r"BRA\S*\s.*?0x([0-9a-f]+)", text)
        after = [place[int(jump.group(1), 16)]] if jump else []
        if goes_on or not text.startswith(("BRA", "EXIT", "RET")):
            after.append(i + 1)
        for j in after:
            if j >= len(code):
                continue
            there = arrives[i] | known[i][1]
            there = there if arrives[j] is None else there & arrives[j]
            if there != arrives[j]:
                arrives[j] = there
                work.append(j)
    return [
        (address, text, sorted(known[i][0] - arrives[i]))
        for i, (address, text) in enumerate(code)
        if arrives[i] is not None and known[i][0] - arrives[i]
    ]
