"""A Hugging Face causal LM as an FSDP2 policy: where it comes from, how it is sharded, what it computes, how it leaves.

Layouts: parameters are fp32 masters, one FSDP group per decoder layer and one for the rest (embedding, final norm,
head); compute is bf16 or fp32, gradients are reduced in fp32. The transformers module is kept as it is: attention is
replaced through AttentionInterface and the head is bypassed (trainer/logprob.py).
With fp8.train the projections are gathered as FP8 codes and multiplied by trainer/fp8.
What it gives up: loading needs the checkpoint once in rank 0's host memory, and every model whose log-probs would be
wrong here is refused (transformed logits, dropout, layers other than full or sliding-window attention).
"""

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from sync.encode import Wire
from sync.fields import doc
from sync.fp8_tensor import Fp8Weights, Named
from sync.quantize import Fp8Config
from sync.shards import Piece, Shard
from trainer import attention, presets
from trainer.fp8 import make_backend
from trainer.fp8.linear import Arithmetic, swap
from trainer.logprob import token_logprobs
from trainer.pack import MicroBatch

LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
LAYER_TYPES = {"full_attention", "sliding_attention"}
OTHER_HEADS = ("classifier_", "summary_")  # config keys of heads that a causal LM does not have


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model to train: exactly one of `path` and `preset`."""

    path: Annotated[
        str,
        doc(
            "Hugging Face causal-LM directory, a GGUF file, or package:<import name>/<file> for a GGUF file shipped in"
            " an installed Python package."
        ),
    ] = ""
    preset: Annotated[str, doc(f"Small model with random weights and a character tokenizer: {presets.PRESETS}.")] = ""
    init_std: Annotated[float, doc("Standard deviation of a preset's initial weights.", gt=0)] = 0.02

    def __post_init__(self) -> None:
        if bool(self.path) == bool(self.preset):
            raise ValueError("model needs exactly one of path and preset")
        if self.preset and self.preset not in presets.PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}, allowed: {', '.join(presets.PRESETS)}")


def materialize(config: ModelConfig, directory: Path, seed: int) -> Path:
    """The model as a Hugging Face directory (config.json, tokenizer, safetensors) that trainer and engine both read.

    A Hugging Face path is returned as it is. A preset (drawn from `seed`) or a GGUF file is written once, in bf16, to a
    sub-directory of `directory` whose name says what it holds; later calls find it. The write is renamed into place, so
    a killed run leaves no half model. No collectives: call it on one rank, or on all (the first to finish wins).
    Raises ValueError, with a remedy, if the path holds no model.
    """
    if config.preset:
        target = directory / f"{config.preset}-std{config.init_std:g}-seed{seed}"
        return _write_once(target, lambda part: presets.write_preset(config.preset, config.init_std, seed, part))
    path = _resolve(config.path)
    if path.suffix == ".gguf":
        return _write_once(directory / path.stem, lambda part: _convert_gguf(path, part))
    if not (path / "config.json").is_file():
        raise ValueError(f"model.path {path}: no config.json there; give the directory of a downloaded model")
    return path


def _resolve(path: str) -> Path:
    if not path.startswith("package:"):
        result = Path(path).expanduser()
    else:
        package, _, file = path.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"model.path {path}: Python package {package} is not installed; pip install it")
        result = Path(spec.submodule_search_locations[0]) / file
    if not result.exists():
        raise ValueError(f"model.path {path}: {result} does not exist; download the model first")
    return result


def _write_once(target: Path, write: Any) -> Path:
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(part)
        part.chmod(0o755)
        part.rename(target)
    except OSError:
        if not (target / "config.json").is_file():  # else another rank was faster, and its model is the same
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _convert_gguf(path: Path, directory: Path) -> None:
    """What `from_pretrained(gguf_file=…)` does, without the accelerate package that it asks for and does not use."""
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    lost = set(missing) - set(model.all_tied_weights_keys)
    if lost or unexpected:
        raise ValueError(f"{path}: transformers' GGUF reader does not cover {sorted(lost) or unexpected}")
    model.bfloat16().save_pretrained(directory)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(directory)


class Policy(nn.Module):
    """The model as the trainer sees it: packed tokens in, log-probs of the sampled tokens out."""

    def __init__(self, hf: PreTrainedModel, shard_mesh: DeviceMesh, temperature: float, logits_mib: int) -> None:
        super().__init__()
        self.hf = hf
        self.shard_mesh = shard_mesh  # 1-D: the ranks that hold one copy of the model together
        self._pieces: dict[str, tuple[Piece, ...]] = {}
        self.arithmetic: Arithmetic | None = None  # with fp8.train, as the next one
        self.fp8: Fp8Weights | None = None
        self.temperature = temperature
        self.chunk_rows = max(1, logits_mib * 2**20 // (4 * hf.config.get_text_config().vocab_size))

    def forward(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """(log-prob f32[R], entropy f32[R] in nats) at the R rows of `micro`; only the log-prob carries a gradient.

        Both are of softmax(logits / temperature), renormalised over the candidates where `micro.support` is given.
        """
        if self.fp8 is not None:
            self.fp8.refresh()
        hidden = self.hf.get_decoder()(
            input_ids=micro.tokens[None], position_ids=micro.positions[None], use_cache=False, layout=micro.layout
        ).last_hidden_state[0]
        head: Any = self.hf.get_output_embeddings()
        return token_logprobs(
            hidden.index_select(0, micro.rows), head.weight, head.bias, micro.targets,
            temperature=self.temperature, support_RS=micro.support, chunk_rows=self.chunk_rows,
        )  # fmt: skip

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, whole fp32 tensor) of every weight, tied ones once: what `save_pretrained` would write.

        A collective: every rank must run it to the end. One parameter is gathered at a time; tensors may be views of it
        (experts are stacked in the model and separate in the checkpoint), so copy what must outlive the iteration.
        """
        for name, tensor in self._own_state():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            yield from revert_weight_conversion(self.hf, {name: whole.detach()}).items()

    def shards(self) -> list[Shard]:
        """The same weights where they lie: this rank's rows of every parameter, without moving any. With fp8.train the
        codes and scales that the next forward multiplies with.

        A collective with fp8.train only. Raises ValueError for a model whose checkpoint tensors are not runs of rows of
        its parameters, and, with fp8.train, naming a tensor that holds a NaN or Inf.
        """
        ready: dict[str, Shard] = {} if self.fp8 is None else self.fp8.shards()
        return [
            ready.get(name) or Shard(self._pieces_of(name, tensor.shape), self._bounds(tensor), _local_rows(tensor))
            for name, tensor in self._own_state()
        ]

    def high_precision(self, *, weights: bool = True, activations: bool = True) -> AbstractContextManager[None]:
        """Forwards inside (under no_grad) take masters and activations in the compute dtype, or one of the two, where
        FP8 layers take their FP8 values. A collective per layer for weights. Without fp8.train: nothing changes."""
        return nullcontext() if self.arithmetic is None else self.arithmetic.high_precision(weights, activations)

    def other_scales(self) -> AbstractContextManager[None]:
        """Forwards inside (under no_grad) quantize with the scale format that the config does not name. A collective
        per layer. Needs fp8.train."""
        assert self.arithmetic is not None
        return self.arithmetic.other_scales()

    @property
    def fp8_names(self) -> list[str]:
        """Checkpoint names of the weights that the forward multiplies with in FP8."""
        stored = () if self.fp8 is None else self.fp8.stored.values()
        return [piece.name for each in stored for piece in each.pieces]

    def use_fp8(self, fp8: Fp8Config, n_layers: int) -> None:
        """Before sharding. Swaps in the modules that multiply in FP8. Raises ValueError where the model cannot."""
        backend = make_backend(fp8, self.shard_mesh.device_type)
        if backend is None:
            return
        chosen = {}
        for name, tensor in self._own_state():
            pieces = self._pieces_of(name, tensor.shape)
            verdicts = {fp8.is_quantized(piece.name, piece.shape, n_layers): piece.name for piece in pieces}
            if len(verdicts) > 1:
                raise ValueError(f"fp8: {verdicts[True]} is quantized and {verdicts[False]} is not, but {name} is both")
            if True in verdicts:
                chosen[name] = pieces
        self.arithmetic = swap(self.hf, chosen, backend, fp8)
        self._chosen = chosen

    def hold_fp8(self, fp8: Fp8Config, n_layers: int, dtype: torch.dtype) -> None:
        """After sharding and loading, before the first forward: FSDP gathers codes from now on."""
        if self.arithmetic is None:
            return
        named = {}
        for name in self._chosen:
            tensor = self.hf.get_parameter(name)
            assert isinstance(tensor, DTensor)
            named[name] = Named(tensor, self._pieces_of(name, tensor.shape), self._bounds(tensor))
        group = self.shard_mesh.get_group()
        self.fp8 = Fp8Weights(Wire(fp8, n_layers, dtype), named, self.shard_mesh.get_local_rank(), group)

    def weights_changed(self) -> None:
        """After an optimizer's step, which leaves no other trace: the next forward makes the FP8 codes anew."""
        if self.fp8 is not None:
            self.fp8.changed()

    def _own_state(self) -> Iterator[tuple[str, Tensor]]:
        """The state dict, tied tensors once."""
        seen = set()
        for name, tensor in self.hf.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def _bounds(self, tensor: Tensor) -> tuple[int, ...]:
        """Rows at which the ranks' parts of a parameter begin, and the end."""
        ranks = self.shard_mesh.size()
        inner, first = tensor.shape[1:-1].numel(), tensor.shape[0] if tensor.ndim else 1
        if not isinstance(tensor, DTensor):  # a buffer, the same on every rank: rank 0 sends it
            return (0, *[first * inner] * ranks)
        each = -(-first // ranks)  # what torch.chunk gives, and so Shard(0)
        return tuple(min(rank * each, first) * inner for rank in range(ranks + 1))

    def _pieces_of(self, name: str, shape: torch.Size) -> tuple[Piece, ...]:
        """The checkpoint tensors inside one parameter."""
        if name not in self._pieces:
            # The conversion is asked with a tensor of two columns in which every number is that of its row.
            columns = 2 if len(shape) > 1 else 1
            inner, width = (shape[:-1], shape[-1:]) if columns == 2 else (shape, shape[:0])
            numbered = torch.arange(inner.numel()).repeat_interleave(columns).view(*inner, *[columns] * len(width))
            pieces = []
            for key, part in revert_weight_conversion(self.hf, {name: numbered}).items():
                first = int(part.flatten()[0])
                run = torch.arange(first, first + part.numel() // columns).repeat_interleave(columns)
                if not torch.equal(part.flatten(), run):
                    raise ValueError(f"{key} is not a run of rows of {name}: this model cannot be swapped by shards")
                pieces.append(Piece(key, (*part.shape[: part.ndim - len(width)], *width), first))
            self._pieces[name] = tuple(sorted(pieces, key=lambda piece: piece.row))
        return self._pieces[name]


def _local_rows(tensor: Tensor) -> Tensor:
    """f32 [rows of this rank, K], a view."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)


def build_model(
    directory: Path,
    *,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    temperature: float,
    logits_mib: int,
    activation_checkpointing: bool,
    fp8: Fp8Config | None = None,
    like: Policy | None = None,
) -> Policy:
    """The model of a Hugging Face directory, sharded over `mesh` (1-D: FSDP; 2-D: replicate x shard). With `like` the
    weights are those of that policy of the same model and mesh.

    A collective. Rank 0 reads the checkpoint into host memory in its stored dtype (61 GB for a 30B model in bf16) and
    scatters it parameter by parameter; no other rank and no device ever holds more than its shard and one parameter.
    Raises ValueError for models whose log-probs would be wrong here, and for an fp8.train that cannot run here.
    """
    AttentionInterface.register(attention.NAME, attention.packed_attention)
    config = AutoConfig.from_pretrained(directory)
    _refuse_unsupported(config.get_text_config(), directory)
    with torch.device("meta"):
        # experts, where there are any: transformers' default is one grouped GEMM per projection, on every device
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention.NAME)
    if not hf._supports_attention_backend or not hasattr(hf.get_decoder(), "layers"):
        raise ValueError(f"{directory}: {type(hf).__name__} is not a stack of layers whose attention can be replaced")
    if any(isinstance(c, WeightConverter) and len(c.target_patterns) > 1 for c in get_model_conversion_mapping(hf)):
        raise ValueError(f"{directory}: {type(hf).__name__} splits checkpoint tensors, which weights() cannot undo")
    if activation_checkpointing:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(hf.train(), mesh if mesh.ndim == 1 else mesh["shard"], temperature, logits_mib)
    n_layers = config.get_text_config().num_hidden_layers
    if fp8 is not None:
        policy.use_fp8(fp8, n_layers)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in hf.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    policy.to_empty(device=mesh.device_type if mesh.device_type == "cpu" else torch.cuda.current_device())
    hf.tie_weights()  # to_empty gave tied parameters separate storage
    if like is None:
        _load(hf, directory)
    else:
        copy_weights(like, policy)
    if fp8 is not None:
        policy.hold_fp8(fp8, n_layers, dtype)
    return policy


def _refuse_unsupported(config: Any, directory: Path) -> None:
    for name in LOGIT_TRANSFORMS:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"{directory}: config.{name} changes the logits, which the trainer does not support")
    if others := set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        raise ValueError(f"{directory}: {config.model_type} has layers of type {', '.join(sorted(others))}; "
                         f"the trainer computes {' and '.join(sorted(LAYER_TYPES))}")  # fmt: skip
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float) and value and not name.startswith(OTHER_HEADS):
            raise ValueError(f"{directory}: config.{name} of {config.model_type} is {value}; set it to 0: with dropout "
                             "the log-probs would be random")  # fmt: skip


@torch.no_grad()
def _load(hf: PreTrainedModel, directory: Path) -> None:
    """Fills parameters and buffers (the rotary ones are in no checkpoint) from rank 0's copy."""
    source = None
    if dist.get_rank() == 0:
        source = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    for name, param in hf.named_parameters():
        assert isinstance(param, DTensor), name
        local = param.to_local()
        whole = torch.empty(param.shape, dtype=param.dtype, device=local.device)
        if source is not None:
            whole.copy_(source.get_parameter(name))
        local.copy_(distribute_tensor(whole, param.device_mesh, param.placements).to_local())
    for name, buffer in hf.named_buffers():
        if source is not None:
            buffer.copy_(source.get_buffer(name))
        dist.broadcast(buffer, src=0)


@torch.no_grad()
def copy_weights(source: Policy, target: Policy) -> None:
    """Gives `target` this rank's masters and buffers of `source`, a policy of the same model and mesh."""
    for policy in (source, target):
        reshard(policy)  # parameters that are gathered are not the masters
    theirs, buffers = dict(source.hf.named_parameters()), dict(source.hf.named_buffers())
    for name, mine in target.hf.named_parameters():
        other = theirs[name]
        assert isinstance(mine, DTensor) and isinstance(other, DTensor), name
        mine.to_local().copy_(other.to_local())
    for name, buffer in target.hf.named_buffers():
        buffer.copy_(buffers[name])


def reshard(policy: Policy) -> None:
    """Drops the gathered root parameters that a forward without backward leaves behind; else they would go stale."""
    assert isinstance(policy, FSDPModule)
    policy.reshard()
