"""Batched decoding of Llama and its kin: a static cache, a CUDA graph per batch size, rows refilled as they end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dflash2.errors import ConfigError
from dflash2.ops.decode_attention import decode_attention
from dflash2.ops.gumbel_sample import gumbel_sample
from dflash2.ops.residual_norm import rms_norm
from dflash2.rope import apply_rope
from dflash2.training.llama import LlamaNetwork
from dflash2.training.requests import Answer, Request

__all__ = ["LlamaDecoder", "rows_that_fit"]

#: Decode steps between two looks at which rows have ended: each look waits for the device.
STRIDE = 16
#: A prefill interrupts everybody, so it waits until this share of the rows is free.
REFILL = 1 / 16
#: Padded prompt tokens of one prefill: enough to fill the device, few enough for their activations.
PREFILL_TOKENS = 2**15
#: cuDNN's attention is planned anew for every shape, and here shapes change all the time.
PREFILL_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
#: More rows than this gain little: weights and launches are paid for by then, and the cache is read in any case.
MOST_ROWS = 2048
#: Smallest batch with a graph of its own.
LEAST_BATCH = 32


class LlamaDecoder:
    """Sequences that decode independently, each in a slot. State is in fixed tensors, so a step can be a CUDA graph.

    Attributes:
        tokens: int64 ``[R + 1]``, the newest token of each slot, not yet in the cache.
        lengths: int64 ``[R + 1]``, cached tokens.
        written: int64 ``[R + 1]``, answer tokens so far.
        answers: int64 ``[R + 1, max_new_tokens]``.
        done: bool ``[R + 1]``; such slots may be computed and change nothing. The last slot always is: batches that are
            smaller than their graph are filled up with it.

    Args:
        model: a Transformers causal LM that `LlamaNetwork` can read.
        rows: R.
        max_tokens: prompt and answer together.
        max_new_tokens: longest answer.
        eos: ids that end an answer.
        graphs: use CUDA graphs; the model must be on a GPU with Triton.
    """

    def __init__(
        self, model: Any, *, rows: int, max_tokens: int, max_new_tokens: int, eos: tuple[int, ...], graphs: bool
    ):
        self.network = net = LlamaNetwork(model)
        self.rows, self.budget = rows, max_new_tokens
        device, dtype = net.embedding.device, net.embedding.dtype
        self.max_tokens = -(-max_tokens // 8) * 8
        shape = (len(net.layers), rows + 1, net.kv_heads, self.max_tokens, net.head_dim)
        self.keys, self.values = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self.tokens, self.lengths, self.written, self.seeds = (
            torch.zeros(rows + 1, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.answers = torch.zeros(rows + 1, max_new_tokens, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(rows + 1, device=device)
        self.done = torch.ones(rows + 1, dtype=torch.bool, device=device)
        self.eos = torch.tensor(eos, dtype=torch.int64, device=device)
        self._batch = torch.full((rows,), rows, dtype=torch.int64, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] | None = {} if graphs else None
        self._pool = torch.cuda.graph_pool_handle() if graphs else None  # one memory for all: they run in turn

    def answer(self, todo: Sequence[Request], *, deadline: float = float("inf")) -> Iterator[Answer]:
        """Answers in the order in which they finish.

        Short prompts come first: those that are prefilled together have similar lengths, so that little is padded.

        Args:
            todo: the requests.
            deadline: on `time.monotonic`; then what is in flight is dropped.

        Raises:
            ConfigError: a prompt leaves no room for an answer.
        """
        queue = sorted(todo, key=lambda r: len(r.prompt), reverse=True)
        if queue and len(queue[0].prompt) + self.budget > self.max_tokens:
            raise ConfigError(
                f"a prompt of {len(queue[0].prompt)} tokens and an answer of up to {self.budget} do not fit into "
                f"max_tokens={self.max_tokens}. Raise it, or leave the prompt out."
            )
        free, running, ready = list(range(self.rows)), dict[int, Request](), list[Answer]()
        while (queue or running) and time.monotonic() < deadline:
            if queue and (len(free) >= self.rows * REFILL or not running):
                slots = [free.pop() for _ in range(min(len(free), len(queue)))]
                taken = [queue.pop() for _ in slots]
                running.update(zip(slots, taken, strict=True))
                self.start(slots, taken)
            self.steps(STRIDE, list(running))
            yield from ready  # the device works meanwhile
            done = self.done.tolist()
            ended = [slot for slot in running if done[slot]]
            ready = self._take(ended, running)
            free += ended
        yield from ready

    def _take(self, ended: list[int], running: dict[int, Request]) -> list[Answer]:
        index = torch.tensor(ended, dtype=torch.int64, device=self.done.device)
        counts, texts = self.written[index].tolist(), self.answers[index].tolist()
        return [Answer(running.pop(s), t[:n]) for s, t, n in zip(ended, texts, counts, strict=True)]

    @torch.no_grad()
    def start(self, slots: Sequence[int], taken: Sequence[Request]) -> None:
        """Put requests into slots that are done, prefill them, and give each its first token."""
        first = 0
        while first < len(slots):
            last, longest = first, 0
            while last < len(slots):
                longest = max(longest, len(taken[last].prompt))
                if last > first and (last + 1 - first) * longest > PREFILL_TOKENS:
                    break
                last += 1
            self._prefill(slots[first:last], taken[first:last])
            first = last

    @torch.no_grad()
    def steps(self, count: int, slots: Sequence[int]) -> None:
        """Decode ``count`` tokens in each of these slots that is not done."""
        batch = len(slots)
        if self._graphs is not None:
            batch = self.rows
            while batch // 2 >= max(len(slots), LEAST_BATCH):
                batch //= 2
        filled = [*slots, *[self.rows] * (batch - len(slots))]
        self._batch[:batch] = torch.tensor(filled, device=self._batch.device)
        for _ in range(count):
            self._run(batch)

    def _run(self, batch: int) -> None:
        if self._graphs is None:
            self._step(self._batch[:batch])
            return
        if batch not in self._graphs:
            self._graphs[batch] = self._capture(self._batch[:batch])
        self._graphs[batch].replay()

    def _capture(self, batch: Tensor) -> torch.cuda.CUDAGraph:
        slots = batch.clone()
        batch.fill_(self.rows)  # warm-up runs for real: in the last slot it changes nothing
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(batch)
        batch.copy_(slots)
        return graph

    def _prefill(self, slots: Sequence[int], taken: Sequence[Request]) -> None:
        net, device = self.network, self.tokens.device
        rows, longest = len(slots), max(len(r.prompt) for r in taken)
        # Padded on the right: under a causal mask no real token sees padding, and decoding overwrites it.
        ids = torch.tensor([r.prompt + [0] * (longest - len(r.prompt)) for r in taken], device=device)
        where, lengths = torch.tensor(slots, device=device), torch.tensor([len(r.prompt) for r in taken], device=device)
        cos, sin = net.rope(torch.arange(longest, device=device))

        def attend(i: int, qkv: Tensor) -> Tensor:
            heads = qkv.view(rows, longest, -1, net.head_dim)
            q, k, v = heads.split((net.heads, net.kv_heads, net.kv_heads), dim=2)
            if (norm := net.layers[i].head_norm) is not None:
                q, k = rms_norm(q, norm.q, norm.eps), rms_norm(k, norm.k, norm.eps)
            q, k, v = (x.transpose(1, 2) for x in (apply_rope(q, cos, sin), apply_rope(k, cos, sin), v))
            self.keys[i, where, :, :longest], self.values[i, where, :, :longest] = k, v
            with sdpa_kernel(PREFILL_ATTENTION):
                found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return found.transpose(1, 2).reshape(rows * longest, -1)

        x = net.states(ids.flatten(), attend)[torch.arange(rows, device=device) * longest + lengths - 1]
        self.lengths[where], self.written[where], self.done[where] = lengths - 1, 0, False
        self.seeds[where] = torch.tensor([r.seed for r in taken], device=device)
        self.temperatures[where] = torch.tensor([r.temperature for r in taken], dtype=torch.float32, device=device)
        self._advance(where, x)

    def _step(self, slots: Tensor) -> None:
        net = self.network
        at = self.lengths[slots].masked_fill(self.done[slots], 0)
        cos, sin = net.rope(at)

        def attend(i: int, qkv: Tensor) -> Tensor:
            norm = net.layers[i].head_norm
            return decode_attention(qkv, self.keys[i], self.values[i], slots, at, cos, sin, norm=norm)

        self._advance(slots, net.states(self.tokens[slots], attend))

    def _advance(self, slots: Tensor, x: Tensor) -> None:
        """Draw each slot's next token from its state, and keep it."""
        done, written = self.done[slots], self.written[slots]
        logits = F.linear(x, self.network.head)
        drawn = gumbel_sample(logits, self.temperatures[slots], self.seeds[slots], written)
        token = torch.where(done, self.tokens[slots], drawn)
        place = written.clamp(max=self.budget - 1)
        self.answers[slots, place] = torch.where(done, self.answers[slots, place], token)
        self.tokens[slots] = token
        self.lengths[slots] += ~done
        self.written[slots] = written + ~done
        ended = (token.unsqueeze(-1) == self.eos).any(-1) | (written + 1 >= self.budget)
        self.done[slots] = done | ended


def rows_that_fit(model: Any, max_tokens: int) -> int:
    """How many rows a `LlamaDecoder` of this model should have: on a GPU what 3/4 of the free memory hold.

    Args:
        model: a causal LM.
        max_tokens: prompt and answer together.
    """
    if model.device.type != "cuda":
        return LEAST_BATCH
    c = model.config
    width = 2 * c.num_hidden_layers * c.num_key_value_heads * model.get_decoder().layers[0].self_attn.head_dim
    bytes_per_row = (width * max_tokens + 3 * c.vocab_size) * model.dtype.itemsize
    torch.cuda.empty_cache()  # what torch keeps of an earlier decoder is free
    fit = int(0.75 * torch.cuda.mem_get_info(model.device)[0] / bytes_per_row)
    return max(1, min(MOST_ROWS, fit // LEAST_BATCH * LEAST_BATCH))
