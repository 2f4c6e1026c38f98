"""The algorithm ``DFLASH2`` in SGLang's registry."""

from __future__ import annotations

from typing import Any

from dflash2.adapters.sglang.arguments import resolve
from dflash2.adapters.versions import SGLANG

__all__ = ["NAME", "register_algorithm"]

NAME = "DFLASH2"
_registered = False


def register_algorithm() -> None:
    """Idempotent."""
    global _registered
    if _registered:
        return
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=_algorithm_class())(_worker)
    _registered = True


def _worker(_server_args: Any) -> type:
    from dflash2.adapters.sglang.engine import install_hooks, make_worker

    SGLANG.warn_if_untested()
    install_hooks()
    return make_worker()


def _algorithm_class() -> type:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class DFlash2Algorithm(CustomSpecAlgo):
        """To SGLang's target of the kind DFLASH: it verifies a block in one pass and hands out its layers' outputs."""

        def is_dflash_family(self) -> bool:
            return True

        def supports_target_verify_for_draft(self) -> bool:
            return True

        def supports_grammar_overlap(self) -> bool:
            return True

        def handle_server_args(self, server_args: Any) -> None:
            from dflash2.adapters.sglang import engine

            engine.decide(server_args, resolve(engine.decided(server_args)))

        def __getattr__(self, name: str) -> Any:
            """What the base class lacks is as for the kind."""
            if name.startswith("__"):  # how it is copied, for one, is its own
                raise AttributeError(name)
            return getattr(SpeculativeAlgorithm.DFLASH, name)

    return DFlash2Algorithm
