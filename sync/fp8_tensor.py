"""The block-FP8 weight: quantized once per update where its shard lies, gathered by FSDP2 as bytes, shipped as it is.

    fp32 master, sharded ──encode──► codes of this rank's rows ──FSDP all-gather──► Fp8Weight: the forward multiplies
         │ optimizer                          └──Shard(codes, scale)──sync.push──► the engine

One call of sync.encode makes the codes of a rank's rows, wherever a rank's border lies in a 128-row block, and both
arrows start from that one buffer, so trainer and engine have the same bytes. They are made anew when a master has
changed, not for every forward. Scales are 1/4096 of the codes: every rank keeps all of them.

FSDP2 asks the local tensor of a sharded parameter for `fsdp_pre_all_gather` and `fsdp_post_all_gather`. `Master` is a
plain float32 tensor (same storage, same autograd version) with these two methods, so that optimizer, checkpoints and
offloading see nothing new.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from sync.encode import Wire, encode, exchange_edges
from sync.layout import Form, Share
from sync.quantize import dequantize
from sync.shards import Piece, Shard


class Named(NamedTuple):
    """A parameter to hold in FP8: DTensor f32 [..., N, K], sharded over its first dimension."""

    parameter: DTensor
    pieces: tuple[Piece, ...]
    bounds: tuple[int, ...]  # rows of the ranks, as in sync/shards.py


class Stored:
    """One FP8 weight on one rank: its master, the codes of this rank's rows, the scales of all rows."""

    def __init__(self, named: Named, form: Form, rank: int, scale: Tensor, scale_row: int, held: int):
        self.parameter, self.pieces, self.bounds = named
        self.form, self.scale = form, scale  # f32 [..., N / 128, K / 128], in place for good
        self.rows = (self.bounds[rank], self.bounds[rank + 1])
        columns = scale.shape[-1]
        self.held = scale.view(-1, columns)[scale_row : scale_row + held]  # of the blocks that begin in these rows
        shape, local = self.parameter.shape, self.parameter.to_local()
        ranks = len(self.bounds) - 1
        padded = (-(-shape[0] // ranks), *shape[1:])  # FSDP gathers shards of equal size
        n_codes = np.prod(padded, dtype=int)
        self.scales_at = int(-(-n_codes // 16) * 16)
        self.space = torch.zeros(self.scales_at + held * columns * 4, dtype=torch.uint8, device=local.device)
        self.codes = self.space[:n_codes].view(padded)
        self.seen: Tensor | None = None  # fingerprint of what was gathered since the last swap
        self.watched = False

    @property
    def name(self) -> str:
        return self.pieces[0].name

    @property
    def local(self) -> Tensor:
        """f32 [rows of this rank, K], a view of the master."""
        return self.parameter._local_tensor.detach().reshape(-1, self.parameter.shape[-1])

    @property
    def version(self) -> tuple[int, int]:
        """Changes with writes to the master, through the parameter or its local tensor; not with fused optimizers."""
        return self.parameter._version, self.parameter._local_tensor._version

    def shard(self) -> Shard:
        """This rank's codes and scales, views."""
        n, k = self.rows[1] - self.rows[0], self.parameter.shape[-1]
        codes = self.codes.view(-1, k)[:n].view(torch.float8_e4m3fn)
        return Shard(self.pieces, self.bounds, codes, self.held)

    def gathered(self, codes: Tensor) -> None:
        """FSDP has gathered all codes, uint8 of the parameter's shape."""
        if self.watched and self.seen is None:
            self.seen = fingerprint(codes.view(-1, codes.shape[-1]), 0)

    def master(self, dtype: torch.dtype) -> Tensor:
        """All ranks of the group. The whole master cast to `dtype`, without FP8."""
        master: Any = self.parameter.detach().to(dtype)
        return master.full_tensor()


class Fp8Weight(Tensor):
    """A whole weight [..., N, K] as codes and scales. Its dtype is that of the gradient that it takes.

    No torch function computes with it, so that nothing can take it for a dense matrix: trainer/fp8 reads `codes`
    (float8_e4m3fn) and `scale`.
    """

    codes: Tensor
    scale: Tensor
    stored: Stored | None

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype, stored: Stored | None = None) -> "Fp8Weight":
        make: Any = Tensor._make_wrapper_subclass  # type: ignore[reportAttributeAccessIssue]
        weight = make(cls, codes.shape, dtype=dtype, device=codes.device)
        weight.codes, weight.scale, weight.stored = codes, scale, stored
        return weight

    def dequantized(self) -> Tensor:
        """f32 values of the codes, what an FP8 product sees of the weight."""
        return dequantize(self.codes, self.scale)

    def __repr__(self) -> str:  # type: ignore[reportIncompatibleMethodOverride]
        return f"Fp8Weight{tuple(self.shape)}"

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[reportIncompatibleMethodOverride]
        weight = args[0]
        if func is torch.ops.aten.as_strided.default and [*args[1]] == [*weight.shape] and not any(args[3:]):
            func = torch.ops.aten.detach.default  # FSDP takes off the padding, which is off already
        if func is torch.ops.aten.detach.default:
            return Fp8Weight(weight.codes, weight.scale, weight.dtype, weight.stored)
        raise NotImplementedError(f"{func}: only FP8 products read an FP8 weight; keep this module in ignored_layers")


class Master(Tensor):
    """A rank's rows of a weight in fp32, which FSDP2 gathers as FP8 codes."""

    stored: Stored
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Sequence[int], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Any]:
        return (self.stored.codes,), None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        stored = self.stored
        codes = outputs[0][: stored.parameter.shape[0]]  # all of Shard(0)'s padding is at the end
        stored.gathered(codes)
        if out is None:
            return Fp8Weight(codes.view(torch.float8_e4m3fn), stored.scale, dtype, stored), ()
        assert isinstance(out, Fp8Weight) and out.codes.data_ptr() == codes.data_ptr(), "FSDP refills the same storage"
        return None


class Fp8Weights:
    """All FP8 weights of one model on one rank."""

    def __init__(self, wire: Wire, named: Mapping[str, Named], rank: int, group: dist.ProcessGroup | None):
        """`named`: by parameter name, the same on all ranks of `group`, which hold one copy of the model together.
        Turns the local tensors of the parameters into `Master`s."""
        self.wire, self.rank, self.group = wire, rank, group
        forms = {name: wire.form(Shard(n.pieces, n.bounds, torch.empty(0))) for name, n in named.items()}
        sizes = {name: sum(entry.shape[0] * entry.shape[1] for entry in form.scales) for name, form in forms.items()}
        device = next(iter(named.values())).parameter.device
        self.scales = torch.zeros(sum(sizes.values()), device=device)  # of every weight, in one piece
        self.stored: dict[str, Stored] = {}
        at = 0
        for name, form in forms.items():
            *leading, n, _ = named[name].parameter.shape
            scale = self.scales[at : at + sizes[name]].view(*leading, -(-n // form.block_rows), -1)
            assert scale.shape[-1] == form.scales[0].shape[1] and np.prod(leading, dtype=int) * n == form.bounds[-1]
            first, held = _held(form, rank)
            self.stored[name] = Stored(named[name], form, rank, scale, first, held)
            at += sizes[name]
        self._install()
        self.versions: list[tuple[int, int]] = []
        self.sent: Tensor | None = None  # fingerprints of the codes that were handed out

    def changed(self) -> None:
        """The masters have changed: for writers that leave no trace in `Stored.version`."""
        self.versions = []

    def refresh(self) -> None:
        """All ranks of the group, which change their masters together. Makes the codes anew if masters have changed.

        Raises ValueError, on all ranks, naming a tensor that holds a NaN or Inf.
        """
        stored = [*self.stored.values()]
        if [each.version for each in stored] == self.versions:
            return
        self._install()
        if any(each.watched and each.seen is None for each in stored):
            self.sent = None  # nothing was computed with the codes that the engine has
        for each in stored:
            each.watched = each.watched and each.seen is not None
        problem = self._encode(stored)
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(self.scales, group=self.group)  # each was written by one rank, so the sum is exact
        # Waits for the device, which FSDP counts on: its streams do not wait for the writes above.
        if not bool(self.scales.isfinite().all()):
            raise ValueError(problem or "a weight holds a NaN or Inf in the part of another rank")
        self.versions = [each.version for each in stored]

    def _install(self) -> None:
        """Makes local tensors `Master`s; FSDP and checkpoints may put others in place, over the same storage."""
        for each in self.stored.values():
            local = each.parameter._local_tensor
            if not isinstance(local, Master):
                with torch.no_grad():
                    each.parameter._local_tensor = master = local.as_subclass(Master)
                master.stored = each

    def _encode(self, stored: Sequence[Stored]) -> str:
        """Codes and scales of this rank's rows; what is wrong with one of them."""
        problem = ""
        shards = [Shard(each.pieces, each.bounds, each.local) for each in stored]
        forms = [each.form for each in stored]
        edges = exchange_edges(self.wire, forms, shards, self.rank, self.group)
        self.scales.zero_()
        for number, (each, shard) in enumerate(zip(stored, shards)):
            if each.rows[0] == each.rows[1]:
                continue
            share = Share(number, each.rows, 0, each.scales_at)
            try:
                encode(self.wire, share, each.form, shard, self.rank, edges, each.space)
                each.held.copy_(each.space[each.scales_at :].view(torch.float32).view(each.held.shape))
            except ValueError as error:
                problem = problem or str(error)
                self.scales.fill_(torch.nan)  # the sum carries it to all ranks
        return problem

    def shards(self) -> dict[str, Shard]:
        """All ranks of the group. This rank's codes and scales by parameter name, made anew, so that no change of a
        master can be missed; remembers what it handed out, for `codes_equal`."""
        self.changed()
        self.refresh()
        prints = []
        for each in self.stored.values():
            each.watched, each.seen = True, None
            shard = each.shard()
            prints.append(fingerprint(shard.local.view(torch.uint8), each.rows[0]))
        self.sent = torch.stack(prints)
        return {name: each.shard() for name, each in self.stored.items()}

    def codes_equal(self) -> float | None:
        """All ranks of the group. The fraction of weights whose codes, as gathered for the first product since the
        last `shards()`, are those handed out there; None if there is nothing to compare."""
        if self.sent is None:
            return None
        sent, self.sent = self.sent, None
        dist.all_reduce(sent, group=self.group)
        seen = [each.seen for each in self.stored.values()]
        for each in self.stored.values():
            each.watched, each.seen = False, None
        equal = [theirs is not None and bool(theirs == ours) for ours, theirs in zip(sent, seen)]
        return sum(equal) / len(equal)

    def tensors(self) -> list[Tensor]:
        """What lies on the device beside the masters."""
        return [each.space for each in self.stored.values()]


def fingerprint(codes: Tensor, first_row: int) -> Tensor:
    """A checksum, i64, of uint8 [R, K] that lie at `first_row` of a matrix; those of its parts add up to that of all.

    Sees every changed code and rows in other places (a sum of each row, times an odd number made of its place), not
    the order of the numbers inside a row.
    """
    words = codes.view(torch.int32) if codes.shape[1] % 4 == 0 and codes.data_ptr() % 4 == 0 else codes
    rows = torch.arange(first_row, first_row + len(codes), device=codes.device)
    return (words.sum(1, dtype=torch.int64) * (2 * rows + 1)).sum()


def _held(form: Form, rank: int) -> tuple[int, int]:
    """(first, number) of the rows of scales whose block begins in this rank's rows."""
    counts = [entry.shape[0] for entry in form.scales]
    firsts = np.concatenate([start + form.block_rows * np.arange(n) for start, n in zip(form.starts, counts)])
    first, last = np.searchsorted(firsts, form.bounds[rank : rank + 2])
    return int(first), int(last - first)
