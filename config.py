"""The root Config: one section per room, each defined beside the code that reads it."""

from typing import Annotated, Literal

import msgspec
import torch

from engine.host import EngineConfig
from engine.rollout import EvalConfig, RolloutConfig
from engine.tasks import TaskConfig
from records.guard import GuardConfig
from records.log import RecordsConfig
from sync.fields import doc
from sync.push import SyncConfig
from sync.quantize import Fp8Config
from trainer.algo import AlgoConfig
from trainer.checkpoint import CheckpointConfig
from trainer.model import ModelConfig
from trainer.probe import ProbeConfig
from trainer.trainer import SftConfig, TrainerConfig

SGLANG_SPARE = 2  # tokens of the context that SGLang does not fill


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the ranks run. Under torchrun only `device` counts."""

    device: Annotated[Literal["auto", "cuda", "cpu"], doc("auto: CUDA where this machine has a GPU, else the CPU.")] = (
        "auto"
    )
    ranks: Annotated[int, doc("Ranks on this machine; 0: one per GPU, or one on the CPU.", unit="ranks", ge=0)] = 0
    threads: Annotated[int, doc("CPU threads of a rank's math; 0: its share of the cores.", unit="threads", ge=0)] = 0

    def resolved_device(self) -> str:
        """ "cuda" or "cpu". Raises ValueError where CUDA is asked for and there is none."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("cluster.device = cuda: no CUDA device is visible to this process")
        return "cuda" if self.device != "cpu" and torch.cuda.is_available() else "cpu"

    def resolved_ranks(self) -> int:
        """Raises ValueError for more ranks than GPUs."""
        if self.resolved_device() == "cpu":
            return self.ranks or 1
        gpus = torch.cuda.device_count()
        if self.ranks > gpus:
            raise ValueError(f"cluster.ranks = {self.ranks}: this machine has {gpus} GPUs, one rank each")
        return self.ranks or gpus


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run."""

    name: Annotated[str, doc("Name of the run; results go to runs/NAME.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    steps: Annotated[int, doc("Reinforcement-learning steps.", unit="steps", ge=0)]
    seed: Annotated[int, doc("Seed of everything that is random.", ge=0)] = 0
    model: Annotated[ModelConfig, doc("Which model to train.")]
    task: Annotated[TaskConfig, doc("Where prompts and rewards come from.")]
    rollout: Annotated[RolloutConfig, doc("What is sampled each step.")] = RolloutConfig()
    eval: Annotated[EvalConfig, doc("Held-out evaluation.")] = EvalConfig()
    engine: Annotated[EngineConfig, doc("The SGLang engine of a rank, or of several.")] = EngineConfig()
    trainer: Annotated[TrainerConfig, doc("Optimiser and memory of the trainer.")] = TrainerConfig()
    sft: Annotated[SftConfig, doc("Supervised warm start on the task's demonstrations.")] = SftConfig()
    algo: Annotated[AlgoConfig, doc("Advantages, loss, rollout correction, KL.")] = AlgoConfig()
    fp8: Annotated[Fp8Config, doc("Which weights are FP8, and how.")] = Fp8Config()
    sync: Annotated[SyncConfig, doc("How weights reach the engine.")] = SyncConfig()
    checkpoint: Annotated[CheckpointConfig, doc("What is saved, and when.")] = CheckpointConfig()
    records: Annotated[RecordsConfig, doc("What a run writes beside its metrics.")] = RecordsConfig()
    probe: Annotated[ProbeConfig, doc("Measuring where the mismatch between trainer and engine comes from.")] = (
        ProbeConfig()
    )
    guard: Annotated[GuardConfig, doc("When to warn of a run, and when to stop it.")] = GuardConfig()
    cluster: Annotated[ClusterConfig, doc("Where the ranks run.")] = ClusterConfig()

    def __post_init__(self) -> None:
        groups, updates = self.rollout.prompts_per_step, self.trainer.updates_per_rollout
        if updates > groups * self.rollout.group_size:
            raise ValueError(
                f"trainer.updates_per_rollout = {updates} is more than the {groups * self.rollout.group_size} samples "
                "of a step (rollout.prompts_per_step x rollout.group_size)"
            )
        if self.algo.calibration.period and updates < 2:
            raise ValueError(
                f"algo.calibration.period = {self.algo.calibration.period} needs trainer.updates_per_rollout of at "
                f"least 2, not {updates}: in the only update every ratio is 1"
            )
        if self.algo.calibration.period and self.fp8.train == "off":
            raise ValueError(
                f"algo.calibration.period = {self.algo.calibration.period} undoes what FP8 training does to clipping, "
                "and fp8.train is off"
            )
        longest = self.task.max_prompt_tokens + self.rollout.max_tokens + SGLANG_SPARE
        if longest > self.engine.context_length:
            raise ValueError(
                f"engine.context_length = {self.engine.context_length} must be at least {longest}: "
                f"task.max_prompt_tokens + rollout.max_tokens + {SGLANG_SPARE} that SGLang keeps"
            )
        if self.fp8.enabled and self.fp8.granularity != "block":
            raise ValueError(f"fp8.granularity = {self.fp8.granularity}: SGLang is served block only")
        if self.algo.advantage.overlong.buffer_tokens > self.rollout.max_tokens:
            raise ValueError(
                f"algo.advantage.overlong.buffer_tokens = {self.algo.advantage.overlong.buffer_tokens} is more than "
                f"rollout.max_tokens = {self.rollout.max_tokens}"
            )
        if self.cluster.ranks:
            self.check_ranks(self.cluster.ranks)
        if self.cluster.ranks > groups:
            raise ValueError(f"rollout.prompts_per_step = {groups} is less than cluster.ranks = {self.cluster.ranks}")
        compared = self.algo.advantage.name in ("grpo", "dr_grpo", "rloo")
        if compared and self.rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size = 1: algo.advantage.name = {self.algo.advantage.name} compares the samples of a "
                "group, so it needs at least 2 (reinforce_pp takes 1)"
            )

    def check_ranks(self, ranks: int) -> None:
        """Raises ValueError if a run of so many ranks cannot be divided as the recipe says."""
        replicas, team = self.trainer.replicas, self.engine.tensor_parallel
        if ranks % replicas:
            raise ValueError(f"trainer.replicas = {replicas} must divide the number of ranks, {ranks}")
        if ranks % team:
            raise ValueError(f"engine.tensor_parallel = {team} must divide the number of ranks, {ranks}")
        if ranks // replicas % team:
            raise ValueError(
                f"engine.tensor_parallel = {team} must divide the ranks of one model copy, {ranks // replicas} "
                f"(trainer.replicas = {replicas})"
            )
