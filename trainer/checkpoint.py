"""Checkpoints that survive a crash at any moment, and the export that transformers and SGLang load.

A checkpoint is written to `step_000012.tmp` and renamed to `step_000012` by rank 0 after every rank has written its
part, so a directory without the suffix is complete. Ranks must see the same file system. Saving is asynchronous by
default: the state is copied to host memory, then a thread writes it over a process group of its own (gloo), while
training goes on; at most one save is in flight, and its error is raised by the next call.
"""

import json
import re
import shutil
from collections.abc import Callable, Collection
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from sync.fields import doc
from trainer.trainer import Trainer

COMPLETE = re.compile(r"step_(\d{6,})")
EXTRA = "extra.json"
SHARD_BYTES = 4 * 2**30
# What an export takes over from the model it began with: configs, tokenizer, chat template, model code; no weights.
COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When to save."""

    every: Annotated[int, doc("Save every so many steps; 0: never.", unit="steps", ge=0)] = 50
    keep_last: Annotated[int, doc("Complete checkpoints to keep.", ge=1)] = 2
    asynchronous: Annotated[bool, doc("Write in a thread while training goes on (costs a copy in host memory).")] = True
    export_hf: Annotated[bool, doc("Write the final policy as a Hugging Face directory.")] = True


class Checkpointer:
    """Saves and restores one Trainer under `directory`. Every method but `settle` is a collective over all ranks."""

    def __init__(self, config: CheckpointConfig, directory: Path) -> None:
        self.config, self.directory = config, directory
        # its own group: the writer's collectives must not mix with training's
        self.group: dist.ProcessGroup = dist.new_group(backend="gloo")  # type: ignore[reportAttributeAccessIssue]
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.in_flight: Future[None] | None = None

    def save(self, trainer: Trainer, step: int, extra: dict[str, Any]) -> None:
        """Saves as `step`. `extra` (JSON values, the same on all ranks) is what `restore` returns.

        Waits for the previous save first. RuntimeError if that one, or a synchronous one, could not be written: then
        nothing has been renamed and the last complete checkpoint stands.
        """
        self.wait()
        partial = self.directory / f"step_{step:06d}.tmp"
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / EXTRA).write_text(json.dumps(extra))
        dist.barrier()
        state = _state(trainer)
        if self.config.asynchronous:
            written = async_save(state, checkpoint_id=partial, process_group=self.group)
            assert isinstance(written, Future)
            self.in_flight = self.thread.submit(self._finish, partial, written.result)
        else:
            self._finish(partial, lambda: save(state, checkpoint_id=partial, process_group=self.group))
            dist.barrier()

    def wait(self) -> None:
        """Returns when no save is in flight; raises RuntimeError if it could not be written."""
        in_flight, self.in_flight = self.in_flight, None
        if in_flight is not None:
            in_flight.result()

    def settle(self, seconds: float) -> None:
        """For a run that ends by an error: lets the save in flight finish, for at most `seconds`. Raises nothing."""
        if self.in_flight is not None:
            futures.wait([self.in_flight], timeout=seconds)

    def close(self) -> None:
        """Waits, on every rank, until the last save is in place."""
        self.wait()
        dist.barrier()
        self.thread.shutdown()

    def _finish(self, partial: Path, written: Callable[[], Any]) -> None:
        try:
            written()  # returns, or raises, after DCP has heard from every rank
        except CheckpointException as failure:  # a BaseException, which callers would not catch
            raise RuntimeError(f"checkpoint {partial} could not be written: {_reasons(failure)}") from failure
        if dist.get_rank() == 0:
            final = partial.with_suffix("")
            shutil.rmtree(final, ignore_errors=True)  # the same step, saved by an earlier run
            partial.rename(final)
            for old in complete(self.directory)[: -self.config.keep_last]:
                shutil.rmtree(old)

    def restore(self, trainer: Trainer, warn: Callable[[str], None]) -> dict[str, Any] | None:
        """Puts `trainer` into the state of the newest readable checkpoint, bit for bit, and returns its `extra`.

        None if there is no checkpoint. An unreadable one is reported through `warn` and the one before it is tried;
        ValueError if none can be read, or if it lacks the reference policy that algo.kl.coef now asks for. The number
        of ranks may differ from the one that saved. Learning rate, betas, eps and weight decay stay the config's.
        """
        found = [complete(self.directory)[::-1]]
        dist.broadcast_object_list(found, src=0, group=self.group)
        [candidates] = found
        for path in candidates:
            extra, error = self._try_restore(trainer, path)
            if error is None:
                return extra
            warn(f"checkpoint {path} cannot be read ({error}), trying the one before it")
        if candidates:
            raise ValueError(f"no checkpoint in {self.directory} can be read; remove it to start anew")
        return None

    def _try_restore(self, trainer: Trainer, path: Path) -> tuple[dict[str, Any], str | None]:
        """`extra`, and None or what went wrong on some rank; all ranks agree on the latter."""
        state, extra, saved, error = _state(trainer), {}, {}, None
        try:
            extra = json.loads((path / EXTRA).read_text())
            saved = FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as failure:  # damaged files raise all kinds of exceptions; every one is reported
            error = f"{type(failure).__name__}: {failure}"
        error = self._first(error)  # nobody enters the collective load unless everybody does
        if error is not None:
            return extra, error
        _drop_unsaved(state, saved, path)
        try:
            load(state, checkpoint_id=path, process_group=self.group)
        except CheckpointException as failure:
            error = _reasons(failure)
        except Exception as failure:  # as above
            error = f"{type(failure).__name__}: {failure}"
        else:
            _set_state(trainer, state)
        return extra, self._first(error)

    def _first(self, error: str | None) -> str | None:
        """The first error of any rank."""
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error, group=self.group)
        return next((e for e in errors if e is not None), None)


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints of a directory, oldest first."""
    found = [path for path in directory.glob("step_*") if COMPLETE.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def _reasons(failure: CheckpointException) -> str:
    """Which rank failed with what, without the tracebacks."""
    return "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, (error, _) in failure.failures.items())


def _rng_key() -> str:
    return f"rng_{dist.get_rank()}"


def _state(trainer: Trainer) -> dict[str, Any]:
    """What is saved; its tensors alias the live ones."""
    rng = {"cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state()
    state = {
        "model": get_model_state_dict(trainer.policy),
        "optimizer": get_optimizer_state_dict(trainer.policy, trainer.optimizer),
        "updates": trainer.updates,
        _rng_key(): rng,
    }
    if trainer.reference is not None:
        state["reference"] = get_model_state_dict(trainer.reference)
    if trainer.calibrator is not None:
        state["calibrator"] = trainer.calibrator.state()
    return state


def _drop_unsaved(state: dict[str, Any], saved: Collection[str], path: Path) -> None:
    """Takes out of `state` what the run that saved did not have: the random states of more ranks or of a GPU, and
    calibrated clip bounds."""
    if "reference" in state and not any(f"reference.{name}" in saved for name in state["reference"]):
        raise ValueError(f"checkpoint {path} was saved with algo.kl.coef = 0 and holds no reference policy")
    if not any(name.startswith("calibrator.") for name in saved):
        state.pop("calibrator", None)
    key = _rng_key()
    state[key] = {device: rng for device, rng in state[key].items() if f"{key}.{device}" in saved}
    if not state[key]:
        del state[key]


def _set_state(trainer: Trainer, state: dict[str, Any]) -> None:
    set_model_state_dict(trainer.policy, state["model"])
    set_optimizer_state_dict(trainer.policy, trainer.optimizer, state["optimizer"])
    for group, fresh in zip(trainer.optimizer.param_groups, trainer.new_optimizer().param_groups, strict=True):
        group |= {name: fresh[name] for name in ("betas", "eps", "weight_decay")}  # what --resume may have overridden
    if trainer.reference is not None:
        set_model_state_dict(trainer.reference, state["reference"])
    trainer.updates = state["updates"]
    if trainer.calibrator is not None and "calibrator" in state:
        trainer.calibrator.load(state["calibrator"])
    rng = state.get(_rng_key(), {})
    if "cpu" in rng:
        torch.set_rng_state(rng["cpu"])
    if "cuda" in rng:
        torch.cuda.set_rng_state(rng["cuda"])


def export_hf(trainer: Trainer, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """All ranks. Writes config, tokenizer and safetensors (at most 4 GiB each, in `dtype`) that transformers loads.

    Rank 0 writes a temporary directory and renames it to `directory`, replacing what was there.
    """
    writer = _ExportWriter(directory, trainer.model_dir, dtype) if dist.get_rank() == 0 else None
    for name, tensor in trainer.weights():
        if writer is not None:
            writer.add(name, tensor)
    if writer is not None:
        writer.close()
    dist.barrier()


class _ExportWriter:
    def __init__(self, directory: Path, model_dir: Path, dtype: torch.dtype) -> None:
        self.directory, self.dtype = directory, dtype
        self.partial = directory.with_name(directory.name + ".tmp")
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        for file in model_dir.iterdir():
            if file.is_file() and file.suffix in COPIED and not file.name.endswith(".index.json"):
                shutil.copy(file, self.partial)
        config = json.loads((self.partial / "config.json").read_text())
        for name in ("torch_dtype", "quantization_config"):  # of the model it began with
            config.pop(name, None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (self.partial / "config.json").write_text(json.dumps(config, indent=2))
        self.pending: dict[str, torch.Tensor] = {}
        self.pending_bytes = 0
        self.shards: list[tuple[Path, list[str], int]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        copy = tensor.to("cpu", self.dtype, copy=True).contiguous()
        self.pending[name] = copy
        self.pending_bytes += copy.nbytes
        if self.pending_bytes >= SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        path = self.partial / f"part-{len(self.shards)}"
        save_file(self.pending, path, metadata={"format": "pt"})
        self.shards.append((path, list(self.pending), self.pending_bytes))
        self.pending, self.pending_bytes = {}, 0

    def close(self) -> None:
        if self.pending:
            self._flush()
        count, weight_map = len(self.shards), {}
        for i, (path, names, _) in enumerate(self.shards, 1):
            file = "model.safetensors" if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors"
            path.rename(self.partial / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": sum(size for *_, size in self.shards)}, "weight_map": weight_map}
            (self.partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        shutil.rmtree(self.directory, ignore_errors=True)
        self.partial.rename(self.directory)
