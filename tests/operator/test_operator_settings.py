"""The operator's flags: what they mean, and what stops the process."""

from pathlib import Path

import pytest

from cacheaware_operator.__main__ import main
from cacheaware_operator.settings import parse

IMAGES = ["--engine-image=e:1", "--sidecar-image=s:1"]


def test_what_is_left_out_has_a_default() -> None:
    settings = parse(IMAGES, {"POD_NAME": "operator-1", "POD_NAMESPACE": "system"})
    assert settings.namespaces == ()  # the whole cluster
    assert (settings.metrics_port, settings.lease_name) == (8080, "cacheaware-operator")
    assert (settings.identity, settings.lease_namespace, settings.operator_namespace) == (
        "operator-1",
        "system",
        "system",
    )


def test_namespaces_may_be_given_several_times() -> None:
    settings = parse([*IMAGES, "--namespace=b", "--namespace=a", "--namespace=b"], {})
    assert settings.namespaces == ("b", "a")


def test_the_lease_may_be_elsewhere_than_the_pod(tmp_path: Path) -> None:
    settings = parse([*IMAGES, "--lease-namespace=leases"], {"POD_NAMESPACE": "system"})
    assert (settings.lease_namespace, settings.operator_namespace) == ("leases", "system")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--sidecar-image=s"], "--engine-image", id="an image is missing"),
        pytest.param([*IMAGES, "--namespaces=a"], "unrecognized arguments: --namespaces=a", id="a misspelt flag"),
        pytest.param([*IMAGES, "--namespace=A b"], "--namespace: 'A b' is no name", id="no name"),
        pytest.param([*IMAGES, "--metrics-port=70000"], "--metrics-port: '70000' is no port", id="no port"),
        pytest.param([*IMAGES, "--lease-name="], "--lease-name: '' is no name", id="an empty name"),
        pytest.param([*IMAGES, "--kubeconfig=/none"], "--kubeconfig: /none is no file", id="no file"),
    ],
)
def test_a_bad_flag_ends_the_process_with_2_and_its_name(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


def test_a_kubeconfig_that_cannot_be_read_ends_the_process_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "kubeconfig"
    broken.write_text("current-context: none\n")
    with pytest.raises(SystemExit) as ended:
        main([*IMAGES, f"--kubeconfig={broken}"])
    assert ended.value.code == 2
    assert "no cluster to work with" in capsys.readouterr().err
