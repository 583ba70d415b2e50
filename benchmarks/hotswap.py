"""`python -m benchmarks.hotswap`: what a weight swap costs, beside SGLang's own update and beside the memory's limit.

Prints one JSON line per figure on stdout; numbers are medians over repeats in which both sides take turns, in one
process group of one rank with one real SGLang engine.

    python -m benchmarks.hotswap --out hotswap.json
    python -m benchmarks.hotswap --only many --layers 12      # a quarter of the tensors

many    The names of Qwen3-30B-A3B (48 layers x 128 experts) at hidden size 128: 37,491 tensors, 307 MB. Both sides
        start from the same FP8 codes and scales.
        apply_many_names  Engine side: the calls that take the bytes, checksum included, against SGLang's
            `update_weights_from_tensor` of a flattened bucket, its payload being ready.
        swap_many_names   All of it: packing, checksums, session, flush; against flattening, serializing, session,
            flush.
        apply_vs_memcpy   The copies into the engine's parameters alone, against one warm copy of the same bytes.
        plan_s            Making the plan, once per engine process.
        growth_names      Cost of 1,000 tensors in a swap of all, against a swap of a sixteenth.
wide    Few large tensors (hidden 2048, 2 layers) from float32 masters, where bandwidth is the limit.
        swap_wide         The whole swap against quantizing the same tensors and copying the result once.
        growth_bytes      Cost of a megabyte in a swap of all, against a swap of a sixteenth.
ranks   bytes_per_rank_N  What one of N ranks receives when Qwen3-30B-A3B is swapped, against gathering bfloat16 on
            every rank: from the layout, which tests compare with what is really sent.
quantize  quantize_gb_per_s  The CPU quantizer, bytes of float32 read, against copying them.

SGLang's CPU platform dequantizes FP8 weights at the first forward after a swap; that belongs to no swap on a GPU and is
counted in none of these, on either side.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks.figure import figure
from benchmarks.ours import alone
from engine.host import EngineConfig, server_args
from engine.hotswap import Reply
from engine.updater import LOADER, Updater
from sync.encode import Wire
from sync.layout import build, entries_of
from sync.messages import Entry, Failed
from sync.plan import BLOCK, Blocks, row_form
from sync.push import Pusher, SyncConfig
from sync.quantize import Fp8Config, quantize, scale_name
from sync.receive import Receiver
from sync.shards import Piece, Shard
from trainer.presets import character_tokenizer

CPU = torch.device("cpu")
KINDS = ("many", "wide", "ranks", "quantize")
Figures = Iterator[dict[str, Any]]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS, action="append", help="part to run, may be repeated (default: all)")
    parser.add_argument("--layers", type=int, default=48, help="layers of the many-names model (default 48)")
    parser.add_argument("--experts", type=int, default=128, help="experts per layer (default 128)")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of each side (default 5)")
    parser.add_argument("--bucket-mb", type=int, default=SyncConfig().bucket_mb, help="sync.bucket_mb (its default)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the rank (default 1)")
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    parts: dict[str, Callable[[argparse.Namespace, Path], Figures]] = {
        "many": many, "wide": wide, "ranks": ranks, "quantize": quantizer,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory, alone():
        lines = []
        for name in options.only or KINDS:
            for line in parts[name](options, Path(directory)):
                lines.append(json.dumps(line))
                print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


# -------------------------------------------------------------------- models


def many_config(layers: int, experts: int) -> PreTrainedConfig:
    values: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": layers, "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 128, "moe_intermediate_size": 128, "num_experts": experts,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "architectures": ["Qwen3MoeForCausalLM"],
    }  # fmt: skip
    return Qwen3MoeConfig(**values)


def wide_config() -> PreTrainedConfig:
    return Qwen3Config(
        vocab_size=512, hidden_size=2048, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=4,
        head_dim=128, intermediate_size=8192, max_position_embeddings=512, tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip


def shapes(config: Any) -> Iterator[tuple[tuple[int, ...], list[tuple[str, tuple[int, ...]]]]]:
    """(shape of a trainer parameter, checkpoint tensors inside it in order), as transformers holds these models."""
    hidden, head = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head

    def one(name: str, *shape: int) -> tuple[tuple[int, ...], list[tuple[str, tuple[int, ...]]]]:
        return shape, [(f"{name}.weight", shape)]

    yield one("model.embed_tokens", config.vocab_size, hidden)
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}"
        for name, n in (("q", q), ("k", kv), ("v", kv)):
            yield one(f"{at}.self_attn.{name}_proj", n, hidden)
        yield one(f"{at}.self_attn.o_proj", hidden, q)
        for name, n in (("self_attn.q_norm", head), ("self_attn.k_norm", head), ("input_layernorm", hidden),
                        ("post_attention_layernorm", hidden)):  # fmt: skip
            yield one(f"{at}.{name}", n)
        if isinstance(config, Qwen3MoeConfig):
            experts, inter = config.num_experts, config.moe_intermediate_size
            yield one(f"{at}.mlp.gate", experts, hidden)
            each = [f"{at}.mlp.experts.{e}" for e in range(experts)]
            gate_up = [(f"{e}.{kind}_proj.weight", (inter, hidden)) for e in each for kind in ("gate", "up")]
            yield (experts, 2 * inter, hidden), gate_up
            yield (experts, hidden, inter), [(f"{e}.down_proj.weight", (hidden, inter)) for e in each]
        else:
            for name in ("gate", "up"):
                yield one(f"{at}.mlp.{name}_proj", config.intermediate_size, hidden)
            yield one(f"{at}.mlp.down_proj", hidden, config.intermediate_size)
    yield one("model.norm", hidden)
    yield one("lm_head", config.vocab_size, hidden)


def random_shards(config: Any, quantized: bool, wire: Wire, seed: int) -> list[Shard]:
    """Trainer parameters on one rank; `quantized`: those that travel as FP8 hold codes and scales already."""
    g = torch.Generator().manual_seed(seed)
    result = []
    for shape, tensors in shapes(config):
        columns = shape[-1] if len(shape) > 1 else 1
        rows = torch.Size(shape).numel() // columns
        each = rows // len(tensors)
        pieces = tuple(Piece(name, s, i * each) for i, (name, s) in enumerate(tensors))
        shard = Shard(pieces, (0, rows), torch.empty(0, columns))
        form = wire.form(shard)
        if quantized and form.scales:
            codes = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8, generator=g)  # every code but NaN
            n = sum(int(np.prod(entry.shape[:-1])) for entry in form.scales)
            scale = torch.rand(n, form.scales[0].shape[-1], generator=g)
            result.append(shard._replace(local=codes.view(torch.float8_e4m3fn), scale=scale))
        else:
            result.append(shard._replace(local=torch.randn(rows, columns, generator=g)))
    return result


def named_tensors(shards: list[Shard], wire: Wire) -> list[tuple[str, Tensor]]:
    """What SGLang's own update gets: the same numbers by name, views of the same memory."""
    result = []
    for shard in shards:
        scales = iter(wire.form(shard).scales)
        at = 0
        for piece in shard.pieces:
            result.append((piece.name, shard.local[piece.row : piece.row + piece.rows].view(piece.shape)))
            if shard.scale is not None:
                shape = next(scales).shape
                result.append((scale_name(piece.name), shard.scale[at : at + shape[0]]))
                at += shape[0]
    return result


