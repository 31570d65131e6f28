"""What the doctor finds, on this machine and on ones made up."""

import pytest

from zeroshard.cli import doctor
from zeroshard.cli.doctor import Finding, Verdict
from zeroshard.cli.main import main
from zeroshard.machine import Amx


def test_this_machine_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for about in ("machine", "cores", "memory", "python", "torch", "gpu", "backends", "AMX"):
        assert about in shown


def test_a_bad_finding_fails_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "findings", lambda: iter([Finding("torch", "2.1", Verdict.BAD, "upgrade it")]))
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
