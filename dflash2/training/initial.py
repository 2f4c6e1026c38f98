"""Where training starts: the target's final norm and last layers, in a drafter that is otherwise neutral."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dflash2.drafter import DFlash2Drafter
from dflash2.errors import ConfigError
from dflash2.training.target import FrozenTarget

__all__ = ["initialise"]

LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@torch.no_grad()
def initialise(
    drafter: DFlash2Drafter, target: FrozenTarget, *, layers: bool, sample: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Start the drafter from the target.

    The final norm is copied: a head trained on normed states of one scale gives a loss of dozens of nats otherwise.
    With ``layers``, draft layer i starts as the i-th of the target's last L layers, and `fc` passes the last tap on:
    then the context is near what those layers saw. Convolutions stay the identity and the selector neutral.

    Args:
        drafter: fp32 or working dtype.
        target: the target.
        layers: copy layers too; they must have the drafter's shapes and no biases.
        sample: tokens, positions, document ``[R, S]`` to measure the size of the target's queries and keys on.

    Raises:
        ConfigError: shapes differ.
    """
    drafter.norm.weight.copy_(_weight(target.decoder, "norm"))
    if not layers:
        return
    sources = list(target.layers)[-len(drafter.layers) :]
    scales = _query_key_scales(target, sources, sample)
    for mine, theirs, (query, key) in zip(drafter.draft_layers, sources, scales, strict=True):
        # Context rows skip input_layernorm, so its weight goes into the projections and both inputs look alike.
        gain = _weight(theirs, "input_layernorm").float()
        for name in LINEARS[:3]:
            _copy(mine, theirs, name, gain)
        for name in (LINEARS[3], *MLP):
            _copy(mine, theirs, name, None)
        mine.post_attention_layernorm.weight.copy_(_weight(theirs, "post_attention_layernorm"))
        mine.self_attn.q_norm.weight.fill_(query)
        mine.self_attn.k_norm.weight.fill_(key)
    hidden = drafter.config.hidden_size
    drafter.fc.weight.normal_(std=0.2 / hidden**0.5)
    drafter.fc.weight[:, -hidden:] += torch.eye(hidden, device=drafter.device)


def _weight(module: nn.Module, name: str) -> Tensor:
    found = module.get_submodule(name).weight
    if not isinstance(found, Tensor):
        raise ConfigError(f"init_layers: the target's {name} has no weight. Set init_layers to false.")
    return found


def _copy(mine: nn.Module, theirs: nn.Module, name: str, gain: Tensor | None) -> None:
    source, place = _weight(theirs, name), _weight(mine, name)
    if source.shape != place.shape or getattr(theirs.get_submodule(name), "bias", None) is not None:
        raise ConfigError(
            f"init_layers: the target's {name} is {list(source.shape)} and the drafter's {list(place.shape)}, without "
            "bias. Give the drafter the target's shape, or set init_layers to false."
        )
    place.copy_(source if gain is None else source.float() * gain)


def _query_key_scales(
    target: FrozenTarget, sources: list[nn.Module], sample: tuple[Tensor, Tensor, Tensor]
) -> list[list[float]]:
    """Root mean square of queries and keys per layer: q_norm and k_norm of this size keep the softmax as sharp."""
    sizes: dict[tuple[int, str], float] = {}

    def measure(i: int, name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            sizes[i, name] = output.float().square().mean().sqrt().item()

        return hook

    names = LINEARS[:2]
    handles = [s.get_submodule(n).register_forward_hook(measure(i, n)) for i, s in enumerate(sources) for n in names]
    try:
        target(*sample)
    finally:
        for handle in handles:
            handle.remove()
    return [[sizes[i, n] for n in names] for i in range(len(sources))]