# -------------------------------------------------------------------- the engine


class TimedUpdater(Updater):
    """Adds up what the engine processes say of their copies, and how long the calls that take bytes last."""

    copy_s = take_s = 0.0

    async def bucket(self, number: int, checksums: list[int], verify: bool) -> None:
        began = time.perf_counter()
        await super().bucket(number, checksums, verify)
        self.take_s += time.perf_counter() - began

    async def _run(self, commands: Any) -> list[Reply]:
        replies = await super()._run(commands)
        self.copy_s += max(reply.copy_s for reply in replies)
        return replies


class InProcess:
    """`sglang.Engine` in this process: our receiver in front of it, and its own update."""

    team = 1

    def __init__(self, config: Any, work: Path):
        import sglang

        wire = Wire(Fp8Config(), config.num_hidden_layers, torch.float32)
        work.mkdir()
        config.save_pretrained(work)
        character_tokenizer().save_pretrained(work)
        names = [name for _, tensors in shapes(config) for name, _ in tensors]
        quantization = wire.fp8.sglang_quantization_config(config.num_hidden_layers, names)
        settings = EngineConfig(context_length=64, max_running_requests=4, record_experts=False)
        self.engine = sglang.Engine(**server_args(settings, work, quantization, CPU), custom_weight_loader=[LOADER])
        (work / "reports").mkdir()
        self.updater = TimedUpdater(self.engine.tokenizer_manager, work / "reports")
        self.receiver = Receiver(self.updater)
        self.unplanned = True
        self.replies: list[Any] = []

    def post(self, message: Any) -> None:
        self.replies.append(self.engine.loop.run_until_complete(self.receiver.handle(message)))

    def reply(self, timeout: float) -> Any:
        reply = self.replies.pop(0)
        assert not isinstance(reply, Failed), reply
        return reply

    def stock(self, named: list[tuple[str, Tensor]]) -> tuple[float, float]:
        """SGLang's own swap: (seconds in all, seconds of the update call)."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        began = time.perf_counter()
        bucket = FlattenedTensorBucket(named_tensors=sorted(named, key=lambda item: -item[1].element_size()))
        payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        data = MultiprocessingSerializer.serialize(payload)
        self.engine.begin_weight_update()
        called = time.perf_counter()
        done, message = self.engine.update_weights_from_tensor([data], load_format="flattened_bucket")
        assert done, message
        ended = time.perf_counter()
        self.engine.end_weight_update()
        self.engine.flush_cache()
        return time.perf_counter() - began, ended - called


def swap(pusher: Pusher, shards: list[Shard], version: int, verify: bool = False) -> dict[str, float]:
    return pusher.push(lambda: shards, version, verify)


def memcpy(nbytes: int) -> Callable[[], float]:
    """Seconds of one warm copy of so many bytes."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)

    def run() -> float:
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began

    run()
    return run


