"""What the doctor finds, on this machine and on ones made up."""

import pytest

from zeroshard.cli import doctor
from zeroshard.cli.doctor import Finding
from zeroshard.cli.main import main
from zeroshard.offload.library import Choice, Simd
from zeroshard.system.machine import Amx


def test_this_machine_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for about in ("machine", "cores", "memory", "python", "torch", "gpu", "backends", "host step", "AMX"):
        assert about in shown


def test_a_bad_finding_fails_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "findings", lambda: iter([Finding("torch", "2.1", "upgrade it", bad=True)]))
    assert main(["doctor"]) == 1
    assert "-> upgrade it" in capsys.readouterr().out


@pytest.mark.parametrize("amx", [Amx.FAULTS, Amx.UNKNOWN, Amx.CAPPED])
def test_amx_that_is_not_plain_names_the_variable(
    amx: Amx, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.machine, "probe_amx", lambda: amx)
    assert main(["doctor"]) == 0
    assert "ONEDNN_MAX_CPU_ISA" in capsys.readouterr().out


def test_an_old_torch_is_bad(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor.torch, "__version__", "2.9.1+cpu")
    assert main(["doctor"]) == 1
    assert "2.11 or later" in capsys.readouterr().out


def test_a_host_name_that_does_not_resolve_is_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unresolved(name: str) -> str:
        raise OSError("no such name")

    monkeypatch.setattr(doctor.socket, "gethostbyname", unresolved)
    assert main(["doctor"]) == 0
    assert "GLOO_SOCKET_IFNAME" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        (Choice(Simd.AVX512, "the best that this processor has"), "ok    host step    native, AVX-512 (the best"),
        (Choice(Simd.PORTABLE, "asked for"), "native, portable (asked for)"),
        (Choice(Simd.TORCH, "no native library: no compiler", "install one"), "-> install one"),
    ],
)
def test_the_host_optimizer_is_named_with_the_reason(
    choice: Choice, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "choose", lambda: choice)
    assert main(["doctor"]) == 0
    assert shown in capsys.readouterr().out


def test_a_path_that_is_not_there_is_bad(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ZEROSHARD_KERNEL", "avx1024")
    assert main(["doctor"]) == 1
    assert "unset ZEROSHARD_KERNEL" in capsys.readouterr().out
