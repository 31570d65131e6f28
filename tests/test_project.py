"""The files around the code: one version everywhere, templates and workflows that parse, a wheel that is complete."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import zeroshard
from zeroshard.cli.main import COMMANDS
from zeroshard.offload.native.build import library_name

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GITHUB = ROOT / ".github"
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
LINKED = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def workflow(name: str) -> dict[Any, Any]:
    found: dict[Any, Any] = parsed(GITHUB / "workflows" / name)
    found["on"] = found.pop(True)  # in YAML 1.1, `on` is a truth value
    return found


def commands_of(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_a_version_is_the_same_wherever_it_stands() -> None:
    released = re.findall(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = parsed(ROOT / "CITATION.cff")
    version = PYPROJECT["project"]["version"]
    assert released[0] == (version, citation["date-released"])
    assert citation["version"] == version
    assert zeroshard.__version__ == version


def test_the_changelog_has_a_place_for_what_comes_next() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings.count("Unreleased") == 1


def test_the_citation_names_both_papers_and_all_their_authors() -> None:
    citation = parsed(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == PYPROJECT["project"]["license"]
    papers = {paper["url"]: [author["family-names"] for author in paper["authors"]] for paper in citation["references"]}
    assert papers == {
        "https://arxiv.org/abs/1910.02054": ["Rajbhandari", "Rasley", "Ruwase", "He"],
        "https://arxiv.org/abs/2101.06840": [
            *("Ren", "Rajbhandari", "Aminabadi", "Ruwase", "Yang", "Zhang", "Li", "He"),
        ],
    }
    for url in papers:
        assert url in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", LINKED)
def test_every_link_to_a_file_leads_to_one(name: str) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / name).read_text())
    for target in targets:
        assert re.match(r"https?://", target) or (ROOT / target).exists(), target


def test_the_readme_leads_to_those_who_help() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "](CONTRIBUTING.md)" in readme
    assert "](SECURITY.md)" in readme


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_for_issues_has_what_github_asks_for(form: Path) -> None:
    content = parsed(form)
    assert content["name"]
    assert content["description"]
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert fields
    assert len({field["id"] for field in fields}) == len(fields)
    for field in content["body"]:
        assert field["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        assert field["attributes"].get("value") if field["type"] == "markdown" else field["attributes"]["label"]


@pytest.mark.parametrize("path", [*FORMS, GITHUB / "PULL_REQUEST_TEMPLATE.md"], ids=lambda path: path.stem)
def test_templates_name_files_and_commands_that_exist(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\.\./blob/HEAD/([^)\s]+)\)", text):
        assert (ROOT / target).exists(), target
    for command in re.findall(r"`zeroshard ([a-z]+)`", text):
        assert command in COMMANDS


def test_a_bug_comes_with_what_doctor_says() -> None:
    fields = {field.get("id"): field for field in parsed(GITHUB / "ISSUE_TEMPLATE/bug.yml")["body"]}
    assert fields["doctor"]["validations"]["required"]
    assert "`zeroshard doctor`" in fields["doctor"]["attributes"]["label"]


def test_each_push_and_pull_request_runs_make_test_on_two_versions_of_python() -> None:
    content = workflow("test.yml")
    assert set(content["on"]) == {"push", "pull_request"}
    job = content["jobs"]["test"]
    assert commands_of(job) == ["make test"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    assert commands_of(content["jobs"]["docs"]) == ["make docs"]
    assert {"test:", "docs:"} <= set((ROOT / "Makefile").read_text().split())


def test_only_a_tag_publishes_and_only_after_all_wheels_were_tried() -> None:
    content = workflow("release.yml")
    assert content["on"]["push"] == {"tags": ["v*"]}
    jobs = content["jobs"]
    publish = jobs["publish"]
    assert publish["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"
    assert set(publish["needs"]) == set(jobs) - {"publish"}
    assert publish["permissions"] == {"id-token": "write"}
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["publish"]
    assert any("cibuildwheel" in command for command in commands_of(jobs["wheel"]))


def test_the_release_refuses_a_tag_that_is_not_the_version(tmp_path: Path) -> None:
    (command,) = (run for run in commands_of(workflow("release.yml")["jobs"]["sdist"]) if "GITHUB_REF_NAME" in run)
    version = PYPROJECT["project"]["version"]
    for tag, code in ((f"v{version}", 0), (f"v{version}.1", 1)):
        words = shlex.split(command.replace("$GITHUB_REF_NAME", tag))
        done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == code, done.stderr


def test_wheels_are_built_and_tried_as_the_package_needs_it() -> None:
    settings = PYPROJECT["tool"]["cibuildwheel"]
    oldest = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    pythons = settings["build"].split()
    assert pythons[0] == f"cp{oldest.replace('.', '')}-manylinux_*"
    assert all(python.endswith("-manylinux_*") for python in pythons)
    assert "auditwheel repair" in settings["repair-wheel-command"]
    (script,) = re.findall(r"\{project\}/(\S+)", settings["test-command"])
    assert (ROOT / script).exists()


def test_pre_commit_runs_make_lint_and_downloads_nothing() -> None:
    (repository,) = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    (hook,) = repository["hooks"]
    assert repository["repo"] == "local"
    assert (hook["entry"], hook["language"], hook["pass_filenames"]) == ("make lint", "system", False)


@pytest.mark.slow
def test_a_wheel_has_every_file_of_the_package_and_fits_any_python(tmp_path: Path) -> None:
    source = tmp_path / "source"
    skipped = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "zeroshard", source / "zeroshard", ignore=skipped)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"zeroshard-{zeroshard.__version__}-py3-none-linux_")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("zeroshard/")}
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zeroshard").rglob("*") if path.is_file()}
    files = {name for name in files if not name.endswith((".so", ".pyc"))}
    assert inside == files | {f"zeroshard/offload/native/{library_name()}"}
