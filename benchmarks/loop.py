"""`python -m benchmarks.loop`: the whole loop and its halves on this machine's CPU, each beside its peer.

Prints one JSON line per figure on stdout; all numbers are medians over repeats in which both sides take turns.

    make peers                                          # once: TRL in .venv-peers, beside the torch of .venv
    python -m benchmarks.loop --out loop.json
    python -m benchmarks.loop --only trainer --repeats 9
    python -m benchmarks.loop --peer none               # without TRL

rollout_tokens_per_s   Sampled tokens per second of the demo's engine (tiny Qwen3-MoE, block FP8, routed experts and
    log-probs recorded): 32 prompts of 6 tokens x 8 samples, all at once, new prompts every time. Two tokens of 64 stop
    a response, which gives lengths from 1 to 64, mean about 28. Against SGLang's own torch code: the same engine with
    our hooks off (SGLANG_PLUGINS) and unquantized float32 weights, without routed experts; it has no FP8 on a CPU and
    cannot record experts there, so it does less.
trainer_tokens_per_s   Tokens of the batch (prompts and responses, no padding) per second of `Trainer.step`, packing,
    advantages, metrics and the mismatch correction included. Against the optimisation step of TRL's GRPOTrainer on the
    same model directory, samples, advantages, dtype (float32), number of threads and of updates (one). What TRL does
    before its forward is not counted: see benchmarks/peer_trl.py. Responses are log-normal, 8 to 256 tokens.
step_s   Seconds of one whole step: rollout, rewards, training, verified swap into SGLang, records. Against
    GRPOTrainer's own step, sampling with transformers' generate (its default without a GPU); same start, prompts, group
    size, length limit and reward. "demo" is the recipe after its warm start, responses of 6 tokens; "long" starts from
    random weights, where one token of 64 ends a response: mean length about 64, at most 256.
peak_mb   The largest proportional set size (shared pages counted once) during a step after the warm-up, of the process
    and all its descendants: for the loop that is the rank, the engine child, SGLang's processes and reward workers.

TRL gets `--peer-batch` sequences through the model at a time: of 8, 16, 32 and 64 none was clearly faster than 32 (one
thread), and 256 took twice as long on the MoE. On a busy machine pass `--threads 1`: threads that wait for each other
make both sides meaningless there.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.figure import figure
from benchmarks.ours import alone, random_batch, recipe
from benchmarks.sides import Side
from engine.host import EngineConfig, EngineHost
from engine.protocol import Sampling
from engine.tasks import load_task
from sync.encode import Wire
from sync.push import Pusher, SyncConfig
from sync.quantize import Fp8Config
from sync.shards import whole
from trainer.algo.advantages import AdvantageConfig, advantages
from trainer.model import ModelConfig, materialize

PEER_PYTHON = Path(__file__).resolve().parents[1] / ".venv-peers" / "bin" / "python"
TRL = "TRL 1.16.0 GRPOTrainer"
GROUPS, GROUP_SIZE, VOCABULARY = 32, 8, 64
LONG = ["sft.steps=0", "rollout.max_tokens=256", "engine.context_length=320"]
CPU = torch.device("cpu")
Figures = Iterator[dict[str, Any]]


def main(arguments: list[str]) -> None:
    """Prints the figures. Raises SystemExit with the remedy where the peer's environment is missing."""
    options = parse(arguments)
    if options.peer == "trl" and options.only != "rollout" and not PEER_PYTHON.exists():
        raise SystemExit(f"{PEER_PYTHON} is missing: run `make peers`, or leave TRL out with --peer none")
    parts = {"rollout": rollout_figures, "trainer": trainer_figures, "step": step_figures}
    figures = []
    with tempfile.TemporaryDirectory(prefix="hotswap-benchmark-") as work:
        for name, part in parts.items():
            if options.only in (None, name):
                for line in part(options, Path(work)):
                    print(json.dumps(line), flush=True)
                    figures.append(line)
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=("rollout", "trainer", "step"), help="only these figures (default: all)")
    parser.add_argument("--peer", choices=("trl", "none"), default="trl", help="the other side (default: trl)")
    parser.add_argument("--repeats", type=int, default=5, help="timed turns of each side (default: 5)")
    parser.add_argument("--warmup", type=int, default=2, help="turns before them (default: 2)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of either trainer (default: all)")
    parser.add_argument("--groups", type=int, default=GROUPS, help="groups of 8 samples per step (default: 32)")
    parser.add_argument("--longest", type=int, default=256, help="longest response of the trainer figures")
    parser.add_argument("--peer-batch", type=int, default=32, help="sequences of one forward of TRL (default: 32)")
    parser.add_argument("--out", type=Path, help="also write the figures to this file")
    return parser.parse_args(arguments)


