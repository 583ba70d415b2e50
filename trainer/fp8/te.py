"""Transformer Engine as a backend: why it cannot be chosen yet.

Its Float8BlockScaling makes the same bytes as sync/quantize.py on sampled data, but scales that differ in the last bit
with fp32 scales; a weight must come as (codes, scale) pairs made by sync, which te.Linear does not take.
"""

import importlib.metadata
from importlib.util import find_spec

import torch


def missing(device: str) -> str:
    """What keeps it from running on `device`."""
    if device != "cuda" or not torch.cuda.is_available():
        return "Transformer Engine needs a CUDA device"
    if find_spec("transformer_engine") is None:
        return "the package transformer_engine is not installed"
    version = importlib.metadata.version("transformer_engine")
    return f"this version has no Transformer Engine backend (installed: {version}); use deepgemm or reference"
