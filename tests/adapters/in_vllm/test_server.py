"""vLLM's OpenAI server in its own processes, found by its plug-in entry point: texts, metrics, the stress command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import pytest
from engine import CACHE_BYTES

from dflash2 import cli
from dflash2.errors import ConfigError
from dflash2.serving.client import Server


@pytest.fixture(scope="module")
def url(tiny_pair, tmp_path_factory):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    spec = {"method": "dflash", "model": tiny_pair[1], "num_speculative_tokens": 3}
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", tiny_pair[0], "--port", str(port),
        "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--block-size", "32",
        "--max-num-batched-tokens", "256", "--max-num-seqs", "8", "--speculative-config", json.dumps(spec),
        "--kv-cache-memory-bytes", str(CACHE_BYTES),
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "INFO"}
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        for _ in range(240):
            try:
                Server(f"http://127.0.0.1:{port}")
                break
            except ConfigError:
                assert server.poll() is None, log.read_text()[-3000:]
                time.sleep(1)
        yield f"http://127.0.0.1:{port}", log
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.slow
def test_a_server_drafts_and_survives(url, tiny_pair, engines, tmp_path, capsys):
    address, log = url
    assert "dflash2: drafting 3 tokens with" in log.read_text()
    plain = engines(tiny_pair[0], None, max_model_len=4096)
    from test_greedy import greedy

    prompts = {f"p{i}": f"{'shared words before ' * 6}and number {i}:" for i in range(4)}
    ids = {n: plain.llm.get_tokenizer()(text)["input_ids"] for n, text in prompts.items()}
    plain.run(ids, greedy(12))
    server = Server(address)
    for name, text in prompts.items():
        answer = server.complete(text, 12, temperature=0.0, ignore_eos=True)
        assert answer.tokens == 12
        assert answer.text == plain.outputs[name].outputs[0].text
    out = tmp_path / "first.json"
    sizes = ["--requests", "40", "--concurrency", "8", "--max-tokens", "24", "--long-words", "300"]
    assert cli.main(["stress", "--url", address, *sizes, "--out", str(out)]) == 0
    assert cli.main(["stress", "--url", address, *sizes, "--compare", str(out)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["drafts"]["rounds"] > 100
    assert found["comparison"]["different"] == []
