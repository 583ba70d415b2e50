"""The real engine behind a rank: log-probs are those of the pushed weights and of nothing else; what dies is restarted.

One SGLang start serves all tests of this file but the last, which kills it. SGLang runs in a child process of its own,
so pytest survives whatever happens to it.
"""

import os
import signal

import msgspec
import numpy as np
import psutil
import pytest
import torch
from trainer_cases import process_group
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from engine.host import EngineConfig, EngineDied, EngineError, EngineHost, n_experts, server_args
from engine.protocol import Sampling
from sync.encode import Wire
from sync.messages import Done
from sync.push import Pusher, SyncConfig
from sync.quantize import Fp8Config, dequantize, quantize
from sync.shards import whole
from trainer.presets import write_preset

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
FP8 = Fp8Config()
WIRE = Wire(FP8, 4, torch.float32)
EOS = 1


class Pushed:
    """The model whose weights the engine should have: fp32 masters to push, and transformers on what they become."""

    def __init__(self, directory):
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def weights(self):
        state = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        return revert_weight_conversion(self.model, state).items()

    @torch.no_grad()
    def perturb(self, seed, scale=0.02):
        torch.manual_seed(seed)
        for parameter in self.model.parameters():
            parameter += scale * torch.randn_like(parameter)

    def oracle(self, directory):
        """transformers on the dequantized weights; activations are quantized by hooks where the engine does it."""
        from safetensors.torch import save_file

        state = {}
        for name, tensor in self.weights():
            quantized = FP8.is_quantized(name, tuple(tensor.shape), 4)
            state[name] = dequantize(*quantize(tensor, "block"), "block") if quantized else tensor
        directory.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")
        self.model.config.save_pretrained(directory)
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, experts_implementation="eager"
        ).eval()


def q_dq(x):
    from sync.quantize import quantize

    return dequantize(*quantize(x.reshape(-1, x.shape[-1]), "group", "fp32"), "group").view(x.shape)


def quantize_activations(model):
    """Quantizes the input of every linear and expert product that the engine runs in FP8."""
    import torch.nn.functional as F

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, args: (q_dq(args[0]),))
        if name.endswith("mlp.experts"):

            def experts(x, index, weight, m=module):
                out = torch.zeros_like(x)
                for e in index.unique().tolist():
                    rows, k = (index == e).nonzero(as_tuple=True)
                    gate, up = F.linear(q_dq(x[rows]), m.gate_up_proj[e]).chunk(2, -1)
                    down = F.linear(q_dq(F.silu(gate) * up), m.down_proj[e])
                    out.index_add_(0, rows, down * weight[rows, k, None])
                return out

            module.forward = experts
    return model


@torch.no_grad()
def oracle_logprobs(model, prompt, response, temperature=1.0, support=None):
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].double() / temperature
    if support is not None:
        mask = torch.full_like(logits, -torch.inf)
        for row, ids in enumerate(support):
            mask[row, ids[ids >= 0]] = 0.0
        logits = logits + mask
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(response)[:, None])[:, 0].numpy()


def sample(host, prompts, sampling):
    done = []
    for finished, arena in host.generate(prompts, sampling):  # noqa: B007
        done += finished
    assert sorted(done) == list(range(len(prompts)))
    return arena


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    directory = tmp_path_factory.mktemp("engine")
    write_preset("tiny-qwen3-moe", 0.08, 0, directory)
    pushed = Pushed(directory)
    host = EngineHost(
        EngineConfig(context_length=128, max_running_requests=64),
        directory,
        FP8.sglang_quantization_config(4, [name for name, _ in pushed.weights()]),
        directory / "engine.log",
        seed=0,
        device=torch.device("cpu"),
    )
    with process_group(), host:
        pushed.pusher = Pusher(host, WIRE, SyncConfig(bucket_mb=1), host.reports, torch.device("cpu"), None, str)
        yield host, pushed, directory
    assert host.process is None


def swap(host, pushed, version, verify=True):
    shards = [whole(name, tensor) for name, tensor in pushed.weights()]
    return pushed.pusher.push(lambda: shards, version, verify)


def prompts(n, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 40, rng.integers(3, 12)).astype(np.int32) for _ in range(n)]


