"""The rank's end of its engine: starts the child process, watches it, speaks to it, starts it again.

The child (engine/child.py) owns `sglang.Engine`. It gets an environment without torchrun's variables (SGLang's own
process groups would wait for them) and a private socket. Everything it prints goes to a log file, whose tail is part of
the error when it dies. Of ranks that share an engine the first does all that; the others connect (engine/team.py).
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch

from engine.protocol import (
    Arena,
    Finished,
    FromChild,
    Generate,
    Generated,
    Join,
    Ready,
    Sampling,
    Skip,
    Sleep,
    Slots,
    Start,
    Stop,
    Wake,
)
from engine.team import Seat
from sync.channel import Channel
from sync.fields import doc
from sync.messages import Done, Failed, FromEngine, ToEngine

_TORCHRUN = ("RANK", "WORLD_SIZE", "GROUP_", "LOCAL_", "ROLE_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC")
_LOG_TAIL = 12  # lines shown when the child dies
_STOP_S = 10.0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The SGLang engine of a rank, or of several."""

    tensor_parallel: Annotated[
        int,
        doc(
            "Ranks (GPUs) that share one engine; it must divide the ranks, and those of an engine must be on one"
            " machine.",
            unit="ranks",
            ge=1,
        ),
    ] = 1
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        doc("Dtype of activations and of weights that are not FP8; auto: bfloat16 on GPUs, float32 on CPUs."),
    ] = "auto"
    context_length: Annotated[int, doc("Longest prompt and response together.", unit="tokens", ge=2)] = 4096
    max_running_requests: Annotated[int, doc("Sequences decoded at the same time.", unit="sequences", ge=1)] = 256
    kv_cache_tokens: Annotated[
        int,
        doc("KV cache; 0: what gpu_memory_fraction leaves, or on CPUs enough for all requests.", unit="tokens", ge=0),
    ] = 0
    gpu_memory_fraction: Annotated[
        float, doc("Share of GPU memory for weights and KV cache (SGLang's mem_fraction_static).", gt=0, lt=1)
    ] = 0.7
    record_experts: Annotated[bool, doc("Record the experts of every token of an MoE model.")] = True
    memory_saver: Annotated[
        bool,
        doc("Release GPU memory of the engine while the trainer works (torch_memory_saver); no effect on CPUs."),
    ] = True
    threads: Annotated[int, doc("CPU threads of the engine's math.", unit="threads", ge=1)] = 1
    start_timeout_s: Annotated[float, doc("Longest start.", unit="s", gt=0)] = 900.0
    stall_timeout_s: Annotated[float, doc("Longest wait for the next finished sample.", unit="s", gt=0)] = 600.0
    max_restarts: Annotated[int, doc("Engine starts after a crash, per run, before the run stops.", ge=0)] = 3
    sglang: Annotated[
        dict[str, Any], doc("Further arguments of sglang.Engine by their own names; they win over ours.")
    ] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if "tp_size" in self.sglang:
            raise ValueError("sglang.tp_size is not for you to set: use engine.tensor_parallel")


class EngineDied(RuntimeError):
    """The child process ended or stopped answering. The trainer is untouched; `EngineHost.restart` may follow."""


class EngineError(RuntimeError):
    """The engine refused a request and goes on."""


