"""The algorithms: pure functions of tensors, and the config section that chooses among them.

No I/O, no collectives, no numpy: what has to be summed over ranks is returned as sums and passed back in.
"""

from typing import Annotated

import msgspec

from sync.fields import doc
from trainer.algo.advantages import AdvantageConfig
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
