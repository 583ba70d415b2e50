"""The trainer's side of calibrated clipping: which forwards it takes, the bounds in use, and what is said about them.

    a step that calibrates (every `period`-th, from the first)
      before the first update   high-precision old log-probs of the last mini-batch
      before the last update    its ordinary and high-precision log-probs under the moved policy, then new bounds
      the last update           already clips with them

The last mini-batch is where r is farthest from 1. The ordinary old log-probs are there anyway.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.algo import AlgoConfig
from trainer.algo.clipping import Calibration, ClipTokens, calibrate
from trainer.algo.correction import check_finite
from trainer.algo.loss import LossConfig
from trainer.algo.packed import log_ratio
from trainer.model import Policy, reshard
from trainer.pack import MicroBatch


class Piece(NamedTuple):
    """One micro-batch of the mini-batch that is calibrated on."""

    micro: MicroBatch
    old_R: Tensor  # f32 ordinary log π_old
    advantage_R: Tensor  # f32
    keep_R: Tensor  # bool, after rejection
    weight_R: Tensor  # f32 w


class Calibrator:
    """Usage, in a step: `begin`, updates with `loss_config`, `calibrate`, the last update, `metrics`.

    `low`, `high` (the bounds of the ratio in use) and `steps` (steps begun) are the state that a checkpoint keeps.
    """

    def __init__(self, algo: AlgoConfig) -> None:
        self.config, self.loss = algo.calibration, algo.loss
        self.low, self.high = self.config.initial(self.loss.bounds)
        self.steps = 0
        self.skipped = ""  # why the last step that should have calibrated did not
        self._old16: list[Tensor] | None = None  # f32[R] per micro-batch, between begin and calibrate
        self._found: Calibration | None = None
        self._seconds = 0.0

    @property
    def loss_config(self) -> LossConfig:
        """The loss with the bounds in use."""
        return msgspec.structs.replace(self.loss, clip_low=1 - self.low, clip_high=self.high - 1)

    def begin(self, policy: Policy, micros: Sequence[MicroBatch]) -> None:
        """All ranks, before the first update of a step; `micros`: this rank's micro-batches of the last one."""
        began = time.perf_counter()
        self.skipped, self._found, self._old16 = "", None, None
        if self.steps % self.config.period == 0:
            self._old16 = _logprobs(policy, micros, precise=True)
        self.steps += 1
        self._seconds = time.perf_counter() - began

    def calibrate(self, policy: Policy, pieces: Sequence[Piece], moved: bool) -> None:
        """All ranks, before the last update, which then clips with the new bounds. `pieces` belong to the `micros` of
        `begin`; `moved`: whether an update was made since. Raises ValueError naming the sample whose log-prob is not
        finite.
        """
        if self._old16 is None:
            return
        began = time.perf_counter()
        if moved:
            micros = [piece.micro for piece in pieces]
            now8, now16 = (_logprobs(policy, micros, precise) for precise in (False, True))
            tokens = [_tokens(*each) for each in zip(pieces, now8, now16, self._old16, strict=True)]
            found = calibrate(
                ClipTokens(*(torch.cat(column) for column in zip(*tokens, strict=True))),
                self.loss.bounds, self.loss.dual_clip, (self.low, self.high), self.config, _summed,
            )  # fmt: skip
            self.low, self.high, self.skipped = found.low, found.high, found.skipped
            self._found = None if found.skipped else found
        else:
            self.skipped = "no update came before the last mini-batch, so every ratio is 1"
        self._old16 = None
        self._seconds += time.perf_counter() - began

    def metrics(self) -> dict[str, float]:
        """Of the step, the same on every rank but for the time."""
        result = {
            "trainer/clip_low": self.low,
            "trainer/clip_high": self.high,
            "trainer/clip_calibrated": float(self._found is not None),
            "trainer/clip_calibration_s": self._seconds,
        }
        if self._found is not None:
            result |= {
                "trainer/clip_alpha": self._found.alpha,
                "trainer/clip_alpha_naive": self._found.alpha_naive,
                "trainer/clip_mass_ratio": self._found.mass_ratio,
            }
        return result

    def state(self) -> dict[str, float]:
        return {"low": self.low, "high": self.high, "steps": self.steps}

    def load(self, state: dict[str, float]) -> None:
        self.low, self.high, self.steps = state["low"], state["high"], int(state["steps"])


@torch.no_grad()
def _logprobs(policy: Policy, micros: Sequence[MicroBatch], precise: bool) -> list[Tensor]:
    """f32[R] of every micro-batch. Nothing gathered stays: parameters may move, or be wanted in the other precision."""
    reshard(policy)
    if precise:
        with policy.high_precision():
            result = [policy(micro)[0] for micro in micros]
    else:
        result = [policy(micro)[0] for micro in micros]
    reshard(policy)
    return result


def _tokens(piece: Piece, now8_R: Tensor, now16_R: Tensor, old16_R: Tensor) -> ClipTokens:
    keep_R, samples = piece.keep_R, piece.micro.sequences.tolist()
    for whose, logp_R in (("trainer", now8_R), ("high-precision", now16_R), ("old high-precision", old16_R)):
        check_finite(whose, logp_R, keep_R, piece.micro.sequence, samples)
    log_r8_R = log_ratio(now8_R.double(), piece.old_R.double(), keep_R)
    log_r16_R = log_ratio(now16_R.double(), old16_R.double(), keep_R)
    return ClipTokens(*(x_R.double()[keep_R] for x_R in (log_r8_R, log_r16_R, piece.advantage_R, piece.weight_R)))


def _summed(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x
