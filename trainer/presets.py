"""Small models built from a config, with their own character tokenizer, so that demos and tests need no download.

Every quantised dimension is a multiple of 128 (block FP8 works on 128x128 blocks), and head_dim is 64, so the same
presets exercise the FP8 path of the engine. Weights are drawn at random; a supervised warm start teaches them.
"""

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCABULARY_SIZE = 64
PAD, EOS = "<pad>", "<eos>"
CHARACTERS = string.digits + "+-*=<>,: " + string.ascii_lowercase
PRESETS = ("tiny-qwen3", "tiny-qwen3-moe")


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of CHARACTERS, ids: <pad> 0, <eos> 1, then the characters, then unused names up to 64.

    Encoding a character outside the vocabulary raises instead of dropping it.
    """
    names = [PAD, EOS, *CHARACTERS]
    names += [f"<unused{i}>" for i in range(VOCABULARY_SIZE - len(names))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def preset_config(preset: str, init_std: float) -> PreTrainedConfig:
    """The transformers config of a preset; `init_std` is the standard deviation of the initial weights."""
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
        "hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256, "max_position_embeddings": 512,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": False,
        "initializer_range": init_std,
    }  # fmt: skip
    if preset == "tiny-qwen3-moe":
        values |= {
            "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "router_aux_loss_coef": 0.0,
        }  # fmt: skip
        return Qwen3MoeConfig(**values)
    return Qwen3Config(**values)


def write_preset(preset: str, init_std: float, seed: int, directory: Path) -> None:
    """Writes config.json, tokenizer and bf16 safetensors drawn from `seed` into `directory`.

    bf16, because that is what the engine computes in: trainer and engine then read exactly the same numbers.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(preset_config(preset, init_std), dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
