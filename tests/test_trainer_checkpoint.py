"""Checkpoints: bitwise resume, and no crash that loses the previous one."""

import json
import shutil
import threading

import pytest
import torch
import torch.multiprocessing as mp
import trainer_cases
from trainer_cases import new_trainer, plain_logprobs, process_group, random_batch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer import checkpoint
from trainer.algo import AlgoConfig
from trainer.algo.kl import KlConfig
from trainer.checkpoint import CheckpointConfig, Checkpointer, complete, export_hf
from trainer.model import reshard


@pytest.fixture(scope="module")
def model(tmp_path_factory, group):
    return trainer_cases.preset("tiny-qwen3-moe", tmp_path_factory.mktemp("models"))


def make(model, kl=0.0):
    return new_trainer(model, AlgoConfig(kl=KlConfig(coef=kl)), schedule="cosine", warmup_steps=2, weight_decay=0.1)


def state(trainer):
    """Copies of every number that decides what comes next."""
    found = {name: p.full_tensor().clone() for name, p in trainer.policy.named_parameters()}
    if trainer.reference is not None:
        reshard(trainer.reference)
        found |= {f"reference.{name}": p.full_tensor().clone() for name, p in trainer.reference.named_parameters()}
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
    trainer.sft_step([([2, 3], [4, 5, 1])], lr=1e-2)
    trainer.begin_rl()  # the reference is no longer the model that `make` reads
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
        kl = resumed.step(random_batch(seed))["trainer/kl_ref"]
    assert kl > 1e-5
    torch.rand(5)
    assert same(state(resumed), state(trainer))


def test_the_optimizer_follows_the_config_not_the_checkpoint(model, tmp_path):
    trainer = make(model)
    trainer.step(random_batch())
    checkpointer = Checkpointer(CheckpointConfig(asynchronous=False), tmp_path)
    checkpointer.save(trainer, 1, {})
    other = new_trainer(model, beta1=0.5, beta2=0.6, eps=1e-3, weight_decay=0.3)
    checkpointer.restore(other, no_warning)
    matrices, vectors = other.optimizer.param_groups
    for group in (matrices, vectors):
        assert (group["betas"], group["eps"]) == ((0.5, 0.6), 1e-3)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert all(p.ndim > 1 for p in matrices["params"]) and all(p.ndim <= 1 for p in vectors["params"])
    assert same(state(other), state(trainer))  # the moments are the checkpoint's


def test_a_reference_that_was_not_saved_is_named(model, tmp_path):
    checkpointer = Checkpointer(CheckpointConfig(asynchronous=False), tmp_path)
    checkpointer.save(make(model), 1, {})
    with pytest.raises(ValueError, match=r"step_000001 was saved with algo\.kl\.coef = 0"):
        checkpointer.restore(make(model, kl=0.1), no_warning)


def test_a_checkpoint_of_a_cpu_resumes_on_a_gpu(model, tmp_path, monkeypatch):
    checkpointer = Checkpointer(CheckpointConfig(asynchronous=False), tmp_path)
    checkpointer.save(make(model), 1, {"step": 1})
    random_state = torch.get_rng_state()
    torch.rand(3)
    resumed = make(model)
    resumed.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
    assert checkpointer.restore(resumed, no_warning) == {"step": 1}
    assert torch.equal(torch.get_rng_state(), random_state)


def test_settling_waits_for_the_save_in_flight_but_not_for_ever(model, tmp_path, monkeypatch):
    checkpointer = Checkpointer(CheckpointConfig(), tmp_path)
    checkpointer.settle(60)  # none in flight
    finish, may_end = checkpointer._finish, threading.Event()
    monkeypatch.setattr(checkpointer, "_finish", lambda *args: (may_end.wait(60), finish(*args)))
    checkpointer.save(make(model), 1, {})
    checkpointer.settle(0.05)
    assert not complete(tmp_path)
    threading.Timer(0.2, may_end.set).start()
    checkpointer.settle(60)
    assert len(complete(tmp_path)) == 1

    def fail(*_):
        raise RuntimeError("disk full")

    monkeypatch.setattr(checkpointer, "_finish", fail)
    checkpointer.save(make(model), 2, {})
    checkpointer.settle(60)  # raises nothing
    with pytest.raises(RuntimeError, match="disk full"):
        checkpointer.wait()


def two_ranks(rank, root, directory):
    """Saves two checkpoints of a tied model; then only rank 1 fails to read the newer one."""
    with process_group(rank, 2, root / "store"):
        trainer = new_trainer(directory)
        checkpointer = Checkpointer(CheckpointConfig(asynchronous=False), root)
        batch = random_batch()
        for step in (1, 2):
            trainer.step(batch.select(range(4) if rank else range(4, 12)))
            checkpointer.save(trainer, step, {"step": step})
        saved = state(trainer)
        read = checkpoint.FileSystemReader.read_metadata

        def broken_once(reader, *args, **named):
            checkpoint.FileSystemReader.read_metadata = read
            raise OSError("stale handle")

        if rank:
            checkpoint.FileSystemReader.read_metadata = broken_once
        messages = []
        extra = checkpointer.restore(trainer, messages.append)
        torch.save((saved, extra, messages), root / f"{rank}.pt")


@pytest.fixture(scope="module")
def two(tmp_path_factory, group):
    root = tmp_path_factory.mktemp("two")
    directory = trainer_cases.write_model("llama-tied", root)
    mp.spawn(two_ranks, (root, directory), nprocs=2)
    return root, directory, [torch.load(root / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_two_ranks_that_saved_a_tied_model_resume_as_one(two):
    root, directory, [(saved, _, _), _] = two
    alone = new_trainer(directory)
    assert Checkpointer(CheckpointConfig(), root).restore(alone, no_warning) == {"step": 2}
    assert same(state(alone), saved)
    weights = dict(alone.weights())
    assert "lm_head.weight" not in weights and "model.embed_tokens.weight" in weights


def test_a_rank_that_cannot_read_takes_the_others_along(two):
    for _, extra, messages in two[2]:
        assert extra == {"step": 1}
        assert len(messages) == 1 and "step_000002 cannot be read (OSError: stale handle)" in messages[0]


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
    source = tmp_path / "source"
    shutil.copytree(model, source)
    (source / "original").mkdir()
    (source / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("original/params.json", "pytorch_model.bin.index.json", "model.onnx"):
        (source / name).write_text("{}")
    trainer = make(source)
    trainer.step(random_batch())
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    exported = {path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith("model")}
    assert exported == {
        "chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
