"""Ports, and the private folder of a local pool."""

import json
import socket
from pathlib import Path

import pytest

from cacheaware_api import wire
from cacheaware_operator.errors import PortInUse
from cacheaware_operator.local_folder import LocalFolder
from cacheaware_operator.ports import free_ports, require_free


def test_free_ports_are_all_different() -> None:
    assert len(set(free_ports(50))) == 50


def test_a_port_in_use_is_named_with_the_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is in use: .*--port"):
            require_free([port], port)


def test_ports_beyond_the_last_are_refused() -> None:
    with pytest.raises(PortInUse, match="lower --port than 65535"):
        require_free(range(65536, 65537), 65535)


def test_a_new_folder_has_fresh_secrets_for_its_owner_alone(tmp_path: Path) -> None:
    folders = [LocalFolder.create(tmp_path) for _ in range(2)]
    names = {"salt-key", "control-token", "hop-key", "api-keys.json"}
    assert {path.name for path in folders[0].secrets.iterdir()} == names
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folders[0].secrets.iterdir())
    assert folders[0].path.stat().st_mode & 0o777 == 0o700
    for name in names - {"api-keys.json"}:
        texts = [(folder.secrets / name).read_text() for folder in folders]
        assert texts[0] != texts[1]
        assert all(len(text) == 64 for text in texts)


def test_socket_paths_stay_short_enough_for_the_kernel(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    folder = LocalFolder.create(deep)
    try:
        assert len(str(folder.kv_socket(9999))) < 100
    finally:
        folder.remove()
    assert not folder.path.exists()


def test_keys_are_written_as_the_sidecar_reads_them(tmp_path: Path) -> None:
    folder = LocalFolder.create(tmp_path)
    keys = wire.ApiKeys((wire.ApiKey(name="a", sha256="0" * 64, tenant="acme", tiers=("gold",)),))
    folder.write_api_keys(keys)
    assert wire.from_json(wire.ApiKeys, json.loads((folder.secrets / "api-keys.json").read_text())) == keys
