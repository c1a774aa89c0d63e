"""Settings: what is understood, and that each bad one ends the process with one line that names it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cacheaware_engine.settings import DType, KvDtype, LogFormat, Settings, parse


def least(tmp_path: Path) -> list[str]:
    return ["--model", "/models/chat", "--kv-socket", str(tmp_path / "kv.sock")]


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    settings = parse(least(tmp_path))
    assert settings.served_model_name == settings.model == "/models/chat"
    assert (settings.host, settings.port) == ("127.0.0.1", 8001)
    assert (settings.kv_cache_memory, settings.num_kv_blocks, settings.block_size) == (2**30, None, 16)
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (32, 256)
    assert settings.threads >= 1
    defaults = Settings(model="m", kv_socket=Path("s"), served_model_name="m", threads=settings.threads)
    for name in Settings.__slots__:
        if name not in ("model", "kv_socket", "served_model_name"):
            assert getattr(settings, name) == getattr(defaults, name), name


def test_what_is_given_is_kept(tmp_path: Path) -> None:
    given = "--kv-cache-memory 512Mi --dtype float32 --log-format json --port 0 --threads 3 --drain-timeout 1.5"
    settings = parse([*least(tmp_path), *given.split(), "--served-model-name", "chat"])
    assert settings.kv_cache_memory == 512 * 2**20
    assert (settings.dtype, settings.log_format) == (DType.FLOAT32, LogFormat.JSON)
    assert (settings.port, settings.threads, settings.drain_timeout) == (0, 3, 1.5)
    assert settings.served_model_name == "chat"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        pytest.param("--prot 8001", "--prot, did you mean --port?", id="unknown, nearly known"),
        pytest.param("--verbose", "--verbose", id="unknown"),
        pytest.param("--por 8001", "--por", id="no abbreviations"),
        pytest.param("extra", "extra", id="no positional arguments"),
        pytest.param("--port -1", "--port", id="port below"),
        pytest.param("--port 65536", "--port", id="port above"),
        pytest.param("--port http", "--port", id="port in words"),
        pytest.param("--host example.org", "--host", id="host by name"),
        pytest.param("--kv-cache-memory 0", "--kv-cache-memory", id="no memory"),
        pytest.param("--kv-cache-memory -1Gi", "--kv-cache-memory", id="negative memory"),
        pytest.param("--kv-cache-memory 1GiB", "--kv-cache-memory", id="wrong unit"),
        pytest.param("--kv-cache-memory 99999999999999999999", "--kv-cache-memory", id="memory without end"),
        pytest.param("--num-kv-blocks 1", "--num-kv-blocks", id="one block"),
        pytest.param("--num-kv-blocks 9 --kv-cache-memory 1Gi", "--num-kv-blocks", id="blocks and memory"),
        pytest.param("--block-size 0", "--block-size", id="empty blocks"),
        pytest.param("--block-size 1.5", "--block-size", id="half a token"),
        pytest.param("--kv-cache-dtype int4", "--kv-cache-dtype", id="a cache dtype that is not built"),
        pytest.param("--max-model-len 1", "--max-model-len", id="no room for output"),
        pytest.param("--max-num-seqs 0", "--max-num-seqs", id="no sequences"),
        pytest.param(
            "--max-num-seqs 64 --max-num-batched-tokens 63", "--max-num-batched-tokens", id="less than a token each"
        ),
        pytest.param("--dtype float16", "--dtype", id="dtype"),
        pytest.param("--threads 0", "--threads", id="no threads"),
        pytest.param("--drain-timeout nan", "--drain-timeout", id="not a time"),
        pytest.param("--drain-timeout -1", "--drain-timeout", id="negative time"),
        pytest.param("--log-level loud", "--log-level", id="log level"),
        pytest.param("--kv-socket /no/such/folder/kv.sock", "--kv-socket", id="socket in no folder"),
        pytest.param(f"--kv-socket /tmp/{'x' * 120}", "--kv-socket", id="socket path too long"),
    ],
)
def test_a_bad_setting_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, named: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*least(tmp_path), *flags.split()])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert named in said


def test_what_is_required_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([])
    said = capsys.readouterr().err
    assert "--model" in said
    assert "--kv-socket" in said


def test_help_explains_every_flag_without_loading_torch() -> None:
    script = (
        "import sys, runpy\nsys.argv = ['engine', '--help']\n"
        "try: runpy.run_module('cacheaware_engine', run_name='__main__')\n"
        "except SystemExit: pass\nassert 'torch' not in sys.modules, 'torch was imported'"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    for flag in (
        "--model",
        "--kv-socket",
        "--kv-cache-memory",
        "--max-num-batched-tokens",
        "--drain-timeout",
        "--threads",
    ):
        assert flag in said


def test_the_servers_come_up_without_torch() -> None:
    """What answers 503 while the model loads must not wait for torch to be imported."""
    script = "import sys, cacheaware_engine.process\nassert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("dtype", list(KvDtype))
def test_keys_and_values_are_stored_as_said(tmp_path: Path, dtype: KvDtype) -> None:
    flags = ["--model", "m", "--kv-socket", str(tmp_path / "kv.sock"), f"--kv-cache-dtype={dtype}"]
    assert parse(flags).kv_cache_dtype is dtype


def test_sharing_reads_is_on_unless_it_is_turned_off(tmp_path: Path) -> None:
    flags = ["--model", "m", "--kv-socket", str(tmp_path / "kv.sock")]
    assert parse(flags).share_prefix_reads
    assert not parse([*flags, "--no-share-prefix-reads"]).share_prefix_reads
