"""Tiny random models and plain references, for tests of the engine and of what is built on it.

A tiny model is an ordinary Hugging Face folder: everything that loads a real one loads it. Its weights are random but
large enough for the next token to be a clear choice, so that greedy texts can be compared.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from cacheaware_engine.errors import NativeAttentionUnsupported
from cacheaware_engine.native_attention import NativeAttention
from cacheaware_engine.runner import ModelRunner, SequenceWork
from cacheaware_engine.settings import AttentionBy
from cacheaware_engine.startup import native_attention

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES: Final = (("t", "h"), ("th", "e"))  # so that a token is not always one letter
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

TINY_MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama-gqa": {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2},
    "llama-mha": {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "llama-mqa-biases": {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama-odd-head": {"model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 54},
    "llama-linear-rope": {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "llama3-rope": {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"model_type": "mistral", "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None},
    "mistral-window": {
        "model_type": "mistral",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 9,
    },
    "qwen2-some-windows": {
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "use_sliding_window": True,
        "sliding_window": 17,
        "max_window_layers": 1,
    },
    "qwen2": {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gemma": {"model_type": "gemma", "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16},
    "gemma3-windows": {
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 24,
    },
    "phi3": {"model_type": "phi3", "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None},
    "qwen3": {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24},
}


@functools.cache
def native_here() -> NativeAttention | None:
    """The native library as an engine on this machine would have it, built at the first call if need be.

    None where the machine lacks what it takes. A library that should be there and is not, such as one that does not
    compile, raises NoNativeAttention: tests of it must not be skipped then.
    """
    try:
        return native_attention(AttentionBy.NATIVE)
    except NativeAttentionUnsupported:
        return None


def save_tiny_model(folder: Path, kind: str = "llama-gqa", *, seed: int = 0, **changes: Any) -> Path:
    """Write a random model of one of `TINY_MODELS` into `folder`; `changes` are fields of its config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    tokenizer = byte_tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": None,
        **TINY_MODELS[kind],
        **changes,
    }
    config = AutoConfig.for_model(**fields)
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    spread = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # biases and norms too: an ignored one must show
            if "norm" in name:
                parameter.copy_(1.0 + 0.3 * torch.randn(parameter.shape, generator=spread))
            else:
                scale = 1.0 if "embed" in name else 0.25
                parameter.copy_(scale * torch.randn(parameter.shape, generator=spread))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer() -> Any:
    """A byte-level tokenizer that reads any text: 256 bytes, a few merges, and the special tokens of ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in MERGES)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


# -- greedy texts, ours ------------------------------------------------------------------------------------------------


def greedy(
    runner: ModelRunner, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, chunk: int = 64
) -> list[list[int]]:
    """Continue all prompts together, greedily, each on blocks of its own. No pool, no end-of-text."""
    tables, free = [], 0
    for prompt in prompts:
        blocks = -(-(len(prompt) + max_new_tokens) // runner.block_size)
        tables.append(range(free, free + blocks))
        free += blocks
    assert free <= runner.num_blocks, f"these prompts need {free} blocks, and the runner has {runner.num_blocks}"
    known = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    while True:
        work, owners = [], []
        for index, prompt in enumerate(prompts):
            if len(known[index]) == len(prompt) + max_new_tokens:
                continue
            end = min(computed[index] + chunk, len(known[index]))
            tokens = known[index][computed[index] : end]
            sample = end == len(known[index])
            work.append(SequenceWork(tokens=tokens, start=computed[index], table=tables[index], sample=sample))
            computed[index] = end
            if sample:
                owners.append(index)
        if not work:
            return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]
        for index, token in zip(owners, runner.forward(work).logits.argmax(-1).tolist(), strict=True):
            known[index].append(token)


# -- greedy texts, by transformers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReferenceText:
    """What transformers' `generate` writes greedily, and by how much each token won."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]  # logit of the first minus logit of the second choice, per token


def load_reference(folder: Path) -> Any:
    """The same folder as a transformers model in fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True).eval()


@torch.inference_mode()
def reference_logits(reference: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after every token. [tokens, vocab]"""
    logits: torch.Tensor = reference(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def reference_greedy(
    reference: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, ignore_eos: bool = True
) -> list[ReferenceText]:
    """`generate` for each prompt alone: the text that the engine must write too, but for ties (tiny margins)."""
    texts = []
    for prompt in prompts:
        output = reference.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            **({"eos_token_id": None} if ignore_eos else {}),
        )
        best = torch.stack([step[0] for step in output.logits]).topk(2).values
        texts.append(
            ReferenceText(
                tokens=tuple(output.sequences[0, len(prompt) :].tolist()),
                margins=tuple((best[:, 0] - best[:, 1]).tolist()),
            )
        )
    return texts