def compare(host, pushed, directory, sampling):
    """Median difference between engine and oracle log-probs [nats], and the arena.

    The median, because FP8 activations are steps: where float32 rounding differs by 1e-7 next to a boundary, one
    activation moves by 6 %, or a token goes to another expert, and a few log-probs differ visibly.
    """
    arena = sample(host, prompts(12), sampling)
    oracle = quantize_activations(pushed.oracle(directory))
    differences = []
    for i, prompt in enumerate(prompts(12)):
        n = arena.lengths[i]
        support = arena.support[i, :n] if sampling.support else None
        expected = oracle_logprobs(oracle, prompt.tolist(), arena.tokens[i, :n].tolist(), sampling.temperature, support)
        differences += np.abs(arena.logprobs[i, :n] - expected).tolist()
    return float(np.median(differences)), arena


def test_an_engine_without_weights_refuses(setup):
    host, _, _ = setup
    with pytest.raises(EngineError, match="fenced"):
        sample(host, prompts(1), Sampling(4))


def test_the_circle_ends_at_exactly_the_pushed_weights(setup, tmp_path):
    host, pushed, _ = setup
    stats = swap(host, pushed, 1)
    assert stats["sync/verified_params"] == 55 and stats["sync/tensors"] == 247
    median, arena = compare(host, pushed, tmp_path / "v1", Sampling(16, temperature=0.7, stop_token_ids=(EOS,)))
    assert median < 1e-4 and set(arena.versions) == {1}
    pushed.perturb(seed=1)
    stale, _ = compare(host, pushed, tmp_path / "stale", Sampling(16, stop_token_ids=(EOS,)))
    assert stale > 0.01, "the oracle must notice an engine that still has the old weights"
    swap(host, pushed, 2)
    median, arena = compare(host, pushed, tmp_path / "v2", Sampling(16, stop_token_ids=(EOS,)))
    assert median < 1e-4 and set(arena.versions) == {2}


def test_replayed_support_is_the_distribution_that_was_sampled_from(setup, tmp_path):
    host, pushed, _ = setup
    with torch.no_grad():
        pushed.model.lm_head.weight.mul_(4)  # a peaked distribution, so that every rule cuts somewhere
    swap(host, pushed, 3)
    sampling = Sampling(16, top_k=6, top_p=0.8, min_p=0.05, support=6, stop_token_ids=(EOS,))
    median, arena = compare(host, pushed, tmp_path / "s", sampling)
    assert median < 1e-4
    kept = [(arena.support[i, : arena.lengths[i]] >= 0).sum(1) for i in range(12)]
    assert len(set(np.concatenate(kept).tolist())) > 2 and np.concatenate(kept).max() <= 6
    for i in range(12):
        for token, support in zip(arena.tokens[i, : arena.lengths[i]], arena.support[i]):
            assert token in support, "a token outside the recorded support was sampled"


def test_finish_reasons_and_experts(setup):
    host, pushed, _ = setup
    swap(host, pushed, 4)
    arena = sample(host, prompts(40), Sampling(24, stop_token_ids=(EOS, 5, 6, 7)))
    for i, prompt in enumerate(prompts(40)):
        n, last = arena.lengths[i], arena.tokens[i, arena.lengths[i] - 1]
        assert (arena.finish[i] == 0) == (last in (EOS, 5, 6, 7)) and (arena.finish[i] == 1) <= (n == 24)
        rows = arena.expert_rows(i, len(prompt) + n)
        assert (rows[:-1] < 8).all() and (rows[:-1, :, 0] != rows[:-1, :, 1]).all() and (rows[-1] == 255).all()
    assert {0, 1} == set(arena.finish[:40])


def test_a_request_that_cannot_fit_names_the_field(setup):
    host, _, _ = setup
    with pytest.raises(ValueError, match=r"engine\.context_length = 128"):
        sample(host, [np.zeros(100, np.int32)], Sampling(64))


def test_two_hundred_swaps_leave_nothing_behind(setup):
    host, pushed, _ = setup
    tree = [psutil.Process(host.process.pid), *psutil.Process(host.process.pid).children(recursive=True)]

    def held():
        """(resident MB, shared MB, open files) of the engine's processes."""
        memory = [process.memory_info() for process in tree]
        return sum(m.rss for m in memory) / 1e6, sum(m.shared for m in memory) / 1e6, sum(p.num_fds() for p in tree)

    def swaps(n):
        return [swap(host, pushed, 10 + i, verify=False)["sync/swap_s"] for i in range(n)]

    swaps(20)
    before = held()
    seconds = swaps(200)
    after = held()
    assert after[0] - before[0] < 8 and after[1] - before[1] < 2 and after[2] <= before[2], (before, after)
    assert np.median(seconds[-50:]) < 2 * np.median(seconds[:50])
    swap(host, pushed, 500)
    assert set(sample(host, prompts(4), Sampling(4)).versions) == {500}


