"""Finding, building and doing without the native library."""

from __future__ import annotations

import _ctypes
import hashlib
import os
import stat
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.offload.host import ADAM, ADAMW, NATIVE, SGD, Format, clone, pool, random_segment, ulps, update
from zeroshard.offload import library
from zeroshard.offload.kernel import Pool
from zeroshard.offload.library import Simd
from zeroshard.offload.native import build
from zeroshard.offload.rules import AdamRule, SGDRule
from zeroshard.system.machine import is_private, make_private


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing is loaded, installed or in the cache, whose folder is returned; nothing has been warned of."""
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setattr(library, "HERE", tmp_path / "nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(library.VARIABLE, raising=False)
    library.warn_once.cache_clear()
    return tmp_path / "cache" / "zeroshard"


def compiler(folder: Path, script: str) -> str:
    """A compiler that runs a script, with the output's path in $out."""
    file = folder / "compiler"
    file.write_text(f"#!/bin/sh\nfor out; do :; done\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


@pytest.mark.slow
def test_what_nobody_installed_is_built_once_in_the_users_cache(
    forgetful: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library.choose().simd is NATIVE[0]
    assert (forgetful / build.library_name()).exists()
    monkeypatch.setattr(library, "_loaded", [])
    monkeypatch.setenv(build.CXX_VARIABLE, "/bin/false")  # and is found there next time
    assert library.choose().simd is NATIVE[0]


FOREIGN = {
    "written by the group": lambda file: file.chmod(0o775),
    "written by everybody": lambda file: file.chmod(0o757),
    "a link": lambda file: file.symlink_to(file.rename(file.with_suffix(".else"))),
    "without our functions": lambda file: file.write_bytes(Path(_ctypes.__file__).read_bytes()),
    "cut off": lambda file: file.write_bytes(file.read_bytes()[:1000]),
}
"""What can be wrong with a library in the cache."""


@pytest.mark.slow
@pytest.mark.parametrize("what", FOREIGN)
def test_a_library_in_the_cache_that_others_can_write_or_that_is_damaged_is_built_again(
    forgetful: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    file = build.build(forgetful)
    good = file.read_bytes()
    file.with_suffix(".sha256").write_text(hashlib.sha256(good).hexdigest())
    FOREIGN[what](file)
    built: list[Path] = []
    monkeypatch.setattr(library, "build", lambda folder: built.append(folder) or build.build(folder))
    assert library.choose().simd is NATIVE[0]
    assert built == [forgetful]
    assert file.read_bytes() == good
    assert not file.is_symlink()
    assert is_private(file)


@pytest.mark.slow
def test_a_cache_folder_of_somebody_else_is_not_used(forgetful: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgetful.mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    forgetful.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="is not a folder that only this user can write to"):
        assert library.choose().simd is NATIVE[0]
    assert not list(forgetful.iterdir())


def test_a_cache_folder_that_a_umask_opened_to_the_group_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o775)
    assert make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_many_ranks_may_build_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.CXX_VARIABLE, compiler(tmp_path, 'echo made > "$out"'))
    with ThreadPoolExecutor(8) as ranks:
        made = set(ranks.map(lambda rank: build.build(tmp_path / "cache"), range(8)))
    assert made == {tmp_path / "cache" / build.library_name()}
    assert list((tmp_path / "cache").iterdir()) == list(made)


def test_installing_leaves_no_library_of_older_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.CXX_VARIABLE, compiler(tmp_path, 'echo made > "$out"'))
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "libzeroshard-0123.so").write_text("old")
    build.install(folder)
    assert [file.name for file in folder.iterdir()] == [build.library_name()]


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("echo 'x.cpp:1: error: no such thing' >&2; exit 1", "failed: x.cpp:1: error: no such thing"),
        ('echo rubbish > "$out"', "the library does not load"),
        (None, "could not be run"),
    ],
)
def test_without_a_working_compiler_torch_takes_over_audibly_and_once(
    forgetful: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, complaint: str
) -> None:
    monkeypatch.setenv(build.CXX_VARIABLE, compiler(tmp_path, script) if script else str(tmp_path / "missing"))
    with pytest.warns(RuntimeWarning, match="install a C\\+\\+17 compiler") as caught:
        without = Pool(threads=1)
    assert complaint in str(caught[0].message)
    assert without.simd is Simd.TORCH
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Pool(threads=1)
    with pytest.raises(ValueError, match="the portable path was asked for, but there is no native library"):
        Pool(threads=1, simd=Simd.PORTABLE)


def test_no_compiler_at_all_is_named(forgetful: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(build.CXX_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "")
    assert "no C++ compiler found" in library.choose().reason


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(build.BuildError, match="cannot be written"):
        build.build(tmp_path / "file" / "cache")


@pytest.mark.parametrize("simd", list(Simd))
def test_the_environment_forces_a_path(simd: Simd, monkeypatch: pytest.MonkeyPatch) -> None:
    if simd not in (*NATIVE, Simd.TORCH):
        pytest.skip("not on this processor")
    monkeypatch.setenv(library.VARIABLE, simd.value)
    forced = Pool(threads=1)
    assert forced.simd is simd
    assert forced.square_sum(torch.tensor([3.0, 4.0])) == 25
    forced.close()


def test_an_unknown_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.VARIABLE, "avx1024")
    with pytest.raises(ValueError, match="ZEROSHARD_KERNEL='avx1024' must be one of avx512, avx2, portable, torch"):
        Pool()


# -- torch in its place -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "rule",
    [
        ADAMW,
        replace(ADAM, maximize=True, step=1),
        SGD,
        replace(SGD, step=1, nesterov=True, dampening=0.0),
        replace(SGD, momentum=0.0),
    ],
)
def test_torch_gives_the_same_within_rounding(rule: AdamRule | SGDRule, dtype: torch.dtype) -> None:
    moments = 2 if isinstance(rule, AdamRule) else int(rule.momentum != 0)
    form = Format(dtype, dtype, moments=(torch.float32,) * moments, over_gradient=True)
    native = random_segment(3001, form)
    other = clone(native)
    size = native.master.abs() + native.gradient.float().abs()
    update(pool(), [native], rule, 0.5)
    update(pool(Simd.TORCH), [other], rule, 0.5)
    assert ulps(other.master, native.master.double(), size) <= 4
    for one, two in zip(native.moments, other.moments, strict=True):
        assert ulps(two, one.double(), size) <= 4
    assert native.parameter is not None
    assert other.parameter is not None
    assert float((native.parameter == other.parameter).float().mean()) > 0.99


def test_torch_publishes_and_sums_as_the_native_path_does() -> None:
    still = replace(SGD, momentum=0.0, lr=0.0, weight_decay=0.0)
    native = random_segment(3001, Format(moments=()), special=True)
    native.gradient.zero_()
    other = clone(native)
    update(pool(), [native], still, 0.5)
    update(pool(Simd.TORCH), [other], still, 0.5)
    assert native.parameter is not None
    assert other.parameter is not None
    assert torch.equal(native.parameter.view(torch.int16), other.parameter.view(torch.int16))
    values = torch.randn(1000).bfloat16()
    assert pool(Simd.TORCH).square_sum(values) == pytest.approx(pool().square_sum(values), rel=1e-13)
    totals = torch.ones(1000), torch.ones(1000)
    for each, total in zip((pool(), pool(Simd.TORCH)), totals, strict=True):
        each.accumulate(total, values, first=True)
        each.accumulate(total, values, first=False)
    assert torch.equal(*totals)
