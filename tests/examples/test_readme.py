"""The README's code runs, its commands work, and its tables are what is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.examples.programs import ROOT, needs, run
from trainvet.rule import catalogue

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)[ ]?(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
# What the README's code takes for granted.
GIVEN = {
    "lightning": """
import lightning as L, torch
class Net(L.LightningModule):
    def __init__(self): super().__init__(); self.net = torch.nn.Linear(4, 2)
    def training_step(self, batch, index): return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
model, loader = Net(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,))), batch_size=16)
""",
    "keras": """
import keras, numpy
x, y = numpy.random.default_rng(0).normal(size=(64, 4)), numpy.arange(64) % 2
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
from trainvet.callbacks.keras import Diagnostics
""",
    "torch": """
import torch
model, criterion = torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy
optimizer, loader = torch.optim.SGD(model.parameters(), 0.1), [(torch.randn(16, 4), torch.randint(0, 2, (16,))) for _ in range(8)]
""",
}
MODULES = {"lightning": ("lightning",), "keras": ("keras", "tensorflow"), "torch": ("torch",)}
STEPS = {"lightning": 12, "keras": 6, "torch": 8}


def between(mark: str) -> list[str]:
    """The lines between <!-- mark --> and <!-- /mark -->."""
    return README.split(f"<!-- {mark} -->\n")[1].split(f"<!-- /{mark} -->")[0].strip().splitlines()


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The README's Python, one process per framework; the folders in which it ran."""
    folders = {}
    for framework in GIVEN:
        folders[framework] = tmp_path_factory.mktemp(framework)
        code = "\n".join([GIVEN[framework], *(text for language, mark, text in BLOCKS if (language, mark) == ("python", framework))])
        needs(*MODULES[framework])
        run("-c", code, cwd=folders[framework])
    return folders


def test_every_python_block_is_run() -> None:
    marks = [mark for language, mark, _ in BLOCKS if language == "python"]
    assert set(marks) == set(GIVEN)
    assert len(marks) >= 6


@pytest.mark.parametrize(("framework", "below"), [("lightning", "lightning_logs"), ("keras", "runs/a"), ("torch", "runs/b")])
def test_the_starts_watch_the_whole_run(ran: dict[str, Path], framework: str, below: str) -> None:
    out = run("-m", "trainvet", "report", below, cwd=ran[framework])
    assert f"finished after {STEPS[framework]} steps ({STEPS[framework]} applied)" in out


def commands() -> list[str]:
    return [line[2:] for language, _, text in BLOCKS if language == "console" for line in text.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("command", commands())
def test_commands(ran: dict[str, Path], command: str) -> None:
    program, *arguments = shlex.split(command)
    assert program == "trainvet"
    assert run("-m", "trainvet", *arguments, cwd=ran["keras"]).strip()


def test_the_table_of_rules_is_the_catalogue(tmp_path: Path) -> None:
    assert between("rules") == run("-m", "trainvet", "rules", "--markdown", cwd=tmp_path).strip().splitlines()


def test_the_families_are_those_of_the_catalogue() -> None:
    named = re.findall(r"^\| [\w ,]+ \(([A-Z]{2})\) \|", README, re.MULTILINE)
    assert sorted(named) == sorted({code[:2] for code in catalogue()})


def test_every_yes_in_the_table_of_modes_names_a_test() -> None:
    cells = [cell.strip() for line in between("modes") for cell in line.strip("|").split("|")]
    named = [cell for cell in cells if cell.startswith("yes")]
    assert len(named) >= 15
    for cell in named:
        path, case = re.fullmatch(r"yes[^:]*: `([\w/]+\.py): ([^`]+)`", cell).groups()  # type: ignore[union-attr]
        text = (ROOT / "tests" / path).read_text(encoding="utf-8")
        assert f'"{case}": ' in text or f"def {case}(" in text, cell


def test_the_two_commands_are_targets_of_make() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", README, re.MULTILINE)) == {"demo", "test"} <= targets


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) >= 3
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []
