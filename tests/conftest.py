import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Before any kernel is imported: without a GPU the real kernels run in Triton's interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def kernel_device() -> str:
    """Where Triton kernels run in this session."""
    pytest.importorskip("triton", reason="triton is not installed")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return "cpu" if interpreted else "cuda"
