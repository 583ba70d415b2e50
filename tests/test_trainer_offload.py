"""Tensors that went to host memory and came back: the same bits behind the same references, so the same training.

On a CPU the trainer moves nothing by itself; these tests make it, so that all but the pinning runs here.
"""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FSDPModule
from trainer_cases import new_trainer, process_group, random_batch
from transformers import AutoModelForCausalLM, LlamaConfig

from trainer.algo import AlgoConfig
from trainer.algo.kl import KlConfig
from trainer.offload import HostStore, held
from trainer.presets import character_tokenizer
from trainer.trainer import Trainer

CPU = torch.device("cpu")
ALGO = AlgoConfig(kl=KlConfig(coef=0.1))  # with a reference policy


def test_storages_come_back_bit_for_bit_behind_all_views():
    whole = torch.randn(10, 33)
    views = [whole[2:5], whole[7:, :4], torch.randn(3, dtype=torch.bfloat16), torch.empty(0), whole.t()]
    before = [view.clone() for view in [whole, *views]]
    store = HostStore(CPU)
    for _ in range(2):
        store.offload(views)
        assert whole.untyped_storage().nbytes() == 0 and views[2].untyped_storage().nbytes() == 0
        store.onload()
        assert all(torch.equal(a, b) for a, b in zip(before, [whole, *views], strict=True))
    whole[3, 1] = 7.0
    assert views[0][1, 1] == 7.0, "still one storage"


def test_host_memory_grows_when_it_must_and_is_kept():
    store, small, large = HostStore(CPU), torch.randn(100), torch.randn(100_000)
    copy = large.clone()
    store.offload([small])
    store.onload()
    store.offload([small, large])
    store.onload()
    host = store._host.data_ptr()
    store.offload([large])
    store.onload()
    assert torch.equal(large, copy) and store._host.data_ptr() == host


def test_out_twice_is_a_bug_and_in_twice_nothing():
    store = HostStore(CPU)
    store.onload()
    store.offload([torch.randn(4)])
    with pytest.raises(AssertionError, match="twice"):
        store.offload([torch.randn(4)])


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """A model whose vocabulary and feed-forward width do not divide by two: FSDP pads its shards."""
    directory = tmp_path_factory.mktemp("models") / "uneven"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=65, hidden_size=36, num_hidden_layers=2, intermediate_size=97, num_attention_heads=3,
        num_key_value_heads=1, head_dim=12, max_position_embeddings=128, initializer_range=0.08, pad_token_id=0,
        eos_token_id=1, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return directory


def phases(trainer: Trainer) -> None:
    """What one step of a run does around training."""
    trainer.offload("optimizer")
    synced = {name: tensor.clone() for name, tensor in trainer.weights()}
    trainer.offload("params")
    for param in trainer.optimizer.param_groups[0]["params"]:
        assert param.to_local().untyped_storage().nbytes() == 0
    trainer.onload("params")
    trainer.onload("optimizer")
    assert all(torch.equal(synced[name], tensor) for name, tensor in trainer.weights())


def train(directory, moving: bool, rank: int = 0, world: int = 1) -> dict[str, torch.Tensor]:
    """Everything that training leaves behind: weights, moments, metrics, log-probs."""
    trainer = new_trainer(directory, ALGO, updates_per_rollout=2, max_grad_norm=1.0, tokens_per_micro_batch=40)
    trainer.offloads = moving
    around = phases if moving else lambda trainer: None
    around(trainer)  # before FSDP's lazy initialisation and without optimizer state
    trainer.sft_step([([2, 3], [4, 5])], lr=1e-3)
    around(trainer)
    trainer.begin_rl()
    around(trainer)
    found = {}
    for seed in range(3):
        batch = random_batch(seed).select(range(rank, 12, world))
        metrics = trainer.step(batch)
        found |= {f"{seed} {name}": torch.tensor(x) for name, x in metrics.items() if "per_s" not in name}
        around(trainer)
        found[f"{seed} logprobs"] = torch.from_numpy(trainer.logprobs(batch))
        around(trainer)  # after a forward that gathered the root and the reference
    found |= {name: tensor.clone() for name, tensor in trainer.weights()}
    params = trainer.optimizer.param_groups[0]["params"]
    return found | {f"moment {i}": trainer.optimizer.state[p]["exp_avg_sq"].to_local() for i, p in enumerate(params)}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_training_is_the_same_bit_for_bit(uneven):
    with process_group():
        assert equal(train(uneven, moving=False), train(uneven, moving=True))


