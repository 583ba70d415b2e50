"""Where the mismatch between trainer and engine comes from, measured on one batch.

Trainer and engine differ in a few known ways: the sources. The trainer evaluates the sampled tokens once with all of
them matched to the engine, and once more per source with that one as a trainer without it would have it. What the KL
to the engine gains is that source's part; what is left with all matched is the remainder (kernels, order of sums).

    source        matched                                  not matched
    weights       the FP8 codes that the engine has        the masters in the compute dtype
    activations   FP8, as the engine quantizes them        the compute dtype
    scales        the engine's format                      the other one, for weights and activations (fp32, pow2)

Parts need not add up: errors of several sources partly cancel or amplify each other. "As trained" is the run's own
forward, and `Source.open` says which sources it leaves unmatched. A trainer without FP8 evaluates a copy of its policy
that has it, for the time of the probe: 4 bytes of masters and 1 of codes per parameter, sharded like the policy.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
import torch.distributed as dist

from sync.batch import Batch
from sync.fields import doc
from trainer.algo.attribution import Bootstrap, Interval, group_sums
from trainer.model import Policy
from trainer.trainer import Trainer


class ProbeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often the run measures where its mismatch comes from, and how surely."""

    every: Annotated[int, doc("Measure every so many steps, before the update; 0: only with --probe.", ge=0)] = 0
    confidence: Annotated[float, doc("Of the intervals.", gt=0, lt=1)] = 0.95
    resamples: Annotated[int, doc("Bootstrap draws of the prompts.", ge=100)] = 2000


class Arm(msgspec.Struct, frozen=True):
    """The KL of the engine's policy to the trainer's, evaluated in one way; in nats."""

    label: str
    kl: float
    low: float
    high: float


class Source(msgspec.Struct, frozen=True):
    """What one source adds to the KL when it alone is not matched; in nats."""

    name: str
    label: str
    kl: float
    low: float
    high: float
    open: bool  # the run's own trainer leaves it unmatched


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a probe."""

    arms: list[Arm]  # as trained, all matched, none matched
    sources: list[Source]
    absent: dict[str, str]  # a source that this run does not have, and why
    groups: int
    tokens: int
    confidence: float

    def metrics(self) -> dict[str, float]:
        trained, matched, _ = (arm.kl for arm in self.arms)
        parts = {f"trainer/probe_{source.name}": source.kl for source in self.sources}
        return {"trainer/probe_kl": trained, "trainer/probe_remainder": matched} | parts


@dataclass(frozen=True)
class Numerics:
    """One way to evaluate; True: as the engine does."""

    weights: bool = True
    activations: bool = True
    scales: bool = True

    @contextmanager
    def of(self, policy: Policy) -> Iterator[None]:
        """Forwards inside compute so. Under no_grad."""
        with ExitStack() as stack:
            if not self.scales:
                stack.enter_context(policy.other_scales())
            if not (self.weights and self.activations):
                stack.enter_context(policy.high_precision(weights=not self.weights, activations=not self.activations))
            yield


LABELS = {
    "weights": "weights not in FP8",
    "activations": "activations not in FP8",
    "scales": "other scale format",
}


def attribute(trainer: Trainer, batch: Batch, config: ProbeConfig, seed: int) -> Attribution:
    """All ranks, before the update: `batch` (this rank's) was sampled with the weights that the trainer has now.

    Raises ValueError where fewer than two prompts have samples, or for a model that cannot compute in FP8.
    """
    absent = _absent(trainer)
    names = [name for name in LABELS if name not in absent]
    matched = Numerics()
    none = Numerics(weights=False, activations=False)
    trained = matched if trainer.policy.arithmetic is not None else none
    ways = list(dict.fromkeys([trained, matched, none, *(replace(matched, **{name: False}) for name in names)]))
    with trainer.fp8_twin() as policy:
        arms = np.empty((len(ways), batch.n_tokens), np.float32)
        for row, way in zip(arms, ways):
            with way.of(policy):
                row[:] = trainer.logprobs(batch, policy)
    numbers = np.unique(batch.groups, return_inverse=True)[1][batch.sequence_ids]
    sums = _gathered(group_sums(arms, batch.logprobs, batch.sampled, numbers))
    estimate = Bootstrap(sums, config.confidence, config.resamples, seed)

    def part(name: str) -> Interval:
        return estimate.difference(ways.index(replace(matched, **{name: False})), ways.index(matched))

    titled = {"as trained": trained, "all matched": matched, "none matched": none}
    return Attribution(
        arms=[Arm(label, *estimate.kl(ways.index(way))) for label, way in titled.items()],
        sources=[Source(name, LABELS[name], *part(name), open=not getattr(trained, name)) for name in names],
        absent=absent,
        groups=estimate.groups,
        tokens=estimate.tokens,
        confidence=config.confidence,
    )


def _absent(trainer: Trainer) -> dict[str, str]:
    if trainer.fp8.enabled:
        return {}
    return dict.fromkeys(("weights", "activations", "scales"), "fp8.enabled = false")


def _gathered(sums_GA: Any) -> Any:
    """The rows of all ranks; no group is on two."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sums_GA)
    return np.concatenate(everyone)
