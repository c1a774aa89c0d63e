"""As whom the operator speaks: from a kubeconfig, with tokens that change."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from cacheaware_operator.errors import NoCluster
from cacheaware_operator.kubernetes_credentials import Credentials


def kubeconfig(folder: Path, server: str = "https://10.0.0.1:6443", **user: Any) -> Path:
    file = folder / "kubeconfig"
    content = {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    file.write_text(yaml.safe_dump(content))
    return file


def test_a_kubeconfig_says_where_the_server_is_and_who_we_are(tmp_path: Path) -> None:
    credentials = Credentials.load(kubeconfig(tmp_path, token="secret"))
    assert credentials.server == "https://10.0.0.1:6443"
    assert credentials.authorization == ("Bearer", "secret")
    assert credentials.certificate is None


def test_a_server_without_tls_needs_none(tmp_path: Path) -> None:
    assert Credentials.load(kubeconfig(tmp_path, "http://127.0.0.1:8001")).tls() is None


def test_who_has_a_certificate_only_sends_no_token(tmp_path: Path) -> None:
    for name in ("cert", "key"):
        (tmp_path / name).write_text("pem")
    files = {"client-certificate": str(tmp_path / "cert"), "client-key": str(tmp_path / "key")}
    credentials = Credentials.load(kubeconfig(tmp_path, **files))
    assert credentials.authorization is None
    assert credentials.certificate == (str(tmp_path / "cert"), str(tmp_path / "key"))


def test_a_file_that_is_no_kubeconfig_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text("{}")
    with pytest.raises(NoCluster, match="give --kubeconfig FILE"):
        Credentials.load(file)


def test_a_token_that_is_renewed_is_used_within_a_second_and_not_asked_for_at_every_request() -> None:
    asked, now = 0, 100.0

    def renew(configuration: client.Configuration) -> None:
        nonlocal asked
        asked += 1
        configuration.api_key = {"BearerToken": f"Bearer token-{asked}"}

    configuration = client.Configuration()
    configuration.refresh_api_key_hook = renew  # type: ignore[assignment]  # its stub knows the default only
    credentials = Credentials(configuration, lambda: now)
    assert {credentials.authorization for _ in range(100)} == {("Bearer", "token-1")}
    now += 1.0
    assert credentials.authorization == ("Bearer", "token-2")
