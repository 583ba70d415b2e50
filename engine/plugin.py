"""What runs inside SGLang's own processes, found through the entry points in pyproject.toml.

SGLang imports this file while it looks for a platform, before torch and itself are ready, so nothing heavy is imported
at module level.
"""


def platform() -> str | None:
    """Entry point `sglang.srt.platforms`: the path of our CPU platform, or None where torch sees a GPU."""
    import torch

    return None if torch.cuda.is_available() else "engine.cpu_platform:CpuPlatform"


def install() -> None:
    """Entry point `sglang.srt.plugins`: run once in every SGLang process, before anything is built."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from engine import llama_scales

    legacy = "sglang.srt.models.llama.LlamaForCausalLM._legacy_load_weights"
    HookRegistry.register(legacy, llama_scales.load_weights, HookType.AROUND)
    remap = "sglang.srt.model_loader.auto_loader.get_weight_remap"
    HookRegistry.register(remap, llama_scales.weight_remap, HookType.AFTER)
    if platform() is not None:
        from engine import cpu_platform

        cpu_platform.install_hooks()
