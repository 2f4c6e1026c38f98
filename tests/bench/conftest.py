import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tiny import tiny_config

from dflash2.bench.cases import Workshop
from dflash2.bench.timing import Timer
from dflash2.testing import cpu_as_device


@pytest.fixture
def timer() -> Timer:
    return Timer(torch.device("cpu"), samples=3, sample_us=1.0, warm_up_us=1.0)


@pytest.fixture
def shop(timer):
    """Tiny drafters in place of the published ones, on a CPU whose tensors count as a device's."""
    shapes = {name: tiny_config(block_size=4, sliding_window=8) for name in ("27b", "30b", "flash")}
    with cpu_as_device():
        yield Workshop(timer, shapes, torch.float32)
