"""The drafter that hosts talk to: `append` context, `propose` a block, at explicit positions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash2.append import append_on_device, append_on_host, append_rows_on_device
from dflash2.borrowed import Borrowed, check_table
from dflash2.capture import CAPTURED_BATCHES, CapturedDrafting
from dflash2.config import DFlash2Config
from dflash2.errors import ConfigError
from dflash2.int8_linear import quantize_linears
from dflash2.lm_head import LMHead, as_lm_head
from dflash2.model import DraftNetwork
from dflash2.ops.block_inputs import embed_blocks
from dflash2.ops.selector_walk import shape_logits
from dflash2.ops.window_attention import PagedContext
from dflash2.positions import (
    as_list,
    host_integers,
    integer_ids,
    integers_on_device,
    is_integer,
    on_device,
    per_request,
    upload,
)
from dflash2.proposal import Proposal
from dflash2.propose import block_pass, choose_drafts
from dflash2.random import Stream, random_bits, uniform_of
from dflash2.window_kv import WindowKV

__all__ = ["DFlash2Drafter"]


class DFlash2Drafter(DraftNetwork):
    """Drafts blocks for a target whose embedding and head it borrows. See `append` and `propose`.

    Args:
        config: shape and rules. Weights are random: convolutions are the identity, the selector is neutral.
        dtype: of weights, context rows and block rows; default the config's.
    """

    mask_embedding: Tensor | None

    def __init__(self, config: DFlash2Config, *, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__(config, device=device, dtype=dtype or getattr(torch, config.dtype))
        self.register_buffer("mask_embedding", None, persistent=False)
        self._embedding: list[Tensor] = Borrowed()
        self._head: list[LMHead] = Borrowed()

    # -- making ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> DFlash2Drafter:
        """Load a checkpoint in the published layout.

        Args:
            path: a folder, the name of a packaged checkpoint, or a hub id. Folders are looked for first.
            dtype: default is the config's.
            device: where the weights go.

        Raises:
            ConfigError: the configuration is refused.
            CheckpointError: files or tensors are missing, unexpected, mis-shaped or truncated; all are listed.
        """
        from dflash2.weights import load

        return load(cls, path, dtype, torch.device(device))

    def save_pretrained(self, path: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors`` (and the mask embedding, if any) in the published layout.

        Raises:
            ConfigError: the linears are int8, which that layout does not know.
        """
        from dflash2.weights import save

        save(self, Path(path))

    def quantize_linears(self) -> DFlash2Drafter:
        """Make the large linears int8, one scale per output row, in place: half the bytes that a `propose` reads.

        Activations, norms, convolution taps and the selector keep their dtype. The target verifies, so this changes
        acceptance only (``dflash2 eval --drafter-int8`` measures it). It cannot be saved or undone: load the checkpoint
        again.

        Returns:
            self.

        Raises:
            ConfigError: a layer is not finite, or int8 changes its outputs by more than a tenth; nothing is changed.
        """
        quantize_linears(self)
        return self

    def bind_target(self, embed_weight: Tensor | nn.Module, lm_head: Any) -> DFlash2Drafter:
        """Borrow the target's tables. They are shared, never copied: not part of `state_dict`, nor of a pickle.

        Args:
            embed_weight: raw rows ``[V', H]``, or the module that owns them as ``weight``; scaling or norms that the
                target applies to its embeddings are not applied here.
            lm_head: a weight ``[V', H]``, an `nn.Linear`, a tied embedding, an `Int8LMHead`, or a callable
                ``[N, H] -> [N, V']``. Rows from ``vocab_size`` on are padding and never drafted.

        Returns:
            self.

        Raises:
            ConfigError: shapes do not fit this drafter, or the head is all zeros.
        """
        embedding: Any = embed_weight if isinstance(embed_weight, Tensor) else getattr(embed_weight, "weight", None)
        if not isinstance(embedding, Tensor) or not embedding.is_floating_point():
            found = getattr(embedding, "dtype", type(embed_weight).__name__)
            raise ConfigError(f"embed_weight is a {found}: expected the table [V, H] or the module that has it.")
        check_table("embed_weight", embedding, self.config, self.device)
        head = as_lm_head(lm_head)
        weight = getattr(head, "weight", None)
        if isinstance(weight, Tensor):
            check_table("lm_head", weight, self.config, self.device)
        self._embedding, self._head = Borrowed([embedding]), Borrowed([head])
        return self

    @property
    def is_bound(self) -> bool:
        """Whether `bind_target` was called."""
        return bool(self._head)

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, context rows and block rows, and of all weights that are not int8."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.norm.weight.device

    def new_kv(
        self,
        max_sequences: int = 64,
        max_tokens: int = 262144,
        page_size: int = 16,
        prefix_store_bytes: int = 0,
        *,
        num_pages: int | None = None,
    ) -> WindowKV:
        """Memory for context rows, fixed from now on.

        Args:
            max_sequences: sequences open at a time.
            max_tokens: longest sequence. It bounds the pages of drafters with a full-attention layer; a drafter whose
                layers all slide owns ceil(W/page_size) + 2 pages per sequence, whatever the length.
            page_size: rows per page.
            prefix_store_bytes: budget for rows of prefixes seen before; 0 is no store and no extra work.
            num_pages: a smaller pool than max_sequences times the worst case.

        Raises:
            CapacityError: a size is below 1, or the device cannot give the memory.
        """
        return WindowKV(
            self.config, max_sequences=max_sequences, max_tokens=max_tokens, page_size=page_size,
            prefix_store_bytes=prefix_store_bytes, num_pages=num_pages, dtype=self.dtype, device=self.device,
        )  # fmt: skip

    # -- using ----------------------------------------------------------------------------------------------------

    def append(
        self,
        kv: WindowKV,
        seqs: Sequence[int],
        taps: Tensor,
        start_positions: Sequence[int] | Tensor,
        lengths: Sequence[int] | Tensor,
        valid_lengths: Sequence[int] | Tensor | None = None,
        token_ids: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Add context rows for tokens that the target has committed.

        Args:
            kv: from `new_kv`.
            seqs: R different handles.
            taps: ``[sum(lengths), T*H]``, outputs of the layers ``target_layer_ids``, concatenated in their order,
                sequence after sequence.
            start_positions: R absolute positions, each the sequence's next.
            lengths: R numbers of rows.
            valid_lengths: R numbers of rows that count; the rest is a rejected suffix. Default: all.
            token_ids: ``[sum(lengths)]``, the tokens of the rows; with a prefix store they publish the rows. Host
                positions only.

        Positions, lengths and valid lengths are host integers (checked before anything runs), or tensors on an
        accelerator: then nothing is copied to the host and nothing raises; a sequence that does not fit (or was not
        reserved far enough with `WindowKV.reserve`) keeps its state and is counted in `WindowKV.faults`.

        Raises:
            PositionError: naming the sequence, the position expected and the one given.
            CapacityError: pages ran out.
            ConfigError: the KV is another drafter's, or was made before this one changed its dtype or device.
            ValueError: shapes do not fit. After any error the state is what it was.
        """
        self._check_kv(kv)
        self._check_taps(taps)
        seqs = as_list("seqs", seqs)
        on_host = not any(on_device(x) for x in (start_positions, lengths, valid_lengths))
        if not on_host and token_ids is not None:
            raise ValueError("token_ids publish rows under host positions only: these are on a device. Leave them out.")
        with torch.no_grad(), self._own_dtype():
            if on_host:
                append_on_host(self, kv, seqs, taps, start_positions, lengths, valid_lengths, token_ids)
            else:
                append_on_device(self, kv, seqs, taps, start_positions, lengths, valid_lengths, self._captured(kv))

    def propose(
        self,
        kv: WindowKV,
        seqs: Sequence[int],
        anchor_ids: Sequence[int] | Tensor,
        start_positions: Sequence[int] | Tensor,
        num_draft_tokens: int | None = None,
        temperature: float | Sequence[float] | Tensor = 0.0,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """Draft k tokens after each anchor in one pass. Changes nothing in ``kv``.

        Args:
            kv: from `new_kv`.
            seqs: R handles.
            anchor_ids: R token ids: the newest token of each sequence, sampled but not yet run through the target.
            start_positions: R absolute positions of the anchors, each the sequence's next. Host integers are checked;
                a tensor on an accelerator is not copied back, and `Proposal.valid` says where it did not fit.
            num_draft_tokens: k, at most ``block_size - 1``, which is the default.
            temperature: of the drafts, one for all or one per request, finite; <= 0 is greedy.
            generator: noise for sampled drafts. Independent of what `verify` draws, even from equal seeds.

        Raises:
            PositionError: naming the sequence, the position expected and the one given.
            ConfigError: no target is bound, the KV is another drafter's, or k is out of range.
            ValueError: anchors or temperatures do not fit.
        """
        self._check_kv(kv)
        seqs = as_list("seqs", seqs)
        k = self.config.max_draft_tokens if num_draft_tokens is None else num_draft_tokens
        self.check_propose(k)
        starts, length = self._starts(kv, seqs, start_positions)
        slots = kv.slots(seqs)
        anchors = integer_ids("anchor_ids", anchor_ids).to(self.device)
        if anchors.shape != starts.shape:
            raise ValueError(f"anchor_ids has shape {list(anchors.shape)}: expected one id for each of {len(seqs)}.")
        temperatures = _temperatures(temperature, starts)
        bits = None if temperatures is None else random_bits((len(seqs), k), generator, self.device)
        with torch.no_grad(), self._own_dtype():
            inputs = (slots, starts, anchors, temperatures, bits)
            captured = self._captured(kv)
            if captured is not None and captured.k == k and (replayed := captured.propose(*inputs)) is not None:
                return replayed
            return self._draft(kv, k, length, *inputs)

    def append_and_propose(
        self,
        kv: WindowKV,
        seqs: Sequence[int],
        taps: Tensor,
        start_positions: Tensor,
        lengths: Tensor,
        valid_lengths: Tensor,
        anchor_ids: Tensor,
        num_draft_tokens: int | None = None,
        temperature: float | Tensor = 0.0,
        generator: torch.Generator | None = None,
    ) -> Proposal | None:
        """A round with positions on the device, `append` and then `propose` at the positions after it, as one launch.

        Args:
            kv, seqs, taps, start_positions, lengths, valid_lengths: of the `append`.
            anchor_ids, num_draft_tokens, temperature, generator: of the `propose`.

        Returns:
            The proposal, with tokens 0 where it is not valid. None, and nothing has happened, where no graph of
            `capture` has room for it: call the two.

        Raises:
            As the two do. Nothing has happened then.
        """
        captured, k = self._captured(kv), self.config.max_draft_tokens if num_draft_tokens is None else num_draft_tokens
        if captured is None or captured.k != k or not seqs:
            return None
        self._check_kv(kv)
        self._check_taps(taps)
        numbers = {
            "starts": start_positions, "lengths": lengths, "valid_lengths": valid_lengths, "anchors": anchor_ids
        }  # fmt: skip
        ints = {name: integers_on_device(name, v, len(seqs), self.device) for name, v in numbers.items()}
        slots, temperatures = kv.distinct_slots_on_device(seqs), _temperatures(temperature, ints["starts"])
        bits = None if temperatures is None else random_bits((len(seqs), k), generator, self.device)
        with torch.no_grad():
            proposal = captured.round(slots, taps, **ints, temperature=temperatures, bits=bits)
        if proposal is not None:
            kv.advance_on_device(seqs)
        return proposal

    def capture(
        self, kv: WindowKV, batch_sizes: Sequence[int] = CAPTURED_BATCHES, num_draft_tokens: int | None = None
    ) -> None:
        """Record `propose`, and `append` of what a verify pass leaves, as CUDA graphs: a call is then one launch.

        From now on `propose` with this KV replays the smallest graph that holds its requests, and so does `append` with
        positions on the device and at most k+1 rows for each request. Results are those of the calls without graphs.
        Larger batches, other k and other forms run as before. Capturing again replaces the graphs; `bind_target`,
        `quantize_linears` and a move of the weights end them.

        Args:
            kv: from `new_kv`.
            batch_sizes: numbers of requests to capture for; smaller batches are filled up.
            num_draft_tokens: k, by default ``block_size - 1``.

        Raises:
            ConfigError: the drafter is not on a GPU or not bound, the KV is another drafter's, or a size is out of
                range.
        """
        self._check_kv(kv)
        k = self.config.max_draft_tokens if num_draft_tokens is None else num_draft_tokens
        self.check_propose(k)
        if self.device.type != "cuda":
            raise ConfigError(
                f"capture records CUDA graphs and the drafter is on {self.device}: move it to a GPU first."
            )
        if not batch_sizes or not all(is_integer(n) and 1 <= n <= kv.max_sequences for n in batch_sizes):
            raise ConfigError(f"batch_sizes={list(batch_sizes)}: expected numbers from 1 to {kv.max_sequences}.")
        kv.captured = None
        with torch.no_grad(), self._own_dtype():
            kv.captured = CapturedDrafting(
                self._captured_weights(),
                lambda **inputs: self._draft(kv, k, self._most_context(kv), **inputs),
                lambda **inputs: append_rows_on_device(self, kv, **inputs),
                batch_sizes,
                k,
                self.norm.weight.new_empty(0, len(self.config.target_layer_ids) * self.config.hidden_size),
                kv.padding_slot,
            )

    def _captured_weights(self) -> list[Tensor]:
        """Tensors whose address changes when what a graph reads is moved, quantised or bound anew.

        Every call asks, so the layers are looked up in their parents' tables: `nn.Module` takes ten times as long.
        """
        layers: Any = self.layers._modules.values()
        linears = [
            part._modules[name].weight
            for layer in layers
            for part, name in ((layer._modules["self_attn"], "q_proj"), (layer._modules["mlp"], "down_proj"))
        ]
        head = [t for t in (getattr(self._head[0], "weight", None),) if isinstance(t, Tensor)]
        return [self.norm.weight, self.fc.weight, self._embedding[0], *linears, *head]

    def _captured(self, kv: WindowKV) -> CapturedDrafting | None:
        """The graphs over this KV, unless they read what is no longer this drafter's."""
        captured: CapturedDrafting | None = kv.captured
        return captured if captured is not None and captured.serves(self._captured_weights()) else None

    def _own_dtype(self) -> AbstractContextManager[Any]:
        """A row depends on its taps and position only, not on a cast that happens to be on around the call."""
        kind = self.device.type
        return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()

    def _check_kv(self, kv: WindowKV) -> None:
        c = self.config
        if kv.config is not c and (
            kv.row_shape != (c.num_hidden_layers, c.num_key_value_heads, c.head_dim) or kv.config.windows != c.windows
        ):
            raise ConfigError(
                f"this KV holds rows of shape {kv.row_shape} for windows {kv.config.windows}, this drafter has windows "
                f"{c.windows}: it was made for another drafter. Use this drafter's new_kv()."
            )
        if kv.keys.dtype != self.dtype or kv.device != self.device:
            raise ConfigError(
                f"this KV holds {kv.keys.dtype} rows on {kv.device} and the drafter is {self.dtype} on {self.device}: "
                "it was made before the drafter moved. Use new_kv() again."
            )

    def _check_taps(self, taps: Tensor) -> None:
        taps_width = len(self.config.target_layer_ids) * self.config.hidden_size
        if taps.dim() != 2 or taps.shape[1] != taps_width:
            raise ValueError(
                f"taps have shape {list(taps.shape)}: expected [rows, {taps_width}], the outputs of "
                f"{len(self.config.target_layer_ids)} target layers {list(self.config.target_layer_ids)} of width "
                f"{self.config.hidden_size}."
            )
        if not taps.is_floating_point() or taps.device != self.device:
            raise ValueError(f"taps are {taps.dtype} on {taps.device}: expected hidden states on {self.device}.")

    def check_propose(self, k: int) -> None:
        """Raises `ConfigError` unless a target is bound and k drafts are as many as a block has room for."""
        if not self.is_bound:
            raise ConfigError("no target is bound: call drafter.bind_target(embed_weight, lm_head) first.")
        if not is_integer(k) or not 0 <= k <= self.config.max_draft_tokens:
            raise ConfigError(
                f"num_draft_tokens={k}: must be a whole number in [0, {self.config.max_draft_tokens}], block_size - 1, "
                f"since row 0 of the block is the anchor (block_size={self.config.block_size})."
            )

    def _starts(self, kv: WindowKV, seqs: Sequence[int], start_positions: Any) -> tuple[Tensor, int]:
        """Start positions on the device, and how many context positions before them are worth gathering."""
        most = self._most_context(kv)
        if on_device(start_positions):
            return integers_on_device("start_positions", start_positions, len(seqs), self.device), most
        starts = host_integers("start_positions", start_positions, len(seqs))
        kv.check_positions("propose", seqs, starts)
        spans = [kv.span(q) for q in seqs]
        length = max((end - first for first, end in spans), default=0)
        return upload(starts, self.device), min(length, most)

    def _most_context(self, kv: WindowKV) -> int:
        """Positions before a start that any layer can see."""
        return kv.ring if self.config.retention is None else min(self.config.retention, kv.ring)

    def _draft(
        self, kv: WindowKV, k: int, length: int, slots: Tensor, starts: Tensor, anchors: Tensor,
        temperature: Tensor | None, bits: Tensor | None,
    ) -> Proposal:  # fmt: skip
        """All that a propose does on the device."""
        context = PagedContext(kv.tags, kv.page_table, slots, starts, kv.page_size, length)
        table, mask_row = self._embedding[0], self.mask_embedding
        noise = None if bits is None else uniform_of(bits, Stream.DRAFT)
        rows, valid = block_pass(self, kv, context, table, mask_row, anchors, k + 1)
        return choose_drafts(self, self._head[0], rows, anchors, valid, temperature, noise)

    def embed(self, anchors: Tensor, k: int) -> Tensor:
        """Input rows of blocks: anchors ``[...]`` and k masks each -> ``[..., k+1, H]``, raw rows times the scale."""
        c, table, mask_row = self.config, self._embedding[0], self.mask_embedding
        return embed_blocks(anchors, k + 1, c.mask_token_id, table, mask_row, c.input_embedding_scale, self.dtype)

    def shape_logits(self, logits: Tensor) -> Tensor:
        """Multiplier, then softcap, in fp32. Monotone, so the best tokens are known before. -inf stays ruled out."""
        return shape_logits(logits, self.config.output_multiplier, self.config.final_logit_softcapping)


def _temperatures(temperature: float | Sequence[float] | Tensor, like: Tensor) -> Tensor | None:
    """fp32 ``[R]`` on the device, or None when every request is known to be greedy."""
    if isinstance(temperature, (int, float)) and temperature == 0:  # the usual call, without an operation
        return None
    t = per_request("temperature", temperature, like.shape[0])
    if on_device(t):
        return t.to(like.device).expand(like.shape)
    if not bool((t > 0).any()):
        return None
    return t.to(like.device) if t.dim() else torch.full(like.shape, float(t), device=like.device, dtype=torch.float32)
