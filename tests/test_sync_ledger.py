"""What the ledger counts, against psutil; how it keeps the most used and the least free."""

import os
import subprocess
import sys
import time

import psutil
import pytest
import torch

from sync.ledger import Ledger, resident_bytes

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ENGINE = """
import subprocess, sys, threading
hold = bytearray(40_000_000)
def beside():  # a child that belongs to another thread
    global child
    child = subprocess.Popen([sys.executable, "-c", "hold = bytearray(70_000_000); input()"], stdin=subprocess.PIPE)
    done.set(); child.wait()
done = threading.Event()
threading.Thread(target=beside, daemon=True).start()
done.wait(); print("up", flush=True); input(); child.kill()
"""


@pytest.fixture
def engine():
    """A process of 40 MB with a child of 70 MB."""
    process = subprocess.Popen([sys.executable, "-c", ENGINE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    (child,) = psutil.Process(process.pid).children()
    while child.memory_info().rss < 70_000_000:
        time.sleep(0.02)
    yield process
    child.kill()
    process.kill()
    process.wait()


def test_the_engine_counts_with_all_its_processes(engine):
    family = [psutil.Process(), psutil.Process(engine.pid), *psutil.Process(engine.pid).children(recursive=True)]
    expected = sum(p.memory_info().rss for p in family)
    assert resident_bytes(os.getpid(), engine.pid) == pytest.approx(expected, abs=3e6)
    assert resident_bytes(os.getpid(), None) == pytest.approx(psutil.Process().memory_info().rss, abs=3e6)
    assert expected - resident_bytes(os.getpid(), None) > 110e6


def test_an_engine_that_is_gone_counts_nothing(engine):
    engine.kill()
    for child in psutil.Process(engine.pid).children():
        child.kill()
    engine.wait()
    assert resident_bytes(os.getpid(), engine.pid) == pytest.approx(resident_bytes(os.getpid(), None), abs=3e6)


def test_a_measurement_is_cheap(engine):
    ledger, took = Ledger(CPU, lambda: engine.pid), []
    for _ in range(20):
        began = time.perf_counter()
        ledger.measure("train")
        took.append(time.perf_counter() - began)
    assert sorted(took)[10] < 5e-3


def test_on_a_cpu_each_phase_has_one_figure_per_step():
    ledger = Ledger(CPU, lambda: None)
    for phase in ["rollout", "train", "sync"]:
        ledger.measure(phase)
    metrics = ledger.take(dict)
    assert set(metrics) == {"memory/rollout_mb", "memory/train_mb", "memory/sync_mb"}
    assert metrics["memory/train_mb"] == pytest.approx(psutil.Process().memory_info().rss / 1e6, abs=3)
    assert ledger.take(dict) == {}


def test_on_a_gpu_most_used_and_least_free_of_steps_and_ranks(monkeypatch):
    free = iter([60_000_000, 20_000_000, 90_000_000])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 100_000_000))
    ledger = Ledger(GPU, lambda: None)
    ledger.measure("rollout")
    ledger.measure("rollout")
    ledger.measure("sync")
    assert ledger.take(dict) == {
        "memory/rollout_mb": 80.0, "memory/rollout_free_mb": 20.0, "memory/sync_mb": 10.0, "memory/sync_free_mb": 90.0
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70_000_000, 100_000_000))
    ledger.measure("train")
    other = {"memory/train_mb": 55.0, "memory/train_free_mb": -45.0}  # of another rank, before the reduction
    assert ledger.take(lambda mine: {name: max(mine[name], other[name]) for name in mine}) == {
        "memory/train_mb": 55.0, "memory/train_free_mb": 45.0
    }  # fmt: skip