def test_memory_that_slept_comes_back_through_a_swap(setup):
    host, pushed, _ = setup
    cache, weights, greedy = ("kv_cache", "cuda_graph"), ("weights",), Sampling(16, top_k=1, stop_token_ids=(EOS,))
    swap(host, pushed, 4)
    before = sample(host, prompts(1), greedy)
    sample(host, prompts(40), Sampling(8))  # the scheduler is hardly idle when it is told to sleep
    assert host.sleep(weights + cache) == Done()
    with pytest.raises(EngineError, match="fenced"):
        sample(host, prompts(1), greedy)
    assert "weights are asleep" in push_reason(host, pushed)
    assert "asleep already: weights" in host.sleep(weights).reason
    assert host.wake(weights) == Done() and "awake already: weights" in host.wake(weights).reason
    with pytest.raises(EngineError, match="fenced"):
        sample(host, prompts(1), greedy)
    swap(host, pushed, 5)
    with pytest.raises(EngineError, match="sleeps: cuda_graph, kv_cache"):
        sample(host, prompts(1), greedy)
    assert host.wake(cache) == Done()
    after = sample(host, prompts(1), greedy)
    assert (after.lengths == before.lengths).all() and (after.tokens == before.tokens).all()
    assert (after.logprobs == before.logprobs).all() and set(after.versions) == {5}
    assert host.sleep(cache) == Done() and host.wake(cache) == Done()
    assert set(sample(host, prompts(4), greedy).versions) == {5}, "without its weights asleep, it keeps its version"


def test_a_killed_and_a_stuck_engine(setup, tmp_path):
    host, pushed, _ = setup
    os.kill(host.process.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match=r"SIGKILL.*last lines of"):
        sample(host, prompts(8), Sampling(100))
    host.restart()
    with pytest.raises(EngineError, match="fenced"):
        sample(host, prompts(1), Sampling(4))
    pushed.perturb(seed=2)
    swap(host, pushed, 5)
    assert compare(host, pushed, tmp_path / "again", Sampling(16, stop_token_ids=(EOS,)))[0] < 1e-4
    pid = host.process.pid
    os.kill(pid, signal.SIGSTOP)
    host.config = msgspec.structs.replace(host.config, stall_timeout_s=2.0, max_restarts=1)
    with pytest.raises(EngineDied, match="gave no sign for 2 s while generating"):
        sample(host, prompts(8), Sampling(100))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not host.alive and "ended" in push_reason(host, pushed)
    assert "signal SIGKILL" in host.wake(("weights",)).reason
    with pytest.raises(EngineDied, match=r"engine\.max_restarts = 1"):
        host.restart()


def push_reason(host, pushed):
    from sync.push import SwapError

    with pytest.raises(SwapError) as error:
        swap(host, pushed, 6)
    return str(error.value).replace("closed its channel", "ended")


def test_arguments_for_gpus_and_cpus(tmp_path):
    write_preset("tiny-qwen3", 0.02, 0, tmp_path)
    cpu = server_args(EngineConfig(sglang={"schedule_policy": "fcfs"}), tmp_path, None, torch.device("cpu"))
    gpu = server_args(EngineConfig(), tmp_path, {"quant_method": "fp8"}, torch.device("cuda", 1))
    assert cpu["device"] == "cpu" and cpu["dtype"] == "float32" and cpu["schedule_policy"] == "fcfs"
    assert "quantization" not in cpu and cpu["max_total_tokens"] == 256 * 4096
    assert gpu["quantization"] == "fp8" and gpu["dtype"] == "bfloat16" and "device" not in gpu
    assert gpu["enable_memory_saver"] and "enable_memory_saver" not in cpu
    plain = server_args(EngineConfig(memory_saver=False), tmp_path, None, torch.device("cuda"))
    assert not plain["enable_memory_saver"]
    assert n_experts({"num_experts": 128}) == 128 and n_experts({}) == 0
    with pytest.raises(ValueError, match=r"engine\.sglang\.pp_size must be 1"):
        server_args(EngineConfig(sglang={"pp_size": 2}), tmp_path, None, torch.device("cpu"))


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused(tmp_path, monkeypatch, name):
    write_preset("tiny-qwen3", 0.02, 0, tmp_path)
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")

    def host(device, **config):
        return EngineHost(EngineConfig(**config), tmp_path, None, tmp_path / "log", 0, torch.device(device))

    with pytest.raises(ValueError, match=f"{name} turns expandable_segments on"):
        host("cuda")
    host("cpu")
    host("cuda", memory_saver=False)
    monkeypatch.setenv(name, "expandable_segments:False")
    host("cuda")
