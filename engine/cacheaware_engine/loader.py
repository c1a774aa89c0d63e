"""A Hugging Face folder becomes a network in memory, with its tokenizer.

Reads configuration, safetensors (one file or an index of shards) and the tokenizer. A checkpoint is loaded only if its
tensors are exactly those that `llama.py` uses. Where the folder comes from is `model_source.py`'s job.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cacheaware_engine.compute_dtype import torch_dtype
from cacheaware_engine.errors import ModelNotFound, ModelUnreadable, ModelUnsupported
from cacheaware_engine.foreign import load_foreign
from cacheaware_engine.linear import Linear
from cacheaware_engine.llama import Layer, Llama
from cacheaware_engine.model_config import DecoderConfig, ModelConfig, read_config
from cacheaware_engine.network import Network
from cacheaware_engine.rotary import interleave, inverse_frequencies
from cacheaware_engine.settings import DType


@dataclass(frozen=True, slots=True)
class LoadedModel:
    network: Network
    config: DecoderConfig
    tokenizer: Any  # a transformers fast or slow tokenizer
    eos_token_ids: frozenset[int]

    @property
    def can_chat(self) -> bool:
        """Whether the tokenizer knows how to write a conversation; completions work without."""
        return self.tokenizer.chat_template is not None


def load_model(folder: Path, dtype: DType = DType.AUTO, device: torch.device | str = "cpu") -> LoadedModel:
    """Load everything in `folder`; raises a `ModelError` that names what is missing, damaged or not built."""
    config = read_config(folder)
    tokenizer = load_tokenizer(folder)
    most = max(tokenizer.get_vocab().values(), default=0)
    if most >= config.vocab_size:  # a prompt with such a token would break the step of everyone
        raise ModelUnreadable(
            f"the tokenizer in {folder} has token ids up to {most}, and the model embeds only {config.vocab_size}"
        )
    network: Network
    if isinstance(config, ModelConfig):
        network = load_network(folder, config, dtype, device)
    else:
        target = torch.device(device)
        network = load_foreign(folder, config, torch_dtype(dtype, target), target)
    eos = config.eos_token_ids
    if tokenizer.eos_token_id is not None:
        eos |= {tokenizer.eos_token_id}
    return LoadedModel(network=network, config=config, tokenizer=tokenizer, eos_token_ids=eos)


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer  # seconds to import: a folder that is refused is refused at once

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # every tokenizer kind raises its own; all of it means missing or damaged files
        raise ModelUnreadable(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def weight_bytes(folder: Path, config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes that the weights of `folder` take in memory, from the files' headers."""
    with open_weights(folder) as weights:
        numbers = sum(math.prod(weights.shape(name)) for name in weights.names)
    if config.tied_embeddings:
        numbers += config.vocab_size * config.hidden_size  # looked up by row and multiplied: kept in both layouts
    return numbers * dtype.itemsize


def load_network(
    folder: Path, config: ModelConfig, dtype: DType = DType.AUTO, device: torch.device | str = "cpu"
) -> Llama:
    """The weights of `folder` as a network that computes in `dtype` on `device`."""
    target = torch.device(device)
    with open_weights(folder) as files, torch.inference_mode():
        take = _Taker(files, torch_dtype(dtype, target), target)
        network = _assemble(take, config)
        take.refuse_leftovers()
    return network


# -- files ------------------------------------------------------------------------------------------------------------


class WeightFiles:
    """Named tensors spread over open safetensors files."""

    def __init__(self, files: dict[str, Any]) -> None:
        self._files = files  # tensor name -> the open file that holds it

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


