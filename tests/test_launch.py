"""`python launch.py`: what a user types, what comes back, and whole runs with the real engine.

The runs are few, because each starts SGLang: one that loses its engine on the way and is resumed afterwards, and one on
two ranks with everything unusual turned on.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

import launch
from config import Config
from engine.tasks import load_task
from engine.tasks.prompts import Prompts
from records.metrics import METRICS
from settings import field_docs, find_recipe, load, recipes, undocumented
from trainer.presets import character_tokenizer

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = [  # metrics of every step
    "engine/reward_mean",
    "engine/tokens_per_s",
    "trainer/mismatch_k1",
    "trainer/mismatch_k3",
    "trainer/correction_truncated_frac",
    "trainer/clip_frac_pos",
    "trainer/clip_frac_neg",
    "trainer/entropy",
    "trainer/grad_norm",
    "trainer/tokens_per_s",
    "sync/swap_s",
    "sync/bytes",
    "sync/version",
    "memory/rollout_mb",
    "memory/train_mb",
    "memory/sync_mb",
    "time/rollout_s",
    "time/train_s",
    "time/sync_s",
    "time/step_s",
]
SMALL = [
    "sft.steps=3",
    "task.params.partial=true",
    "rollout.prompts_per_step=8",
    "rollout.group_size=4",
    "eval.prompts=8",
]
SMALL += ["engine.max_running_requests=32", "sync.verify=always"]


# ---------------------------------------------------------------- the command line


def call(capsys, *arguments):
    status = launch.main(list(arguments))
    out = capsys.readouterr()
    return status, out.out, out.err


def test_list_and_print_config(capsys):
    status, out, _ = call(capsys, "--list")
    names = {line.split()[0] for line in out.splitlines()}
    assert status == 0 and {"demo", "smollm2_135m", "qwen3_8b", "qwen3_30b_a3b"} <= names
    status, out, _ = call(capsys, "--config", "demo", "trainer.lr=5e-5", "--print-config")
    assert status == 0 and yaml.safe_load(out)["trainer"]["lr"] == 5e-5


def test_help_names_every_field(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    status, out, _ = call(capsys, "--help")
    assert status == 0 and undocumented(Config) == []
    for doc in field_docs(Config):
        assert doc.path.rpartition(".")[2] in out


@pytest.mark.parametrize("name", [name for name, _ in recipes(ROOT / "configs")])
def test_every_recipe_resolves(name):
    config = load(Config, find_recipe(name, ROOT / "configs"))
    assert config.name == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config NAME_OR_PATH is missing"),
        (["--config", "demmo"], "did you mean demo"),
        (["--config", "demo", "trainer.lrr=1"], "trainer.lrr = 1: unknown key; did you mean trainer.lr"),
        (["--config", "demo", "trainer.lr=fast"], 'trainer.lr = "fast": expected float'),
        (["--config", "demo", "model.path=x"], "model: model needs exactly one of path and preset"),
        (["--config", "demo", "rollout.group_size=1"], "rollout.group_size = 1"),
        (["--config", "demo", "rollout.max_tokens=64"], "engine.context_length = 64 must be at least 82"),
        (["--config", "demo", "trainer.updates_per_rollout=1000"], "more than the 512 samples"),
        (["--config", "demo", "rollout.replay_support=true"], "set top_k from 1 to 1024"),
        (["--config", "demo", "algo.correction.mode=bypass"], "importance: none"),
        (["--config", "demo", "task.name=arithmetik"], "arithmetic"),
        (["--config", "demo", "task.params.kind=sorted"], "task"),
        (["--config", "demo", "cluster.ranks=99"], "less than cluster.ranks = 99"),
        (["--config", "demo", "engine.tensor_parallel=2"], "tensor_parallel = 2 must divide the number of ranks, 1"),
        (
            ["--config", "demo", "cluster.ranks=3", "engine.tensor_parallel=2"],
            "engine.tensor_parallel = 2 must divide the number of ranks, 3",
        ),
        (
            ["--config", "demo", "cluster.ranks=4", "trainer.replicas=4", "engine.tensor_parallel=2"],
            "must divide the ranks of one model copy, 1 (trainer.replicas = 4)",
        ),
        (["--config", "demo", "cluster.ranks=4", "trainer.replicas=3"], "replicas = 3 must divide the number of ranks"),
        (["--config", "demo", "engine.sglang={tp_size: 2}"], "engine: sglang.tp_size is not for you to set"),
        (["--config", "demo", "fp8.granularity=rowwise"], "SGLang is served block only"),
        (["--config", "demo", "algo.advantage.overlong.buffer_tokens=11"], "buffer_tokens = 11 is more than"),
        (["--config", "demo", "rollout={dynamic_sampling: true, group_size: 1}"], "dynamic_sampling drops groups"),
        (["--config", "qwen3_8b"], "cluster.device = cuda: no CUDA device is visible"),
        (["--config", "qwen3_8b", "cluster.device=cpu"], "dapo-math-17k.jsonl: no such file"),
        (["--config", "demo", "--resume", "--run-dir", "nowhere"], "there is no run in nowhere"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(capsys, arguments, message):
    status, out, err = call(capsys, *arguments)
    assert status == 2 and out == ""
    assert err.startswith("config error: ") and err.count("\n") == 1 and message in err


def test_cuda_without_a_gpu_says_so(capsys):
    status, _, err = call(capsys, "--config", "demo", "cluster.device=cuda")
    assert status == 2 and "no CUDA device is visible" in err


# ---------------------------------------------------------------- whole runs


def start(run_dir, *arguments):
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, str(ROOT / "launch.py"), "--run-dir", str(run_dir), *arguments]
    return subprocess.Popen(
        command, cwd=run_dir.parent, env=environment | {"PYTHONPATH": str(run_dir.parent)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def last_engine(launcher):
    """The engine child of the highest rank that has one."""
    children = psutil.Process(launcher.pid).children(recursive=True)
    ranks = sorted((c for c in children if str(ROOT / "launch.py") in c.cmdline()), key=lambda c: c.environ()["RANK"])
    return [child for rank in ranks for child in rank.children() if "engine.child" in child.cmdline()][-1]


def finish_without(launcher, line, victim):
    """Waits for the run to end, killing `victim(launcher)` when a line of output begins with `line`."""
    output = []
    for text in launcher.stdout:
        output.append(text)
        if text.startswith(line):
            os.kill(victim(launcher).pid, signal.SIGKILL)
    launcher.wait()
    return "".join(output)


def metrics_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run of three steps whose engine is killed after the first; (directory, console output)."""
    run_dir = tmp_path_factory.mktemp("launch") / "run"
    saves = ["checkpoint.every=1", "checkpoint.keep_last=2"]
    process = start(run_dir, "--config", "demo", "steps=3", "eval.every=2", "probe.every=2", *saves, *SMALL)
    output = finish_without(process, "step 0/3", last_engine)
    assert process.returncode == 0, output
    return run_dir, output


