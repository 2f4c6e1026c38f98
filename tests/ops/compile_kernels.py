"""A program, run without the interpreter: compiles the kernels for a GPU that need not be there.

python tests/ops/compile_kernels.py 90        compute capability 9.0; one JSON line for each kernel
"""

import importlib
import json
import sys

import triton
from sass import disassembled, unwritten
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.window_attention import fitted

I8, B16, F32, F64, I32, I64, I1 = "*i8", "*bf16", "*fp32", "*fp64", "*i32", "*i64", "*i1"
TILE = {"EVEN": True, "EARLY": 0, "SETTLED": False, "PREFETCH": 1024, "BLOCK_K": 128, "WEIGHTS_FIRST": 1}
EARLY = {"EARLY": 3, "SETTLED": True}
#: Arguments that are multiples of 16, by the end of their name.
ALIGNED = ("_ptr", "stride", "hidden", "inner", "inputs", "span", "to_up")
LINEAR = TILE | {"SEGMENTS": 3, "SPLIT": 4, "BLOCK_O": 64}
GATED = TILE | {"BLOCK_O": 32}
UNIT = {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "PARTS": 17, "QUERIES": 32, "DIM": 128}
#: Settings of an H200 for heads of 128, on a card with 99 KiB of shared memory, for heads of 256.
WIDE = {"KV_HEADS": 4, "GROUP": 2, "HEAD_DIM": 256, "PARTS": 9, "QUERIES": 64, "DIM": 256}
WIDE_TILE, WIDE_STAGES = fitted(128, 3, 64, 256, 2, 99 << 10)


def _linear(weight, rows, **more):
    types = {f"w{i}_ptr": weight for i in range(3)} | {f"s{i}_ptr": F32 for i in range(3)}
    return {"x_ptr": rows, "x_scale_ptr": F32, "y_ptr": F32, **types}, LINEAR | more


def _gated(weight, rows, **more):
    types = {"gate_ptr": weight, "gate_scale_ptr": F32, "up_scale_ptr": F32, "to_up": "i64"}
    return {"x_ptr": rows, "x_scale_ptr": F32, "y_ptr": B16, **types}, GATED | more


