"""The trainer: one `step` turns a Batch of rollouts into parameter updates and metrics.

Everything distributed happens here; trainer/algo is pure. What keeps micro-batches and ranks from changing the
gradient: losses are summed, not averaged, over micro-batches and ranks, and since they are linear in 1/denominator, the
gradient is divided once, at the end, by the denominator summed over all of them. So a denominator that depends on the
trainer's own log-probs (sequences rejected by the rollout correction) needs no forward of its own either.

Which log-probs are "old" (ALGORITHMS §4): bypass: the rollout's. Else, with one update per rollout: the detached values
of the training forward itself (the parameters are the same, r = 1). Else, or when weights are normalised over the
batch: an extra pass before the first update.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from sync.batch import Batch
from sync.quantize import Fp8Config
from sync.shards import Shard
from trainer.algo import AlgoConfig
from trainer.algo.advantages import advantage_parts, advantages, overlong_penalty, reward_moments
from trainer.algo.correction import Correction, check_finite, correct, normalized
from trainer.algo.kl import kl_loss
from trainer.algo.loss import denominator, policy_loss
from trainer.algo.mismatch import mismatch
from trainer.algo.parts import Mean, masked_mean
from trainer.attention import needs_padding
from trainer.calibration import Calibrator, Piece
from trainer.model import Policy, build_model, copy_weights, reshard
from trainer.offload import HostStore, Part, held
from trainer.pack import MicroBatch, demonstrations, empty_micro_batch, micro_batches, update_shares
from trainer.settings import SftConfig, TrainerConfig, learning_rate
from trainer.tally import Tally

__all__ = ["SftConfig", "Trainer", "TrainerConfig"]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Work:
    """One micro-batch with what its loss needs; `old_R` and `correction` are filled from the trainer's log-probs."""

    micro: MicroBatch  # on the device
    roll_R: Tensor  # f32[R] rollout log-probs
    advantages_n: Tensor  # f32[n]
    old_R: Tensor | None = None
    correction: Correction | None = None


