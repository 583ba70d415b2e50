"""The staging buffer is one memory for both processes, and a rank that is gone cannot be attached to."""

import multiprocessing

import pytest
import torch

from sync.buckets import checksum
from sync.staging import Staging, attach


def other_process(handle, results, device):
    halves = attach(handle)
    results.put([checksum(half) for half in halves])
    halves[1][:4] = torch.tensor([9, 8, 7, 6], dtype=torch.uint8, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    results.put("written")


def shared(device):
    """Bytes that one process writes and the other sees, in both directions; the other's checksums."""
    staging = Staging(1000, torch.device(device))
    for i, half in enumerate(staging.halves):
        half.copy_((torch.arange(len(half)) * (i + 3) % 251).to(torch.uint8))
    staging.ready()
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=other_process, args=(staging.handle, results, device))
    process.start()
    seen = results.get()
    before = [checksum(half) for half in staging.halves]
    assert results.get() == "written"
    process.join()
    assert len(staging.halves) == 2 and {len(half) for half in staging.halves} == {1024}
    assert staging.halves[1][:4].tolist() == [9, 8, 7, 6]
    return seen, before


def test_both_processes_see_the_same_bytes():
    seen, before = shared("cpu")
    assert seen[0] == before[0] and len(set(seen)) == 2


@pytest.mark.gpu
def test_both_processes_see_the_same_device_memory():
    seen, before = shared("cuda")
    assert seen[0] == before[0] and len(set(seen)) == 2


def test_a_rank_that_is_gone_cannot_be_attached_to():
    with pytest.raises(OSError, match="No such file"):
        attach(["memfd", "/proc/4194305/fd/3"])


def test_pages_cost_nothing_until_written():
    staging = Staging(8 << 30, torch.device("cpu"))
    assert staging.halves[1].data_ptr() - staging.halves[0].data_ptr() == 8 << 30