# -------------------------------------------------------------------- rollout


def rollout_figures(options: argparse.Namespace, work: Path) -> Figures:
    """Our engine and SGLang's stock code on the same weights, in turns."""
    model = materialize(ModelConfig(preset="tiny-qwen3-moe"), work, seed=0)
    with _engine(model, work, fp8=True) as ours, _engine(model, work, fp8=False) as stock:
        rates: dict[EngineHost, list[float]] = {ours: [], stock: []}
        for turn in range(options.warmup + options.repeats):
            for host in rates:
                rates[host].append(_rollout_rate(host, options.groups, seed=turn))
            _say(f"rollout {turn}: ours {rates[ours][-1]:.0f}, stock {rates[stock][-1]:.0f} tokens/s")
    yield figure(
        "rollout_tokens_per_s", "tokens/s", rates[ours][options.warmup :],
        "SGLang's stock CPU code, float32 weights, no routed experts", rates[stock][options.warmup :],
        higher_is_better=True,
        note=f"tiny-qwen3-moe, block FP8, log-probs and experts recorded, {options.groups * GROUP_SIZE} concurrent "
        "samples, prompts of 6, responses of 1 to 64 tokens, 1 thread",
    )  # fmt: skip


@contextmanager
def _engine(model: Path, work: Path, fp8: bool) -> Iterator[EngineHost]:
    """A serving engine with the weights of `model`; without `fp8`: SGLang's stock code."""
    weights = load_file(model / "model.safetensors")
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    config = EngineConfig(context_length=128, max_running_requests=256, record_experts=fp8)
    form = Fp8Config(enabled=fp8)
    quantization = form.sglang_quantization_config(layers, list(weights)) if fp8 else None
    host = EngineHost(config, model, quantization, work / f"engine-{'fp8' if fp8 else 'stock'}.log", 0, CPU)
    old = os.environ.get("SGLANG_PLUGINS")
    if not fp8:
        os.environ["SGLANG_PLUGINS"] = "hotswap_cpu"  # the platform alone, not the plugin with our hooks
    try:
        host.spawn()
    finally:
        os.environ.pop("SGLANG_PLUGINS", None)
        if old is not None:
            os.environ["SGLANG_PLUGINS"] = old
    with host, alone():
        wire = Wire(form, layers, torch.float32)
        shards = [whole(name, weight.float()) for name, weight in weights.items()]
        Pusher(host, wire, SyncConfig(bucket_mb=32), host.reports, CPU, None, str).push(lambda: shards, 0, verify=fp8)
        yield host


def _rollout_rate(host: EngineHost, groups: int, seed: int) -> float:
    rng = np.random.default_rng(seed)
    prompts = [row for row in rng.integers(2, VOCABULARY, (groups, 6), np.int32) for _ in range(GROUP_SIZE)]
    began, tokens = time.perf_counter(), 0
    for samples, arena in host.generate(prompts, Sampling(max_tokens=64, stop_token_ids=(1, 2))):
        tokens += int(arena.lengths[samples].sum())
    return tokens / (time.perf_counter() - began)


# -------------------------------------------------------------------- trainer


def trainer_figures(options: argparse.Namespace, work: Path) -> Figures:
    """`Trainer.step` and GRPOTrainer's optimisation step, on a sparse and on a dense model."""
    batch = random_batch(options.groups, GROUP_SIZE, options.longest, VOCABULARY, seed=0)
    batch.save(work / "batch.npz")
    values = advantages(torch.from_numpy(batch.rewards), torch.from_numpy(batch.groups), AdvantageConfig())
    np.save(work / "advantages.npy", values.numpy())
    padded = batch.n_sequences * int((batch.lengths - batch.sampled_lengths).max() + batch.sampled_lengths.max())
    shape = f"float32, {batch.n_sequences} samples, {batch.n_tokens} tokens ({padded} padded as TRL does), one update"
    for preset in ("tiny-qwen3-moe", "tiny-qwen3"):
        job = {
            "kind": "trainer",
            "overrides": [],
            "model": str(materialize(ModelConfig(preset=preset), work, seed=0)),
            "batch": str(work / "batch.npz"),
            "advantages": str(work / "advantages.npy"),
        }
        prompts = [("0", "0")] * options.groups  # never read
        with _sides(options, work, f"trainer-{preset}", job, prompts, options.longest) as (ours, peer):
            seconds = _in_turns(options, ours, peer)
            rates = [[batch.n_tokens / s for s in side] for side in seconds]
            yield figure(
                "trainer_tokens_per_s", "tokens/s", rates[0], f"{TRL}, optimisation step", rates[1],
                higher_is_better=True, note=f"{preset}, {shape}, {options.threads} threads",
            )  # fmt: skip
            yield _peak(f"{preset}, trainer alone, {shape}", ours, peer)