@pytest.mark.sglang
@pytest.mark.slow
def test_a_run_survives_its_engine_and_leaves_everything_behind(interrupted):
    run_dir, output = interrupted
    assert "SIGKILL" in output and "started again" in output
    steps = metrics_of(run_dir)
    assert [record["step"] for record in steps] == [0, 1, 2, 3]
    for record in steps[:3]:
        assert set(ALWAYS) <= set(record) and set(record) - {"step", "time"} <= set(METRICS)
        assert record["sync/verified_params"] == 55 and record["sync/version"] == record["step"] + 1
        assert abs(record["trainer/mismatch_k1"]) < 0.05
        assert record["trainer/grad_norm"] > 0
    assert (
        "engine/eval_accuracy" in steps[0] and "engine/eval_accuracy" in steps[2] and "engine/eval_accuracy" in steps[3]
    )
    assert steps[0]["engine/restarts"] == 0 and steps[2]["engine/restarts"] == 1
    probes = lines(run_dir / "probes.jsonl")
    assert [probe["step"] for probe in probes] == [0, 2] and "activations not in FP8" in output
    for record, probe in zip(steps[0:3:2], probes):
        # the engine computes in FP8 and the trainer does not: with that matched, rounding is all that is left
        assert record["trainer/probe_remainder"] < 0.01 * record["trainer/probe_kl"]
        assert record["trainer/probe_kl"] == pytest.approx(record["trainer/mismatch_k3"], rel=1e-3)
        assert [source["open"] for source in probe["sources"]] == [True, True, False]
    samples = lines(run_dir / "samples.jsonl")
    assert {s["version"] for s in samples} == {0, 1, 2} and all(s["version"] == s["step"] for s in samples)
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["rollout"]["group_size"] == 4
    assert sorted(p.name for p in (run_dir / "checkpoints").iterdir()) == ["step_000002", "step_000003"]
    page = (run_dir / "report.html").read_text()
    assert "engine/reward_mean" in page and list((run_dir / "tb").iterdir())


