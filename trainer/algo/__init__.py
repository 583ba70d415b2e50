"""The algorithms: pure functions of tensors, and the config section that chooses among them.

No I/O, no collectives, no numpy: what has to be summed over ranks is returned as sums and passed back in (clipping.py
takes the summing function instead: what it asks for next depends on the sum).
"""

from typing import Annotated

import msgspec

from sync.fields import doc
from trainer.algo.advantages import AdvantageConfig
from trainer.algo.clipping import CalibrationConfig
from trainer.algo.correction import CorrectionConfig
from trainer.algo.kl import KlConfig
from trainer.algo.loss import LossConfig


class AlgoConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    advantage: Annotated[AdvantageConfig, doc("From rewards to advantages.")] = AdvantageConfig()
    loss: Annotated[LossConfig, doc("The policy loss.")] = LossConfig()
    correction: Annotated[CorrectionConfig, doc("What is done about the rollout engine not being the trainer.")] = (
        CorrectionConfig()
    )
    kl: Annotated[KlConfig, doc("The KL term to a reference policy.")] = KlConfig()
    calibration: Annotated[CalibrationConfig, doc("Clip bounds that undo what FP8 noise does to clipping.")] = (
        CalibrationConfig()
    )

    def __post_init__(self) -> None:
        if not self.calibration.period:
            return
        if self.loss.objective != "ppo":
            raise ValueError(f"calibration.period is for loss.objective = ppo, not {self.loss.objective}")
        if self.correction.mode == "bypass":
            raise ValueError(
                "calibration.period needs the trainer's own old policy: correction.mode = decoupled or off"
            )
        self.calibration.check(self.loss.bounds)
