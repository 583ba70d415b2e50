"""The chunked head against a whole f64 log-softmax and autograd."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.logprob import token_logprobs

R, H, V, S = 37, 12, 50, 6


def problem(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(R, H, generator=generator).to(dtype)
    weight = torch.randn(V, H, generator=generator).to(dtype)
    bias = torch.randn(V, generator=generator).to(dtype)
    support = torch.stack([torch.randperm(V, generator=generator)[:S] for _ in range(R)])
    targets = support[torch.arange(R), torch.arange(R) % 3].clone()
    support[::2, 3:] = -1  # rows with fewer candidates
    return hidden, weight, bias, targets, support


def reference(hidden, weight, bias, targets, support, temperature):
    """In f64, with −inf written over everything outside the support."""
    logits = (hidden @ weight.T + bias) / temperature
    if support is not None:
        allowed = torch.zeros(R, V, dtype=torch.bool)
        for row in range(R):
            allowed[row, support[row][support[row] >= 0]] = True
        logits = torch.where(allowed, logits, -torch.inf)
    logp = logits.log_softmax(1)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    return logp[torch.arange(R), targets], entropy


@pytest.mark.parametrize("chunk_rows", [1, 8, 1000])
@pytest.mark.parametrize("supported", [False, True])
def test_values_and_gradients_are_those_of_a_whole_log_softmax(chunk_rows, supported):
    hidden, weight, bias, targets, support = problem(torch.float32)
    support = support if supported else None
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    logp, entropy = token_logprobs(*leaves, targets, temperature=0.7, support_RS=support, chunk_rows=chunk_rows)
    upstream = torch.linspace(-1, 2, R)
    (logp * upstream).sum().backward()

    exact = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    expected, expected_entropy = reference(*exact, targets, support, 0.7)
    (expected * upstream.double()).sum().backward()
    torch.testing.assert_close(logp.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=3e-5)
    for got, want in zip(leaves, exact):
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-4, atol=2e-5)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation made, in forward and backward."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.nbytes)
        return result


@pytest.mark.parametrize("supported", [False, True])
def test_no_temporary_is_larger_than_a_chunk_of_logits(supported):
    rows, vocabulary, chunk_rows = 256, 1000, 16
    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(vocabulary, 4, requires_grad=True)
    targets = torch.randint(vocabulary, (rows,))
    support = targets[:, None].repeat(1, 3) if supported else None
    with LargestTensor() as largest:
        logp, _ = token_logprobs(
            hidden, weight, None, targets, temperature=1.0, support_RS=support, chunk_rows=chunk_rows
        )
        forward = largest.bytes
        logp.sum().backward()
    assert forward == largest.bytes == 4 * chunk_rows * vocabulary


def test_no_rows_give_a_zero_gradient_not_an_error():
    hidden, weight, _, _, _ = problem(torch.float32)
    weight.requires_grad_()
    logp, _ = token_logprobs(hidden[:0], weight, None, torch.empty(0, dtype=torch.int64), temperature=1.0, chunk_rows=4)
    logp.sum().backward()
    assert weight.grad.abs().sum() == 0


def test_bf16_rounds_the_logits_only():
    hidden, weight, bias, targets, _ = problem(torch.bfloat16)
    logp, _ = token_logprobs(hidden, weight, bias, targets, temperature=1.0, chunk_rows=8)
    exact, _ = reference(hidden.double(), weight.double(), bias.double(), targets, None, 1.0)
    assert logp.dtype == torch.float32
    assert (logp - exact).abs().max() < 0.1