@pytest.mark.sglang
@pytest.mark.slow
def test_the_export_is_the_trained_policy(interrupted, tmp_path):
    """transformers loads the export, which holds the weights of the last checkpoint."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir, _ = interrupted
    model = AutoModelForCausalLM.from_pretrained(run_dir / "export", dtype=torch.float32)
    assert AutoTokenizer.from_pretrained(run_dir / "export").decode([1]) == "<eos>"
    dcp_to_torch_save(run_dir / "checkpoints" / "step_000003", tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=False)["model"]
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, saved[f"hf.{name}"].bfloat16().float(), rtol=0, atol=0)


@pytest.mark.sglang
@pytest.mark.slow
def test_resume_goes_on_where_the_run_stopped(interrupted):
    run_dir, _ = interrupted
    before = metrics_of(run_dir)
    quiet = ["eval.every=0", "checkpoint.every=0", "checkpoint.export_hf=false"]
    process = start(run_dir, "--config", "demo", "--resume", "steps=4", *quiet, *SMALL)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    steps = metrics_of(run_dir)
    assert [record["step"] for record in steps] == [0, 1, 2, 3] and steps[:3] == before[:3]
    assert steps[3]["sync/version"] == 4
    config = load(Config, ROOT / "configs" / "demo.yaml", SMALL)
    tokenizer = character_tokenizer()
    prompts = Prompts(load_task(config.task, 0), tokenizer, config.task, 0)
    expected = {tokenizer.decode(prompt.ids) for prompt in prompts.draw(3 * 8, 8)}
    drawn = {s["prompt"] for s in lines(run_dir / "samples.jsonl") if s["step"] == 3}
    assert drawn == expected, "the resumed run must draw what the uninterrupted one would have drawn"


@pytest.mark.sglang
@pytest.mark.slow
def test_a_probe_of_a_checkpoint_adds_to_the_records(interrupted):
    run_dir, _ = interrupted
    before = metrics_of(run_dir)
    process = start(run_dir, "--config", "demo", "--resume", "--probe", *SMALL)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert "all matched" in output and "report:" in output
    assert metrics_of(run_dir) == before and len(lines(run_dir / "probes.jsonl")) == 3
    assert "all matched" in (run_dir / "report.html").read_text()


USER_TASK = '''
"""A task whose rewards misbehave: one in eight raises, one in sixteen hangs."""
import time
from engine.tasks.base import Example


class Task:
    n_train, n_held_out = None, 16

    def train(self, index):
        return Example(prompt=f"{index % 1000}=", metadata={"index": index})

    def held_out(self, index):
        return Example(prompt=f"{1000 + index}=", metadata={"index": -1})

    def reward(self, example, completion):
        kind = hash(completion) % 16
        if kind in (0, 1):
            raise RuntimeError("no reward today")
        if kind == 2:
            time.sleep(60)
        return len(completion) / 8


def make(seed):
    return Task()
'''


@pytest.mark.sglang
@pytest.mark.slow
def test_two_ranks_with_everything_unusual(tmp_path):
    (tmp_path / "user_task.py").write_text(USER_TASK)
    process = start(
        tmp_path / "run", "--config", "demo", "steps=2", "cluster.ranks=2", "cluster.threads=1",
        "task={name: 'user_task:make', reward_timeout_s: 0.5, max_prompt_tokens: 16}", "sft.steps=0",
        "model.preset=tiny-qwen3",
        "rollout.prompts_per_step=6", "rollout.group_size=4", "rollout.top_k=8", "rollout.top_p=0.9",
        "rollout.replay_support=true", "rollout.dynamic_sampling=true", "rollout.max_rounds=2", "eval.every=2",
        "eval.prompts=4", "eval.samples=2", "trainer.updates_per_rollout=2", "algo.kl.coef=0.01",
        "algo.correction={importance: mis, rejection: [seq_max_k2], normalize: true}", "fp8.scales=pow2",
        "fp8.num_first_layers_in_bf16=1", "engine.max_running_requests=32", "checkpoint.export_hf=false",
    )  # fmt: skip
    output = finish_without(process, "step 0/2", last_engine)
    assert process.returncode == 0, output
    assert "rank 1: the engine" in output and "rank 1: started again" in output
    assert [e["kind"] for e in lines(tmp_path / "run" / "events.jsonl")].count("engine") == 2
    steps = metrics_of(tmp_path / "run")
    assert [record["step"] for record in steps] == [0, 1, 2] and steps[1]["engine/restarts"] == 1
    for record in steps[:2]:
        assert abs(record["trainer/mismatch_k1"]) < 0.02 and record["trainer/updates"] == 2
        assert record["engine/samples"] % 12 == 0 and record["engine/reward_failed_frac"] < 0.6
        assert "trainer/kl_ref" in record
    assert sum(r["engine/reward_failed_frac"] + r["engine/reward_timeout_frac"] for r in steps[:2]) > 0
    assert "engine/eval_pass_at_k" in steps[2] and (tmp_path / "run" / "engine-rank1.log").exists()
    assert "no reward today" in output or "no reward within" in output


def model_for_two_gpus(directory):
    """A model of which each of two engine processes holds FP8 blocks of 128 in every dimension; bytes on the wire."""
    import torch
    from transformers import AutoModelForCausalLM

    from sync.quantize import Fp8Config
    from trainer.presets import preset_config

    config = preset_config("tiny-qwen3-moe", 0.08)
    config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = 2, 4, 4
    config.num_experts, config.moe_intermediate_size = 4, 256
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    nbytes = 0
    for name, parameter in model.named_parameters():  # experts are stacked: [4, rows, columns]
        quantized = name.endswith("_proj") or Fp8Config().is_quantized(name, tuple(parameter.shape), 2)
        nbytes += parameter.numel() + parameter.numel() // 128**2 * 4 if quantized else parameter.numel() * 4
    return nbytes


@pytest.mark.sglang
@pytest.mark.slow
def test_two_ranks_share_an_engine_that_dies_once(tmp_path):
    nbytes = model_for_two_gpus(tmp_path / "model")
    process = start(
        tmp_path / "run", "--config", "demo", "steps=2", "cluster.ranks=2", "cluster.threads=1",
        "engine.tensor_parallel=2", "engine.max_running_requests=32", f"model={{path: {tmp_path / 'model'}}}",
        "sft.steps=0", "task.params.partial=true", "rollout.prompts_per_step=8", "rollout.group_size=4",
        "rollout.max_tokens=6", "eval.every=0", "sync.verify=always", "checkpoint={every: 0, export_hf: false}",
    )  # fmt: skip
    output = finish_without(process, "step 0/2", last_engine)
    assert process.returncode == 0, output
    assert "SIGKILL" in output and "rank 1: the engine" not in output
    assert output.count("started again") == 1 and not (tmp_path / "run" / "engine-rank1.log").exists()
    steps = metrics_of(tmp_path / "run")
    assert [record["sync/version"] for record in steps] == [1, 2] and steps[1]["engine/restarts"] == 1
    for record in steps:
        assert record["engine/samples"] == 32 and abs(record["trainer/mismatch_k1"]) < 0.05
        assert record["sync/verified_params"] == 29 and record["sync/stock_tensors"] == 0
        assert record["sync/bytes"] < 0.51 * nbytes, "each process of the engine holds half of the weights"
        assert record["sync/bytes_received"] < 0.5 * (nbytes / 2), "alone, a rank receives all that the other one has"
    assert all(s["version"] == s["step"] for s in lines(tmp_path / "run" / "samples.jsonl"))


@pytest.mark.slow
@pytest.mark.sglang
def test_a_dead_rank_ends_the_run_and_every_engine(tmp_path):
    """kill -9 of a trainer rank between or in the middle of swaps: nothing is left running, the checkpoint is whole."""
    process = start(tmp_path / "run", "--config", "demo", "steps=9", "cluster.ranks=2", "cluster.threads=1",
                    "model.preset=tiny-qwen3", "eval.every=0", "checkpoint.every=1", *SMALL)  # fmt: skip
    family: list[psutil.Process] = []

    def rank_one(launcher):
        family.extend(psutil.Process(launcher.pid).children(recursive=True))
        (rank,) = [c for c in family if str(ROOT / "launch.py") in c.cmdline() and c.environ()["RANK"] == "1"]
        return rank

    output = finish_without(process, "step 1/9", rank_one)
    assert process.returncode == 1 and "rank 1 failed with exit status -9; results so far" in output, output
    psutil.wait_procs(family, timeout=30)
    assert len(family) > 6 and not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert any(re.fullmatch(r"step_\d+", name) for name in saved), saved


@pytest.mark.slow
@pytest.mark.sglang
def test_an_engine_that_cannot_start_ends_the_run_with_its_reason(tmp_path):
    process = start(tmp_path / "run", "--config", "demo", "engine.sglang={attention_backend: no_such_backend}", *SMALL)
    began = time.monotonic()
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 1 and "engine-rank0.log" in output and "no_such_backend" in output
    assert re.search(r"rank 0 failed with exit status 1; results so far", output), output
    assert time.monotonic() - began < 300


@pytest.mark.slow
def test_a_signal_ends_the_run_in_order(tmp_path):
    process = start(tmp_path / "run", "--config", "demo", "sft.steps=1000000", "rollout.prompts_per_step=8")
    for text in process.stdout:
        if text.startswith("demo: "):
            break
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    output = process.stdout.read()
    assert process.wait() == 128 + signal.SIGTERM and "--resume" in output, output
    assert (
        lines(tmp_path / "run" / "events.jsonl")[-1]["kind"] == "stopped"
        and (tmp_path / "run" / "report.html").exists()
    )
    psutil.wait_procs(family, timeout=30)
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