class EngineHost:
    """A rank's engine: owns the child process, or shares the one of another rank. Use as a context manager."""

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        quantization: dict[str, Any] | None,
        log_path: Path,
        seed: int,
        device: torch.device,
        seat: Seat = Seat(),  # noqa: B008
    ):
        """`quantization` is the model's `quantization_config` override (FP8), None for the plain dtype. Ranks that
        share an engine pass the same but for `device` and the place of `seat`: what differs is the first one's.

        Raises ValueError for an allocator setting that the memory saver cannot work with.
        """
        assert seat.ranks == config.tensor_parallel, (seat, config.tensor_parallel)
        self.config, self.log_path, self.seed, self.device, self.seat = config, log_path, seed, device, seat
        if device.type == "cuda" and config.memory_saver:
            _refuse_expandable_segments(os.environ)
        self.team = seat.ranks
        self.server_args = server_args(config, model_dir, quantization, device)
        self.model = json.loads((model_dir / "config.json").read_text())
        self.reports = log_path.with_suffix(".swap").absolute()  # files that cross in a swap
        self.starts = 0
        self.unplanned = self.unverified = True  # this engine process has recorded no plan, proved no swap yet
        self.sglang = ""  # version, once it runs
        self.process: subprocess.Popen[bytes] | None = None  # of the rank that started it
        self.channel: Channel[Any] | None = None

    def __enter__(self) -> "EngineHost":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        if self.seat.place:
            return self.channel is not None and not self.channel.closed
        return self.process is not None and self.process.poll() is None

    def spawn(self) -> None:
        """Starts the child without waiting for it, so that the rank can build its trainer meanwhile."""
        self.starts += 1
        self.unplanned = self.unverified = True
        self.reports.mkdir(exist_ok=True)
        if self.seat.place:
            self.channel = Channel(socket.socket(socket.AF_UNIX), FromChild)  # `start` connects it
            return
        ours, theirs = socket.socketpair()
        ends = [theirs] if self.team == 1 else [theirs, self.seat.listen(self.starts)]
        descriptor, *listener = [str(end.fileno()) for end in ends]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engine.child", descriptor, str(os.getpid()), *listener],
                env=self._environment(),
                pass_fds=[end.fileno() for end in ends],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a signal for the rank's group is not for the engine: the rank closes it
            )
        for end in ends:
            end.close()
        self.channel = Channel(ours, FromChild)
        self._send(Start(self.server_args, self.seed + 7919 * self.starts, str(self.reports), self.team))

    def start(self) -> None:
        """Waits until the engine serves; spawns it first if need be. Raises EngineDied."""
        if self.channel is None:
            self.spawn()
        if self.seat.place:
            self._join()
        message = self._receive(self.config.start_timeout_s, "starting")
        assert isinstance(message, Ready), message
        self.sglang = message.sglang

    def restart(self) -> None:
        """Ends what is left of the child and starts a new one, without weights. EngineDied past `max_restarts`.

        All ranks that share the engine must do so.
        """
        self.close()
        if self.starts > self.config.max_restarts:
            raise EngineDied(f"the engine died {self.starts} times: engine.max_restarts = {self.config.max_restarts}")
        self.start()

    def post(self, message: ToEngine | Sleep | Wake | None) -> None:
        """Sends a message of a swap or a memory phase. `reply` waits for the answer, or finds that the child is gone.

        None, for a rank that has a problem: the other ranks of the engine get `Failed` for what they send, and so does
        it.
        """
        assert self.channel is not None, "the engine is not started"
        assert message is not None or self.team > 1, "only ranks that share an engine have nothing to send"
        with contextlib.suppress(OSError):  # it closed its channel: `reply` finds that out, and why
            self.channel.send(Skip() if message is None else message)

    def reply(self, timeout: float) -> FromEngine:
        """The next answer to a posted message. A dead or stuck child is `Failed`: a swap can be retried whole."""
        try:
            reply = self._receive(timeout, "changing its weights or its memory")
        except EngineDied as error:
            return Failed(str(error))
        assert isinstance(reply, FromEngine), reply
        return reply

    def sleep(self, tags: tuple[str, ...]) -> Done | Failed:
        """The engine gives back the memory of `tags`, SGLang's names, and what is in it. Errors as in `reply`."""
        return self._ask(Sleep(tags))

    def wake(self, tags: tuple[str, ...]) -> Done | Failed:
        """The engine takes memory for `tags` that sleep; weights must be swapped in before it generates again."""
        return self._ask(Wake(tags))

    def _ask(self, message: Sleep | Wake) -> Done | Failed:
        self.post(message)
        reply = self.reply(self.config.stall_timeout_s)
        assert isinstance(reply, Done | Failed), reply
        return reply

    def generate(self, prompts: list[Any], sampling: Sampling) -> Iterator[tuple[list[int], Arena]]:
        """Samples one response per prompt (i32 arrays); yields the numbers of samples as they finish, and the arena.

        Raises ValueError for a prompt that leaves no room, EngineError if the engine refuses, EngineDied if it is gone.
        """
        arena, memory = Arena.create(self._slots(prompts, sampling))
        arena.prompt_starts[1:] = [len(prompt) for prompt in prompts]
        arena.prompt_starts[:] = arena.prompt_starts.cumsum()
        for i, prompt in enumerate(prompts):
            arena.prompt(i)[:] = prompt
        try:
            self._send(Generate(arena.slots, sampling), (memory.fd,))
            while not isinstance(message := self._receive(self.config.stall_timeout_s, "generating"), Generated):
                if isinstance(message, Failed):
                    raise EngineError(message.reason)
                assert isinstance(message, Finished), message
                yield message.samples, arena
        finally:
            memory.close()

    def close(self) -> None:
        """Stops the child, by force (of the rank that started it) if it does not stop. Safe to call twice."""
        if self.channel is None:
            return
        with contextlib.suppress(OSError):  # it may be gone already
            self.channel.send(Stop())
        self.channel.close()
        if self.process is not None:
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            with contextlib.suppress(ProcessLookupError):  # what SGLang left behind; all are in the child's own group
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process = self.channel = None

    def _join(self) -> None:
        assert self.channel is not None
        timeout = self.config.start_timeout_s
        try:
            self.seat.connect(self.channel.socket, self.starts, timeout)
        except TimeoutError:
            raise self._died(f"could not be reached for {timeout:.0f} s") from None
        self._send(Join(self.seat.place))

    def _slots(self, prompts: list[Any], sampling: Sampling) -> Slots:
        longest = max((len(prompt) for prompt in prompts), default=0)
        if longest + sampling.max_tokens > self.config.context_length:
            raise ValueError(
                f"engine.context_length = {self.config.context_length} is less than the longest prompt ({longest}) "
                f"and {sampling.max_tokens} sampled tokens together"
            )
        experts = n_experts(self.model) if self.config.record_experts else 0
        return Slots(
            samples=len(prompts),
            prompt_tokens=sum(len(prompt) for prompt in prompts),
            max_tokens=sampling.max_tokens,
            layers=self.model["num_hidden_layers"] if experts else 0,
            top_k=self.model["num_experts_per_tok"] if experts else 0,
            wide=experts > 255,
            support=sampling.support,
        )

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(_TORCHRUN)}
        kept.pop("SGLANG_USE_CPU_ENGINE", None)  # it would import sgl_kernel, which needs libcuda
        kept.pop("SGLANG_FP8_IGNORED_LAYERS", None)  # it would quantize other layers than the `fp8` section says
        kept["CUDA_VISIBLE_DEVICES"] = ""
        if self.device.type == "cuda":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            first = self.device.index or 0
            indices = range(first, first + self.team)
            kept["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[i] if visible else str(i) for i in indices)
        elif self.team > 1:  # SGLang asks for it, and then binds nothing without its kernels
            kept.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, range(self.team))))
        return kept | {
            "OMP_NUM_THREADS": str(self.config.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONWARNINGS": "ignore",
        }

    def _send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        assert self.channel is not None, "the engine is not started"
        try:
            self.channel.send(message, fds)
        except OSError:
            raise self._died("closed its channel") from None

    def _receive(self, timeout: float, doing: str) -> Any:
        assert self.channel is not None, "the engine is not started"
        try:
            message, _ = self.channel.receive(timeout)
        except TimeoutError:
            raise self._died(f"gave no sign for {timeout:.0f} s while {doing}") from None
        except OSError as error:
            raise self._died(f"{error} while {doing}") from None
        if message is None:
            raise self._died(f"ended while {doing}")
        return message

    def _died(self, what: str) -> EngineDied:
        how = self._end()
        log = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        tail = "\n  ".join(log.splitlines()[-_LOG_TAIL:])
        return EngineDied(f"the engine {what} ({how}); last lines of {self.log_path}:\n  {tail}")

    def _end(self) -> str:
        """Sees to it that the child is at its end; how it ended."""
        if self.seat.place:
            assert self.channel is not None
            self.channel.close()  # ends the child, unless it is stuck: then the rank that started it kills it
            return f"shared by {self.team} ranks"
        assert self.process is not None
        if self.process.poll() is None:
            try:
                self.process.wait(1.0)  # it may be on its way out; then its exit status is known
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        code = self.process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _refuse_expandable_segments(environment: Mapping[str, str]) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):  # torch's old and new name
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            raise ValueError(
                f"{name} turns expandable_segments on, with which torch_memory_saver cannot release the engine's "
                "memory: unset it, or set engine.memory_saver: false"
            )


