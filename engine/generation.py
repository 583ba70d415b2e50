"""In the engine's child: one `Generate` of one rank, sample by sample through SGLang into the rank's arena."""

import asyncio
import base64
from typing import Any

import numpy as np

from engine.protocol import Arena, Finished, Generate, Generated, Sampling
from sync.batch import FINISH_REASONS
from sync.channel import Channel
from sync.messages import Failed
from sync.shm import SharedBytes

_ANNOUNCE_S = 0.004  # finished samples are announced together, to spare the rank a message each


class Generation:
    """`run` once. Generations of several ranks may run at the same time; SGLang batches their requests together."""

    def __init__(self, manager: Any, io: Any, channel: "Channel[Any]", message: Generate, memory: SharedBytes):
        """`manager` is SGLang's TokenizerManager, `io` its module of request structs; `memory` holds the arena."""
        self.manager, self.io, self.channel = manager, io, channel
        self.sampling, self.arena = message.sampling, Arena(memory, message.slots)
        self.finished: list[int] = []  # samples to be announced

    async def run(self, version: int) -> None:
        """Samples with the weights of `version`; the last message is Generated, or Failed."""
        params = _sampling_params(self.sampling)
        try:
            async with asyncio.TaskGroup() as tasks:  # one that fails cancels the others
                for i in range(self.arena.slots.samples):
                    tasks.create_task(self._sample(i, params, version))
            self._announce()
            self.channel.send(Generated())
        except ExceptionGroup as group:  # a refused request: the rank raises it; the engine itself lives on
            self.manager.abort_request(abort_all=True)
            self.finished = []
            self.channel.send(Failed("; ".join(f"{type(e).__name__}: {e}" for e in group.exceptions[:3])))

    async def _sample(self, i: int, params: dict[str, Any], version: int) -> None:
        arena = self.arena
        prompt = arena.prompt(i).tolist()
        request = self.io.GenerateReqInput(  # Engine.async_generate has no return_sampling_mask
            input_ids=prompt,
            sampling_params=dict(params),
            return_logprob=True,
            return_sampling_mask=self.sampling.support > 0,
            return_routed_experts=arena.slots.layers > 0,
        )
        out = await anext(self.manager.generate_request(request, None))
        meta = out["meta_info"]
        if meta["weight_version"] != str(version):
            raise RuntimeError(f"SGLang served weight version {meta['weight_version']}, not {version}")
        n = len(out["output_ids"])
        arena.tokens[i, :n] = out["output_ids"]
        arena.logprobs[i, :n] = [entry[0] for entry in meta["output_token_logprobs"]]
        if self.sampling.support and n:
            _record_support(arena, i, meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"])
        if arena.slots.layers and n:  # SGLang records nothing for a sample that was aborted before it began
            _record_experts(arena, i, len(prompt) + n, meta["routed_experts"])
        arena.versions[i] = version
        arena.finish[i] = FINISH_REASONS.index(meta["finish_reason"]["type"])
        arena.lengths[i] = n  # last: a length says that the rest is there
        if not self.finished:
            asyncio.get_running_loop().call_later(_ANNOUNCE_S, self._announce)
        self.finished.append(i)

    def _announce(self) -> None:
        if self.finished:
            self.channel.send(Finished(self.finished))
            self.finished = []


def _sampling_params(s: Sampling) -> dict[str, Any]:
    return {
        "max_new_tokens": s.max_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k or -1,
        "min_p": s.min_p,
        "stop_token_ids": list(s.stop_token_ids) or None,
    }


def _record_experts(arena: Arena, i: int, n_tokens: int, encoded: str) -> None:
    """SGLang's base64 int32 [n-1, L, K] into the sample's rows. The last token has no record: it gets the sentinel."""
    slots = arena.slots
    record = np.frombuffer(base64.b64decode(encoded), np.int32)
    if record.size != (n_tokens - 1) * slots.layers * slots.top_k:
        raise ValueError(
            f"sample {i}: routed experts hold {record.size} numbers for {n_tokens} tokens, "
            f"{slots.layers} layers, top-{slots.top_k}"
        )
    rows = arena.expert_rows(i, n_tokens)
    rows[:-1] = record.reshape(n_tokens - 1, slots.layers, slots.top_k)
    rows[-1] = -1 if slots.wide else 255


def _record_support(arena: Arena, i: int, kept: list[list[int]], logprobs: list[float]) -> None:
    """The candidates SGLang chose each token from, and the log-prob of the token among them."""
    if (widest := max(map(len, kept), default=0)) > arena.slots.support:
        raise ValueError(f"sample {i}: {widest} tokens were kept, more than top_k = {arena.slots.support}")
    arena.support[i, : len(kept)] = -1
    for row, ids in zip(arena.support[i], kept):
        row[: len(ids)] = ids
    arena.logprobs[i, : len(kept)] = logprobs
