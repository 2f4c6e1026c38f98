"""dflash2 stress and bench-serve against a server made up here, over real sockets."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from dflash2 import cli
from dflash2.errors import ConfigError
from dflash2.serving.bench import spread
from dflash2.serving.client import Server, acceptance
from dflash2.serving.stress import compare, jobs


class Fake(BaseHTTPRequestHandler):
    """Says words that follow from the prompt; counts drafts as vLLM does; can be told to go wrong."""

    protocol_version = "HTTP/1.1"
    wrong: str | None = None
    seen: ClassVar[list[dict]] = []
    aborted = rounds = running = most = 0
    lock = threading.Lock()

    def log_message(self, *args):
        pass

    def _send(self, body: bytes, kind: str = "application/json", status: int = 200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/v1/models":
            self._send(b'{"data": [{"id": "fake"}]}')
        elif self.path == "/metrics":
            lines = ["# TYPE vllm:x counter", f"vllm:spec_decode_num_drafts_total{{engine=\"0\"}} {Fake.rounds}",
                     f"vllm:spec_decode_num_draft_tokens_total{{engine=\"0\"}} {7 * Fake.rounds}",
                     f"vllm:spec_decode_num_accepted_tokens_total{{engine=\"0\"}} {2 * Fake.rounds}",
                     f"vllm:num_requests_running {Fake.running}", "vllm:e2e_bucket{le=\"1\"} 3"]  # fmt: skip
            self._send("\n".join(lines).encode(), "text/plain")
        else:
            self._send(b"{}", status=404)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Fake.lock:
            Fake.seen.append(body)
            Fake.running += 1
            Fake.most = max(Fake.most, Fake.running)
        try:
            self._answer(body)
        finally:
            with Fake.lock:
                Fake.running -= 1

    def _answer(self, body: dict):
        if Fake.wrong == "refuse" and body["temperature"] > 0:
            return self._send(b'{"error": "no sampling today"}', status=500)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        digest = hashlib.sha256(body["prompt"].encode()).hexdigest()
        if Fake.wrong == "differ" and digest[0] in "0123":
            digest = digest[::-1]
        n = body["max_tokens"]
        try:
            for i in range(n):
                self._event({"choices": [{"text": f"{digest[i % 64]} "}]})
                time.sleep(0.0005)
                Fake.rounds += 1
            self._event({"choices": [], "usage": {"completion_tokens": n}})
            self.wfile.write(b"data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            Fake.aborted += 1
        self.close_connection = True

    def _event(self, value: dict):
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()


@pytest.fixture
def url():
    Fake.wrong, Fake.seen, Fake.aborted, Fake.rounds, Fake.running, Fake.most = None, [], 0, 0, 0, 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def stress(url: str, *more: str) -> list[str]:
    sizes = ["--requests", "40", "--concurrency", "6", "--max-tokens", "24", "--long-words", "80"]
    return ["stress", "--url", url, *sizes, *more]


def last_json(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_run_and_its_comparison(url, tmp_path, capsys):
    plain = tmp_path / "plain.json"
    assert cli.main(stress(url, "--out", str(plain))) == 0
    found = last_json(capsys)
    assert found["requests"] == 40
    assert set(found["kinds"]) == {"greedy", "sampled", "aborted"}
    assert found["errors"] == {}
    assert found["drafts"]["tokens_per_round"] == pytest.approx(3.0)
    assert Fake.most > 1
    assert "answers" not in found
    assert {s["temperature"] for s in Fake.seen} == {0.0, 0.8}
    assert len(json.loads(plain.read_text())["answers"]) == found["kinds"]["greedy"]
    assert cli.main(stress(f"{url}/v1/", "--compare", str(plain), "--pid", str(os.getpid()))) == 0
    again = last_json(capsys)
    assert again["comparison"] == {"compared": found["kinds"]["greedy"], "different": []}
    assert again["rss_bytes"]["peak"] >= again["rss_bytes"]["first"] > 1 << 20


def test_answers_that_differ_fail(url, tmp_path, capsys):
    plain = tmp_path / "plain.json"
    assert cli.main(stress(url, "--out", str(plain))) == 0
    Fake.wrong = "differ"
    capsys.readouterr()
    assert cli.main(stress(url, "--compare", str(plain))) == 1
    different = last_json(capsys)["comparison"]["different"]
    assert different
    assert cli.main(stress(url, "--compare", str(plain), "--allow-different", str(len(different)))) == 0


def test_requests_that_fail_are_named(url, capsys):
    Fake.wrong = "refuse"
    assert cli.main(stress(url)) == 1
    found = last_json(capsys)
    assert len(found["errors"]) == found["kinds"]["sampled"]
    assert all("HTTP 500" in e and "no sampling today" in e for e in found["errors"].values())


def test_aborted_requests_close_the_connection(url):
    answer = Server(url).complete("x", 5000, abort_after=3, temperature=0.0)
    assert answer.aborted
    assert answer.tokens == 3
    deadline = time.monotonic() + 10
    while not Fake.aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert Fake.aborted == 1


def test_the_same_seed_makes_the_same_requests():
    assert jobs(30, 1, 50, 100) == jobs(30, 1, 50, 100)
    assert jobs(30, 1, 50, 100) != jobs(30, 2, 50, 100)
    assert all(j.abort_after is None or 0 < j.abort_after <= j.max_tokens for j in jobs(200, 0, 4, 9))


def test_bench(url, tmp_path, capsys):
    out = tmp_path / "bench.json"
    argv = [
        "bench-serve",
        "--url",
        url,
        "--concurrency",
        "1",
        "4",
        "--limit",
        "4",
        "--max-tokens",
        "8",
        "--repeats",
        "2",
    ]
    assert cli.main([*argv, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "first token, ms" in printed
    found = json.loads(out.read_text())
    assert [r["concurrency"] for r in found["results"]] == [1, 4]
    for r in found["results"]:
        assert r["requests"] == 8
        assert r["tokens"] == 64
        assert r["ttft_ms"]["p20"] <= r["ttft_ms"]["median"] <= r["ttft_ms"]["p80"]
        assert r["drafts"]["tokens_per_round"] == pytest.approx(3.0)
    assert found["model"] == "fake"


def test_what_the_user_can_mend(url, tmp_path, capsys):
    assert cli.main(stress("http://127.0.0.1:9")) == 2
    assert "no OpenAI-compatible server answers there" in capsys.readouterr().err
    assert cli.main(stress(url, "--model", "other")) == 2
    assert "the server has ['fake']" in capsys.readouterr().err
    assert cli.main(stress(url, "--out", str(tmp_path / "no" / "x.json"))) == 2
    assert "no such folder" in capsys.readouterr().err
    assert cli.main(stress(url, "--compare", str(tmp_path / "none.json"))) == 2
    assert "dflash2 stress --out" in capsys.readouterr().err
    assert not Fake.seen  # all of that before a request was sent
    with pytest.raises(ConfigError, match="no request in common"):
        compare({"a": "x"}, {"b": "x"})


def test_numbers():
    assert spread([]) is None
    assert spread([2.0]) == {"p20": 2.0, "median": 2.0, "p80": 2.0}
    assert spread([5, 1, 2, 3, 4, 6]) == {"p20": 2.0, "median": 3.5, "p80": 5.0}
    assert acceptance({}, {"vllm:other": 3.0}) is None
