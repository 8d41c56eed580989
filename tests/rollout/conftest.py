"""One thread per process: the models are tiny, and several test processes share the cores."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def single_thread() -> None:
    torch.set_num_threads(1)
