"""Pure-torch kernels of the CPU platform: batched attention over a paged cache, experts, block-FP8 emulation.

SGLang's own CPU fallbacks loop in Python over requests and experts. These do the same arithmetic in a few large calls,
and need no SGLang, so that they are tested against plain references.

Shapes: T packed tokens, R requests, H query heads, G key/value heads, D head size, S cache slots, E experts, K experts
per token, N x M a weight of N rows and M columns.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_MAX = 448.0
AMAX_FLOOR = 1e-10
# Requests are padded to a common length in groups of at most this many score entries (8 MiB of float32 mask).
GROUP_SCORES = 1 << 21
# ... and this many cache slots, so that the gathered keys and values of a group stay near the CPU's cache.
GROUP_SLOTS = 1 << 12


class AttentionGroup(NamedTuple):
    """Requests of similar length that one attention call serves. P queries and C cache slots each, after padding."""

    queries: Tensor  # i64[R, P] rows of the packed queries; padding repeats a row
    real: Tensor | None  # bool[R, P] False for padding; None where there is none
    slots: Tensor  # i64[R, C] cache slots of the tokens; padding repeats the first
    mask: Tensor  # [R, 1, P, C] 0 where the query sees the slot, -inf elsewhere


def plan_attention(
    req_to_token: Tensor, requests: Tensor, kv_lengths: Tensor, q_lengths: Tensor, dtype: torch.dtype
) -> list[AttentionGroup]:
    """Groups the requests of one forward; the plan serves all its layers.

    `req_to_token` i32[any, any] maps (request slot, position) to a cache slot, `requests` i[R] are request slots,
    `kv_lengths` i[R] count all tokens so far, `q_lengths` i[R] the last of them that are queries now (1 in decode).
    Query j of a request is its token kv_length - q_length + j and sees the tokens up to itself.
    """
    kv_lengths, q_lengths = kv_lengths.long(), q_lengths.long()
    first_query = q_lengths.cumsum(0) - q_lengths
    order = torch.argsort(kv_lengths)
    groups = []
    for members in _split(order, kv_lengths, q_lengths):
        kv, q = kv_lengths[members, None], q_lengths[members, None]
        position = torch.arange(int(kv.max()))
        j = torch.arange(int(q.max()))
        tokens = req_to_token[requests[members].long(), : len(position)].long()
        slots = torch.where(position < kv, tokens, tokens[:, :1])
        real = j < q
        sees = position <= (kv - q + j).unsqueeze(-1)
        mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -torch.inf)
        queries = first_query[members, None] + torch.where(real, j, 0)
        groups.append(AttentionGroup(queries, None if bool(real.all()) else real, slots, mask.unsqueeze(1)))
    return groups


def _split(order: Tensor, kv_lengths: Tensor, q_lengths: Tensor) -> list[Tensor]:
    """Cuts `order` (rising kv length) into runs whose padded size stays within the limits; never an empty run."""
    kv, q = kv_lengths[order].tolist(), q_lengths[order].tolist()
    cuts, start, longest = [], 0, 0
    for end in range(len(kv)):
        longest = max(longest, q[end])
        slots = (end + 1 - start) * kv[end]
        if end > start and (slots > GROUP_SLOTS or slots * longest > GROUP_SCORES):
            cuts.append(end - start)
            start, longest = end, q[end]
    cuts.append(len(kv) - start)
    return list(order.split(cuts))


def attend(
    query: Tensor, keys: Tensor, values: Tensor, plan: list[AttentionGroup], scale: float, out: Tensor
) -> Tensor:
    """Causal attention of packed queries [T, H, D] over paged keys [S, G, D] and values [S, G, Dv] into out [T, H, Dv].

    Keys and values may have another dtype (float8): they are cast to the query's. H is a multiple of G.
    """
    for group in plan:
        o = F.scaled_dot_product_attention(
            query[group.queries].transpose(1, 2),
            _gather(keys, group.slots).to(query.dtype).transpose(1, 2),
            _gather(values, group.slots).to(query.dtype).transpose(1, 2),
            attn_mask=group.mask,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        ).transpose(1, 2)
        if group.real is None:
            out[group.queries] = o
        else:
            out[group.queries[group.real]] = o[group.real]
    return out


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """[S, G, D], i64[R, C] -> [R, C, G, D]."""
    return cache.view(len(cache), -1).index_select(0, slots.view(-1)).view(*slots.shape, *cache.shape[1:])


def quantize_dequantize(x: Tensor, group: int, pow2: bool = False) -> Tensor:
    """What a block-FP8 GEMM sees of its activations: x rounded to E4M3 in groups of `group` columns, times s.

    ALGORITHMS §1: s = max(1e-10, amax) / 448, with `pow2` rounded up to a power of two, q = e4m3(clamp(x / s, -448,
    448)), result q * s in float32, shape of x: what sync.quantize gives, which a test compares bit for bit.
    Rounding to E4M3 is done in float32: adding and subtracting 1.5 * 2^23 quanta rounds to the nearest multiple of the
    quantum, ties to even. It gives the codes of the cast bit for bit, at half its time (casts from float8 are slow).
    """
    width = x.shape[-1]
    x32 = x.float()
    if width % group:
        x32 = F.pad(x32, (0, -width % group))
    groups = x32.reshape(*x.shape[:-1], -1, group)
    s = groups.abs().amax(-1, keepdim=True).clamp_(min=AMAX_FLOOR).div_(FP8_MAX)
    if pow2:
        mantissa, exponent = torch.frexp(s)
        s = torch.ldexp(torch.ones_like(s), exponent - (mantissa == 0.5).int())
    y = groups / s  # at most 448 (1 + 2^-22), which rounds to 448: the clamp of the formula has nothing to do
    # The exponent bits of y are 2^e; its E4M3 quantum is 2^(e-3), and 2^-9 among the subnormals, below 2^-6.
    power = (y.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=2.0**-6)
    magic = power.mul_(1.5 * 2.0**20)
    q = y.add_(magic).sub_(magic)
    return q.mul_(s).view(x32.shape)[..., :width]


def dequantize_weight(codes: Tensor, scales: Tensor, block: tuple[int, int], out: Tensor) -> Tensor:
    """Writes codes * scales in float32: codes e4m3[..., N, M], scales f32[..., ceil(N/block), ceil(M/block)].

    Blocks at the edge may be partial. `out` f32[..., N, M] is returned.
    """
    rows, columns = codes.shape[-2:]
    s = scales.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
    return torch.mul(codes.float(), s, out=out)


def experts(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, group: int | None = None, pow2: bool = False
) -> Tensor:
    """Gated SiLU experts: sum_k weights[t, k] * (silu(x w1^T) * (x w3^T)) w2^T for expert ids[t, k].

    x [T, M], w13 [E, 2I, M] (gate rows, then up rows), w2 [E, M, I], weights [T, K], ids i[T, K]; returns x's shape and
    dtype. With `group` the inputs of both products are rounded to FP8 in groups of that size; the weights are then
    float32 and so is the arithmetic, but for the cast of each product to x's dtype, as on GPUs.
    """
    tokens, per_token = ids.shape
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=len(w13)).cumsum(0).int()
    rows = x if group is None else quantize_dequantize(x, group, pow2)
    hidden = F.grouped_mm(rows.index_select(0, order // per_token), w13.transpose(1, 2), offs=ends).to(x.dtype)
    gate, up = hidden.chunk(2, dim=-1)
    hidden = F.silu(gate).mul_(up)
    if group is not None:
        hidden = quantize_dequantize(hidden, group, pow2)
    sorted_out = F.grouped_mm(hidden, w2.transpose(1, 2), offs=ends)
    out = torch.empty_like(sorted_out).index_copy_(0, order, sorted_out).view(tokens, per_token, -1)
    return torch.einsum("tkm,tk->tm", out.float(), weights.float()).to(x.dtype)