# -------------------------------------------------------------------- whole step


def step_figures(options: argparse.Namespace, work: Path) -> Figures:
    """Whole steps of the demo as it is, and with long responses: ours with SGLang, TRL with transformers."""
    for name, changes in (("demo", []), ("long", LONG)):
        overrides = [f"rollout.prompts_per_step={options.groups}", *changes]
        config = recipe(overrides)
        task = load_task(config.task, config.seed)
        steps = options.warmup + options.repeats + 2  # one to measure memory, one to spare
        examples = [task.train(i) for i in range(steps * options.groups)]
        prompts = [(str(example.prompt), str(example.answer)) for example in examples]
        job = {"kind": "loop", "overrides": overrides}
        with _sides(options, work, name, job, prompts, config.rollout.max_tokens) as (ours, peer):
            parts: list[dict[str, float]] = []
            seconds = _in_turns(options, ours, peer, parts)
            shape = f"{name}: {options.groups} prompts x {GROUP_SIZE}, up to {config.rollout.max_tokens} tokens"
            yield figure(
                "step_s", "s", seconds[0], f"{TRL}, sampling with transformers", seconds[1], higher_is_better=False,
                note=f"{shape}, {options.threads} threads; ours: {_medians(parts[options.warmup :])}",
            )  # fmt: skip
            yield _peak(f"{shape}, all processes", ours, peer)


def _medians(parts: list[dict[str, float]]) -> str:
    return ", ".join(f"{key.removeprefix('time/')} {median(part[key] for part in parts):.2f}" for key in parts[0])


# -------------------------------------------------------------------- both sides


@contextmanager
def _sides(
    options: argparse.Namespace, work: Path, name: str, job: dict[str, Any], prompts: list[tuple[str, str]], limit: int
) -> Iterator[tuple[Side, Side | None]]:
    """Our process and TRL's; TRL starts from the model that ours replies where `job` names none."""
    job |= {"threads": options.threads, "output": str(work / name)}
    with ExitStack() as stack:
        _say(f"{name}: starting both sides")
        ours = stack.enter_context(Side(f"{name}-ours", [sys.executable, "-m", "benchmarks.ours"], job, work))
        if options.peer == "none":
            yield ours, None
            return
        samples = options.groups * GROUP_SIZE
        theirs = {"model": ours.ready.get("model")} | job | {
            "lr": recipe(job["overrides"]).trainer.lr,
            "samples": samples,
            "group_size": GROUP_SIZE,
            "batch_size": min(options.peer_batch, samples),
            "max_tokens": limit,
            "prompts": [prompt for prompt, _ in prompts],
            "answers": [answer for _, answer in prompts],
        }  # fmt: skip
        command = [str(PEER_PYTHON), "-m", "benchmarks.peer_trl"]
        yield ours, stack.enter_context(Side(f"{name}-trl", command, theirs, work))


def _in_turns(
    options: argparse.Namespace, ours: Side, peer: Side | None, parts: list[dict[str, float]] | None = None
) -> tuple[list[float], list[float]]:
    """Seconds of each side's timed turns; `parts` collects what ours says about its own."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(options.warmup + options.repeats):
        for side, kept in zip((ours, peer), seconds):
            if side is None:
                continue
            reply = side.turn()
            kept.append(reply["seconds"])
            if parts is not None and "parts" in reply:
                parts.append(reply["parts"])
            _say(f"{side.name} {turn}: {kept[-1]:.3f} s")
    return seconds[0][options.warmup :], seconds[1][options.warmup :]


def _peak(note: str, ours: Side, peer: Side | None) -> dict[str, Any]:
    theirs = [] if peer is None else [peer.peak_mb()]
    return figure("peak_mb", "MB", [ours.peak_mb()], TRL, theirs, higher_is_better=False, note=note)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
