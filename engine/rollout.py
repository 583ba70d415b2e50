"""Prompts → Batch: generation, rewards while the rest still generates, dynamic sampling, held-out evaluation.

Log-probs in the batch are those of the distribution that was really sampled from when `replay_support` is on: SGLang
reports log-probs of the whole temperature-scaled softmax, also where top-p, top-k or min-p cut it. Replaying the
support renormalises both sides over the kept candidates; without it both sides use the whole softmax.
"""

import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from engine.host import EngineHost
from engine.protocol import Arena, Sampling
from engine.rewards import RewardPool, gather
from engine.tasks.prompts import Prompt, Prompts
from sync.batch import FINISH_REASONS, Batch, empty
from sync.fields import doc

Advance = Callable[[float], None]  # progress: samples finished since the last call


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is sampled each step, over all ranks."""

    prompts_per_step: Annotated[int, doc("Prompts of one step, over all ranks.", unit="prompts", ge=1)] = 32
    group_size: Annotated[int, doc("Responses sampled per prompt.", unit="samples", ge=1)] = 8
    max_tokens: Annotated[int, doc("Longest response.", unit="tokens", ge=1)] = 1024
    temperature: Annotated[float, doc("Sampling temperature; the trainer divides its logits by it too.", gt=0)] = 1.0
    top_p: Annotated[float, doc("Keep the smallest set of tokens with this probability.", gt=0, le=1)] = 1.0
    top_k: Annotated[int, doc("Keep this many tokens; 0 keeps all.", unit="tokens", ge=0)] = 0
    min_p: Annotated[
        float, doc("Keep tokens with at least this share of the likeliest one's probability.", ge=0, lt=1)
    ] = 0.0
    replay_support: Annotated[
        bool, doc("Log-probs of both sides over the tokens that top_k, top_p and min_p kept; needs top_k.")
    ] = False
    stop: Annotated[tuple[str, ...], doc("Further stop tokens, beside the model's own end tokens.")] = ()
    dynamic_sampling: Annotated[bool, doc("Drop groups whose rewards are all equal and draw more prompts (DAPO).")] = (
        False
    )
    max_rounds: Annotated[int, doc("Draws per step at most, with dynamic_sampling.", unit="rounds", ge=1)] = 3

    def __post_init__(self) -> None:
        if self.replay_support and not 0 < self.top_k <= 1024:
            raise ValueError("replay_support records the kept tokens: set top_k from 1 to 1024")
        if self.dynamic_sampling and self.group_size < 2:
            raise ValueError("dynamic_sampling drops groups whose rewards are all equal: set group_size to at least 2")


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out evaluation."""

    every: Annotated[
        int, doc("Steps between evaluations, the first before training, one at the end; 0: never.", unit="steps", ge=0)
    ] = 10
    prompts: Annotated[int, doc("Held-out prompts.", unit="prompts", ge=1)] = 64
    samples: Annotated[
        int, doc("Responses per prompt, k: accuracy (pass@1) is over all, pass@k over prompts.", unit="samples", ge=1)
    ] = 1
    temperature: Annotated[float, doc("Sampling temperature; 0 is greedy.", ge=0)] = 1.0
    top_p: Annotated[float, doc("Keep the smallest set of tokens with this probability.", gt=0, le=1)] = 1.0
    correct_reward: Annotated[float, doc("Reward from which a response counts as correct.")] = 1.0


class Sample(NamedTuple):
    """One finished response: a slot of an arena, its text and its reward (NaN where the reward failed)."""

    prompt: Prompt
    arena: Arena
    slot: int
    text: str
    reward: float

    @property
    def length(self) -> int:
        return int(self.arena.lengths[self.slot])


class Stats(NamedTuple):
    """One rank's share of the metrics, to be combined over ranks."""

    means: dict[str, tuple[float, float]]  # (numerator, denominator)
    totals: dict[str, float]
    peaks: dict[str, float]


class Rollout(NamedTuple):
    """One rank's share of a step."""

    batch: Batch
    stats: Stats
    samples: list[Sample]
    rounds: int
    first_error: str | None  # of a reward that failed


