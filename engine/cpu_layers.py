"""The layers SGLang runs on a CPU that are ours: block FP8, experts, attention. Glue only; arithmetic is in cpu_ops.py.

- FP8: parameters (`weight`, `weight_scale_inv`, ...), their loaders and the update path are SGLang's. Only the
  repacking after a load and the product are ours: weights are dequantized once per load, to float32, by the first step
  that needs them, and activations are rounded to FP8 in 1xK groups, so a step computes what an FP8 GEMM computes.
- Attention: one padded call per group of requests instead of a Python loop over requests.
- Experts: two grouped products instead of a Python loop over experts.
"""

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.quantization import fp8
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from engine import cpu_ops


class CpuFp8Config(fp8.Fp8Config):
    """SGLang's FP8 config with our methods; block-quantized weights and dynamic activation scales only."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.weight_block_size is None or self.use_mxfp8:
            raise ValueError("FP8 on CPU needs a quantization_config with weight_block_size, such as [128, 128]")

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.half]

    def get_quant_method(self, layer: Any, prefix: str):
        method = super().get_quant_method(layer, prefix)
        ours = {fp8.Fp8LinearMethod: Fp8LinearMethod, fp8.Fp8MoEMethod: Fp8MoEMethod}.get(type(method))
        return method if ours is None else ours(self)


# SGLang chooses a layer's weight loader by the NAME of its method's class, so the two names must stay.
class Fp8LinearMethod(fp8.Fp8LinearMethod):
    """y = fp8(x) dequantized(W)^T + b, products and sums in float32, result in x's dtype."""

    quant_config: CpuFp8Config
    weight_block_size: list[int]  # never None: CpuFp8Config

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.stale = {"weight"}

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        rounded = cpu_ops.quantize_dequantize(x, self.weight_block_size[1], self.quant_config.scale_fmt == "ue8m0")
        weight = dequantized(layer, "weight", self.weight_block_size)
        return F.linear(rounded, weight, None if bias is None else bias.float()).to(x.dtype)


class Fp8MoEMethod(fp8.Fp8MoEMethod):
    """Experts with FP8 inputs of both products; see cpu_ops.experts."""

    quant_config: CpuFp8Config
    weight_block_size: list[int]

    def create_moe_runner(self, layer: Any, moe_runner_config) -> None:
        if not is_plain(moe_runner_config):
            raise ValueError(f"FP8 experts on CPU are gated SiLU with weights on the output, not {moe_runner_config}")
        self.moe_runner_config = moe_runner_config

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.stale = {"w13_weight", "w2_weight"}

    def apply(self, layer: Any, dispatch_output: Any):
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        weights, ids, _ = dispatch_output.topk_output
        out = cpu_ops.experts(
            dispatch_output.hidden_states,
            dequantized(layer, "w13_weight", self.weight_block_size),
            dequantized(layer, "w2_weight", self.weight_block_size),
            weights,
            ids,
            group=self.weight_block_size[1],
            pow2=self.quant_config.scale_fmt == "ue8m0",
        )
        return StandardCombineInput(hidden_states=out)


def dequantized(layer: Any, name: str, block: list[int]) -> Tensor:
    """f32 values of an FP8 parameter of `layer`, made at the first use after a load.

    `layer.stale` names the parameters that were loaded since: SGLang's hook sets it after the first load and at every
    end_weight_update, the only moments at which parameters change. To dequantize there would make every swap wait. The
    values are a plain attribute, not a parameter or buffer: checksums and loaders see SGLang's own parameters only.
    """
    out = getattr(layer, f"dequantized_{name}", None)
    if name in layer.stale:
        codes, scales = getattr(layer, name).data, getattr(layer, f"{name}_scale_inv").data
        if out is None:
            out = torch.empty(codes.shape, dtype=torch.float32)
            setattr(layer, f"dequantized_{name}", out)
        cpu_ops.dequantize_weight(codes, scales, (block[0], block[1]), out)
        layer.stale.discard(name)
    assert out is not None
    return out


def is_plain(config: Any) -> bool:
    """Whether `cpu_ops.experts` computes what this MoeRunnerConfig asks for."""
    plain = config.is_gated and config.activation == "silu" and config.gemm1_alpha is None
    return plain and not config.apply_router_weight_on_input


def experts_forward(original, layer: Any, x: Tensor, topk_output, moe_runner_config) -> Tensor:
    """Around SGLang's `moe_forward_native` (unquantized experts): the plain kind in grouped products."""
    if not is_plain(moe_runner_config):
        return original(layer, x, topk_output, moe_runner_config)
    weights, ids, _ = topk_output
    return cpu_ops.experts(x, layer.w13_weight, layer.w2_weight, weights, ids)


class BatchedAttention(TorchNativeAttnBackend):
    """SGLang's torch_native attention, batched. Cross, encoder and sliding-window attention stay SGLang's loop."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.dtype = model_runner.dtype
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.plan: list[cpu_ops.AttentionGroup] = []

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        lengths = forward_batch.seq_lens
        decode = forward_batch.forward_mode.is_decode_or_idle()
        self.plan = cpu_ops.plan_attention(
            self.req_to_token,
            forward_batch.req_pool_indices,
            lengths,
            torch.ones_like(lengths) if decode else forward_batch.extend_seq_lens,
            self.dtype,
        )

    def forward_extend(self, q, k, v, layer, forward_batch: Any, save_kv_cache=True):
        if not self._is_plain(layer):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(self, q, k, v, layer, forward_batch: Any, save_kv_cache=True):
        if not self._is_plain(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache)

    def _is_plain(self, layer) -> bool:
        causal = layer.attn_type == AttentionType.DECODER and not layer.is_cross_attention
        return causal and layer.sliding_window_size <= -1 and not self.use_sliding_window_kv_pool

    def _forward(self, q, k, v, layer, forward_batch: Any, save_kv_cache):
        if save_kv_cache and k is not None:
            pool: Any = self.token_to_kv_pool  # annotated without the KVWriteLoc that it takes
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = query.new_empty(len(query), layer.tp_q_head_num, layer.v_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        cpu_ops.attend(query, keys, values, self.plan, layer.scaling, out)
        return out.view(len(query), -1)
