"""Many different requests at once against a server, and a comparison of its greedy answers with a recorded run."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash2.errors import ConfigError
from dflash2.serving.client import Answer, Server, acceptance

__all__ = ["Job", "compare", "jobs", "load", "run"]

WORDS = ("river", "stone", "seven", "under", "light", "maybe", "green", "carry", "paper", "north", "again", "slowly")
#: Greedy and sampled requests, those given up half-way, long prompts: shares of all.
SAMPLED, ABORTED, LONG = 0.25, 0.15, 0.1


@dataclass(frozen=True)
class Job:
    """One request. ``kind`` is greedy, sampled or aborted."""

    name: str
    kind: str
    prompt: str
    max_tokens: int
    abort_after: int | None = None


def jobs(count: int, seed: int, max_tokens: int, long_words: int) -> list[Job]:
    """The same requests for the same arguments: half of them begin with one of a few shared prefixes."""
    rng = random.Random(seed)

    def words(n: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(n))

    prefixes = [words(n) for n in (60, 150, 400)]
    made = []
    for i in range(count):
        kind = rng.choices(("greedy", "sampled", "aborted"), (1 - SAMPLED - ABORTED, SAMPLED, ABORTED))[0]
        head = rng.choice(prefixes) + " " if rng.random() < 0.5 else ""
        own = words(long_words if rng.random() < LONG else rng.randrange(5, 60))
        budget = rng.randrange(max(1, max_tokens // 4), max_tokens + 1)
        abort = rng.randrange(1, max(2, budget // 2)) if kind == "aborted" else None
        made.append(Job(f"{kind} {i}", kind, f"{head}{own}\n\nContinue the list:", budget, abort))
    return made


@dataclass
class _Watch:
    """Readings of a server's metrics and of a process's memory, while requests run."""

    server: Server
    pid: int | None
    every_s: float = 1.0

    def __post_init__(self) -> None:
        self.rss: list[int] = []
        self.peaks: Counter[str] = Counter()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        while not self._stop.is_set():
            if self.pid is not None:
                self.rss.append(resident_bytes(self.pid))
            for name, value in self.server.metrics().items():
                if name.endswith(("num_requests_running", "num_requests_waiting", "cache_usage_perc")):
                    self.peaks[name] = max(self.peaks[name], value)  # type: ignore[assignment]
            self._stop.wait(self.every_s)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


def resident_bytes(pid: int) -> int:
    """Memory of a process; 0 once it is gone.

    Raises:
        ConfigError: there is no /proc to ask.
    """
    if not Path("/proc").is_dir():
        raise ConfigError("--pid: the memory of another process is read from /proc, which this system does not have.")
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    line = next((line for line in status.splitlines() if line.startswith("VmRSS")), "VmRSS: 0 kB")
    return int(line.split()[1]) * 1024


def run(server: Server, work: Sequence[Job], concurrency: int, pid: int | None = None) -> dict[str, Any]:
    """Send all requests, at most ``concurrency`` at a time.

    Returns:
        ``answers`` (texts of greedy requests by name), ``errors`` by name, and what was measured; JSON-able.
    """

    def send(job: Job) -> Answer | str:
        options = {"temperature": 0.8, "top_p": 0.95} if job.kind == "sampled" else {"temperature": 0.0}
        try:
            return server.complete(job.prompt, job.max_tokens, job.abort_after, **options)
        except (OSError, ValueError) as e:
            return f"{type(e).__name__}: {e}"

    before, began = server.metrics(), time.perf_counter()
    with _Watch(server, pid) as watch, ThreadPoolExecutor(concurrency) as pool:
        found = dict(zip((j.name for j in work), pool.map(send, work), strict=True))
    after = server.metrics()
    answers = {n: a for n, a in found.items() if isinstance(a, Answer)}
    return {
        "requests": len(work),
        "kinds": dict(Counter(j.kind for j in work)),
        "seconds": round(time.perf_counter() - began, 3),
        "tokens": sum(a.tokens for a in answers.values()),
        "errors": {n: a for n, a in found.items() if isinstance(a, str)},
        "drafts": acceptance(before, after),
        "metrics_peak": dict(watch.peaks),
        "rss_bytes": {"first": watch.rss[0], "last": watch.rss[-1], "peak": max(watch.rss)} if watch.rss else None,
        "alive": bool(after) or not before,
        "answers": {n: a.text for n, a in answers.items() if n.startswith("greedy")},
    }


def load(path: Path) -> dict[str, str]:
    """Answers of an earlier run.

    Raises:
        ConfigError: it is no file of ``dflash2 stress --out``.
    """
    try:
        answers = json.loads(path.read_text())["answers"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"--compare {path}: not a file written by dflash2 stress --out ({e}).") from e
    return dict(answers)


def compare(mine: dict[str, str], theirs: dict[str, str]) -> dict[str, Any]:
    """Greedy answers of two runs of the same requests.

    Raises:
        ConfigError: the runs have no request in common.
    """
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        raise ConfigError("--compare: no request in common. Give both runs the same --requests, --seed and lengths.")
    return {"compared": len(common), "different": [n for n in common if mine[n] != theirs[n]]}
