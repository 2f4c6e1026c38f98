"""The errors that callers can meet. All are ``ValueError``s; each message says found, expected and what to do."""

__all__ = ["CapacityError", "CheckpointError", "ConfigError", "PositionError"]


class ConfigError(ValueError):
    """A configuration is contradictory, incomplete, not implemented, or does not fit the target."""


class PositionError(ValueError):
    """A start position is not the one the sequence is at, or a sequence handle is not open."""


class CapacityError(ValueError):
    """Pages, sequence slots or memory have run out. The state is what it was before the call."""


class CheckpointError(ValueError):
    """A checkpoint file is missing, truncated, mis-shaped or holds tensors that do not belong."""
