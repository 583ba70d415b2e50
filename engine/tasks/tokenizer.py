"""The tokenizer of a model directory, and the tokens that end a response of that model."""

import json
from pathlib import Path
from typing import Any


def load_tokenizer(directory: Path) -> tuple[Any, tuple[int, ...]]:
    """The Hugging Face tokenizer and its end-of-response ids: its own EOS and those of the generation config.

    Raises ValueError if the directory has no tokenizer, or nothing says which token ends a response.
    """
    from transformers import AutoTokenizer  # seconds to import, and reward workers load this package too

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {directory}: no tokenizer there ({str(error).splitlines()[0]})") from None
    ends = {tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        if path.is_file():
            listed = json.loads(path.read_text()).get("eos_token_id")
            ends.update(listed if isinstance(listed, list) else [listed])
    ends.discard(None)
    if not ends:
        raise ValueError(f"model {directory}: neither tokenizer nor config says which token ends a response")
    return tokenizer, tuple(sorted(ends))
