"""What the plug-in takes for granted of vLLM, held against the sources of any version, none of which is imported.

Usage: python hook_points.py FOLDER, where FOLDER holds ``vllm/``: prints what is not as expected, and ends with 1.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from pathlib import Path

from dflash2.adapters.vllm.proposer import Proposing
from dflash2.adapters.vllm.speculator import Speculating

V1, V2 = "v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"
BASE, SPECULATOR = "v1/spec_decode/llm_base_proposer.py", "v1/worker/gpu/spec_decode/speculator.py"
PARALLEL = "model_executor/layers/vocab_parallel_embedding.py"

#: (file, function or Class.method): its first parameters, without self.
PARAMETERS = {
    ("model_executor/models/registry.py", "_ModelRegistry.register_model"): "model_arch model_cls",
    ("model_executor/models/registry.py", "_ModelRegistry.get_supported_archs"): "",
    ("v1/spec_decode/dflash.py", "DFlashProposer.__init__"): "vllm_config device runner",
    (BASE, "SpecDecodeBaseProposer.propose"): (
        "num_speculative_tokens target_token_ids target_positions target_hidden_states next_token_ids "
        "token_indices_to_sample common_attn_metadata sampling_metadata mm_embed_inputs num_rejected_tokens_gpu "
        "slot_mappings"
    ),
    (BASE, "SpecDecodeBaseProposer.load_model"): "target_model",
    (BASE, "SpecDecodeBaseProposer.initialize_attn_backend"): "kv_cache_config kernel_block_sizes",
    (BASE, "SpecDecodeBaseProposer.validate_same_kv_cache_group"): "kv_cache_config",
    (BASE, "SpecDecodeBaseProposer.initialize_cudagraph_keys"): "cudagraph_mode",
    (BASE, "SpecDecodeBaseProposer.dummy_run"): "num_tokens",
    (BASE, "SpecDecodeBaseProposer.take_last_draft_probs"): "",
    (V1, "GPUModelRunner._update_states"): "scheduler_output",
    ("v1/sample/rejection_sampler.py", "expand_batch_to_tokens"): (
        "x cu_num_tokens num_tokens replace_from replace_to"
    ),
    ("v1/worker/gpu/spec_decode/__init__.py", "init_speculator"): "vllm_config device",
    (SPECULATOR, "DraftModelSpeculator.__init__"): "vllm_config device",
    (SPECULATOR, "DraftModelSpeculator.load_model"): "target_model",
    (SPECULATOR, "DraftModelSpeculator.load_draft_model"): "target_model target_attn_layer_names",
    (SPECULATOR, "BaseSpeculator.init_cudagraph_manager"): "cudagraph_mode",
    (SPECULATOR, "BaseSpeculator.capture"): "",
    (SPECULATOR, "BaseSpeculator.propose"): (
        "input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled num_rejected "
        "last_sampled next_prefill_tokens temperature seeds"
    ),
    (V2, "GPUModelRunner.finish_requests"): "scheduler_output",
    ("distributed/parallel_state.py", "get_tp_group"): "",
    ("distributed/parallel_state.py", "GroupCoordinator.all_gather"): "input_ dim",
}

#: (file, class): names that it defines, annotates or sets on itself.
NAMES = {
    ("config/vllm.py", "VllmConfig"): "additional_config speculative_config parallel_config",
    ("config/parallel.py", "ParallelConfig"): "tensor_parallel_size pipeline_parallel_size",
    ("config/scheduler.py", "SchedulerConfig"): "max_num_seqs",
    ("config/cache.py", "CacheConfig"): "enable_prefix_caching",
    ("model_executor/models/qwen3_dflash.py", "DFlashQwen3ForCausalLM"): "",
    (BASE, "SpecDecodeBaseProposer"): (
        "num_speculative_tokens max_model_len kv_cache_gid draft_attn_groups block_size _draft_attn_layer_names "
        "_enable_probabilistic_draft_probs _last_draft_probs"
    ),
    (V1, "GPUModelRunner"): "input_batch requests discard_request_mask effective_drafter_max_model_len drafter",
    ("v1/worker/gpu_input_batch.py", "InputBatch"): ("req_ids num_computed_tokens_cpu num_prompt_tokens token_ids_cpu"),
    ("v1/worker/gpu_input_batch.py", "CachedRequestState"): "prompt_token_ids output_token_ids",
    ("v1/attention/backend.py", "CommonAttentionMetadata"): "num_reqs query_start_loc query_start_loc_cpu",
    ("v1/core/sched/output.py", "SchedulerOutput"): (
        "finished_req_ids preempted_req_ids scheduled_new_reqs scheduled_cached_reqs"
    ),
    ("v1/core/sched/output.py", "CachedRequestData"): "resumed_req_ids",
    ("v1/core/sched/output.py", "NewRequestData"): "req_id prefill_token_ids",
    (SPECULATOR, "DraftModelSpeculator"): "num_speculative_steps draft_logits",
    (V2, "GPUModelRunner"): "speculator req_states",
    ("v1/worker/gpu/input_batch.py", "InputBatch"): (
        "req_ids num_reqs idx_mapping num_scheduled_tokens query_start_loc query_start_loc_np positions "
        "num_computed_tokens_np prefill_len_np is_prefilling_np"
    ),
    ("v1/worker/gpu/states.py", "RequestState"): "req_id_to_index all_token_ids total_len",
    ("distributed/parallel_state.py", "GroupCoordinator"): "rank_in_group world_size cpu_group",
    (PARALLEL, "VocabParallelEmbedding"): "tp_size shard_indices org_vocab_size",
    (PARALLEL, "VocabParallelEmbeddingShardIndices"): "num_org_elements num_org_elements_padded",
}

#: (file, call): numbers of positional arguments that the plug-in's function in its place takes.
CALLS = {
    (V1, "DFlashProposer"): (3,),
    (V1, "self._update_states"): (1,),
    (V2, "init_speculator"): (2, 3),
    (V2, "self.finish_requests"): (1,),
}


def missing(root: Path) -> list[str]:
    """What is not as the plug-in expects in ``root``, a folder ``vllm``; empty if all is."""
    found = [_parameters(root, *where, names.split()) for where, names in PARAMETERS.items()]
    found += [_names(root, *where, names.split()) for where, names in NAMES.items()]
    found += [_calls(root, *where, counts) for where, counts in CALLS.items()]
    found += [_bound(root, V1, "drafter", Proposing), _bound(root, V2, "speculator", Speculating)]
    return [problem for some in [*found, _abstract(root), _used_of_speculators(root)] for problem in some]


def _parameters(root: Path, file: str, name: str, expected: list[str]) -> list[str]:
    function = _definition(root / file, name)
    if not isinstance(function, ast.FunctionDef):
        return [f"{file}: no {name}"]
    given = [a.arg for a in (*function.args.posonlyargs, *function.args.args) if a.arg != "self"]
    return [] if given[: len(expected)] == expected else [f"{file}: {name} takes {given}, expected {expected} first"]


def _names(root: Path, file: str, name: str, expected: list[str]) -> list[str]:
    if not isinstance(_definition(root / file, name), ast.ClassDef):
        return [f"{file}: no class {name}"]
    return [f"{file}: {name} has no {n}" for n in sorted(set(expected) - _known(root / file, name))]


def _calls(root: Path, file: str, call: str, allowed: tuple[int, ...]) -> list[str]:
    made = _made(root / file, call)
    wrong = [len(c.args) for c in made if len(c.args) not in allowed]
    return [f"{file}: {call} is called with {wrong} positional arguments"] if wrong or not made else []


def _made(file: Path, call: str) -> list[ast.Call]:
    return [n for n in ast.walk(_tree(file)) if isinstance(n, ast.Call) and ast.unparse(n.func) == call]


def _bound(root: Path, file: str, name: str, ours: type) -> list[str]:
    """Calls of the runner that do not fit the methods of ours; drafters of other kinds have another ``propose``."""
    wrong = []
    for method, function in vars(ours).items():
        for call in _made(root / file, f"self.{name}.{method}"):
            given = {k.arg: None for k in call.keywords if k.arg is not None}
            if method == "propose" and name == "drafter" and "next_token_ids" not in given:
                continue
            try:
                inspect.signature(function).bind(None, *[None] * len(call.args), **given)
            except TypeError as e:
                wrong.append(f"{file}: self.{name}.{method}: {e}")
    return wrong


def _abstract(root: Path) -> list[str]:
    """Methods that a speculator must have, and neither vLLM's base nor ours has."""
    classes = [_definition(root / SPECULATOR, n) for n in ("BaseSpeculator", "DraftModelSpeculator")]
    abstract = {
        f.name
        for c in classes
        for f in (c.body if isinstance(c, ast.ClassDef) else [])
        if isinstance(f, ast.FunctionDef) and any("abstractmethod" in ast.unparse(d) for d in f.decorator_list)
    }
    return [f"{SPECULATOR}: {name} is abstract, and not ours" for name in sorted(abstract - set(vars(Speculating)))]