# -------------------------------------------------------------------- figures


def many(options: argparse.Namespace, work: Path) -> Figures:
    """Many small tensors."""
    config = many_config(options.layers, options.experts)
    wire = Wire(Fp8Config(), options.layers, torch.float32)
    shards = random_shards(config, True, wire, seed=0)
    named = named_tensors(shards, wire)
    engine = InProcess(config, work / "many")
    pusher = Pusher(engine, wire, SyncConfig(bucket_mb=options.bucket_mb), work / "many" / "reports", CPU, None, str)
    first = swap(pusher, shards, 0, verify=True)
    nbytes = int(first["sync/bytes"])
    copy = memcpy(nbytes)
    ours, takes, copies, theirs, calls, limits = ([] for _ in range(6))
    for repeat in range(options.repeats + 1):
        engine.updater.copy_s = engine.updater.take_s = 0.0
        seconds = swap(pusher, shards, repeat + 1)["sync/swap_s"]
        for values, value in zip((ours, takes, copies), (seconds, engine.updater.take_s, engine.updater.copy_s)):
            values.append(value)
        for values, value in zip((theirs, calls), engine.stock(named)):
            values.append(value)
        limits.append(copy())
        say(f"many {repeat}: ours {ours[-1]:.3f} s (take {takes[-1]:.3f}, copies {copies[-1]:.3f}), "
            f"SGLang {theirs[-1]:.2f} s, memcpy {limits[-1]:.3f} s")  # fmt: skip
    last = swap(pusher, shards, 99, verify=True)
    grown = growth("growth_names", "tensors", engine, shards, wire, options)
    engine.engine.shutdown()
    note = (
        f"{len(named)} tensors, {nbytes / 1e6:.0f} MB, {int(last['sync/buckets'])} buckets of {options.bucket_mb} MiB; "
        f"{int(last['sync/verified_params'])} parameters verified before and after"
    )
    stock = "SGLang's flattened bucket"
    yield figure("apply_many_names", "s", takes[1:], stock, calls[1:], higher_is_better=False, note=note)
    yield figure("swap_many_names", "s", ours[1:], stock, theirs[1:], higher_is_better=False, note=note)
    yield figure("apply_vs_memcpy", "s", copies[1:], "warm memcpy", limits[1:], higher_is_better=False, note=note)
    yield figure("plan_s", "s", [first["sync/plan_s"]], higher_is_better=False, note=f"once per engine process; {note}")
    yield grown


