"""The rollout side: SGLang, tasks and rewards. Imports nothing: SGLang imports this package while it looks for platforms."""