def test_gradients_wait_too(uneven):
    """FSDP reduces the gradients of a layer into one buffer; they must come back as views of one."""
    with process_group():
        trainer = new_trainer(uneven)
        trainer.offloads = True
        trainer._apply = lambda *_: None  # the gradients stay
        trainer.step(random_batch())
        params = [p for p in trainer.policy.parameters() if p.grad is not None]
        assert params
        before = [p.grad.to_local().clone() for p in params]
        trainer.offload("optimizer")
        assert all(p.grad.to_local().untyped_storage().nbytes() == 0 for p in params)
        trainer.onload("optimizer")
        assert all(torch.equal(p.grad.to_local(), b) for p, b in zip(params, before, strict=True))


def test_nothing_of_either_part_stays_behind(uneven):
    """FSDP's own flat copies, optimizer state and the reference are empty too; only scalars may stay."""
    with process_group():
        trainer = new_trainer(uneven, ALGO)
        trainer.offloads = True
        trainer.step(random_batch())
        trainer.offload("optimizer")
        trainer.offload("params")
        for policy in (trainer.policy, trainer.reference):
            for module in policy.modules():
                if isinstance(module, FSDPModule):
                    for group in module._get_fsdp_state()._fsdp_param_groups:
                        for param in group.fsdp_params:
                            assert param._sharded_param_data.untyped_storage().nbytes() == 0
                            gathered = getattr(param, "all_gather_outputs", [])
                            assert all(out.untyped_storage().nbytes() == 0 for out in gathered)
        for state in trainer.optimizer.state.values():
            for name, tensor in state.items():
                local = tensor if name == "step" else tensor.to_local()
                assert (local.untyped_storage().nbytes() == 0) == (name != "step")


def test_on_a_cpu_nothing_moves_unless_made_to(uneven):
    with process_group():
        trainer = new_trainer(uneven)
        before = [p.to_local().data_ptr() for p in held_params(trainer)]
        trainer.offload("params")
        assert all(p.to_local().untyped_storage().nbytes() for p in held_params(trainer))
        trainer.onload("params")
        assert [p.to_local().data_ptr() for p in held_params(trainer)] == before


def held_params(trainer):
    return trainer.optimizer.param_groups[0]["params"]


def two_ranks(rank, store, directory, results):
    with process_group(rank, 2, store):
        still, moved = (train(directory, moving, rank, 2) for moving in (False, True))
        trainer = new_trainer(directory)
        uneven_shards = sum(p.to_local().shape[0] * 2 != p.shape[0] for p in held_params(trainer))
        torch.save((equal(still, moved), uneven_shards), results / f"{rank}.pt")
        dist.barrier()


def test_so_it_is_with_uneven_shards_on_two_ranks(uneven, tmp_path):
    mp.spawn(two_ranks, (tmp_path / "store", uneven, tmp_path), nprocs=2)
    for rank in range(2):
        same, uneven_shards = torch.load(tmp_path / f"{rank}.pt")
        assert same and uneven_shards > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_memory_is_free_for_others_and_comes_back():
    """FSDP2 on one rank: allocated and reserved memory and what the driver calls free, before, during and after."""
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29617", rank=0, world_size=1, device_id=device)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, device=device) for _ in range(8)))
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cuda", (1,)))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        x = torch.randn(16, 4096, device=device)

        def step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = [p.to_local().clone().cpu() for p in model.parameters()]
        params = sum(p.to_local().nbytes for p in model.parameters())
        allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
        stores = {part: HostStore(device) for part in ("optimizer", "params")}
        for _ in range(2):
            stores["optimizer"].offload(held("optimizer", optimizer, None))
            assert torch.cuda.memory_allocated() <= allocated - 1.99 * params
            stores["params"].offload(held("params", optimizer, None))
            assert torch.cuda.memory_allocated() <= allocated - 2.98 * params
            assert torch.cuda.mem_get_info()[0] >= free + 2.9 * params, "torch kept the memory to itself"
            assert stores["params"]._host.is_pinned()
            for part in ("params", "optimizer"):
                stores[part].onload()
            assert abs(torch.cuda.memory_allocated() - allocated) < 0.01 * params
            assert all(torch.equal(a, p.to_local().cpu()) for a, p in zip(before, model.parameters(), strict=True))
        step()
    finally:
        dist.destroy_process_group()