def _used_of_speculators(root: Path) -> list[str]:
    """Attributes of a speculator that the runner uses, and neither vLLM's base nor ours has."""
    used = {
        n.attr
        for n in ast.walk(_tree(root / V2))
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load) and ast.unparse(n.value) == "self.speculator"
    }
    known = _known(root / SPECULATOR, "DraftModelSpeculator") | _known(root / SPECULATOR, "BaseSpeculator")
    set_by_ours = {"model", "draft_attn_layer_names"}
    return [
        f"{V2}: uses {name} of a speculator" for name in sorted(used - known - set(vars(Speculating)) - set_by_ours)
    ]


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8")) if file.exists() else ast.Module([], [])


def _definition(file: Path, name: str) -> ast.AST | None:
    node: ast.AST = _tree(file)
    for part in name.split("."):
        inside = [n for n in ast.walk(node) if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == part]
        if not inside:
            return None
        node = inside[0]
    return node


def _known(file: Path, name: str) -> set[str]:
    """Names that a class defines, annotates or sets on itself."""
    node = _definition(file, name)
    found: set[str] = set()
    for n in ast.walk(node) if node is not None else []:
        if isinstance(n, ast.FunctionDef):
            found.add(n.name)
        elif isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Store):
            found.add(n.id if isinstance(n, ast.Name) else n.attr)
    return found


if __name__ == "__main__":
    problems = missing(Path(sys.argv[1]) / "vllm")
    print("\n".join(problems) or "all as expected")
    sys.exit(bool(problems))