def wide(options: argparse.Namespace, work: Path) -> Figures:
    """Few large tensors from float32 masters."""
    config = wide_config()
    wire = Wire(Fp8Config(), config.num_hidden_layers, torch.float32)
    shards = random_shards(config, False, wire, seed=0)
    engine = InProcess(config, work / "wide")
    pusher = Pusher(engine, wire, SyncConfig(bucket_mb=options.bucket_mb), work / "wide" / "reports", CPU, None, str)
    swap(pusher, shards, 0, verify=True)
    stats: dict[str, float] = {}
    ours, limits = [], []
    for repeat in range(options.repeats + 1):
        stats = swap(pusher, shards, repeat + 1)
        ours.append(stats["sync/swap_s"])
        limits.append(quantize_and_copy(shards, wire))
        say(f"wide {repeat}: ours {ours[-1]:.3f} s, quantize and copy {limits[-1]:.3f} s")
    grown = growth("growth_bytes", "bytes", engine, shards, wire, options)
    engine.engine.shutdown()
    note = f"{stats['sync/bytes'] / 1e6:.0f} MB in {int(stats['sync/buckets'])} buckets of {options.bucket_mb} MiB"
    yield figure("swap_wide", "s", ours[1:], "quantize + one copy", limits[1:], higher_is_better=False, note=note)
    yield grown


def quantize_and_copy(shards: list[Shard], wire: Wire) -> float:
    """Seconds to make the wire bytes of whole tensors and to copy them once to another place."""
    began = time.perf_counter()
    made = []
    for shard in shards:
        if wire.form(shard).scales:
            made += quantize(shard.local.view(len(shard.pieces), -1, shard.local.shape[1]))
        else:
            made.append(shard.local.clone())
    copies = [torch.empty_like(tensor) for tensor in made]
    for target, source in zip(copies, made):
        target.copy_(source)
    return time.perf_counter() - began


def growth(
    name: str, unit: str, engine: InProcess, shards: list[Shard], wire: Wire, options: argparse.Namespace
) -> Any:
    """The cost of one tensor or byte in a large swap, against that in a small one: growth beyond proportion shows."""
    sizes, costs = [], []
    per, scale = {"tensors": (1e3, "1000 tensors"), "bytes": (1e6, "MB")}[unit]
    for part in (16, 8, 4, 2, 1):
        some = shards[::part]
        engine.unplanned = True
        pusher = Pusher(engine, wire, SyncConfig(bucket_mb=options.bucket_mb), engine.updater.reports, CPU, None, str)
        stats = [swap(pusher, some, i) for i in range(options.repeats + 1)][1:]
        sizes.append(stats[0][f"sync/{unit}"] / per)
        costs.append([stat["sync/swap_s"] * 1e3 for stat in stats])
    seconds = ", ".join(f"{size:.1f}: {median(cost):.0f}" for size, cost in zip(sizes, costs))
    return figure(
        name, f"ms per {scale}", [c / sizes[-1] for c in costs[-1]], "the smallest", [c / sizes[0] for c in costs[0]],
        higher_is_better=False, note=f"whole swaps, ms by {scale}: {seconds}",
    )  # fmt: skip


