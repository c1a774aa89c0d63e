"""The `cacheaware` command: what it prints, its exit codes, and that each part of it needs only its own extras."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from cacheaware.__main__ import app
from cacheaware.testing import POOL, UpProcess
from cacheaware_api.status import CacheAwarePoolStatus

SAMPLES = Path(__file__).parents[2] / "manifests" / "samples"


@pytest.fixture
def runner(environment: dict[str, str]) -> CliRunner:
    return CliRunner(env=environment)


def test_version(runner: CliRunner) -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"cacheaware {version('cacheaware')}\n")


@pytest.mark.parametrize("command", [[], ["validate"], ["up"], ["status"], ["top"], ["crd"]])
def test_every_help_text_explains_and_shows_an_example(runner: CliRunner, command: list[str]) -> None:
    result = runner.invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    if command:
        assert f"cacheaware {command[0]} " in result.stdout
    else:
        assert all(name in result.stdout for name in ("validate", "up", "status", "top", "demo", "crd"))


def test_crd_prints_the_definition_that_the_repository_holds(runner: CliRunner) -> None:
    committed = Path(__file__).parents[2] / "crds" / "cacheawarepools.yaml"
    result = runner.invoke(app, ["crd"])
    assert (result.exit_code, result.stdout) == (0, committed.read_text(encoding="utf-8"))


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['cacheaware', '--help']\n"
        "from cacheaware.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('loaded:', [name for name in ('torch', 'aiohttp', 'transformers', 'pydantic') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize(
    ("arguments", "hidden", "extra"),
    [
        pytest.param(["up", "-f", "pool.yaml"], "torch", "engine", id="up without the engine"),
        pytest.param(["up", "-f", "pool.yaml"], "prometheus_client", "sidecar", id="up without the sidecar"),
        pytest.param(["status"], "psutil", "cli", id="status without psutil"),
        pytest.param(["demo"], "torch", "engine", id="demo without the engine"),
    ],
)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    arguments: list[str], hidden: str, extra: str
) -> None:
    code = (
        "import importlib.util, sys\n"
        f"sys.argv = ['cacheaware', *{arguments!r}]\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, package=None: None if name == {hidden!r} else find(name, package)\n"
        "from cacheaware.__main__ import main\n"
        "main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert f"pip install 'cacheaware[{extra}]'" in result.stderr


# -- validate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", [[], ["-f"]], ids=["argument", "flag"])
def test_validate_says_ok_for_a_good_file(runner: CliRunner, pool_file: Path, flag: list[str]) -> None:
    result = runner.invoke(app, ["validate", *flag, str(pool_file)])
    assert result.exit_code == 0
    assert "OK: pool default/chat" in result.stdout


def test_validate_prints_every_problem_and_ends_with_1(runner: CliRunner, pool_file: Path) -> None:
    pool_file.write_text(POOL.replace("weight: 4", "weight: 0").replace("Torch", "Steam"))
    result = runner.invoke(app, ["validate", "-f", str(pool_file)])
    assert result.exit_code == 1
    assert "spec.tiers[0].weight" in result.stderr
    assert "spec.engine.type" in result.stderr


def test_validate_without_a_file_says_how(runner: CliRunner) -> None:
    assert runner.invoke(app, ["validate"]).exit_code == 2


def test_validate_accepts_what_only_a_cluster_has(runner: CliRunner, pool_file: Path) -> None:
    variable = "{name: A, valueFrom: {secretKeyRef: {name: a, key: b}}}"
    pool_file.write_text(POOL.replace("Torch}", f"Torch, env: [{variable}]}}"))
    assert runner.invoke(app, ["validate", str(pool_file)]).exit_code == 0
    assert runner.invoke(app, ["validate", "--local", str(pool_file)]).exit_code == 1


@pytest.mark.parametrize("name", ["chat.yaml", "open.yaml"])
def test_samples_for_one_machine_are_valid_and_can_be_run(name: str) -> None:
    from cacheaware_api.objects import read_pool_file
    from cacheaware_operator.one_machine import not_on_one_machine, without_effect

    spec = read_pool_file((SAMPLES / name).read_bytes()).pool.spec
    assert not_on_one_machine(spec) == []
    assert without_effect(spec) == []


# -- status -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param([], "no pool runs here", id="nothing runs"),
        pytest.param(["chat"], "pool default/chat does not run here", id="this one does not"),
        pytest.param(["chat", "-n", "models"], "pool models/chat does not run here", id="in a namespace"),
    ],
)
def test_status_of_a_pool_that_does_not_run_says_so(runner: CliRunner, arguments: list[str], words: str) -> None:
    result = runner.invoke(app, ["status", *arguments])
    assert result.exit_code == 1
    assert words in result.stderr
    assert "cacheaware up -f FILE" in result.stderr


def test_status_shows_tiers_conditions_and_parts(
    runner: CliRunner, run_up: Callable[..., UpProcess], pool_file: Path
) -> None:
    run_up(pool_file).ready()
    result = runner.invoke(app, ["status"])
    assert result.exit_code == 0
    assert "default/chat: Ready True, 1 of 1 replicas, revision 1" in result.stdout
    for words in ("gold", "50 %", "IdentityEnforced", "chat-0", "sidecar"):
        assert words in result.stdout


@pytest.mark.parametrize(("output", "parse"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_status_for_programs_is_the_object_with_the_spec_as_it_was_written(
    runner: CliRunner,
    run_up: Callable[..., UpProcess],
    pool_file: Path,
    output: str,
    parse: Callable[[str], dict[str, Any]],
) -> None:
    run_up(pool_file).ready()
    result = runner.invoke(app, ["status", "chat", "-o", output])
    assert result.exit_code == 0
    shown = parse(result.stdout)
    assert shown["spec"] == yaml.safe_load(POOL)["spec"]
    assert shown["kind"] == "CacheAwarePool"
    status = CacheAwarePoolStatus.model_validate_json(json.dumps(shown["status"]))
    assert (status.replicas, status.ready_replicas, status.observed_generation) == (1, 1, 1)


def test_status_of_a_pool_whose_up_was_killed_says_that(
    runner: CliRunner, run_up: Callable[..., UpProcess], pool_file: Path
) -> None:
    up = run_up(pool_file)
    up.ready()
    up.process.kill()
    up.end()
    result = runner.invoke(app, ["status", "chat"])
    assert result.exit_code == 1
    assert f"(pid {up.process.pid}) was killed" in result.stderr


def test_status_asks_which_pool_where_several_run(
    runner: CliRunner, run_up: Callable[..., UpProcess], pool_file: Path, tmp_path: Path
) -> None:
    run_up(pool_file).ready()
    other = tmp_path / "other.yaml"
    other.write_text(POOL.replace("{name: chat}", "{name: batch, namespace: models}"))
    run_up(other).expect("is ready")
    result = runner.invoke(app, ["status"])
    assert result.exit_code == 1
    assert "name one of them: batch (-n models), chat (-n default)" in result.stderr
    assert runner.invoke(app, ["status", "batch", "-n", "models"]).exit_code == 0
