"""The step before the engine: a model from anywhere becomes one path in a folder that both share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cacheaware_engine import fetch_model
from cacheaware_engine.progress import Progress

Fetch = Callable[[str, Path, Progress], Path]


def model_at(folder: Path, text: str = "{}") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text)
    return folder


def fetching(place: Path, text: str = "{}") -> Fetch:
    return lambda source, cache, on_progress: model_at(place, text)


def test_what_was_fetched_into_the_folder_is_linked_and_the_folder_may_be_mounted_elsewhere(tmp_path: Path) -> None:
    into = tmp_path / "init"
    into.mkdir()
    target = fetch_model.provide("pypi://a", into, "model", fetching(into / "cache" / "packages" / "a"))
    assert target.is_symlink()
    into.rename(tmp_path / "engine")
    assert (tmp_path / "engine" / "model" / "config.json").read_text() == "{}"


def test_what_came_with_the_image_is_copied_because_the_engine_may_have_another_one(tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    target = fetch_model.provide("pypi://a", into, "model", fetching(tmp_path / "site-packages" / "a"))
    assert not target.is_symlink()
    assert (target / "config.json").read_text() == "{}"


def test_run_again_it_keeps_what_is_there(tmp_path: Path) -> None:
    into = tmp_path / "into"
    into.mkdir()
    for _ in range(2):
        linked = fetch_model.provide("pypi://a", into, "linked", fetching(into / "cache" / "a"))
    for text in ("first", "second"):
        copied = fetch_model.provide("pypi://a", into, "copied", fetching(tmp_path / "image", text))
    assert (linked / "config.json").read_text() == "{}"
    assert (copied / "config.json").read_text() == "first"
    assert {path.name for path in into.iterdir()} == {"cache", "linked", "copied"}


def test_what_a_killed_step_left_half_made_is_replaced(tmp_path: Path) -> None:
    into = tmp_path / "into"
    (into / ".model.new").mkdir(parents=True)
    target = fetch_model.provide("pypi://a", into, "model", fetching(tmp_path / "image"))
    assert [path.name for path in target.iterdir()] == ["config.json"]


def test_a_folder_of_this_machine_is_a_source_like_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_at(tmp_path / "model")
    (tmp_path / "into").mkdir()
    arguments = [f"--source=file://{tmp_path}/model", f"--into={tmp_path}/into", "--name=it"]
    assert fetch_model.main(arguments) == 0
    assert capsys.readouterr().out.strip() == f"{tmp_path}/into/it"


def test_a_model_that_cannot_be_fetched_ends_it_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch_model.main([f"--source=file://{tmp_path}/missing", f"--into={tmp_path}"]) == 1
    assert "there is no model at" in capsys.readouterr().err
    assert list(tmp_path.glob("model*")) == []


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        pytest.param(["--into=/nowhere/at/all"], "--into", id="a folder that is not there"),
        pytest.param(["--into=.", "--name=../x"], "--name", id="a name that leads elsewhere"),
        pytest.param(["--into=.", "--name="], "--name", id="no name"),
    ],
)
def test_a_bad_setting_is_named(arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fetch_model.main(["--source=pypi://a", *arguments])
    assert ended.value.code == 2
    assert names in capsys.readouterr().err
