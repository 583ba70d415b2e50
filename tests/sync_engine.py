"""An engine in the test's own process: our receiver and hotswap code around a small model that loads like SGLang's."""

import asyncio
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from engine.hotswap import Reply, encode, load
from engine.updater import Updater
from sync.encode import Wire
from sync.messages import Failed
from sync.push import Pusher, SyncConfig
from sync.quantize import Fp8Config, quantize, scale_name
from sync.receive import Receiver
from sync.shards import Piece, Shard
from sync.staging import Staging

FP8 = Wire(Fp8Config(), 1, torch.float32)
PLAIN = Wire(Fp8Config(enabled=False), 1, torch.float32)


class LocalUpdater(Updater):
    """The child's updater, but the loader is called directly; what is named in `fail_on` breaks once."""

    def __init__(self, model: torch.nn.Module, reports: Path):
        self.model, self.reports, self.processes, self.sessions, self.version = model, reports, 1, False, -1
        self.fail_on = ""

    def _called(self, name):
        if name == self.fail_on:
            self.fail_on = ""
            raise RuntimeError(f"{name} broke")

    async def begin(self, version):
        self._called("begin")

    async def record(self, entries, plan):
        self._called("record")
        return await super().record(entries, plan)

    async def attach(self, stagings, files):
        self._called("attach")
        await super().attach(stagings, files)

    async def bucket(self, number, checksums, verify):
        self._called("bucket")
        await super().bucket(number, checksums, verify)

    async def finish(self, nbytes, verify):
        self._called("finish")
        return await super().finish(nbytes, verify)

    async def end(self):
        self._called("end")

    async def flush(self):
        self._called("flush")

    async def _command(self, name, commands):
        file = self.reports / name
        (make,) = commands
        load(self.model, encode(make(str(file))))
        reply = msgspec.msgpack.decode(file.read_bytes(), type=Reply)
        if reply.error is not None:
            raise RuntimeError(reply.error)
        return [file], [reply]


class LocalEngine:
    """What a Pusher drives. `damage(message)` may change or drop (None) a message; `sent` keeps them.

    It acts on a message only when its reply is waited for, the latest that a real engine may: bytes that are
    overwritten too early are found.
    """

    team = 1

    def __init__(self, model: torch.nn.Module, reports: Path):
        reports.mkdir(parents=True, exist_ok=True)
        self.updater = LocalUpdater(model, reports)
        self.receiver = Receiver(self.updater)
        self.unplanned = True
        self.damage = lambda message: message
        self.sent, self.waiting = [], []

    def post(self, message):
        self.sent.append(message)
        self.waiting.append(None if message is None else self.damage(message))

    def reply(self, timeout):
        message = self.waiting.pop(0)
        return Failed("nothing was sent") if message is None else asyncio.run(self.receiver.handle(message))