class Trainer:
    """One rank's part of the policy and its optimizer. Needs an initialised process group; every method with "all
    ranks" in its docstring is a collective."""

    def __init__(
        self,
        config: TrainerConfig,
        algo: AlgoConfig,
        model_dir: Path,
        *,
        device: torch.device,
        temperature: float,
        total_steps: int,
        max_response_tokens: int,
        fp8: Fp8Config | None = None,
    ) -> None:
        """All ranks. `temperature` > 0 is the sampling temperature of the rollouts, by which logits are divided;
        `max_response_tokens` is their limit (for the overlong penalty); `total_steps` counts calls of `step`. `fp8`:
        what the policy, and the reference policy, multiply in FP8 (None: nothing).

        Raises ValueError for an unsupported model, an fp8.train that cannot run here, or replicas that do not divide
        the ranks.
        """
        self.config, self.algo, self.device, self.model_dir = config, algo, device, model_dir
        self.fp8, self.temperature = fp8 or Fp8Config(enabled=False), temperature
        self.max_response_tokens = max_response_tokens
        self.padded = needs_padding(device, DTYPES[config.dtype])
        self.total_updates = total_steps * config.updates_per_rollout
        self.world = dist.get_world_size()
        if self.world % config.replicas:
            raise ValueError(f"replicas {config.replicas} must divide the number of ranks, {self.world}")
        shape, names = (self.world,), ("shard",)
        if config.replicas > 1:
            shape, names = (config.replicas, self.world // config.replicas), ("replicate", "shard")
        self.mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self.policy = self._build(self.fp8, config.activation_checkpointing)
        self.reference = self._build(self.fp8).requires_grad_(False) if algo.kl.coef else None
        self.optimizer = self.new_optimizer()
        self.updates = 0  # optimizer updates done by `step`; the schedule's clock
        self.calibrator = Calibrator(algo) if algo.calibration.period else None
        self.offloads = config.offload and device.type != "cpu"
        self.stores = {"params": HostStore(device), "optimizer": HostStore(device)}

    def _build(self, fp8: Fp8Config, checkpointing: bool = False, like: Policy | None = None) -> Policy:
        return build_model(
            self.model_dir, mesh=self.mesh, dtype=DTYPES[self.config.dtype], temperature=self.temperature,
            logits_mib=self.config.logits_mib, activation_checkpointing=checkpointing, fp8=fp8, like=like,
        )  # fmt: skip

    def new_optimizer(self) -> torch.optim.AdamW:
        """AdamW as the config describes it, without any state."""
        matrices = [p for p in self.policy.parameters() if p.ndim > 1]
        vectors = [p for p in self.policy.parameters() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        betas = (self.config.beta1, self.config.beta2)
        optimizer = torch.optim.AdamW(groups, lr=self.config.lr, betas=betas, eps=self.config.eps, fused=True)
        optimizer.register_step_post_hook(lambda *_: self.policy.weights_changed())
        return optimizer

    # ---------------------------------------------------------------- reinforcement learning

    def step(self, batch: Batch) -> dict[str, float]:
        """All ranks. Updates the policy on this rank's `batch` (groups whole; may be empty) and returns the metrics
        `trainer/…`, the same on every rank.

        Before anything of that update is applied, FloatingPointError if loss or gradient is not finite, ValueError
        naming the sample of this rank's batch if a log-prob is not.
        """
        began = time.perf_counter()
        tally = Tally(self.device)
        advantages_N = self._advantages(batch, tally)
        shares = update_shares(batch, self.config.updates_per_rollout)
        updates = [
            [self._work(batch, micro, advantages_N) for micro in micros] for micros in self._equal_counts(batch, shares)
        ]
        if self._needs_old_pass():
            self._old_pass([work for update in updates for work in update], tally)
        if self.calibrator is not None:
            self.calibrator.begin(self.policy, [work.micro for work in updates[-1]])
        done, norms, rate = 0, [], 0.0
        for number, update in enumerate(updates):
            if self.calibrator is not None and number == len(updates) - 1:
                self.calibrator.calibrate(self.policy, [_piece(work) for work in update], moved=done > 0)
            rate = learning_rate(self.config, self.updates, self.total_updates)
            norm = self._update(update, rate, tally, measure=number == 0)
            if norm is not None:
                self.updates += 1
                done += 1
                norms.append(norm)
        micro_count = sum(len(update) for update in updates)
        fed = self._sum(sum(len(work.micro.tokens) for update in updates for work in update if len(work.roll_R)))
        tokens = self._sum(batch.n_tokens)
        metrics = tally.result() | (self.calibrator.metrics() if self.calibrator is not None else {})
        seconds = time.perf_counter() - began
        metrics |= self._codes_equal()
        return metrics | {
            "trainer/grad_norm": float(np.mean(norms)) if norms else 0.0,
            "trainer/lr": rate,
            "trainer/updates": float(done),
            "trainer/micro_batches": float(micro_count),
            "trainer/packed_frac": fed / max(1, micro_count * self.world * self.config.tokens_per_micro_batch),
            "trainer/tokens_per_s": tokens / seconds,
        }

    def _codes_equal(self) -> dict[str, float]:
        """All ranks, after a step with FP8 training: that the engine sampled with the weights that were trained."""
        equal = None if self.policy.fp8 is None else self.policy.fp8.codes_equal()
        if equal is None:
            return {}
        assert equal == 1.0, f"{1 - equal:.1%} of the FP8 weights are not those that were sent to the engine"
        return {"sync/codes_equal": equal}

    def _advantages(self, batch: Batch, tally: Tally) -> Tensor:
        """f32[N] on the CPU; reinforce_pp normalises over all ranks."""
        config = self.algo.advantage
        rewards_N = torch.from_numpy(batch.rewards) + overlong_penalty(
            torch.from_numpy(batch.sampled_lengths), self.max_response_tokens, config.overlong
        )
        moments = None
        if config.name == "reinforce_pp":
            moments = reward_moments(rewards_N).to(self.device)
            dist.all_reduce(moments)
            moments = moments.cpu()
        result_N = advantages(rewards_N, torch.from_numpy(batch.groups), config, moments)
        tally.add(advantage_parts(result_N))
        return result_N

    def _equal_counts(self, batch: Batch, shares: list[NDArray[Any]]) -> list[list[MicroBatch]]:
        """The micro-batches of every update, padded with empty ones to the largest number of any rank."""
        result = [micro_batches(batch, share, self.config.tokens_per_micro_batch, self.padded) for share in shares]
        counts = torch.tensor([len(micros) for micros in result], device=self.device)
        dist.all_reduce(counts, dist.ReduceOp.MAX)
        for micros, count in zip(result, counts.tolist()):
            micros.extend(empty_micro_batch(self.padded) for _ in range(count - len(micros)))
        return result

    def _work(self, batch: Batch, micro: MicroBatch, advantages_N: Tensor) -> Work:
        return Work(
            micro=micro.to(self.device),
            roll_R=torch.from_numpy(batch.logprobs[micro.source]).to(self.device),
            advantages_n=advantages_N[torch.from_numpy(micro.sequences)].to(self.device),
        )

    def _needs_old_pass(self) -> bool:
        correction = self.algo.correction
        normalize = correction.mode == "decoupled" and correction.normalize
        return correction.mode != "bypass" and (self.config.updates_per_rollout > 1 or normalize)

    def _old_pass(self, works: list[Work], tally: Tally) -> None:
        """log π_old and the correction of every micro-batch, before the parameters move."""
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for work in works:
                totals += self._correct(work, self.policy(work.micro)[0], tally, measure=True).totals
        reshard(self.policy)
        if self.algo.correction.normalize:
            dist.all_reduce(totals)
            for work in works:
                assert work.correction is not None
                work.correction = normalized(work.correction, totals)

    def _correct(self, work: Work, logp_R: Tensor, tally: Tally, measure: bool) -> Correction:
        """Fills `work.old_R` and `work.correction` from the trainer's log-probs; `measure`: they are π_old's."""
        rows = (torch.ones_like(work.roll_R, dtype=torch.bool), work.micro.sequence, len(work.advantages_n))
        samples = work.micro.sequences.tolist()
        check_finite("trainer", logp_R, *rows[:2], samples)
        check_finite("rollout", work.roll_R, *rows[:2], samples)
        if measure:
            tally.add(mismatch(logp_R, work.roll_R, *rows))
        work.old_R = work.roll_R if self.algo.correction.mode == "bypass" else logp_R
        work.correction = correct(work.old_R, work.roll_R, *rows, self.algo.correction)
        tally.add(work.correction.parts)
        return work.correction

    def _update(self, works: list[Work], rate: float, tally: Tally, measure: bool) -> float | None:
        """One optimizer update on the micro-batches of all ranks; the gradient norm, or None if no token counted."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        total = torch.zeros_like(loss_sum)
        config = self.algo.loss if self.calibrator is None else self.calibrator.loss_config
        for work in works:
            logp_R, entropy_R = self.policy(work.micro)
            if work.correction is None:
                self._correct(work, logp_R.detach(), tally, measure)
            assert work.correction is not None and work.old_R is not None
            keep_R, rows = work.correction.keep_T, (work.micro.sequence, len(work.advantages_n))
            one = torch.ones_like(loss_sum)  # see the module docstring: divided by the real total in _apply
            loss, parts = policy_loss(
                logp_R, work.old_R, work.advantages_n, keep_R, work.correction.weight_T, rows[0], one, config
            )
            if self.reference is not None:
                kl, kl_parts = kl_loss(
                    logp_R, self._reference_logprobs(work.micro), keep_R, *rows, one, self.algo.kl, self.algo.loss
                )
                loss, parts = loss + kl, parts | kl_parts
            loss.backward()
            loss_sum += loss.detach()
            total += denominator(keep_R, *rows, self.algo.loss)
            tally.add(parts | {"trainer/entropy": masked_mean(entropy_R, torch.ones_like(keep_R))})
        return self._apply(loss_sum, total, rate)

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> Tensor:
        assert self.reference is not None
        return self.reference(micro)[0]  # never resharded: its parameters do not change

    # ---------------------------------------------------------------- updates

    def _apply(self, loss_sum: Tensor, total: Tensor, rate: float) -> float | None:
        """Divides the accumulated gradient by the denominator of all ranks, clips, steps. The norm before clipping.

        FSDP has averaged the summed gradient over the ranks, hence the factor `world`.
        """
        shards = [p.grad.to_local() for p in self.policy.parameters() if isinstance(p.grad, DTensor)]
        squares = torch.zeros_like(total)
        if shards:
            squares += torch.nn.utils.get_total_norm(shards).double().square() / self.config.replicas
        sums = torch.stack([squares, total, loss_sum])
        dist.all_reduce(sums)
        square, denominator_, loss = sums.tolist()
        if not (math.isfinite(square) and math.isfinite(loss)):
            self.optimizer.zero_grad()
            raise FloatingPointError(
                f"trainer update {self.updates}: loss {loss:g}, gradient norm {abs(square) ** 0.5:g}; not applied"
            )
        if not shards or not denominator_:
            self.optimizer.zero_grad()
            return None
        scale = self.world / denominator_
        norm = math.sqrt(square) * scale
        if self.config.max_grad_norm:
            scale *= min(1.0, self.config.max_grad_norm / max(norm, 1e-12))
        torch._foreach_mul_(shards, scale)  # type: ignore[reportPrivateImportUsage]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _sum(self, number: float) -> float:
        value = torch.tensor(float(number), dtype=torch.float64, device=self.device)
        dist.all_reduce(value)
        return value.item()

    # ---------------------------------------------------------------- supervised warm start

    def sft_step(self, pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]], lr: float) -> dict[str, float]:
        """All ranks. One supervised update on this rank's (prompt ids, response ids), which may be none.

        The loss is the mean negative log-prob of all ranks' response tokens at the trainer's temperature, so that it is
        the sampled distribution that learns. Returns `trainer/loss`, `trainer/entropy`, `trainer/grad_norm`,
        `trainer/lr`. Raises as `step` does.
        """
        batch = demonstrations(pairs)
        tally = Tally(self.device)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        total = torch.zeros_like(loss_sum)
        for micro in self._equal_counts(batch, [np.arange(batch.n_sequences)])[0]:
            logp_R, entropy_R = self.policy(micro.to(self.device))
            loss = -logp_R.sum()
            loss.backward()
            loss_sum += loss.detach()
            total += len(logp_R)
            tokens = torch.full_like(total, len(logp_R))
            tally.add({"trainer/loss": Mean(loss.detach(), tokens), "trainer/entropy": Mean(entropy_R.sum(), tokens)})
        norm = self._apply(loss_sum, total, lr)
        return tally.result() | {"trainer/grad_norm": norm or 0.0, "trainer/lr": lr}

    @torch.no_grad()
    def begin_rl(self) -> None:
        """Call between the last `sft_step` and the first `step`: a fresh optimizer and schedule, and the policy as it
        now is becomes the reference of the KL term."""
        self.optimizer, self.updates = self.new_optimizer(), 0
        if self.reference is not None:
            copy_weights(self.policy, self.reference)

    # ---------------------------------------------------------------- memory

    @torch.no_grad()
    def offload(self, part: Part) -> None:
        """Moves this rank's shards to host memory: the parameters, or what only training needs (gradients, optimizer
        state, reference policy). Until `onload(part)`, nothing may be called that reads them."""
        if self.offloads:
            for policy in (self.policy, self.reference):
                if policy is not None:
                    reshard(policy)  # gathered parameters go, and modules show their shards again
            codes = [p.fp8.tensors() for p in (self.policy, self.reference) if p is not None and p.fp8 is not None]
            more = [tensor for tensors in codes for tensor in tensors] if part == "params" else []
            self.stores[part].offload([*held(part, self.optimizer, self.reference), *more])

    def onload(self, part: Part) -> None:
        """Brings back, bit for bit, what `offload(part)` moved."""
        if self.offloads:
            self.stores[part].onload()

    # ---------------------------------------------------------------- what others read

    @torch.no_grad()
    def logprobs(self, batch: Batch, policy: Policy | None = None) -> NDArray[Any]:
        """All ranks. Log-prob f32[T] of each sampled token under the current policy (or a twin of it), at its own
        index; 0 elsewhere."""
        policy = policy or self.policy
        result = np.zeros(batch.n_tokens, np.float32)
        reshard(policy)  # what is gathered may be in another precision, here and for those who come after
        for micro in self._equal_counts(batch, [np.arange(batch.n_sequences)])[0]:
            result[micro.source] = policy(micro.to(self.device))[0].cpu().numpy()
        reshard(policy)
        return result

    @contextmanager
    def fp8_twin(self) -> Iterator[Policy]:
        """All ranks. The policy, or, where it does not multiply in FP8 and the engine does, a copy that does, gone at
        the end of the context. Raises ValueError for a model that cannot."""
        if self.fp8.train != "off" or not self.fp8.enabled:
            yield self.policy
        else:
            yield self._build(msgspec.structs.replace(self.fp8, train="auto"), like=self.policy)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All ranks, to the end. (checkpoint name, whole fp32 tensor on the device), one parameter at a time."""
        return self.policy.weights()

    def shards(self) -> list[Shard]:
        """The same weights as this rank's rows of them; no weight moves. All ranks where fp8.train is on."""
        return self.policy.shards()

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that hold one copy of the model together."""
        return self.policy.shard_mesh.get_group()


def _piece(work: Work) -> Piece:
    assert work.old_R is not None and work.correction is not None  # several updates: filled before the first
    advantage_R = work.advantages_n[work.micro.sequence]
    return Piece(work.micro, work.old_R, advantage_R, work.correction.keep_T, work.correction.weight_T)
