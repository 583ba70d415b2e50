"""The state machine of memory, driven through every order of phases, deaths and restarts that hypothesis comes up with.

The engine here is as strict as SGLang: a tag that is out cannot be released again, one that is in cannot be resumed.
Both owners check at every claim that the other has let go.
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sync.messages import Done, Failed
from sync.phases import PhaseError, Phases

WEIGHTS, CACHE = {"weights"}, {"kv_cache", "cuda_graph"}
TABLE = {  # of DESIGN: engine, trainer
    "rollout": (WEIGHTS | CACHE, set()),
    "train": (set(), {"params", "optimizer"}),
    "sync": (WEIGHTS, {"params"}),
}


class Engine:
    """`deaths` lists the calls (counted from now) in which it dies."""

    def __init__(self, gpu):
        self.gpu, self.alive, self.starts, self.refuses = gpu, True, 1, False
        self.deaths: set[int] = set()
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        gpu.engine = WEIGHTS | CACHE

    def restart(self):
        assert not self.gpu.trainer, "an engine that starts measures free memory: the trainer must be out"
        self.alive, self.starts, self.gpu.engine = True, self.starts + 1, WEIGHTS | CACHE

    def die(self):
        self.alive, self.gpu.engine = False, set()

    def _call(self, name, tags):
        self.calls.append((name, tags))
        if len(self.calls) in self.deaths:
            self.die()
        if not self.alive:
            return Failed("the engine ended")
        if self.refuses:
            return Failed("SGLang still had requests")
        return None

    def sleep(self, tags):
        if failed := self._call("sleep", tags):
            return failed
        assert tags and set(tags) <= self.gpu.engine, "SGLang dies of this"
        self.gpu.engine = self.gpu.engine - set(tags)
        return Done()

    def wake(self, tags):
        if failed := self._call("wake", tags):
            return failed
        assert tags and not set(tags) & self.gpu.engine, "SGLang dies of this"
        self.gpu.engine = self.gpu.engine | set(tags)
        self.gpu.check()
        return Done()


class Trainer:
    def __init__(self, gpu):
        self.gpu = gpu
        gpu.trainer = {"params", "optimizer"}

    def offload(self, part):
        self.gpu.trainer.remove(part)

    def onload(self, part):
        assert part not in self.gpu.trainer
        self.gpu.trainer.add(part)
        self.gpu.check()


class Gpu:
    engine: set[str]
    trainer: set[str]

    def check(self):
        """What never may be in memory together."""
        assert not ("optimizer" in self.trainer and self.engine), "optimizer and engine"
        assert not ("params" in self.trainer and self.engine & CACHE), "parameters and KV cache"


class Rank:
    def __init__(self, agree=lambda ok: ok):
        self.gpu = Gpu()
        self.engine, self.trainer = Engine(self.gpu), Trainer(self.gpu)
        self.measured: list[str] = []
        self.phases = Phases(self.engine, self.trainer, agree, self.measured.append)

    def enter(self, name):
        with getattr(self.phases, name)():
            engine, trainer = TABLE[name]
            assert self.gpu.engine == (engine if self.engine.alive else set()) and self.gpu.trainer == trainer
            if engine:
                assert self.engine.alive

    def enter_restarting(self, name):
        """As the loop does it. The number of restarts."""
        for restarts in itertools.count():
            try:
                self.enter(name)
                return restarts
            except PhaseError:
                assert not self.engine.alive
                with self.phases.start():
                    self.engine.restart()


def started():
    rank = Rank()
    with rank.phases.start():
        assert not rank.gpu.trainer
    return rank


def test_a_run_moves_exactly_what_the_table_says():
    rank = started()
    for name in ["sync", "rollout", "train", "sync", "rollout"]:
        rank.enter(name)
    cache, everything = ("kv_cache", "cuda_graph"), ("weights", "kv_cache", "cuda_graph")
    assert rank.engine.calls == [
        ("sleep", cache), ("wake", cache), ("sleep", everything), ("wake", ("weights",)), ("wake", cache)
    ]  # fmt: skip
    assert rank.measured == ["sync", "rollout", "train", "sync", "rollout"]


@pytest.mark.parametrize("name", TABLE)
def test_entering_again_is_free(name):
    rank = started()
    rank.enter(name)
    calls = list(rank.engine.calls)
    rank.enter(name)
    assert rank.engine.calls == calls


@pytest.mark.parametrize(("before", "after"), itertools.product(TABLE, TABLE))
@pytest.mark.parametrize("death", [1, 2, None])
def test_a_death_on_the_way_into_any_phase(before, after, death):
    """Between phases (None), or in the first or second call."""
    rank = started()
    rank.enter(before)
    if death is None:
        rank.engine.die()
    else:
        rank.engine.deaths = {len(rank.engine.calls) + death}
    calls = len(rank.engine.calls)
    restarts = rank.enter_restarting(after)
    died = death is None or len(rank.engine.calls) - calls >= death
    assert restarts == (died and after != "train"), "training needs no engine; the next swap finds it dead"
    rank.engine.deaths = set()
    assert rank.enter_restarting("sync") == (died and after == "train")


operations = st.lists(st.sampled_from([*TABLE, *TABLE, "die", "die in the next call", "restart"]), max_size=30)


@settings(max_examples=300, deadline=None)
@given(operations)
def test_any_order_of_phases_deaths_and_restarts(order):
    rank = started()
    for operation in order:
        if operation == "die":
            rank.engine.die()
        elif operation == "die in the next call":
            rank.engine.deaths.add(len(rank.engine.calls) + 1)
        elif operation == "restart":  # in the middle of anything, unseen by the phases until the next one
            with rank.phases.start():
                rank.engine.die()
                rank.engine.restart()
        else:
            rank.enter_restarting(operation)


def test_all_ranks_raise_together_and_go_on_together():
    votes = [True]
    rank = Rank(lambda ok: ok and votes[0])
    with rank.phases.start():
        pass
    votes[0] = False
    with pytest.raises(PhaseError, match="another rank"):
        rank.enter("sync")
    votes[0] = True
    for name in ["sync", "rollout", "train", "sync"]:
        rank.enter(name)
    assert rank.measured == ["sync", "rollout", "train", "sync"]


def test_an_engine_that_refuses_keeps_the_trainer_out():
    rank = started()
    rank.enter("rollout")
    rank.engine.refuses = True
    with pytest.raises(PhaseError, match=r"train phase: SGLang still had requests"):
        rank.enter("train")
    assert not rank.gpu.trainer, "else both would be in memory"


def test_a_phase_that_fails_inside_is_not_measured():
    rank = started()
    with pytest.raises(RuntimeError, match="inside"), rank.phases.rollout():
        raise RuntimeError("inside")
    assert rank.measured == []
