"""One OpenAI-compatible server: streamed completions and Prometheus metrics, over the standard library."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from dflash2.errors import ConfigError

__all__ = ["Answer", "Server"]


@dataclass(frozen=True)
class Answer:
    """What a request gave.

    Attributes:
        text: all that was streamed.
        tokens: completion tokens, by the server's count where it gives one, else the number of pieces.
        ttft_s: seconds to the first piece; None if there was none.
        total_s: seconds to the last.
        aborted: the connection was closed on purpose.
    """

    text: str
    tokens: int
    ttft_s: float | None
    total_s: float
    aborted: bool = False

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None for fewer than two."""
        return None if self.ttft_s is None or self.tokens < 2 else (self.total_s - self.ttft_s) / (self.tokens - 1)


class Server:
    """A server at ``url``, with or without ``/v1`` at the end.

    Args:
        url: like ``http://localhost:8000``.
        model: name to ask for; None takes the first that the server lists.
        timeout_s: for each read.

    Raises:
        ConfigError: nobody answers there, or not like an OpenAI server.
    """

    def __init__(self, url: str, model: str | None = None, timeout_s: float = 600.0):
        self.root = url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        try:
            with self._open("/v1/models") as reply:
                names = [m["id"] for m in json.load(reply)["data"]]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"--url {url}: no OpenAI-compatible server answers there ({e}).") from e
        if model is not None and model not in names:
            raise ConfigError(f"--model {model}: the server has {names}.")
        self.model = model if model is not None else names[0]

    def complete(self, prompt: str, max_tokens: int, abort_after: int | None = None, **options: Any) -> Answer:
        """Stream one completion.

        Args:
            prompt: text.
            max_tokens: budget.
            abort_after: close the connection after so many pieces.
            options: of the request's body: temperature, top_p, seed, ignore_eos ...

        Raises:
            OSError: the server refused, failed, or went away.
        """
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        body |= {"stream_options": {"include_usage": True}} | options
        pieces: list[str] = []
        first = last = tokens = None
        began = time.perf_counter()
        with self._open("/v1/completions", body) as reply:
            for line in reply:
                data = line.decode("utf-8").strip().removeprefix("data:").strip()
                if not data or data.startswith(":"):
                    continue
                if data == "[DONE]":
                    break
                event = json.loads(data)
                if "error" in event:
                    raise OSError(f"the server failed in mid-stream: {event['error']}")
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
                if event.get("choices"):
                    last = time.perf_counter() - began
                    first = last if first is None else first
                    pieces.append(event["choices"][0].get("text") or "")
                if abort_after is not None and len(pieces) >= abort_after:
                    return Answer("".join(pieces), len(pieces), first, time.perf_counter() - began, aborted=True)
        total = last if last is not None else time.perf_counter() - began
        return Answer("".join(pieces), len(pieces) if tokens is None else tokens, first, total)

    def metrics(self) -> dict[str, float]:
        """Counters and gauges of ``/metrics``, summed over labels; empty where the server has none."""
        try:
            with self._open("/metrics") as reply:
                text = reply.read().decode("utf-8")
        except (OSError, ValueError):
            return {}
        found: dict[str, float] = {}
        for name, value in re.findall(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})? (\S+)", text, re.M):
            if not name.endswith(("_bucket", "_created")):
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode("utf-8")
        request = urllib.request.Request(self.root + path, data, {"Content-Type": "application/json"})
        try:
            return urllib.request.urlopen(request, timeout=self.timeout_s)
        except urllib.error.HTTPError as e:
            raise OSError(f"{path}: HTTP {e.code}: {e.read()[:300].decode('utf-8', 'replace')}") from e


def acceptance(before: dict[str, float], after: dict[str, float]) -> dict[str, float] | None:
    """What vLLM's counters say of drafts between two readings of `Server.metrics`; None without drafts."""

    def grown(name: str) -> float:
        keys = [k for k in after if k.removesuffix("_total").endswith(f"spec_decode_num_{name}")]
        return sum(after[k] - before.get(k, 0.0) for k in keys)

    rounds, drafted, accepted = (grown(n) for n in ("drafts", "draft_tokens", "accepted_tokens"))
    if not rounds:
        return None
    return {"rounds": rounds, "drafted": drafted, "accepted": accepted, "tokens_per_round": 1 + accepted / rounds}
