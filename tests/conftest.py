"""Fixtures that several test files share."""

import pytest
import torch
from trainer_cases import process_group


@pytest.fixture(scope="module")
def group():
    """A process group of one rank."""
    with process_group():
        yield


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
