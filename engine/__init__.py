"""The rollout side: SGLang, tasks, rewards. Imports nothing, as SGLang imports it while looking for platforms."""
