"""Checkpoints: bitwise resume, and no crash that loses the previous one."""

import json

import pytest
import torch
import trainer_cases
from trainer_cases import new_trainer, plain_logprobs, process_group, random_batch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer import checkpoint
from trainer.algo import AlgoConfig
from trainer.algo.kl import KlConfig
from trainer.checkpoint import CheckpointConfig, Checkpointer, complete, export_hf


@pytest.fixture(scope="module")
def group():
    with process_group():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory, group):
    return trainer_cases.preset("tiny-qwen3-moe", tmp_path_factory.mktemp("models"))


def make(model, kl=0.0):
    return new_trainer(model, AlgoConfig(kl=KlConfig(coef=kl)), schedule="cosine", warmup_steps=2, weight_decay=0.1)


def state(trainer):
    """Copies of every number that decides what comes next."""
    found = {name: p.full_tensor().clone() for name, p in trainer.policy.named_parameters()}
    for i, moments in enumerate(trainer.optimizer.state.values()):
        found |= {
            f"{i}.{key}": torch.as_tensor(getattr(v, "full_tensor", lambda v=v: v)()).clone()
            for key, v in moments.items()
        }
    return found | {"updates": torch.tensor(trainer.updates), "rng": torch.get_rng_state()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def no_warning(message):
    raise AssertionError(message)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(model, tmp_path, asynchronous):
    trainer = make(model, kl=0.1)
    for seed in range(2):
        trainer.step(random_batch(seed))
    checkpointer = Checkpointer(CheckpointConfig(asynchronous=asynchronous), tmp_path)
    saved = state(trainer)
    checkpointer.save(trainer, 2, {"cursor": [3, "x"], "version": 2})
    for seed in (2, 3):  # while an asynchronous save is being written
        trainer.step(random_batch(seed))
    torch.rand(5)
    checkpointer.close()

    resumed = make(model, kl=0.1)
    resumed.step(random_batch(9))  # must leave no trace
    extra = Checkpointer(CheckpointConfig(), tmp_path).restore(resumed, no_warning)
    assert extra == {"cursor": [3, "x"], "version": 2}
    assert same(state(resumed), saved)
    for seed in (2, 3):
        resumed.step(random_batch(seed))
    torch.rand(5)
    assert same(state(resumed), state(trainer))


def test_nothing_to_restore_is_none(model, tmp_path):
    assert Checkpointer(CheckpointConfig(), tmp_path).restore(make(model), no_warning) is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_while_saving_keeps_the_previous_and_is_raised(model, tmp_path, asynchronous, monkeypatch):
    trainer = make(model)
    checkpointer = Checkpointer(CheckpointConfig(asynchronous=asynchronous, keep_last=1), tmp_path)
    checkpointer.save(trainer, 1, {"step": 1})
    checkpointer.wait()
    before = state(trainer)
    trainer.step(random_batch())

    def full_disk(*_, **__):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.filesystem._write_item", full_disk)
        with pytest.raises(RuntimeError, match="rank 0: OSError: disk full"):
            checkpointer.save(trainer, 2, {"step": 2})
            checkpointer.wait()
    assert [path.name for path in complete(tmp_path)] == ["step_000001"]
    other = make(model)
    assert Checkpointer(CheckpointConfig(), tmp_path).restore(other, no_warning) == {"step": 1}
    assert same(state(other), before)
    checkpointer.save(trainer, 2, {"step": 2})  # the left-over directory is no obstacle
    checkpointer.close()
    assert [path.name for path in complete(tmp_path)] == ["step_000002"]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("damage", ["truncated", "missing", "extra", "metadata"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(model, tmp_path, damage):
    trainer = make(model)
    checkpointer = Checkpointer(CheckpointConfig(asynchronous=False), tmp_path)
    checkpointer.save(trainer, 1, {"step": 1})
    before = state(trainer)
    trainer.step(random_batch())
    checkpointer.save(trainer, 2, {"step": 2})
    newest = tmp_path / "step_000002"
    data = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    if damage == "truncated":
        data.write_bytes(data.read_bytes()[:1000])
    elif damage == "missing":
        data.unlink()
    else:
        (newest / {"extra": "extra.json", "metadata": ".metadata"}[damage]).write_bytes(b"")
    messages = []
    assert checkpointer.restore(trainer, messages.append) == {"step": 1}
    assert same(state(trainer), before)
    assert len(messages) == 1 and "step_000002 cannot be read" in messages[0]
    (tmp_path / "step_000001" / "extra.json").unlink()
    with pytest.raises(ValueError, match="can be read; remove it"):
        checkpointer.restore(trainer, messages.append)


def test_only_the_last_are_kept(model, tmp_path):
    trainer = make(model)
    checkpointer = Checkpointer(CheckpointConfig(keep_last=2), tmp_path)
    for step in (8, 9, 10):
        checkpointer.save(trainer, step, {})
    checkpointer.close()
    assert [path.name for path in complete(tmp_path)] == ["step_000009", "step_000010"]


@pytest.mark.parametrize("shard_bytes", [4 * 2**30, 300_000])
def test_the_export_is_what_transformers_loads(model, tmp_path, shard_bytes, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", shard_bytes)
    trainer = make(model)
    trainer.step(random_batch())
    (tmp_path / "out").mkdir()  # replaced
    export_hf(trainer, tmp_path / "out", torch.float32)
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (shard_bytes < 10**6)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    batch = random_batch()
    with torch.no_grad():
        expected = torch.cat(plain_logprobs(loaded, batch, 0.8)).numpy()
    assert abs(trainer.logprobs(batch)[batch.sampled] - expected).max() < 2e-5
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 64
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