class Evaluation(NamedTuple):
    """One rank's share of a held-out evaluation."""

    means: dict[str, tuple[float, float]]
    first_error: str | None  # of a reward that failed; its sample counts as wrong


class _Scored(NamedTuple):
    samples: list[Sample]
    timeouts: int
    first_error: str | None
    waited_s: float  # for rewards, after the last token


class Sampler:
    """Draws this rank's prompts and turns them into rewarded samples."""

    def __init__(
        self,
        host: EngineHost,
        prompts: Prompts,
        rewards: RewardPool,
        config: RolloutConfig,
        evaluation: EvalConfig,
        end_tokens: tuple[int, ...],
        rank: int,
        world: int,
    ):
        """`end_tokens` are the model's end-of-text ids. Raises ValueError for a stop string that is not one token."""
        self.host, self.prompts, self.rewards, self.config, self.evaluation = host, prompts, rewards, config, evaluation
        self.rank, self.world = rank, world
        stop = tuple(_token_id(prompts.tokenizer, text) for text in config.stop)
        self.sampling = Sampling(
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            stop_token_ids=tuple(sorted({*end_tokens, *stop})),
            support=config.top_k if config.replay_support else 0,
        )

    def rollout(self, cursor: int, advance: Advance) -> Rollout:
        """The groups of one step from data position `cursor` on. Raises EngineDied; nothing of it is kept then."""
        config = self.config
        kept: list[list[Sample]] = []
        parts: list[_Scored] = []
        wanted = len(self._share(config.prompts_per_step))
        rounds = dropped = degenerate = 0
        while len(kept) < wanted and rounds < (config.max_rounds if config.dynamic_sampling else 1):
            drawn = self.prompts.draw(cursor + rounds * config.prompts_per_step, config.prompts_per_step)
            mine = [drawn[i] for i in self._share(config.prompts_per_step)]
            parts.append(self._generate(mine, config.group_size, self.sampling, advance))
            samples = parts[-1].samples
            for start in range(0, len(samples), config.group_size):
                group = [s for s in samples[start : start + config.group_size] if s.length and np.isfinite(s.reward)]
                equal = len({s.reward for s in group}) < 2
                degenerate += equal
                if not group or (equal and config.dynamic_sampling):
                    dropped += 1
                else:
                    kept.append(group)
            rounds += 1
        stats = _statistics(parts, degenerate, dropped, rounds * wanted)
        errors = [part.first_error for part in parts if part.first_error]
        samples = [sample for part in parts for sample in part.samples]
        return Rollout(self._batch(kept[:wanted]), stats, samples, rounds, next(iter(errors), None))

    def evaluate(self, advance: Advance) -> "Evaluation":
        """pass@1 and pass@samples on this rank's share of the held-out prompts."""
        config = self.evaluation
        drawn = self.prompts.held_out(config.prompts)
        mine = [drawn[i] for i in self._share(len(drawn))]
        sampling = msgspec.structs.replace(
            self.sampling, temperature=config.temperature, top_p=config.top_p, top_k=0, min_p=0.0, support=0
        )
        samples, _, first_error, _ = self._generate(mine, config.samples, sampling, advance)
        correct = np.array([s.reward >= config.correct_reward for s in samples]).reshape(-1, config.samples)
        means = {"engine/eval_accuracy": (float(correct.sum()), float(correct.size))}
        if config.samples > 1:
            means["engine/eval_pass_at_k"] = (float(correct.any(1).sum()), float(len(correct)))
        return Evaluation(means, first_error)

    def _share(self, n: int) -> range:
        return range(self.rank, n, self.world)

    def _generate(self, prompts: list[Prompt], n: int, sampling: Sampling, advance: Advance) -> "_Scored":
        """`n` samples per prompt, in prompt order."""
        owners = [prompt for prompt in prompts for _ in range(n)]
        if not owners:
            return _Scored([], 0, None, 0.0)
        texts, rewards, pending = [""] * len(owners), np.full(len(owners), np.nan), []
        arena, done = None, 0
        for finished, arena in self.host.generate([prompt.ids for prompt in owners], sampling):
            responses = [arena.tokens[i, : arena.lengths[i]].tolist() for i in finished]
            decoded = self.prompts.tokenizer.batch_decode(responses, skip_special_tokens=True)
            for i, text in zip(finished, decoded, strict=True):
                texts[i] = text
            pending.append((finished, self.rewards.submit([owners[i].example for i in finished], decoded)))
            done += len(finished)
            advance(len(finished))
        assert arena is not None and done == len(owners)
        generated = time.perf_counter()
        scores = gather([future for _, future in pending])
        rewards[[i for finished, _ in pending for i in finished]] = scores.rewards
        samples = [Sample(p, arena, i, texts[i], float(rewards[i])) for i, p in enumerate(owners)]
        return _Scored(samples, scores.timeouts, scores.first_error, time.perf_counter() - generated)

    def _batch(self, groups: list[list[Sample]]) -> Batch:
        samples = [sample for group in groups for sample in group]
        if not samples:
            return empty()
        prompt_lengths = [len(s.prompt.ids) for s in samples]
        lengths = [n + s.length for n, s in zip(prompt_lengths, samples, strict=True)]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens, logprobs = np.empty(starts[-1], np.int32), np.zeros(starts[-1], np.float32)
        sampled = np.zeros(starts[-1], bool)
        slots = samples[0].arena.slots
        experts = np.empty((starts[-1], slots.layers, slots.top_k), samples[0].arena.experts.dtype)
        support = np.full((starts[-1], slots.support), -1, np.int32)
        for s, start, n_prompt, end in zip(samples, starts[:-1], prompt_lengths, starts[1:], strict=True):
            middle, n = start + n_prompt, s.length
            tokens[start:middle], tokens[middle:end] = s.prompt.ids, s.arena.tokens[s.slot, :n]
            logprobs[middle:end], sampled[middle:end] = s.arena.logprobs[s.slot, :n], True
            if slots.layers:
                experts[start:end] = s.arena.expert_rows(s.slot, end - start)
            if slots.support:
                support[middle:end] = s.arena.support[s.slot, :n]
        return Batch(
            tokens=tokens,
            starts=starts,
            sampled=sampled,
            logprobs=logprobs,
            rewards=np.array([s.reward for s in samples], np.float32),
            groups=np.repeat(np.arange(len(groups)) * self.world + self.rank, [len(g) for g in groups]).astype(
                np.int32
            ),
            versions=np.array([s.arena.versions[s.slot] for s in samples], np.int32),
            finish=np.array([s.arena.finish[s.slot] for s in samples], np.uint8),
            experts=experts if slots.layers else None,
            support=support if slots.support else None,
        ).check()


