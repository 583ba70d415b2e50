"""The trainer's config sections, and the learning rate they describe."""

import math
from typing import Annotated, Literal

import msgspec

from sync.fields import doc


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a batch becomes updates."""

    dtype: Annotated[Literal["bf16", "fp32"], doc("Compute dtype; master weights and reductions are fp32.")] = "bf16"
    lr: Annotated[float, doc("Peak learning rate of AdamW.", gt=0)] = 1e-6
    beta1: Annotated[float, doc("AdamW decay of the gradient's mean.", ge=0, lt=1)] = 0.9
    beta2: Annotated[float, doc("AdamW decay of the gradient's square.", ge=0, lt=1)] = 0.99
    eps: Annotated[float, doc("AdamW epsilon.", gt=0)] = 1e-8
    weight_decay: Annotated[float, doc("AdamW weight decay of matrices; norms and biases have none.", ge=0)] = 0.0
    warmup_steps: Annotated[int, doc("Updates over which the learning rate rises linearly.", unit="updates", ge=0)] = 0
    schedule: Annotated[
        Literal["constant", "linear", "cosine"], doc("Learning rate after the warm-up; the last two fall to 0.")
    ] = "constant"
    max_grad_norm: Annotated[float, doc("Gradients above this norm are scaled down to it; 0: never.", ge=0)] = 1.0
    tokens_per_micro_batch: Annotated[
        int,
        doc(
            "Packed tokens of one forward and backward, shared prompts counted once; attention sees at most twice as"
            " many, with the prompt of every sequence. A longer sequence goes alone.",
            unit="tokens",
            ge=1,
        ),
    ] = 16384
    updates_per_rollout: Annotated[int, doc("Optimizer updates per batch, each on its share of the prompts.", ge=1)] = 1
    activation_checkpointing: Annotated[bool, doc("Recompute each decoder layer in the backward; saves memory.")] = (
        False
    )
    logits_mib: Annotated[int, doc("Memory of the largest piece of fp32 logits.", unit="MiB", ge=1)] = 256
    offload: Annotated[
        bool,
        doc("Move parameters and optimizer to pinned host memory while the engine generates; no effect on CPUs."),
    ] = True
    replicas: Annotated[
        int, doc("HSDP: copies of the model, each sharded over ranks / replicas neighbouring ranks; 1: FSDP.", ge=1)
    ] = 1


class SftConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised steps on the task's demonstrations before the first rollout."""

    steps: Annotated[int, doc("Supervised updates; 0: none.", unit="updates", ge=0)] = 0
    target_loss: Annotated[
        float, doc("End early, when the mean loss of 5 updates is below this; 0: never.", unit="nats", ge=0)
    ] = 0.0
    batch_size: Annotated[int, doc("Demonstrations per update, over all ranks.", unit="sequences", ge=1)] = 64
    lr: Annotated[float, doc("Learning rate of these updates, constant.", gt=0)] = 1e-3


def learning_rate(config: TrainerConfig, update: int, total_updates: int) -> float:
    """The rate, above 0, of update `update` (from 0) of `total_updates`: linear warm-up, then the schedule."""
    if update < config.warmup_steps:
        return config.lr * (update + 1) / config.warmup_steps
    progress = min(1.0, (update - config.warmup_steps) / max(1, total_updates - config.warmup_steps))
    factor = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return config.lr * factor[config.schedule]
