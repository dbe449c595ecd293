"""A pytest plugin (``-p gpu_guard``): a device that one test broke is not left to the next ones.

After an illegal access every CUDA call of the process fails. Under pytest-xdist the worker ends, so
that a fresh one goes on and one broken kernel hides nothing else; without it the session ends.
"""

from __future__ import annotations

import os

import pytest
import torch


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Wait for the device; leave where that fails."""
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        message = f"{item.nodeid} broke the device: {error}"
        if "PYTEST_XDIST_WORKER" in os.environ:
            print(message, flush=True)
            os._exit(70)
        pytest.exit(message, returncode=70)
