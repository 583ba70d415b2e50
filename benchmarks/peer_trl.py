"""TRL's GRPOTrainer as the other side of benchmarks/loop.py, run in .venv-peers (`make peers`).

Of ours it imports benchmarks/sides.py alone.

    .venv-peers/bin/python -m benchmarks.peer_trl JOB      JOB is JSON: kind, model, threads, lr, batch_size, ...

kind "trainer": the optimisation step alone, on samples it is given. What GRPOTrainer does before (tokenizing, sampling,
decoding, rewards, advantages, padding) is replaced by tensors prepared before the clock starts; the clock runs from
on_step_begin to on_step_end: forward, loss, backward, clipping, AdamW. `num_iterations=1`, so there is no pass for old
log-probs. Padding is TRL's: all prompts to the longest on the left, all completions to the longest on the right.
kind "loop": its whole step, its own sampling by transformers' generate included.

Set for speed, against TRL's defaults: float32 without autocast (bf16 is slow on CPUs), no gradient checkpointing, no
logging, no saving, no auxiliary loss. `batch_size` sequences go through the model at a time, in gradient accumulation.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from benchmarks.sides import Turns


class OneTurn(TrainerCallback):
    """Waits before every optimiser step until it is our turn, and times it."""

    def __init__(self, turns: Turns):
        self.turns, self.began = turns, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.turns.reply()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.turns.wait():
            os._exit(0)  # nothing is left to save
        self.began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.turns.reply(seconds=time.perf_counter() - self.began)


class FixedSamples(GRPOTrainer):
    """GRPOTrainer that is given its samples instead of generating and scoring them."""

    samples: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
        return dict(self.samples)


def load_samples(path: str, advantages: str) -> dict[str, torch.Tensor]:
    """What GRPOTrainer makes of its own samples, from a saved Batch and the advantage of every sequence."""
    batch = np.load(path)
    bounds = list(zip(batch["starts"][:-1], batch["starts"][1:], strict=True))
    firsts = [int(start + batch["sampled"][start:end].argmax()) for start, end in bounds]
    prompts = [batch["tokens"][start:first] for (start, _), first in zip(bounds, firsts, strict=True)]
    completions = [batch["tokens"][first:end] for (_, end), first in zip(bounds, firsts, strict=True)]
    prompt_ids, prompt_mask = _pad(prompts, left=True)
    completion_ids, completion_mask = _pad(completions, left=False)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.from_numpy(np.load(advantages)),
        "num_items_in_batch": completion_mask.sum(),
    }


def _pad(rows: list[Any], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(ids.shape[1] - len(row), None) if left else slice(0, len(row))
        ids[i, place], mask[i, place] = torch.from_numpy(row.astype(np.int64)), 1
    return ids, mask


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The reward of our arithmetic task."""
    return [float(given.strip() == wanted) for given, wanted in zip(completions, answer, strict=True)]


def main(job: dict[str, Any]) -> None:
    """Trains until nobody takes turns any more."""
    turns = Turns()
    torch.set_num_threads(job["threads"])
    micro_steps = job["samples"] // job["batch_size"]
    moe = "num_experts" in json.load(open(f"{job['model']}/config.json"))  # noqa: SIM115
    config = GRPOConfig(
        output_dir=job["output"],
        max_steps=10**6,
        per_device_train_batch_size=job["batch_size"],
        gradient_accumulation_steps=micro_steps,
        steps_per_generation=micro_steps,
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        temperature=1.0,
        model_init_kwargs={"dtype": "float32"},
        router_aux_loss_coef=0.0 if moe else None,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        adam_beta2=0.99,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = (FixedSamples if job["kind"] == "trainer" else GRPOTrainer)(
        model=job["model"],
        reward_funcs=exact,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": job["prompts"], "answer": job["answers"]}),
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        callbacks=[OneTurn(turns)],
    )
    if isinstance(trainer, FixedSamples):
        trainer.samples = load_samples(job["batch"], job["advantages"])
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
