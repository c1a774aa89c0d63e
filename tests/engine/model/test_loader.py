"""A folder is loaded whole and exact, or refused with the file or tensor that is to blame."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from cacheaware_engine.compute_dtype import torch_dtype
from cacheaware_engine.errors import ModelError, ModelNotFound, ModelUnreadable, ModelUnsupported
from cacheaware_engine.loader import load_model, weight_bytes
from cacheaware_engine.model_config import read_config
from cacheaware_engine.runner import ModelRunner, SequenceWork
from cacheaware_engine.settings import DType

PROMPT = [72, 101, 108, 108, 111, 32, 200, 3, 9]


def logits(folder: Path) -> torch.Tensor:
    runner = ModelRunner(load_model(folder, DType.FLOAT32).network, num_blocks=3, block_size=4)
    return runner.forward([SequenceWork(PROMPT, 0, [2, 0, 1], sample=True)]).logits


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrite the weights of `folder` after `change` has had its way with them."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_folder_is_loaded_with_its_tokenizer_and_its_ends(folder: Path) -> None:
    model = load_model(folder, DType.FLOAT32)
    assert model.tokenizer.decode(model.tokenizer("Grüße 🙂")["input_ids"]) == "Grüße 🙂"
    assert model.eos_token_ids == {model.tokenizer.eos_token_id}
    assert model.can_chat


def test_without_a_chat_template_a_model_still_completes(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert not load_model(folder, DType.FLOAT32).can_chat


def test_shards_are_the_same_model_as_one_file(folder: Path) -> None:
    whole = logits(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(logits(folder), whole)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelUnreadable, match=r"lacks b\.safetensors"):
        load_model(folder)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_weights_stored_in_half_precision_are_computed_in_full(folder: Path, stored: torch.dtype) -> None:
    edit(folder, lambda tensors: tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()}))
    half = logits(folder)
    edit(folder, lambda tensors: tensors.update({name: tensor.float() for name, tensor in tensors.items()}))
    assert torch.equal(half, logits(folder))


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def garbled(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 64 + path.read_bytes()[64:])


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')


def without_a_tensor(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def with_another_shape(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}))


def with_a_foreign_tensor(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(12)}))


def with_integers(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))


def without_a_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def with_a_larger_tokenizer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokenizer.add_tokens(["<pad>"])
    tokenizer.save_pretrained(folder)


def with_a_broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "error", "named"),
    [
        (cut_short, ModelUnreadable, r"model\.safetensors is damaged or cut short"),
        (garbled, ModelUnreadable, r"model\.safetensors is damaged or cut short"),
        (empty, ModelUnreadable, r"model\.safetensors is damaged or cut short"),
        (without_weights, ModelNotFound, r"neither model\.safetensors nor"),
        (pickled, ModelUnsupported, "pickled"),
        (broken_index, ModelUnreadable, r"index\.json is not an index"),
        (without_a_tensor, ModelUnreadable, r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        (with_another_shape, ModelUnreadable, r"model\.norm\.weight has shape \[47\]; config\.json says \[48\]"),
        (with_a_foreign_tensor, ModelUnsupported, r"does not use: model\.layers\.0\.self_attn\.q_norm\.weight"),
        (with_integers, ModelUnsupported, r"model\.norm\.weight is stored as torch\.int8"),
        (without_a_tokenizer, ModelUnreadable, "tokenizer in .* cannot be loaded"),
        (with_a_larger_tokenizer, ModelUnreadable, "token ids up to 261, and the model embeds only 261"),
        (with_a_broken_tokenizer, ModelUnreadable, "tokenizer in .* cannot be loaded"),
    ],
)
def test_a_damaged_folder_is_refused_with_what_is_to_blame(
    folder: Path, damage: Callable[[Path], None], error: type[ModelError], named: str
) -> None:
    damage(folder)
    with pytest.raises(error, match=named):
        load_model(folder)


def test_weights_that_this_user_may_not_read_are_not_called_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def access(path: str | os.PathLike[str], mode: int) -> bool:  # root, as which tests may run, reads everything
        return Path(path).name != "model.safetensors"

    monkeypatch.setattr(os, "access", access)
    with pytest.raises(ModelUnreadable, match=r"model\.safetensors may not be read by user \d+: change its owner"):
        load_model(folder)


def test_a_tied_matrix_that_is_written_twice_is_read_once(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))

    def tie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit(folder, tie)
    twice = logits(folder)
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert torch.equal(twice, logits(folder))


def test_two_different_matrices_are_not_tied_whatever_the_configuration_says(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(ModelUnreadable, match=r"tie_word_embeddings.*lm_head\.weight"):
        load_model(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_of_weights_is_known_from_headers(folder: Path, dtype: torch.dtype) -> None:
    numbers = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert weight_bytes(folder, read_config(folder), dtype) == numbers * dtype.itemsize


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param("fpu avx2 avx512f amx_bf16", torch.bfloat16, id="amx"),
        pytest.param("fpu avx512f avx512_bf16", torch.bfloat16, id="avx512-bf16"),
        pytest.param("fpu avx2 avx512f avx512_vnni", torch.float32, id="avx512-without-bf16"),
        pytest.param("fpu avx2", torch.float32, id="avx2"),
    ],
)
def test_auto_computes_in_what_the_processor_is_fast_in(tmp_path: Path, flags: str, expected: torch.dtype) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert torch_dtype(DType.AUTO, cpuinfo=cpuinfo) == expected
    assert torch_dtype(DType.FLOAT32, cpuinfo=cpuinfo) == torch.float32
    assert torch_dtype(DType.BFLOAT16, cpuinfo=cpuinfo) == torch.bfloat16


def test_auto_is_float32_where_the_processor_is_not_known(tmp_path: Path) -> None:
    assert torch_dtype(DType.AUTO, cpuinfo=tmp_path / "missing") == torch.float32