@contextmanager
def open_weights(folder: Path) -> Iterator[WeightFiles]:
    """Open the safetensors files of `folder`: those of the index if there is one, else model.safetensors."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in _weight_paths(folder):
            if not os.access(path, os.R_OK):  # the library would say that there is no such file
                raise ModelUnreadable(f"{path} may not be read by user {os.geteuid()}: change its owner or its mode")
            try:
                opened = stack.enter_context(safe_open(str(path), framework="pt"))
                files.update(dict.fromkeys(opened.keys(), opened))
            except (SafetensorError, OSError) as error:
                raise ModelUnreadable(f"{path} is damaged or cut short: {error}; fetch it again") from error
        yield WeightFiles(files)


def _weight_paths(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelUnreadable(f"{index} is not an index of shards: {error!r}") from error
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    elif list(folder.glob("*.bin")) or list(folder.glob("*.pth")):
        raise ModelUnsupported(f"{folder} holds pickled weights only; convert them to safetensors")
    else:
        raise ModelNotFound(f"{folder} holds neither model.safetensors nor model.safetensors.index.json")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelUnreadable(f"{folder} lacks {', '.join(missing)}, named by its index; fetch it again")
    return [folder / name for name in names]


# -- tensors ----------------------------------------------------------------------------------------------------------


class _Taker:
    """Takes tensors out of the files by name, checks their shapes, and knows which are left."""

    def __init__(self, files: WeightFiles, dtype: torch.dtype, device: torch.device) -> None:
        self._files = files
        self._left = set(files.names)
        self.dtype = dtype
        self.device = device

    def __call__(self, name: str, *shape: int) -> Tensor:
        if name not in self._files.names:
            raise ModelUnreadable(f"the checkpoint lacks the tensor {name}")
        found = self._files.shape(name)
        if found != shape:
            raise ModelUnreadable(f"the tensor {name} has shape {list(found)}; config.json says {list(shape)}")
        tensor = self._files.tensor(name)
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ModelUnsupported(
                f"the tensor {name} is stored as {tensor.dtype}; built are float32, float16, bfloat16"
            )
        self._left.discard(name)
        return tensor.to(device=self.device, dtype=self.dtype)

    def refuse_untied(self, head: str, embedding: Tensor) -> None:
        """Some exporters write a tied matrix twice; two different ones contradict the configuration."""
        if head in self._left and not torch.equal(self(head, *embedding.shape), embedding):
            raise ModelUnreadable(f"config.json says tie_word_embeddings, and {head} differs from the embedding")

    def refuse_leftovers(self) -> None:
        """A tensor that nothing uses is a feature that would be silently missing."""
        left = sorted(name for name in self._left if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise ModelUnsupported(
                f"its checkpoint has tensors that this architecture does not use: {', '.join(left[:4])}"
            )


def _assemble(take: _Taker, config: ModelConfig) -> Llama:
    embedding = take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = [_layer(take, config, f"model.layers.{index}.") for index in range(config.num_layers)]
    if config.tied_embeddings:
        take.refuse_untied("lm_head.weight", embedding)
        head = embedding
    else:
        head = take("lm_head.weight", config.vocab_size, config.hidden_size)
    return Llama(
        config=config,
        embedding=embedding,
        layers=layers,
        norm=take("model.norm.weight", config.hidden_size),
        head=Linear(head),
        frequencies=inverse_frequencies(config.rope, config.head_dim).to(take.device),
        epsilon=torch.tensor(config.rms_norm_eps, dtype=torch.float32, device=take.device),
    )


def _layer(take: _Taker, config: ModelConfig, prefix: str) -> Layer:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    hidden, head_dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def interleaved(tensor: Tensor) -> Tensor:
        return interleave(tensor, head_dim)

    def stacked(parts: list[tuple[str, int, Callable[[Tensor], Tensor]]], bias: bool) -> Linear:
        weight = torch.cat([order(take(f"{name}.weight", rows, hidden)) for name, rows, order in parts])
        biases = [order(take(f"{name}.bias", rows)) for name, rows, order in parts] if bias else None
        return Linear(weight, torch.cat(biases) if biases else None)

    def single(name: str, inputs: int, bias: bool) -> Linear:
        return Linear(take(f"{name}.weight", hidden, inputs), take(f"{name}.bias", hidden) if bias else None)

    def as_it_is(tensor: Tensor) -> Tensor:
        return tensor

    return Layer(
        attention_norm=take(f"{prefix}input_layernorm.weight", hidden),
        qkv=stacked(
            [
                (f"{attention}q_proj", q_rows, interleaved),
                (f"{attention}k_proj", kv_rows, interleaved),
                (f"{attention}v_proj", kv_rows, as_it_is),
            ],
            config.qkv_bias,
        ),
        q_norm=interleaved(take(f"{attention}q_norm.weight", head_dim)) if config.qk_norm else None,
        k_norm=interleaved(take(f"{attention}k_norm.weight", head_dim)) if config.qk_norm else None,
        output=single(f"{attention}o_proj", q_rows, config.output_bias),
        mlp_norm=take(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=stacked([(f"{mlp}gate_proj", inner, as_it_is), (f"{mlp}up_proj", inner, as_it_is)], config.mlp_bias),
        down=single(f"{mlp}down_proj", inner, config.mlp_bias),
    )
