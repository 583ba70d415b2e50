"""Attention over packed sequences, plugged into transformers' AttentionInterface under the name `packed`.

The T tokens of a micro-batch lie in a single row; sequences never see each other, and sequences of one prompt share its
tokens. Before the kernel, packed rows are copied into slots, where every sequence is whole again; afterwards each row
takes its result from one of its slots (a shared prompt token has several, all equal). On CUDA the slots are dense and
go through the variable-length flash kernel. The CPU has no such kernel, so its slots are right-padded buckets of
similar length for causal SDPA: no T x T mask, and padding comes after every real token, where causality hides it. The
layout travels in the forward keyword `layout`; transformers builds no mask for an interface without a mask function.

Shape letters: T packed rows, P slots, H query heads, G key/value heads, D head dim, N sequences of a bucket, L long.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

NAME = "packed"


@dataclass(frozen=True)
class Layout:
    """How packed rows become the slots of one of the two kernels, and back."""

    gather: Tensor  # i64[P] packed row of every slot; padding repeats row 0, whose result nobody reads
    scatter: Tensor  # i64[T] a slot of every packed row
    buckets: tuple[tuple[int, int], ...]  # padded slots: (N, L) of every bucket, in order; dense slots: none
    cu_seqlens: Tensor  # dense slots: i32[N+1], sequence i is slots cu_seqlens[i]:cu_seqlens[i+1]
    max_len: int  # longest sequence

    def to(self, device: torch.device) -> "Layout":
        """The same layout with its tensors on `device`."""
        moved = {name: getattr(self, name).to(device) for name in ("gather", "scatter", "cu_seqlens")}
        return replace(self, **moved)


def needs_padding(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether attention there runs on padded slots: the flash kernel needs CUDA and a 16-bit dtype."""
    return device.type != "cuda" or dtype == torch.float32


def layout_of(rows: NDArray[Any], lengths: NDArray[Any], padded: bool, max_padding: float = 0.25) -> Layout:
    """The layout of N sequences, longest first: `rows` i64[sum of lengths] are the packed rows of each, in order.

    A bucket of padded slots closes when its next sequence would be padded by more than `max_padding` of its length.
    """
    assert len(lengths) and (np.diff(lengths) <= 0).all(), "sequences come longest first"
    starts = np.concatenate([[0], np.cumsum(lengths)])
    slots, gather, buckets = np.arange(len(rows)), rows, []
    if padded:
        width = np.empty_like(lengths)  # padded length of every sequence
        first = 0
        while first < len(lengths):
            longest = int(lengths[first])
            last = int(np.searchsorted(-lengths, -longest / (1 + max_padding), side="right"))
            width[first:last] = longest
            buckets.append((last - first, longest))
            first = last
        slots += np.repeat(np.cumsum(width) - width - starts[:-1], lengths)
        gather = np.zeros(width.sum(), np.int64)
        gather[slots] = rows
    scatter = np.empty(rows.max() + 1, np.int64)
    scatter[rows] = slots
    return Layout(
        gather=torch.from_numpy(gather),
        scatter=torch.from_numpy(scatter),
        buckets=tuple(buckets),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_len=int(lengths[0]),
    )


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
    q, k, v = (x[0].transpose(0, 1).index_select(0, layout.gather) for x in (query, key, value))
    kernel = _padded_attention if layout.buckets else _dense_attention
    out = kernel(q, k, v, layout, scaling, sliding_window)
    return out.index_select(0, layout.scatter)[None], None


def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None, window: int | None
) -> Tensor:
    """q [P, H, D], k and v [P, G, D] -> [P, H, D]."""
    lens, longest = layout.cu_seqlens, layout.max_len
    sizes = (-1 if window is None else window - 1, 0)  # 0 to the right: causal
    grouped = q.shape[1] != k.shape[1]
    out = varlen_attn(
        q, k, v, lens, lens, longest, longest, scale=scale, window_size=sizes, enable_gqa=grouped
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def _padded_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None, window: int | None
) -> Tensor:
    """q [P, H, D], k and v [P, G, D] -> [P, H, D] through one SDPA per bucket."""
    grouped = q.shape[1] != k.shape[1]
    sizes = [n * length for n, length in layout.buckets]
    outs = []
    for (n, length), *parts in zip(layout.buckets, *(x.split(sizes) for x in (q, k, v))):
        qb, kb, vb = (x.unflatten(0, (n, length)).transpose(1, 2) for x in parts)
        mask = None
        if window is not None and length > window:
            age = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
            mask = (age >= 0) & (age < window)
        out = F.scaled_dot_product_attention(
            qb, kb, vb, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outs)
