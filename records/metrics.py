"""Every metric of a run, in one place: what a name means, its unit, and where it is shown.

A name that is not listed here cannot be logged, so a figure in a report always has a meaning. The console line, the
report's table and `python -m records.metrics` (a markdown table for the docs) all read this registry.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of a step.

    `unit` is "" for plain numbers, "frac" for fractions in [0, 1]; `group` is the section of the report; `console` is
    the short label on the console's step line, "" where the metric is not shown there.
    """

    unit: str
    meaning: str
    group: str
    console: str = ""


# group -> name -> (unit, meaning[, console label]). The order is the order of the report's table and of the docs.
_TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    "Reward": {
        "engine/reward_mean": ("", "Mean task reward of all samples drawn.", "reward"),
        "engine/reward_std": ("", "Standard deviation of the reward over the samples."),
        "engine/eval_accuracy": ("frac", "Held-out prompts answered correctly, one sample each (pass@1).", "eval"),
        "engine/eval_pass_at_k": ("frac", "Held-out prompts with at least one correct answer among k samples."),
        "engine/reward_failed_frac": ("frac", "Samples whose reward function raised; the sample is dropped."),
        "engine/reward_timeout_frac": ("frac", "Samples whose reward hit its time limit; the sample is dropped."),
        "trainer/advantage_mean": ("", "Mean advantage over sequences."),
        "trainer/advantage_std": ("", "Standard deviation of the advantage over sequences."),
    },
    "Rollout": {
        "engine/response_length_mean": ("tokens", "Mean number of sampled tokens of a response.", "len"),
        "engine/response_length_max": ("tokens", "Longest response of the step."),
        "engine/finish_length_frac": ("frac", "Responses cut at the token limit."),
        "engine/finish_abort_frac": ("frac", "Responses aborted by the engine."),
        "engine/groups_degenerate_frac": ("frac", "Groups whose rewards are all equal: no learning signal."),
        "engine/groups_dropped_frac": ("frac", "Groups dropped by dynamic sampling."),
        "engine/samples": ("samples", "Responses sampled, all ranks, dropped groups included."),
        "engine/sampled_tokens": ("tokens", "Tokens sampled in the step, all ranks."),
        "engine/prompts_drawn": ("prompts", "Prompts sampled from, with those dropped by dynamic sampling."),
        "engine/restarts": ("", "Engine restarts since the run began."),
    },
    "Mismatch": {
        "trainer/mismatch_k1": ("nats", "KL(rollout || old), k1 = E[-log rho]; usual 0.001-0.03, above 1 stop.", "k1"),
        "trainer/mismatch_k3": ("nats", "KL, k3 = E[rho - 1 - log rho]; dense 1e-5-1e-3, MoE 1e-3-1e-1."),
        "trainer/mismatch_abs_p_mean": ("", "Mean |p_old - p_roll| of the sampled tokens."),
        "trainer/mismatch_abs_p_max": ("", "Largest |p_old - p_roll| of the sampled tokens."),
        "trainer/mismatch_ppl_ratio": ("", "Perplexity of the trainer over perplexity of the engine."),
        "trainer/mismatch_chi2_token": ("", "Chi-squared over tokens, E[rho^2] - 1."),
        "trainer/mismatch_chi2_seq": ("", "Chi-squared over sequences, with the product of rho."),
        "trainer/mismatch_prob_error": ("", "token_mult_prob_error, E[exp|log rho|]; healthy below 1.03-1.05."),
        "trainer/mismatch_outside_frac": ("frac", "Sampled tokens with rho outside [0.5, 2]."),
        "trainer/mismatch_rho_mean": ("", "Mean rho = pi_old / pi_roll of the sampled tokens; 1 without mismatch."),
        "trainer/mismatch_ess": ("frac", "Effective sample size of the uncorrected rho, 1 / E[(rho / mean rho)^2]."),
    },
    "Attribution": {
        "trainer/probe_kl": ("nats", "KL(rollout || trainer as it trains), k3, of the probed batch."),
        "trainer/probe_remainder": ("nats", "The same with every source matched to the engine."),
        "trainer/probe_weights": ("nats", "What the KL gains where weights alone are not FP8."),
        "trainer/probe_activations": ("nats", "What it gains where activations alone are not FP8."),
        "trainer/probe_scales": ("nats", "What it gains where the scales alone have the other format."),
    },
    "Correction": {
        "trainer/correction_truncated_frac": ("frac", "Sampled tokens whose weight was truncated."),
        "trainer/correction_masked_frac": ("frac", "Sampled tokens masked out by the correction."),
        "trainer/correction_rejected_seq_frac": ("frac", "Sequences rejected by the correction."),
        "trainer/correction_ess": ("frac", "Effective sample size of the weights, 1 / E[(w / mean w)^2]."),
        "trainer/correction_weight_mean": ("", "Mean correction weight over kept tokens."),
    },
    "Policy": {
        "trainer/loss": ("", "Policy loss of the step."),
        "trainer/entropy": ("nats", "Mean entropy of the policy over sampled tokens.", "entropy"),
        "trainer/kl_ref": ("nats", "KL to the reference policy."),
        "trainer/clip_frac": ("frac", "Kept tokens whose ratio was clipped."),
        "trainer/clip_frac_pos": ("frac", "Clipped among kept tokens with positive advantage.", "clip+"),
        "trainer/clip_frac_neg": ("frac", "Clipped among kept tokens with negative advantage.", "clip-"),
        "trainer/dual_clip_frac": ("frac", "Dual-clipped among kept tokens with negative advantage."),
        "trainer/clip_low": ("", "Lower clip bound of the ratio in use, L (calibrated clipping)."),
        "trainer/clip_high": ("", "Upper clip bound of the ratio in use, H (calibrated clipping)."),
        "trainer/clip_calibrated": ("", "1 where the bounds were calibrated in this step, else 0."),
        "trainer/clip_alpha": ("frac", "Tokens with A < 0 that the configured bound clips in high precision."),
        "trainer/clip_alpha_naive": ("frac", "Tokens with A < 0 that the configured bound would clip in FP8."),
        "trainer/clip_mass_ratio": ("", "Positive over negative gradient mass, FP8 with L, H over high precision; 1."),
        "trainer/ratio_mean": ("", "Mean ratio pi_theta / pi_old."),
        "trainer/ratio_max": ("", "Largest ratio pi_theta / pi_old."),
    },
    "Optimizer": {
        "trainer/grad_norm": ("", "Gradient norm before clipping.", "grad"),
        "trainer/lr": ("", "Learning rate of the step."),
        "trainer/updates": ("", "Optimizer updates in the step."),
        "trainer/micro_batches": ("", "Micro-batches in the step, per rank."),
        "trainer/packed_frac": ("frac", "Tokens fed over the token budget of all micro-batches."),
    },
    "Speed": {
        "engine/tokens_per_s": ("tokens/s", "Sampled tokens per second of rollout, all ranks.", "tok/s"),
        "trainer/clip_calibration_s": ("s", "Part of training that calibrates the clip bounds."),
        "trainer/tokens_per_s": ("tokens/s", "Tokens trained on per second of training, all ranks."),
    },
    "Swap": {
        "sync/swap_s": ("s", "Weight swap, from the first byte quantized to the commit of all ranks.", "swap"),
        "sync/quantize_s": ("s", "Part of the swap that makes the FP8 codes and scales."),
        "sync/exchange_s": ("s", "Part of the swap that moves bytes between ranks."),
        "sync/engine_s": ("s", "Part of the swap spent waiting for the engine."),
        "sync/plan_s": ("s", "Part of the swap that makes the copy plan; 0 where the plan was there already."),
        "sync/bytes": ("bytes", "Bytes written into this rank's engine process."),
        "sync/bytes_sent": ("bytes", "Of all engines' bytes, those this rank sent to other ranks."),
        "sync/bytes_received": ("bytes", "Of this rank's bytes, those that came from other ranks."),
        "sync/buckets": ("", "Buckets of a swap."),
        "sync/tensors": ("", "Tensors shipped to one engine."),
        "sync/stock_tensors": ("", "Tensors that SGLang's own loader takes, because it does more than copy them."),
        "sync/verified_params": ("", "Engine parameters whose checksum was verified after the swap."),
        "sync/codes_equal": ("frac", "FP8 weights that the trainer multiplied with and the engine was sent alike; 1."),
        "sync/retries": ("", "Times the swap was sent again."),
        "sync/version": ("", "Weight version the engine holds after the swap."),
    },
    "Memory": {
        "memory/rollout_mb": ("MB", "Memory of a rank and its engine at the end of the rollout; most of any rank."),
        "memory/train_mb": ("MB", "The same at the end of training."),
        "memory/sync_mb": ("MB", "The same at the end of the swap."),
        "memory/rollout_free_mb": ("MB", "GPU memory free at the end of the rollout; least of any rank."),
        "memory/train_free_mb": ("MB", "The same at the end of training."),
        "memory/sync_free_mb": ("MB", "The same at the end of the swap."),
    },
    "Time": {
        "time/rollout_s": ("s", "Rollout: from the first request to the last reward."),
        "time/reward_s": ("s", "Part of the rollout: waiting for rewards after the last token, none of it sampling."),
        "time/train_s": ("s", "Training: log-probs, loss, optimizer."),
        "time/sync_s": ("s", "Sync phase: the swap and the memory moves around it."),
        "time/eval_s": ("s", "Held-out evaluation."),
        "time/probe_s": ("s", "Probe of the mismatch's sources."),
        "time/checkpoint_s": ("s", "Checkpoint, as far as the loop waits for it."),
        "time/step_s": ("s", "Whole step, all of the above and what lies between.", "took"),
    },
}  # fmt: skip

METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        name: Metric(unit=row[0], meaning=row[1], group=group, console=row[2] if len(row) > 2 else "")
        for group, names in _TABLE.items()
        for name, row in names.items()
    }
)


def check_names(metrics: Iterable[str]) -> None:
    """Raises ValueError naming every metric that is not in `METRICS`."""
    if unknown := sorted(name for name in metrics if name not in METRICS):
        raise ValueError(f"metrics not listed in records/metrics.py: {', '.join(unknown)}")


def markdown() -> str:
    """The registry as one markdown table."""
    rows = ["| group | metric | unit | meaning |", "|---|---|---|---|"]
    for name, metric in METRICS.items():
        meaning = metric.meaning.replace("|", "\\|")
        rows.append(f"| {metric.group} | `{name}` | {metric.unit} | {meaning} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
