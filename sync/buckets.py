"""The checksum that both ends of a swap take of a bucket."""

import torch
import xxhash
from torch import Tensor

_CHUNK = 1 << 23  # words of 8 bytes, so that a checksum on a GPU needs little memory


def checksum(data: Tensor) -> int:
    """64 bits that change with the bytes of a tensor of any dtype: XXH3 on CPUs, `word_sum` on GPUs.

    Only checksums of the same device compare.
    """
    flat = data.detach().contiguous().view(-1)
    flat = flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # one element may have any stride
    return word_sum(flat) if flat.is_cuda else xxhash.xxh3_64_intdigest(flat.cpu().numpy().data)


def word_sum(data: Tensor) -> int:
    """Sum of 64-bit words (uint8 `data`, zeros appended), each times an odd number made of its position, modulo 2^64.

    A few passes at the speed of the device's memory, where copying the bytes to the host would take longer than the
    whole swap. Any change of one word is found, since odd factors are invertible; so are words in other places.
    """
    whole = data.numel() // 8 * 8
    tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
    tail[: data.numel() - whole] = data[whole:]
    total = tail.view(torch.int64)[0] * 3
    body = data[:whole]
    words = (body if body.data_ptr() % 8 == 0 and body.storage_offset() % 8 == 0 else body.clone()).view(torch.int64)
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK]
        factor = torch.arange(start + 1, start + 1 + len(part), device=data.device) * -0x61C8864680B583EB
        total += (part * (factor ^ (factor >> 29) | 1)).sum()
    return int(total) % 2**64
