"""Rewards in worker processes: values and order, every way user code can go wrong, limits, speed, no orphans."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from engine.rewards import RewardPool, gather
from engine.tasks import TaskConfig, load_task
from engine.tasks.base import Example

# The completion says what the reward does: a number is the reward, a word is a misbehaviour.
UNRULY = """
import os, signal, subprocess, sys, time
import numpy as np
from engine.tasks.base import Example

class Unruly:
    n_train, n_held_out = 1, 1
    def train(self, index): return Example(prompt="?")
    held_out = train
    def reward(self, example, completion):
        match completion:
            case "raise": raise KeyError("no such key")
            case "exit": sys.exit(3)
            case "die": os._exit(7)
            case "killed": os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                while True: pass
            case "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                subprocess.run(["sleep", "1234.5"])
            case "nan": return float("nan")
            case "inf": return np.inf
            case "none": return None
            case "text": return "1.0"
            case "list": return [1.0]
            case "memory": return float(len(bytearray(2 << 30)))
            case "numpy": return np.float64(0.25)
            case "true": return True
            case "pid": return os.getpid() % 100_000
            case "torch": return any(name.split(".")[0] in ("torch", "transformers", "sglang") for name in sys.modules)
        return float(completion) + float(example.answer or 0)

def make(seed, broken=False):
    if broken and os.environ.get("BREAK_TASK"): raise OSError("no disk")
    return Unruly()
"""


@pytest.fixture
def unruly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "unruly_rewards.py").write_text(UNRULY)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "unruly_rewards:make"


def config(name: str, **changes: object) -> TaskConfig:
    return TaskConfig(name=name, **({"reward_workers": 1} | changes))  # type: ignore[arg-type]


def score(pool: RewardPool, *completions: str):
    return pool.score([Example(prompt="?")] * len(completions), completions)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def worker_pid(pool: RewardPool) -> int:
    process = pool._workers[0]._process
    assert process is not None
    return process.pid


def test_rewards_keep_their_order(unruly: str) -> None:
    n = 100
    with RewardPool(config(unruly, reward_workers=2), 0) as pool:
        examples = [Example(prompt="?", answer=str(i)) for i in range(n)]
        scores = pool.score(examples, ["0.5"] * n)
        np.testing.assert_array_equal(scores.rewards, np.arange(n, dtype=np.float32) + np.float32(0.5))
        assert scores.rewards.dtype == np.float32
        assert (scores.failed, scores.timeouts, scores.first_error) == (0, 0, None)
        futures = [pool.submit(examples[i : i + 7], ["1"] * len(examples[i : i + 7])) for i in range(0, n, 7)]
        np.testing.assert_array_equal(gather(futures).rewards, np.arange(n) + 1)
        assert len(pool.submit([], []).result().rewards) == len(gather([]).rewards) == 0
        with pytest.raises(ValueError):
            pool.submit(examples, ["1"])
        with pytest.raises(ValueError, match="100 examples, 1 completions"):
            pool.score(examples, ["1"])


def test_user_code_costs_its_own_sample_only(unruly: str) -> None:
    with RewardPool(config(unruly, reward_memory_mib=1024), 0) as pool:
        words = ["raise", "exit", "die", "killed", "nan", "inf", "none", "text", "list", "memory"]
        completions = [text for word in words for text in (word, "1")] + ["numpy", "true"]
        scores = score(pool, *completions)
        expected = [value for _ in words for value in (np.nan, 1.0)] + [0.25, 1.0]
        np.testing.assert_array_equal(scores.rewards, np.asarray(expected, np.float32))
        assert (scores.failed, scores.timeouts) == (len(words), 0)
        assert scores.first_error == "KeyError: 'no such key'"
        for word, message in {
            "exit": "SystemExit: 3", "die": "exit code 7", "killed": "exit code -9", "nan": "the reward is nan",
            "none": "None, not a number", "text": "'1.0', not a number", "memory": "MemoryError",
        }.items():  # fmt: skip
            assert message in (score(pool, word).first_error or "")


def test_time_limit_is_per_sample_and_spares_the_rest(unruly: str) -> None:
    with RewardPool(config(unruly, reward_timeout_s=1.0), 0) as pool:
        score(pool, "1")
        first = worker_pid(pool)
        began = time.monotonic()
        scores = score(pool, "1", "hang", "2", "raise", "deaf", "3")
        took = time.monotonic() - began
        np.testing.assert_array_equal(scores.rewards, np.asarray([1, np.nan, 2, np.nan, np.nan, 3], np.float32))
        assert (scores.failed, scores.timeouts, scores.first_error) == (1, 2, "no reward within 1 s")
        assert 2.0 <= took < 6.0  # two limits, not one per sample
        assert not alive(first)


def test_worker_is_light(unruly: str) -> None:
    with RewardPool(config(unruly), 0) as pool:
        assert score(pool, "torch").rewards[0] == 0
    code = """
        import sys
        import engine.reward_worker
        from engine.tasks import TaskConfig, load_reward
        from engine.tasks.base import Example
        for config in TaskConfig(name="math", params={"path": "absent"}), TaskConfig(name="reasoning_gym:chain_sum"):
            load_reward(config, 0)(Example(prompt="", answer="3"), "4")
        assert not {"torch", "transformers", "sglang"} & sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_main_script_is_not_imported_again(tmp_path: Path) -> None:
    """multiprocessing would run launch.py's imports, torch among them, in each worker."""
    script = tmp_path / "main_script.py"
    script.write_text("""
print("imported")
from engine.rewards import RewardPool
from engine.tasks import TaskConfig, load_task
config = TaskConfig(reward_workers=1)
with RewardPool(config, 0) as pool:
    example = load_task(config, 0).train(0)
    print(pool.score([example], [example.answer]).rewards)
""")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    ran = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["imported", "[1.]"]


