"""Wiring and the loop: rollout → train → swap, over and over, and what happens when an engine dies in between.

Every rank runs this. What one rank alone may decide (its engine died, its swap failed) is agreed on by all before
anything follows from it, so that collectives stay in step.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import msgspec
import torch
from safetensors import safe_open

from config import Config
from engine.host import EngineDied, EngineError, EngineHost, n_experts
from engine.rewards import RewardPool
from engine.rollout import Evaluation, Rollout, Sample, Sampler, Stats
from engine.tasks import load_task
from engine.tasks.prompts import Prompts
from engine.tasks.tokenizer import load_tokenizer
from engine.team import Seat
from ranks import Ranks
from records import attribution
from records import log as records
from records.console import RunConsole
from records.guard import Guard
from records.log import RunLog
from sync.batch import FINISH_REASONS
from sync.encode import Wire
from sync.ledger import Ledger
from sync.phases import PhaseError, Phases
from sync.push import Pusher, SwapError
from sync.quantize import audit_layers
from trainer.checkpoint import Checkpointer, export_hf
from trainer.model import materialize
from trainer.probe import attribute
from trainer.trainer import Trainer

_SFT_CURSOR = 500_000  # data position of the demonstrations: not those of the rollouts, which count from 0
_SETTLE_S = 60.0  # longest wait of a failed run for the checkpoint it is writing


class GuardStop(RuntimeError):
    """A metric is beyond a limit of the config that stops the run."""


# Errors whose message says all there is to say; anything else is a bug and shows its traceback.
USER_ERRORS = (ValueError, OSError, FloatingPointError, EngineDied, EngineError, PhaseError, SwapError, GuardStop)
T = TypeVar("T")


class Position(msgspec.Struct):
    """Where the run stands; saved with every checkpoint."""

    step: int = 0  # steps done
    cursor: int = 0  # training prompts drawn
    version: int = 0  # weights the engine serves


def run(config: Config, run_dir: Path, ranks: Ranks, console: RunConsole, *, resume: bool, probe: bool = False) -> None:
    """One whole run on this rank, or with `probe` one probe of where it stands. Raises what `launch.main` turns into
    one line and a non-zero exit."""
    with ExitStack() as stack:
        loop = Loop(config, run_dir, ranks, console, stack)
        loop.prepare(resume, adds=probe)
        if probe:
            loop.probe(loop.at.step, loop.rollout())
            return loop.note_report()
        for step in range(loop.at.step, config.steps):
            loop.step(step)
        loop.finish()


class Loop:
    """One rank of a run: the engine, the trainer and the records, and the order in which they act."""

    def __init__(self, config: Config, run_dir: Path, ranks: Ranks, console: RunConsole, stack: ExitStack):
        """Builds everything; the engine starts in the background while the trainer is built."""
        self.config, self.run_dir, self.ranks, self.console, self.stack = config, run_dir, ranks, console, stack
        self.at = Position()
        self.times: dict[str, float] = {}
        self.seat = self._seat()
        if ranks.first:
            model_dir = materialize(config.model, run_dir / "model", config.seed)
        else:
            model_dir = None
        self.model_dir: Path = ranks.share(model_dir)
        self.names = _weight_names(self.model_dir)
        tokenizer, end_tokens = load_tokenizer(self.model_dir)
        self.prompts = Prompts(load_task(config.task, config.seed), tokenizer, config.task, config.seed)
        if config.sft.steps:
            self.prompts.demonstrations(_SFT_CURSOR, 1)  # raises where the task has none
        self.host = self._host()
        stack.callback(self.host.close)
        rewards = stack.enter_context(RewardPool(config.task, config.seed))
        self.sampler = Sampler(
            self.host, self.prompts, rewards, config.rollout, config.eval, end_tokens, ranks.rank, ranks.world
        )
        if ranks.device.type == "cpu":  # on a GPU it would measure the free memory while the trainer takes some
            self.host.spawn()
        self.trainer = Trainer(
            config.trainer,
            config.algo,
            self.model_dir,
            device=ranks.device,
            temperature=config.rollout.temperature,
            total_steps=config.steps,
            max_response_tokens=config.rollout.max_tokens,
            fp8=config.fp8,
        )
        if config.fp8.train != "off":
            told = msgspec.json.decode(self.host.server_args["json_model_override_args"])["quantization_config"]
            audit_layers(self.trainer.policy.fp8_names, told, self.names)
        self.ledger = Ledger(ranks.device, lambda: self.host.process.pid if self.host.process else None)
        self.phases = Phases(self.host, self.trainer, ranks.agree, self.ledger.measure)
        self.guard = Guard(config.guard, experts=n_experts(self.host.model) > 0)
        self.checkpoints = Checkpointer(config.checkpoint, run_dir / "checkpoints")
        stack.callback(self.checkpoints.settle, _SETTLE_S)
        dtype = getattr(torch, self.host.server_args["dtype"])
        self.pusher = Pusher(
            self.host,
            Wire(config.fp8, self.host.model["num_hidden_layers"], dtype),
            config.sync,
            self.host.reports,
            ranks.device,
            self.trainer.shard_group,
            ranks.first_problem,
        )

    def _seat(self) -> Seat:
        """This rank's place among those that share its engine."""
        ranks, team = self.ranks, self.config.engine.tensor_parallel
        self.config.check_ranks(ranks.world)
        if ranks.neighbours % team:
            raise ValueError(
                f"engine.tensor_parallel = {team} must divide the number of ranks of each machine, {ranks.neighbours}: "
                "an engine is on one"
            )
        if team == 1:
            return Seat()
        place = ranks.rank % team
        folder = None if place else self.stack.enter_context(TemporaryDirectory(prefix="hotswap-"))
        return Seat(place, team, Path(ranks.all(folder)[ranks.rank - place]))

    def _host(self) -> EngineHost:
        config = self.config
        layers = msgspec.json.decode((self.model_dir / "config.json").read_bytes())["num_hidden_layers"]
        return EngineHost(
            config.engine,
            self.model_dir,
            config.fp8.sglang_quantization_config(layers, self.names) if config.fp8.enabled else None,
            self.run_dir / f"engine-rank{self.ranks.rank - self.seat.place}.log",
            config.seed + self.ranks.rank,
            self.ranks.device,
            self.seat,
        )

    # ---------------------------------------------------------------- before the first step

    def prepare(self, resume: bool, adds: bool = False) -> None:
        """Restores a checkpoint or runs the warm start, then gives the engine its first weights. `adds`: no step will
        be made, so a resumed run's records are all kept."""
        warnings: list[str] = []
        saved = self.checkpoints.restore(self.trainer, warnings.append) if resume else None
        if saved is not None:
            self.at = msgspec.convert(saved, Position)
        elif resume and has_run(self.run_dir):
            raise ValueError(f"--resume: {self.run_dir} has no complete checkpoint; start anew in another directory")
        self.log = self.stack.enter_context(
            RunLog(
                self.run_dir,
                self.config.records,
                msgspec.to_builtins(self.config),
                resume_step=None if saved is None else math.inf if adds else self.at.step,
                active=self.ranks.first,
            )
        )
        for warning in warnings:
            self._event("checkpoint", warning)
        self._header()
        if saved is None:
            self._warm_start()
        with self.console.progress("starting SGLang", 1), self.phases.start():
            self.host.start()
        self._event("started", f"SGLang {self.host.sglang} runs", warn=False)
        self._swap(self.at.version)

    def _header(self) -> None:
        config, ranks = self.config, self.ranks
        self.console.header(
            config.name,
            {
                "model": config.model.path or config.model.preset,
                "task": config.task.name
                + (f" ({self.prompts.skipped} prompts too long)" if self.prompts.skipped else ""),
                "ranks": f"{ranks.world} on {ranks.device.type}",
                "engine": f"SGLang, weights {'FP8 ' + config.fp8.granularity if config.fp8.enabled else 'unquantized'}"
                + (f", {self.seat.ranks} ranks each" if self.seat.ranks > 1 else ""),
                "step": f"{config.rollout.prompts_per_step} prompts x {config.rollout.group_size} samples",
                "correction": f"{config.algo.correction.mode}, {config.algo.correction.importance}",
                "results": self.run_dir,
            }
            | ({"resumed": f"at step {self.at.step}"} if self.at.step else {}),
        )

    def _warm_start(self) -> None:
        sft, ranks = self.config.sft, self.ranks
        if not sft.steps:
            return
        losses: list[float] = []
        with self.console.progress("supervised warm start", sft.steps) as advance:
            for step in range(sft.steps):
                pairs = self.prompts.demonstrations(_SFT_CURSOR + step * sft.batch_size, sft.batch_size)
                losses.append(self.trainer.sft_step(pairs[ranks.rank :: ranks.world], sft.lr)["trainer/loss"])
                advance(1)
                if len(losses) >= 5 and sum(losses[-5:]) / 5 < sft.target_loss:
                    break
        self.trainer.begin_rl()
        text = f"{len(losses)} supervised updates, last loss {losses[-1]:.3f} nats"
        self._event("sft", text, warn=False)

    # ---------------------------------------------------------------- one step

    def step(self, step: int) -> None:
        """Evaluation when it is due, then rollout → train → swap, checkpoint when it is due, records."""
        began, self.times = time.perf_counter(), {}
        metrics = self._evaluate(step) if self._due(self.config.eval.every, step) else {}
        with self._timed("time/rollout_s"):
            rollout = self.rollout()
        metrics |= self._combined(rollout.stats)
        if self._due(self.config.probe.every, step):
            with self._timed("time/probe_s"):
                metrics |= self.probe(step, rollout)
        with self._timed("time/train_s"):
            metrics |= self._train(rollout)
        self.at.step = step + 1
        if self._due(self.config.checkpoint.every, step + 1):  # before the swap: it needs the optimizer in memory
            self._save(self.at.version + 1)
        with self._timed("time/sync_s"):
            metrics |= self._swap(self.at.version + 1)
        metrics["engine/restarts"] = self.ranks.combine({}, {"x": (self.host.starts - 1) / self.host.team}, {})["x"]
        metrics["engine/tokens_per_s"] = metrics["engine/sampled_tokens"] / self.times["time/rollout_s"]
        metrics |= self.ledger.take(lambda peaks: self.ranks.combine({}, {}, peaks))
        metrics |= self.times | {"time/step_s": time.perf_counter() - began}
        self.log.write(step, metrics)
        self._write_samples(step, rollout.samples)
        self.console.step(step, self.config.steps, metrics)
        self._judge(step, metrics)

    def _judge(self, step: int, metrics: dict[str, float]) -> None:
        """Warns of metrics beyond the limits of `guard`. Raises GuardStop, after a checkpoint, where one is to stop."""
        verdict = self.guard.check(step, metrics)
        for text in verdict.warnings:
            self._event("guard", f"step {step}: {text}")
        if verdict.stop:
            self._keep()
            raise GuardStop(f"step {step}: {verdict.stop}; a checkpoint is saved, --resume goes on from it")

    def probe(self, step: int, rollout: Rollout) -> dict[str, float]:
        """Where the mismatch of this rollout, sampled with the weights that the trainer has, comes from."""
        config = self.config
        with self.phases.train(), self.console.progress("probe", 1):
            found = attribute(self.trainer, rollout.batch, config.probe, config.seed)
        record = {"step": step, **msgspec.to_builtins(found)}
        self.console.table(attribution.title(record), attribution.HEADS, attribution.table(record))
        self.log.write_probe(step, record)
        return found.metrics()

    def rollout(self) -> Rollout:
        """This rank's samples."""
        size = self.config.rollout

        def sample() -> Rollout:
            share = size.prompts_per_step / self.ranks.world
            with self.console.progress("rollout", share * size.group_size) as advance:
                return self.sampler.rollout(self.at.cursor, advance)

        rollout = self._sampled(sample)
        self.at.cursor += self.ranks.largest(rollout.rounds) * size.prompts_per_step
        self._tell("reward", rollout.first_error)
        return rollout

    def _sampled(self, sample: Callable[[], T]) -> T:
        """What `sample` returns. An engine that dies is started again, gets the same weights, and samples anew."""
        done: list[T] = []
        while True:
            error = None
            try:
                with self.phases.rollout():
                    if not done:
                        done.append(sample())
            except (EngineDied, PhaseError) as failure:
                error = failure
            if self.ranks.agree(error is None):
                return done[0]
            self._revive(error)
            self._swap(self.at.version)

    def _train(self, rollout: Rollout) -> dict[str, float]:
        if not self.ranks.largest(rollout.batch.n_sequences):
            self._event("rollout", f"step {self.at.step}: no usable sample, so there is no update")
            return {}
        try:
            with self.phases.train(), self.console.progress("training", 1):
                metrics = self.trainer.step(rollout.batch)
        except FloatingPointError:  # of all ranks alike, and the update was not applied
            self._keep()
            raise
        calibrator = self.trainer.calibrator
        if calibrator is not None and calibrator.skipped:
            self._event("calibration", f"step {self.at.step}: clip bounds stay as they are: {calibrator.skipped}")
        return metrics

    def _save(self, version: int) -> None:
        """A checkpoint; `version` is that of the trainer's weights, which the engine may not have yet."""
        with self._timed("time/checkpoint_s"), self.phases.train():
            at = msgspec.structs.replace(self.at, version=version)
            self.checkpoints.save(self.trainer, at.step, msgspec.to_builtins(at))

    def _keep(self) -> None:
        """Before the run ends early: a checkpoint of where it stands, unless that is there already."""
        if not (self.at.step and self._due(self.config.checkpoint.every, self.at.step)):
            self._save(self.at.version)
        self.checkpoints.close()

    def _swap(self, version: int) -> dict[str, float]:
        """Gives every engine the trainer's weights as `version`; engines that die on the way are started again."""
        config = self.config.sync
        while True:
            verify = config.verify == "always" or (config.verify == "first" and self.host.unverified)
            try:
                with self.phases.sync():
                    stats = self.pusher.push(self.trainer.shards, version, verify)
                break
            except (PhaseError, SwapError) as error:  # raised by all ranks alike
                self._revive(error)
        self.host.unverified = self.host.unverified and not verify
        self.at.version = version
        if stats["sync/plan_s"]:
            self._event("swap", self._plan_text(stats), warn=False)
        return stats

    def _plan_text(self, stats: dict[str, float]) -> str:
        """What is worth knowing of a copy plan that was just made."""
        text = f"copy plan of {stats['sync/tensors']:.0f} tensors made in {stats['sync/plan_s']:.1f} s"
        if verified := stats["sync/verified_params"]:
            text += f", {verified:.0f} engine parameters equal to what SGLang's own loader writes"
        if stock := self.pusher.stock:
            name, why = next(iter(stock.items()))
            text += f"; {len(stock)} tensors stay with that loader, such as {name} ({why})"
        return text

    def _revive(self, error: Exception | None) -> None:
        """All ranks, after an `error` on some of them: starts engines that died again. Raises `error` if none did,
        EngineDied when one may not be started again. An engine is dead when any of its ranks finds so."""
        deaths = self.ranks.all("" if self.host.alive else str(error or "the engine ended"))
        if not any(deaths):
            raise error or AssertionError("ranks disagree on a failure without a dead engine")
        leader = self.ranks.rank - self.seat.place
        death = next(filter(None, deaths[leader : leader + self.host.team]), None)
        self._tell("engine", None if self.seat.place else death)
        if death:
            with self.phases.start():
                self.host.restart()
        self._tell("engine", "started again" if death and not self.seat.place else None)

    # ---------------------------------------------------------------- evaluation, records, end

    def _evaluate(self, step: int) -> dict[str, float]:
        """Accuracy of the weights after `step` updates."""

        def sample() -> Evaluation:
            total = self.config.eval.prompts * self.config.eval.samples / self.ranks.world
            with self.console.progress("evaluation", total) as advance:
                return self.sampler.evaluate(advance)

        with self._timed("time/eval_s"):
            result = self._sampled(sample)
        self._tell("reward", result.first_error)
        return self._combined(Stats(result.means, {}, {}))

    def finish(self) -> None:
        """The last evaluation, checkpoint and export."""
        config, self.times = self.config, {}
        if config.eval.every:
            metrics = self._evaluate(config.steps) | self.times
            self.log.write(config.steps, metrics)
            self.console.step(config.steps, config.steps, metrics)
        if config.checkpoint.every and self.at.step % config.checkpoint.every:
            self._save(self.at.version)
        if config.checkpoint.export_hf:
            with self.phases.train(), self.console.progress("exporting", 1):
                export_hf(self.trainer, self.run_dir / "export")
        self.checkpoints.close()
        self.note_report()

    def note_report(self) -> None:
        self.console.note(f"report: {self.run_dir / 'report.html'}")

    def _combined(self, stats: Stats) -> dict[str, float]:
        metrics = self.ranks.combine(*stats)
        if "engine/reward_square" in metrics:
            square = metrics.pop("engine/reward_square")
            metrics["engine/reward_std"] = max(square - metrics["engine/reward_mean"] ** 2, 0.0) ** 0.5
        return metrics

    def _write_samples(self, step: int, samples: list[Sample]) -> None:
        self.log.write_samples(
            step,
            (
                records.Sample(
                    prompt=self.prompts.tokenizer.decode(s.prompt.ids),
                    completion=s.text,
                    reward=s.reward,
                    group=i // self.config.rollout.group_size,
                    length=s.length,
                    finish=FINISH_REASONS[s.arena.finish[s.slot]],
                    version=int(s.arena.versions[s.slot]),
                )
                for i in self.log.choose(len(samples))
                for s in [samples[i]]
            ),
        )

    def _tell(self, kind: str, text: str | None) -> None:
        """All ranks: records what any of them has to say."""
        for line in self.ranks.gather(text):
            self._event(kind, line)

    def _event(self, kind: str, text: str, warn: bool = True) -> None:
        self.log.event(kind, text)
        self.console.note(text, warn=warn)

    @staticmethod
    def _due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.times[name] = self.times.get(name, 0.0) + time.perf_counter() - began


def has_run(run_dir: Path) -> bool:
    """Whether the directory holds records of steps."""
    path = run_dir / "metrics.jsonl"
    return path.is_file() and path.stat().st_size > 0


def _weight_names(directory: Path) -> list[str]:
    """Names of all tensors of a checkpoint directory. Raises ValueError if it has no safetensors."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model {directory}: holds no *.safetensors files")
    names: list[str] = []
    for file in files:
        with safe_open(file, "pt") as tensors:
            names += tensors.keys()
    return names


def describe(error: BaseException) -> str:
    """What the console says of an error: one line, but for the log of an engine that died."""
    return str(error) if isinstance(error, EngineDied) else " ".join(str(error).split()) or type(error).__name__
