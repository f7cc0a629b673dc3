"""What no tool checks: that lists kept by hand name what is there, and that text files are in order."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.groups import GROUPS
from tests.text_files import complaint

ROOT = Path(__file__).resolve().parents[2]


def tracked() -> list[Path]:
    """The files git knows of, without links; skips outside a checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def test_the_import_contract_names_every_file_of_the_core() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    named = next(item["source_modules"] for item in contracts if "the core knows" in item["name"])
    files = {path.stem for path in (ROOT / "trainvet").glob("*.py")} - {"__init__", "__main__"}
    assert set(named) == {f"trainvet.{name}" for name in files | {"rules"}}


def test_every_folder_with_tests_is_run_by_make_test() -> None:
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert folders == {folder for group in GROUPS.values() for folder in group}


def test_text_files_are_in_order() -> None:
    wrong = {str(path.relative_to(ROOT)): said for path in tracked() if path.suffix != ".png" and (said := complaint(path))}
    assert wrong == {}


@pytest.mark.skipif(not (ROOT / "callbacks").is_dir(), reason="an unpacked sdist holds folders in place of the links")
def test_links_make_one_package_of_three_folders() -> None:
    assert (ROOT / "trainvet" / "callbacks" / "__init__.py").samefile(ROOT / "callbacks" / "__init__.py")
    assert (ROOT / "trainvet" / "integrations" / "__init__.py").samefile(ROOT / "integrations" / "__init__.py")
