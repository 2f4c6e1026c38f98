"""vLLM's own DFlash v1 proposer on a task's prompts, run twice; prints tokens and drafts as the last line's JSON."""

from __future__ import annotations

import json
import sys

import conftest  # noqa: F401  sets what vLLM reads from the environment


def main(path: str) -> None:
    from engine import Engine, named
    from vllm import SamplingParams
    from vllm.v1.spec_decode.dflash import DFlashProposer

    with open(path) as f:
        task = json.load(f)
    drafts: dict[str, list[int]] = {}
    propose = DFlashProposer.propose

    def recording(self, *args, **kw):
        out = propose(self, *args, **kw)
        common, rejected = kw["common_attn_metadata"], kw.get("num_rejected_tokens_gpu")
        for i in range(common.num_reqs):
            if self.runner.discard_request_mask.np[i]:
                continue
            last = int(common.query_start_loc_cpu[i + 1]) - 1 - (0 if rejected is None else int(rejected[i]))
            end = int(kw["target_positions"][last]) + 1
            key = f"{named(self.runner.input_batch.req_ids[i])} {end} {int(kw['next_token_ids'][i])}"
            drafts[key] = out[i].tolist()
        return out

    init = DFlashProposer.__init__

    def keep_runner(self, vllm_config, device, runner=None):
        init(self, vllm_config, device, runner)
        self.runner = runner

    DFlashProposer.propose, DFlashProposer.__init__ = recording, keep_runner
    engine = Engine(*task["pair"])
    params = SamplingParams(temperature=0.0, max_tokens=task["tokens"], ignore_eos=True)
    engine.run(task["prompts"], params)
    print(json.dumps({"tokens": engine.run(task["prompts"], params), "drafts": drafts}))


if __name__ == "__main__":
    main(sys.argv[1])