class Model(torch.nn.Module):
    """A layer as SGLang holds one: fused qkv, experts gate over up, a row-parallel and a vocabulary-parallel matrix, a
    norm; plus a parameter in another dtype, which its loader converts. `rank` of `size` takes its slices."""

    def __init__(self, rank=0, size=1, fp8=True, hidden=128, heads=256, experts=4, inter=256, vocab=48):
        super().__init__()
        self.rank, self.size, self.inter = rank, size, inter // size
        store = torch.float8_e4m3fn if fp8 else torch.float32

        def parameter(name, *shape, dtype=store):
            value = torch.full(shape, 3.0).to(dtype)
            self.register_parameter(name.replace(".", "-"), torch.nn.Parameter(value, requires_grad=False))

        f32 = torch.float32
        parameter("qkv", 3 * heads // size, hidden)
        parameter("o", hidden, heads // size)
        parameter("w13", experts, 2 * self.inter, hidden)
        parameter("w2", experts, hidden, self.inter)
        if fp8:
            parameter("qkv_scale_inv", 3 * heads // size // 128, hidden // 128, dtype=f32)
            parameter("o_scale_inv", hidden // 128, heads // size // 128, dtype=f32)
            parameter("w13_scale_inv", experts, 2 * -(-self.inter // 128), hidden // 128, dtype=f32)
            parameter("w2_scale_inv", experts, hidden // 128, -(-self.inter // 128), dtype=f32)
        parameter("embed", vocab // size, hidden, dtype=f32)
        parameter("norm", hidden, dtype=f32)
        parameter("gate", experts, hidden, dtype=torch.bfloat16)  # converted: stays with the loader

    def load_weights(self, named):
        p = dict(self.named_parameters())
        for name, tensor in named:
            scale = name.endswith("_scale_inv")
            base = name.removesuffix("_scale_inv").removesuffix(".weight").removeprefix("layers.0.")
            suffix = "_scale_inv" if scale else ""
            parts = base.split(".")
            if parts[-1] in ("q_proj", "k_proj", "v_proj"):
                target, n = p["qkv" + suffix].data, p["qkv" + suffix].shape[0] // 3
                i = ("q_proj", "k_proj", "v_proj").index(parts[-1])
                target[i * n : (i + 1) * n].copy_(tensor.narrow(0, self.rank * n, n))
            elif parts[-1] == "o_proj":
                target = p["o" + suffix].data
                target.copy_(tensor.narrow(1, self.rank * target.shape[1], target.shape[1]))
            elif "experts" in parts:
                e, kind = int(parts[parts.index("experts") + 1]), parts[-1]
                if kind == "down_proj":
                    target = p["w2" + suffix].data[e]
                    target.copy_(tensor.narrow(1, self.rank * target.shape[1], target.shape[1]))
                else:
                    target = p["w13" + suffix].data[e]
                    n = target.shape[0] // 2
                    half = target.narrow(0, 0 if kind == "gate_proj" else n, n)
                    half.copy_(tensor.narrow(0, self.rank * n, n))
            elif parts[-1] == "embed_tokens":
                n = p["embed"].shape[0]
                p["embed"].data.copy_(tensor[self.rank * n : (self.rank + 1) * n])
            elif parts[-1] in ("norm", "gate"):
                p[parts[-1]].data.copy_(tensor)

    def bytes(self):
        return {name: p.data.flatten().view(torch.uint8).clone() for name, p in self.named_parameters()}


def weights(seed=0, hidden=128, heads=256, experts=4, inter=256, vocab=48):
    """Trainer parameters of the model: (name, fp32 tensor, {checkpoint name: first row and shape})."""
    g = torch.Generator().manual_seed(seed)

    def whole(name, *shape):
        return torch.randn(shape, generator=g), [(name, shape, 0)]

    layer = "layers.0."
    for proj in ("q_proj", "k_proj", "v_proj"):
        yield whole(f"{layer}self_attn.{proj}.weight", heads, hidden)
    yield whole(f"{layer}self_attn.o_proj.weight", hidden, heads)
    pieces = [
        (f"{layer}mlp.experts.{e}.{kind}.weight", (inter, hidden), (2 * e + i) * inter)
        for e in range(experts)
        for i, kind in enumerate(("gate_proj", "up_proj"))
    ]
    yield torch.randn(experts, 2 * inter, hidden, generator=g), pieces
    pieces = [(f"{layer}mlp.experts.{e}.down_proj.weight", (hidden, inter), e * hidden) for e in range(experts)]
    yield torch.randn(experts, hidden, inter, generator=g), pieces
    yield whole("embed_tokens.weight", vocab, hidden)
    yield whole("norm.weight", hidden)
    yield whole(f"{layer}mlp.gate.weight", experts, hidden)


def shards(rank, ranks, seed=0, **sizes):
    """This rank's shards, as FSDP cuts them: the first dimension, like torch.chunk."""
    result = []
    for tensor, pieces in weights(seed, **sizes):
        rows = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
        each = -(-tensor.shape[0] // ranks) * (len(rows) // tensor.shape[0])
        bounds = tuple(min(r * each, len(rows)) for r in range(ranks + 1))
        named = tuple(Piece(name, tuple(shape), row) for name, shape, row in pieces)
        result.append(Shard(named, bounds, rows[bounds[rank] : bounds[rank + 1]].clone()))
    return result


def on_the_wire(wire, seed=0, **sizes):
    """(name, tensor) as SGLang would read them from an FP8 checkpoint: whole tensors quantized."""
    for tensor, pieces in weights(seed, **sizes):
        rows = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
        for name, shape, row in pieces:
            part = rows[row : row + torch.Size(shape).numel() // rows.shape[1]].reshape(shape)
            if wire.fp8.is_quantized(name, shape, wire.n_layers):
                codes, scale = quantize(part, wire.fp8.granularity, wire.fp8.scales)
                yield name, codes
                yield scale_name(name), scale
            else:
                yield name, part.to(wire.dtype)


class Side:
    """A rank with its engine."""

    def __init__(self, directory, group=None, wire=FP8, team=1, half=None, agree=lambda problem: problem, **config):
        self.rank, self.ranks, self.wire = dist.get_rank(group), dist.get_world_size(group), wire
        slices = (self.rank % team, team)
        self.model = Model(*slices, fp8=wire.fp8.enabled)
        self.engine = LocalEngine(self.model, directory / f"reports-{self.rank}")
        self.engine.team = team
        self.slices, self.sizes = slices, {}
        self.pusher = Pusher(
            self.engine, wire, SyncConfig(**{"bucket_mb": 1} | config), directory, torch.device("cpu"), group, agree
        )
        if half:
            self.pusher.staging = Staging(half, torch.device("cpu"))

    def swap(self, version=1, seed=0, verify=True, change=lambda given: given):
        self.engine.sent = []
        return self.pusher.push(lambda: change(shards(self.rank, self.ranks, seed)), version, verify)

    def differs(self, seed=0):
        """Names of the parameters that are not what the loader makes of the whole tensors."""
        wanted = Model(*self.slices, fp8=self.wire.fp8.enabled)
        wanted.load_weights(on_the_wire(self.wire, seed))
        have, want = self.model.bytes(), wanted.bytes()
        return [name for name in want if not torch.equal(have[name], want[name])]


def count(side, kind):
    return sum(isinstance(message, kind) for message in side.engine.sent)


def lose(kind):
    return lambda side: lambda message: None if isinstance(message, kind) else message