def _statistics(parts: list[_Scored], degenerate: int, dropped: int, groups: int) -> Stats:
    samples = [sample for part in parts for sample in part.samples]
    timeouts = float(sum(part.timeouts for part in parts))
    n = float(len(samples))
    rewards = np.array([s.reward for s in samples])
    good = rewards[np.isfinite(rewards)]
    lengths = np.array([s.length for s in samples])
    finish = np.array([s.arena.finish[s.slot] for s in samples])
    means = {
        "engine/reward_mean": (float(good.sum()), float(len(good))),
        "engine/reward_square": (float((good**2).sum()), float(len(good))),
        "engine/reward_failed_frac": (n - len(good) - timeouts, n),
        "engine/reward_timeout_frac": (timeouts, n),
        "engine/response_length_mean": (float(lengths.sum()), n),
        "engine/finish_length_frac": (float((finish == FINISH_REASONS.index("length")).sum()), n),
        "engine/finish_abort_frac": (float((finish == FINISH_REASONS.index("abort")).sum()), n),
        "engine/groups_degenerate_frac": (float(degenerate), float(groups)),
        "engine/groups_dropped_frac": (float(dropped), float(groups)),
    }
    totals = {"engine/samples": n, "engine/sampled_tokens": float(lengths.sum()), "engine/prompts_drawn": float(groups)}
    peaks = {
        "engine/response_length_max": float(lengths.max(initial=0)),
        "time/reward_s": sum(part.waited_s for part in parts),
    }
    return Stats(means, totals, peaks)


def _token_id(tokenizer: Any, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"rollout.stop: {text!r} is {len(ids)} tokens of this model, not one")
    return ids[0]
