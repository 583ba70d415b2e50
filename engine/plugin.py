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
    if platform() is not None:
        from engine import cpu_platform

        cpu_platform.install_hooks()
