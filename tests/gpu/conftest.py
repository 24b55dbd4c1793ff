"""Tests of what touches a device run twice: on the CPU, to show that they are right, and on CUDA, marked gpu."""

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a test computes; what it expects is always computed on the CPU in float32."""
    return torch.device(request.param)
