"""Attention over packed sequences, plugged into transformers' AttentionInterface under the name `packed`.

Sequences lie one after the other in a single row of T tokens and never see each other. On CUDA the variable-length
flash kernel reads that layout. The CPU has no such kernel, so sequences are copied into right-padded buckets of
similar length and go through causal SDPA: no T x T mask, and padding comes after every real token, where causality
hides it. The layout travels in the forward keyword `layout`; transformers builds no mask for an attention interface
that has no mask function.

Shape letters: T tokens, P padded tokens, H query heads, G key/value heads, D head dim, N sequences in a bucket of
length L.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

NAME = "packed"


@dataclass(frozen=True)
class Layout:
    """Where the sequences of one micro-batch lie, for both kernels."""

    cu_seqlens: Tensor  # i32[N+1] sequence i is rows cu_seqlens[i]:cu_seqlens[i+1]
    max_len: int  # longest sequence
    buckets: tuple[tuple[int, int], ...]  # (N, L) of every padded bucket, in the order of `gather`
    gather: Tensor  # i64[P] packed row of every padded row; padding repeats row 0, whose result nobody reads
    scatter: Tensor  # i64[T] padded row of every packed row

    def to(self, device: torch.device) -> "Layout":
        """The same layout with its tensors on `device`."""
        return replace(
            self,
            cu_seqlens=self.cu_seqlens.to(device),
            gather=self.gather.to(device),
            scatter=self.scatter.to(device),
        )


def layout_of(lengths: np.ndarray, max_padding: float = 0.25) -> Layout:
    """The layout of sequences packed in the given order; `lengths` i64[N] must not increase (longest first).

    A bucket closes when its next sequence would be padded by more than `max_padding` of its own length.
    """
    assert len(lengths) and (np.diff(lengths) <= 0).all(), "sequences are packed longest first"
    starts = np.concatenate([[0], np.cumsum(lengths)])
    buckets, gathers = [], []
    first = 0
    while first < len(lengths):
        longest = int(lengths[first])
        last = first + int(np.searchsorted(-lengths[first:], -longest / (1 + max_padding), side="right"))
        columns = np.arange(longest)
        rows = starts[first:last, None] + columns
        gathers.append(np.where(columns < lengths[first:last, None], rows, 0).reshape(-1))
        buckets.append((last - first, longest))
        first = last
    gather = np.concatenate(gathers)
    real = np.concatenate(
        [
            (np.arange(longest) < part[:, None]).reshape(-1)
            for (_, longest), part in zip(buckets, np.split(lengths, np.cumsum([n for n, _ in buckets])[:-1]))
        ]
    )
    return Layout(
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_len=int(lengths[0]),
        buckets=tuple(buckets),
        gather=torch.from_numpy(gather),
        scatter=torch.from_numpy(np.flatnonzero(real)),
    )


class _Unpack(torch.autograd.Function):
    """[T, …] -> [P, …]. The plain index_select would add P rows back one by one; only real rows carry a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Tensor, scatter: Tensor) -> Tensor:
        ctx.save_for_backward(scatter)
        return x.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[reportIncompatibleMethodOverride]
        (scatter,) = ctx.saved_tensors
        return grad.index_select(0, scatter), None, None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside every sequence of `layout`, in the calling convention of transformers.

    query [1, H, T, D], key and value [1, G, T, D] -> ([1, T, H, D], None). A sliding window of w keeps a token and the
    w-1 before it. Raises ValueError for what it cannot compute: dropout, score soft-capping, attention sinks.
    """
    if dropout or softcap is not None or s_aux is not None:
        raise ValueError("packed attention supports no dropout, no score soft-capping and no attention sinks")
    assert attention_mask is None, "the layout replaces the mask"
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if q.is_cuda and q.dtype != torch.float32:  # the flash kernel has no fp32
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        lens, longest = layout.cu_seqlens, layout.max_len
        grouped = q.shape[1] != k.shape[1]
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = varlen_attn(
            q, k, v, lens, lens, longest, longest, scale=scaling, window_size=window, enable_gqa=grouped
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out[None], None
    return _padded_attention(q, k, v, layout, scaling, sliding_window)[None], None


def _padded_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None, window: int | None
) -> Tensor:
    """q [T, H, D], k and v [T, G, D] -> [T, H, D] through one SDPA per bucket."""
    grouped = q.shape[1] != k.shape[1]
    padded = [_Unpack.apply(x, layout.gather, layout.scatter) for x in (q, k, v)]
    sizes = [n * length for n, length in layout.buckets]
    outs = []
    for (n, length), *parts in zip(layout.buckets, *(x.split(sizes) for x in padded)):
        qb, kb, vb = (x.unflatten(0, (n, length)).transpose(1, 2) for x in parts)
        mask = None
        if window is not None and length > window:
            age = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
            mask = (age >= 0) & (age < window)
        out = F.scaled_dot_product_attention(
            qb, kb, vb, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs).index_select(0, layout.scatter)