def test_close_ends_a_hanging_reward_and_its_children(unruly: str) -> None:
    pool = RewardPool(config(unruly, reward_timeout_s=60.0), 0)
    score(pool, "1")
    future, waiting = pool.submit([Example(prompt="?")], ["deaf"]), pool.submit([Example(prompt="?")], ["1"])
    pid = worker_pid(pool)
    children = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + 5
    while not children.read_text().split() and time.monotonic() < deadline:
        time.sleep(0.02)
    [sleeper] = map(int, children.read_text().split())
    began = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - began < 2
    assert not alive(pid) and wait_until_gone(sleeper)
    with pytest.raises(RuntimeError, match="closed"):
        future.result()
    assert waiting.cancelled()


def test_worker_dies_with_a_killed_rank(unruly: str) -> None:
    code = f"""
        from engine.rewards import RewardPool
        from engine.tasks import TaskConfig
        from engine.tasks.base import Example
        pool = RewardPool(TaskConfig(name={unruly!r}, reward_workers=1, reward_timeout_s=60.0), 0)
        pool.score([Example(prompt="?")], ["1"])
        print(pool._workers[0]._process.pid, flush=True)
        pool.score([Example(prompt="?")], ["hang"])
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    rank = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, env=environment)
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    time.sleep(0.2)  # the worker is in its endless loop by now, and cannot look at its connection
    assert alive(pid)
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    rank.stdout.close()
    assert wait_until_gone(pid)


def test_task_that_does_not_load_in_the_worker(unruly: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAK_TASK", "1")
    with (
        RewardPool(config(unruly, params={"broken": True}), 0) as pool,
        pytest.raises(RuntimeError, match="does not start: OSError: no disk"),
    ):
        score(pool, "1")


def test_unpicklable_example_is_an_error_not_a_lost_worker(unruly: str) -> None:
    with RewardPool(config(unruly), 0) as pool:
        with pytest.raises(Exception, match="pickle"):
            pool.submit([Example(prompt="?", metadata={"f": lambda: 0})], ["1"]).result()
        assert score(pool, "2").rewards[0] == 2


def test_cheap_rewards_are_cheap() -> None:
    settings = TaskConfig()
    examples = [load_task(settings, 0).train(i) for i in range(256)]
    completions = [example.answer for example in examples]
    with RewardPool(settings, 0) as pool:
        pool.score(examples, completions)
        times = []
        for _ in range(20):
            began = time.perf_counter()
            scores = pool.score(examples, completions)
            times.append(time.perf_counter() - began)
        assert (scores.rewards == 1).all()
        assert min(times) < 0.05  # about 20 ms; the smallest, because test machines are shared