#: Kernel: types that are not i32 or bfloat16, constants, warps, stages. Shapes of the 27B drafter at one sequence.
KERNELS = {
    "block_linear._linear_kernel bf16": (*_linear(B16, B16, INT8=False, PLANES=False, BLOCK_R=16), 4, 4),
    "block_linear._linear_kernel int8": (*_linear(I8, B16, INT8=True, PLANES=False, BLOCK_R=8), 4, 4),
    "block_linear._linear_kernel bf16 early": (*_linear(B16, B16, INT8=False, PLANES=False, BLOCK_R=16, **EARLY), 4, 5),
    "block_linear._linear_kernel int8 early": (*_linear(I8, B16, INT8=True, PLANES=False, BLOCK_R=8, **EARLY), 4, 5),
    "block_linear._gated_kernel bf16 early": (*_gated(B16, B16, INT8=False, PLANES=False, BLOCK_R=16, **EARLY), 4, 5),
    "block_linear._gated_kernel planes early": (*_gated(I8, I8, INT8=True, PLANES=True, BLOCK_R=8, **EARLY), 4, 5),
    "block_linear._gated_kernel bf16": (*_gated(B16, B16, INT8=False, PLANES=False, BLOCK_R=16), 4, 4),
    "block_linear._gated_kernel planes": (*_gated(I8, I8, INT8=True, PLANES=True, BLOCK_R=8), 4, 5),
    "residual_norm._residual_norm_kernel": (
        {"a_ptr": F32, "finite_ptr": I1, "eps": "fp32"},
        {"GROUP_SIZE": 16, "SPLIT": 3, "TAPS": 2, "BIAS": False, "LAST": True, "SETTLED": True, "TILE": 1024,
         "TILES": 5}, 8, 1,
    ),
    "block_conv._block_conv_kernel": (
        {"delta_ptr": F32, "y_ptr": I8, "scale_ptr": F32},
        {"GROUP_SIZE": 16, "SPLIT": 5, "TAPS": 2, "PLANES": True, "SETTLED": True, "TILE": 1024}, 4, 1,
    ),
    "rotary_heads._rotary_heads_kernel": (
        {"qkv_ptr": F32, "cos_ptr": F32, "sin_ptr": F32, "eps": "fp32"}, {"SPLIT": 2, "BIAS": False, "HALF": 64}, 1, 1,
    ),
    "window_attention._window_attention_kernel": (
        {"rows_ptr": I32, "partial_ptr": F32},
        {"CAUSAL": False, "BLOCK": 32, "OWN": 16, "TILE": 64, "SCALE": 0.127, "PRECISION": "tf32", "PREFETCH": 256,
         "LINES": 2, **UNIT},
        4, 2,
    ),
    "window_attention._window_attention_kernel wide": (
        {"rows_ptr": I32, "partial_ptr": F32},
        {"CAUSAL": False, "BLOCK": 16, "OWN": 16, "TILE": WIDE_TILE, "SCALE": 0.127, "PRECISION": "tf32",
         "PREFETCH": 256, "LINES": 4, **WIDE},
        4, WIDE_STAGES,
    ),
    "window_attention._add_up_kernel": ({"partial_ptr": F32}, {"LANES": 8, **UNIT}, 4, 1),
    "int8_head._quantise_kernel": (
        {"halves_ptr": I8, "row_scale_ptr": F32, "floor_ptr": I32}, {"BLOCK": 8192, "PART": 1024, "SLOTS": 16}, 8, 1,
    ),
    "int8_head._top_kernel": (
        {"weight_ptr": I8, "scale_ptr": F32, "halves_ptr": I8, "row_scale_ptr": F32, "lists_ptr": I64,
         "lengths_ptr": I32, "bests_ptr": I32, "floor_ptr": I32},
        {"bias_ptr": None, "SLOTS": 16, "BLOCK_V": 128, "BLOCK_R": 8, "BLOCK_K": 128, "EVEN": True, "PROGRAMS": 0,
         "EARLY": 0},
        4, 4,
    ),
    "top_candidates._select_kernel": (
        {"lists_ptr": I64, "lengths_ptr": I32, "bests_ptr": I32, "ids_ptr": I64, "values_ptr": F32},
        {"BLOCK_R": 8, "SLOTS": 16, "TILES": 0, "RANKED": True}, 8, 1,
    ),
    "row_linear._span_sums_kernel": (
        {"x_scale_ptr": F32, "weight_ptr": I64, "sums_ptr": F32},
        {"TABLE": True, "PLANES": False, "INT8": False, "GATHER": False, "EVEN": True, "EARLY": 0, "BLOCK_R": 16,
         "BLOCK_O": 64, "BLOCK_K": 128}, 4, 4,
    ),
    "row_linear._span_sums_kernel early": (
        {"x_scale_ptr": F32, "weight_ptr": I64, "sums_ptr": F32},
        {"TABLE": True, "PLANES": False, "INT8": False, "GATHER": False, "EVEN": True, "EARLY": 4, "BLOCK_R": 16,
         "BLOCK_O": 64, "BLOCK_K": 128}, 4, 6,
    ),
    "selector_walk._selector_walk_kernel": (
        {"gate_ptr": F32, "anchors_ptr": I64, "candidates_ptr": I64, "logits_ptr": F32, "temperature_ptr": F32,
         "uniforms_ptr": F64, "tokens_ptr": I64, "index_ptr": I64, "q_ptr": F32, "meaningful_ptr": I1,
         "multiplier": "fp32", "softcap": "fp32"},
        {"K": 7, "C": 16, "RANK": 256, "ROWS": 8, "SLOTS": 16, "TILE": 32, "STAGES": 2, "CAPPED": True, "SAMPLED": True,
         "PARTS": 8, "CODE_BYTES": 512}, 4, 2,
    ),
    "decode_attention._decode_attention_kernel": (
        {"slots_ptr": I64, "lengths_ptr": I64, "cos_ptr": F32, "sin_ptr": F32, "eps": "fp32"},
        {"KV_HEADS": 8, "GROUP": 4, "HEAD_DIM": 128, "NORM": True, "QUERIES": 16, "DIM": 128, "TILE": 64,
         "SCALE": 0.127, "PRECISION": "tf32"}, 4, 3,
    ),
    "gumbel_sample._gumbel_sample_kernel": (
        {"temperatures_ptr": F32, "seeds_ptr": I64, "positions_ptr": I64, "out_ptr": I64}, {"TILE": 4096}, 8, 1,
    ),
    "distill._distill_kernel": (
        {"token_ptr": I64, "scale_ptr": F32, "loss_ptr": F32, "gold_ptr": I64, "peaks_ptr": F32, "multiplier": "fp32",
         "softcap": "fp32", "hard": "fp32", "soft": "fp32", "tv": "fp32", "lk": "fp32"},
        {"CAPPED": True, "ACCEPTANCE": True, "GROUP": 64, "TILE": 2048}, 16, 1,
    ),
}  # fmt: skip


def compiled(name, capability):
    """Shared memory in bytes, whether tensor cores are used, and what `unwritten` finds on Hopper."""
    types, constants, warps, stages = KERNELS[name]
    module, _, kernel = name.split(" ")[0].partition(".")
    fn = getattr(importlib.import_module(f"kernels.{module}"), kernel)
    pdl = capability >= 90 and "PDL" in fn.arg_names
    constants = constants | ({"PDL": pdl} if "PDL" in fn.arg_names else {})
    signature, aligned = {}, {}
    for i, argument in enumerate(fn.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        signature[argument] = types.get(argument, B16 if argument.endswith("_ptr") else "i32")
        if argument.endswith(ALIGNED) or argument.startswith("out"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, **({"launch_pdl": True} if pdl else {})}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    sass = disassembled(made.asm["cubin"]) if capability == 90 else None
    strays = unwritten(sass) if sass else []
    return {"kernel": name, "shared": made.metadata.shared, "mma": "mma" in made.asm["ptx"], "strays": strays}


if __name__ == "__main__":
    for each in KERNELS:
        print(json.dumps(compiled(each, int(sys.argv[1]))), flush=True)