def n_experts(model_config: dict[str, Any]) -> int:
    """Experts per layer of a Hugging Face config.json; 0 for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(model_config[name]) for name in names if model_config.get(name)), 0)


def server_args(
    config: EngineConfig, model_dir: Path, quantization: dict[str, Any] | None, device: torch.device
) -> dict[str, Any]:
    """Arguments of `sglang.Engine`: no weights on disk are read, the first swap brings them.

    Raises ValueError for pipeline parallelism: each of its processes has other layers, and a swap expects the same.
    """
    if config.sglang.get("pp_size", 1) > 1:
        raise ValueError("engine.sglang.pp_size must be 1: use engine.tensor_parallel to spread the engine over GPUs")
    cpu = device.type == "cpu"
    model = json.loads((model_dir / "config.json").read_text())
    args: dict[str, Any] = {
        "model_path": str(model_dir),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": ("float32" if cpu else "bfloat16") if config.dtype == "auto" else config.dtype,
        "tp_size": config.tensor_parallel,
        "context_length": config.context_length,
        "max_running_requests": config.max_running_requests,
        "log_level": "error",
        "enable_return_routed_experts": config.record_experts and n_experts(model) > 0,
    }
    if quantization:
        args |= {
            "quantization": "fp8",
            "json_model_override_args": json.dumps({"quantization_config": quantization}),
        }
    if config.kv_cache_tokens or cpu:
        args["max_total_tokens"] = config.kv_cache_tokens or config.max_running_requests * config.context_length
    if cpu:
        args |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "sleep_on_idle": True,  # else the idle scheduler spins a whole core
        }
    else:
        args |= {"mem_fraction_static": config.gpu_memory_fraction, "enable_memory_saver": config.memory_saver}
    return args | config.sglang
