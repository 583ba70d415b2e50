"""The CPU kernels against plain float64 references, one request, expert or group at a time."""

import pytest
import torch

from engine import cpu_ops
from sync.quantize import dequantize, quantize

E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def reference_attention(query, keys, values, req_to_token, requests, kv_lengths, q_lengths, scale):
    """Row by row in float64, from the definition."""
    out, row, share = [], 0, query.shape[1] // keys.shape[1]
    for request, kv, q in zip(requests.tolist(), kv_lengths.tolist(), q_lengths.tolist()):
        for j in range(q):
            slots = req_to_token[request, : kv - q + j + 1].long()
            heads = []
            for head in range(query.shape[1]):
                k, v = keys[slots, head // share].double(), values[slots, head // share].double()
                heads.append(torch.softmax(k @ query[row, head].double() * scale, 0) @ v)
            out.append(torch.stack(heads))
            row += 1
    return torch.stack(out)


@pytest.mark.parametrize("heads, groups, v_size", [(2, 2, 16), (6, 3, 16), (4, 1, 8)])
@pytest.mark.parametrize("limit", [1 << 12, 40])
@pytest.mark.parametrize("decode", [True, False])
def test_attention_equals_the_row_by_row_definition(monkeypatch, heads, groups, v_size, limit, decode):
    monkeypatch.setattr(cpu_ops, "GROUP_SLOTS", limit)
    kv = torch.tensor([7, 1, 30, 12, 30, 3])
    q = torch.ones_like(kv) if decode else torch.tensor([7, 1, 4, 11, 30, 2])  # some with a cached prefix
    slots, size = 200, 16
    req_to_token = torch.randperm(slots)[: 8 * 24].view(8, 24).int()
    req_to_token = torch.cat([req_to_token, torch.randint(0, slots, (8, 16), dtype=torch.int32)], 1)
    requests = torch.tensor([3, 0, 7, 5, 1, 2])
    query = torch.randn(int(q.sum()), heads, size)
    keys, values = torch.randn(slots, groups, size), torch.randn(slots, groups, v_size)
    plan = cpu_ops.plan_attention(req_to_token, requests, kv, q, torch.float32)
    assert limit > 40 or len(plan) > 1
    out = torch.full((len(query), heads, v_size), torch.nan)
    cpu_ops.attend(query, keys, values, plan, 0.3, out)
    expected = reference_attention(query, keys, values, req_to_token, requests, kv, q, 0.3)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


def test_attention_reads_float8_caches_and_never_foreign_slots():
    kv, q = torch.tensor([2, 5]), torch.tensor([1, 1])
    req_to_token = torch.zeros(2, 8, dtype=torch.int32)
    req_to_token[0, :2] = torch.tensor([1, 2])
    req_to_token[1, :5] = torch.arange(3, 8)
    keys = torch.randn(9, 1, 4).to(E4M3)
    keys[0] = torch.tensor(torch.nan).to(E4M3)  # slot 0 is the padding of short requests: must not be read
    query = torch.randn(2, 1, 4)
    plan = cpu_ops.plan_attention(req_to_token, torch.arange(2), kv, q, torch.float32)
    out = cpu_ops.attend(query, keys, keys, plan, 0.5, torch.empty(2, 1, 4))
    expected = reference_attention(query, keys.float(), keys.float(), req_to_token, torch.arange(2), kv, q, 0.5)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("width, group", [(128, 128), (384, 128), (576, 128), (100, 128), (6, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_rounding_is_the_cast_bit_for_bit(width, group, dtype):
    x = (torch.randn(500, width) * torch.exp2(torch.randint(-30, 10, (500, width)).float())).to(dtype)
    x[0] = 0.0
    x[1] = 1e-13  # below the floor: codes are subnormal or zero
    x[2, 0] = 3e38 if dtype == torch.float32 else 1e38
    expected = torch.empty(500, width)
    for start in range(0, width, group):  # the formula of ALGORITHMS §1 with the hardware cast
        part = x[:, start : start + group].float()
        s = torch.maximum(part.abs().max(-1, keepdim=True).values, torch.tensor(1e-10)) / 448.0
        codes = torch.clip(part / s, -448.0, 448.0).to(E4M3)
        expected[:, start : start + group] = codes.float() * s
    got = cpu_ops.quantize_dequantize(x, group)
    assert got.dtype == torch.float32 and got.shape == x.shape
    assert torch.equal(got, expected)


def test_every_float8_value_and_every_tie_between_neighbours_rounds_as_the_cast():
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    grid = codes[codes.isfinite()].sort().values
    points = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, torch.nextafter((grid[1:] + grid[:-1]) / 2, grid[1:])])
    points = torch.cat([points, torch.tensor([448.0])])  # amax 448: s is 1, so the points are the codes themselves
    assert torch.equal(cpu_ops.quantize_dequantize(points, len(points)), points.to(E4M3).float())


@pytest.mark.parametrize("shape", [(256, 384), (576, 1536), (192, 576), (3, 130, 257), (5, 7)])
def test_dequantized_weight_multiplies_each_block_also_partial_ones(shape):
    codes = torch.randn(shape).to(E4M3)
    scales = torch.rand(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128)) + 0.1
    got = cpu_ops.dequantize_weight(codes, scales, (128, 128), torch.empty(shape))
    row, column = torch.arange(shape[-2]) // 128, torch.arange(shape[-1]) // 128
    expected = codes.double() * scales.double()[..., row, :][..., column]
    assert torch.equal(got, expected.float())


@pytest.mark.parametrize("tokens", [1, 5, 64])
@pytest.mark.parametrize("group", [None, 16])
def test_experts_equal_a_loop_over_tokens(tokens, group):
    experts, hidden, inner, per_token = 6, 32, 16, 2
    x = torch.randn(tokens, hidden)
    w13, w2 = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    ids = torch.rand(tokens, experts - 2).topk(per_token).indices.int()  # two experts get nothing
    weights = torch.rand(tokens, per_token)

    def rounded(row):
        return row if group is None else cpu_ops.quantize_dequantize(row.float()[None], group)[0].double()

    expected = torch.zeros(tokens, hidden, dtype=torch.double)
    for t in range(tokens):
        for k in range(per_token):
            gate, up = (w13[ids[t, k]].double() @ rounded(x[t]).double()).split(inner)
            inside = gate / (1 + torch.exp(-gate)) * up
            expected[t] += weights[t, k].double() * (w2[ids[t, k]].double() @ rounded(inside).double())
    got = cpu_ops.experts(x, w13, w2, weights, ids, group)
    # With rounding, a float32 sum may fall on the other side of a tie than the float64 one: rare and one FP8 step.
    error = (got.double() - expected).abs() / expected.abs().max()
    assert error.max() < (1e-5 if group is None else 2e-2) and error.median() < 1e-5


@pytest.mark.parametrize("scales", ["fp32", "pow2"])
def test_activation_rounding_is_the_one_definition(scales):
    x = torch.randn(64, 320) * torch.logspace(-6, 3, 64)[:, None]
    x[3] = 0
    x[4, :128] = 2.0**-3  # a scale that is a power of two already, times 1/448
    expected = dequantize(*quantize(x, "group", scales), "group")
    assert torch.equal(cpu_ops.quantize_dequantize(x, 128, scales == "pow2"), expected)