def ranks(options: argparse.Namespace, work: Path) -> Figures:
    """Bytes that a rank receives when Qwen3-30B-A3B is swapped, from the layout."""
    values: dict[str, Any] = {
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "tie_word_embeddings": False,
    }  # fmt: skip
    config = Qwen3MoeConfig(**values)
    wire = Wire(Fp8Config(), config.num_hidden_layers, torch.bfloat16)
    for n in (2, 4):
        forms, numbers = [], 0
        for shape, tensors in shapes(config):
            rows = [torch.Size(s[:-1] if len(s) > 1 else s).numel() for _, s in tensors]
            starts = np.cumsum([0, *rows]).tolist()
            pieces = tuple(Piece(name, s, start) for (name, s), start in zip(tensors, starts))
            forms.append(wire.form(Shard(pieces, cut(shape, n), torch.empty(0))))
            numbers += torch.Size(shape).numel()
        entries = entries_of(forms)
        for kind, team in (("one engine per rank", 1), (f"one engine over the {n} ranks", n)):
            plans = [parallel_plan(entries, process, team) for process in range(team)] * (n // team)
            layouts = [build(forms, plans, 2**30, rank) for rank in range(n)]
            yield figure(
                f"bytes_per_rank_{n}", "bytes", [max(layout.bytes_received for layout in layouts)],
                "gathering bfloat16 on every rank", [numbers * 2 * (n - 1) / n], higher_is_better=False,
                note=f"Qwen3-30B-A3B, {len(entries)} tensors, FSDP over {n} ranks, {kind}",
            )  # fmt: skip


def cut(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    """Rows at which FSDP cuts a parameter."""
    rows, *_ = shape
    inner = torch.Size(shape[1:-1]).numel()
    return tuple(min(rank * -(-rows // n), rows) * inner for rank in range(n + 1))


def parallel_plan(entries: list[Entry], process: int, team: int) -> Blocks:
    """What one process of a tensor-parallel engine reads: its heads, its part of the vocabulary, its experts whole."""
    blocks = []
    for number, entry in enumerate(entries):
        rows, width = row_form(entry)
        row, column = 0, 0
        if "experts" in entry.name:
            expert, experts = int(entry.name.split("experts.")[1].split(".")[0]), 128
            rows = rows if expert * team // experts == process else 0
        elif "o_proj" in entry.name:
            width //= team
            column = process * width
        elif any(part in entry.name for part in ("q_proj", "k_proj", "v_proj", "embed_tokens", "lm_head")):
            rows //= team
            row = process * rows
        if rows:
            blocks.append((number, number, row, rows, column, width, 0, width))
    return np.array(blocks, BLOCK)


def quantizer(options: argparse.Namespace, work: Path) -> Figures:
    """The CPU quantizer."""
    for shape in ((128, 256, 128), (4096, 4096)):
        x = torch.randn(shape)
        codes, target = torch.empty(shape, dtype=torch.float8_e4m3fn), torch.empty_like(x)
        ours, limits = [], []
        for _ in range(options.repeats * 3 + 1):
            began = time.perf_counter()
            quantize(x, codes=codes)
            middle = time.perf_counter()
            target.copy_(x)
            ours.append(x.nbytes / 1e9 / (middle - began))
            limits.append(x.nbytes / 1e9 / (time.perf_counter() - middle))
        yield figure(
            "quantize_gb_per_s", "GB/s", ours[1:], "memcpy", limits[1:], higher_is_better=True,
            note=f"float32 {list(shape)} to FP8 128x128, {options.threads} threads, bytes read; torch's cast limits it",
        )  # fmt: skip


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
