"""Where the native library comes from: what was shipped for this processor, what was built before, or a build now."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cacheaware_engine import native_build
from cacheaware_engine.errors import NoNativeAttention
from cacheaware_engine.native_build import TARGETS, build, library, main, processor_features
from cacheaware_engine.settings import AttentionBy
from cacheaware_engine.startup import native_attention
from cacheaware_engine.testing import native_here

COMPILES = """#!/bin/sh
[ "$1" = --version ] && echo "a compiler" && exit 0
while [ "$1" != -o ]; do shift; done
echo built > "$2"
"""
FAILS = """#!/bin/sh
[ "$1" = --version ] && exit 0
echo "x.cpp:3: note: this" >&2; echo "x.cpp:7: error: no such thing" >&2; exit 1
"""


def compiler(folder: Path, script: str) -> str:
    path = folder / "compiler"
    path.write_text(script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_it_is_built_once_and_kept(tmp_path: Path) -> None:
    built: list[str] = []
    command = compiler(tmp_path, COMPILES)
    nowhere = tmp_path / "shipped"
    paths = [
        library(tmp_path / "kept", shipped_in=nowhere, compiler=command, on_build=lambda: built.append("now"))
        for _ in range(2)
    ]
    assert paths[0] == paths[1]
    assert paths[0].read_text() == "built\n"
    assert built == ["now"]
    assert list((tmp_path / "kept").iterdir()) == [paths[0]], "nothing unfinished is left"


def test_another_compiler_or_source_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, nowhere = tmp_path / "kept", tmp_path / "shipped"
    first = library(kept, shipped_in=nowhere, compiler=compiler(tmp_path, COMPILES))
    second = library(
        kept, shipped_in=nowhere, compiler=compiler(tmp_path, COMPILES.replace("a compiler", "a newer one"))
    )
    source = tmp_path / "other.cpp"
    source.write_text("// changed")
    monkeypatch.setattr(native_build, "SOURCE", source)
    third = library(kept, shipped_in=nowhere, compiler=compiler(tmp_path, COMPILES))
    assert len({first, second, third}) == 3


def test_what_was_shipped_for_this_processor_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in TARGETS:
        (tmp_path / f"paged-attention-{target}.so").write_text("shipped")
    for target, features in TARGETS.items():
        monkeypatch.setattr(native_build, "processor_features", lambda features=features: frozenset(features))
        assert library(tmp_path / "kept", shipped_in=tmp_path, compiler="none").name == f"paged-attention-{target}.so"
    monkeypatch.setattr(native_build, "processor_features", lambda: frozenset({"sse2"}))
    with pytest.raises(NoNativeAttention):
        library(tmp_path / "kept", shipped_in=tmp_path, compiler="none")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        pytest.param("/no/such/compiler -O1", "no C.. compiler .*/no/such/compiler", id="not-there"),
        pytest.param(FAILS, "error: no such thing", id="fails"),
    ],
)
def test_why_there_is_none_is_said(tmp_path: Path, command: str, said: str) -> None:
    command = compiler(tmp_path, command) if command.startswith("#!") else command
    with pytest.raises(NoNativeAttention, match=said):
        library(tmp_path / "kept", shipped_in=tmp_path / "shipped", compiler=command)
    assert not (tmp_path / "kept").exists() or list((tmp_path / "kept").iterdir()) == []


def test_tests_are_skipped_for_want_of_a_compiler_and_not_for_a_kernel_that_does_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    look = native_here.__wrapped__  # past its cache, which other tests share
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert look() is None
    monkeypatch.setenv("CXX", compiler(tmp_path, FAILS))
    with pytest.raises(NoNativeAttention, match="error: no such thing"):
        look()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NoNativeAttention, match="file"):
        build(tmp_path / "file" / "x.so", "native", [compiler(tmp_path, COMPILES)])


def test_images_are_built_with_a_library_for_each_kind_of_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, COMPILES))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert main([str(tmp_path / "image")]) == 0
    assert {path.name for path in (tmp_path / "image").iterdir()} == {f"paged-attention-{name}.so" for name in TARGETS}
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert main([str(tmp_path / "arm")]) == 0
    assert [path.name for path in (tmp_path / "arm").iterdir()] == ["paged-attention-aarch64.so"]
    monkeypatch.setenv("CXX", "/no/such/compiler")
    assert main([str(tmp_path / "none")]) == 1
    assert "no C++ compiler" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_without_a_compiler_an_engine_says_so_and_computes_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native_attention(AttentionBy.AUTO) is None
    assert "torch's operations" in caplog.text
    assert native_attention(AttentionBy.TORCH) is None
    with pytest.raises(NoNativeAttention, match="CXX"):
        native_attention(AttentionBy.NATIVE)


def test_this_processor_has_features() -> None:
    assert processor_features()
