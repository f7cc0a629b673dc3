"""Each example runs as it stands and prints what it promises."""

from __future__ import annotations

import re
from pathlib import Path

from tests.examples.programs import ROOT, needs, run

EXAMPLES = ROOT / "examples"


def test_lightning_digits(tmp_path: Path) -> None:
    needs("lightning", "sklearn")
    out = run(str(EXAMPLES / "lightning_digits.py"), cwd=tmp_path)
    assert re.search(r"finished after 232 steps \(232 applied\)\. No warnings; \d+ of \d+ rules", out)
    assert re.search(r"^net\.0\.weight +update / weight: \d\.\de-\d\d at step 0, \d\.\de-\d\d at step 231$", out, re.MULTILINE)
    assert (tmp_path / "runs/lightning_digits/trainvet/trainvet.jsonl").is_file()


def test_keras_digits(tmp_path: Path) -> None:
    needs("keras", "tensorflow", "sklearn")
    out = run(str(EXAMPLES / "keras_digits.py"), cwd=tmp_path)
    assert re.search(r"finished after 232 steps \(232 applied\)\. No warnings; \d+ of \d+ rules", out)
    assert len(re.findall(r"^\S+ +gradient norm: \d\.\de[-+]\d\d at step 0, \d\.\de[-+]\d\d at step 231$", out, re.MULTILINE)) == 6
    assert (tmp_path / "runs/keras_digits/trainvet/trainvet.jsonl").is_file()


def test_plain_loop(tmp_path: Path) -> None:
    needs("torch")
    out = run(str(EXAMPLES / "plain_loop.py"), cwd=tmp_path).splitlines()
    assert out[0].startswith("WT102 parameter-without-optimizer at 2 ")
    assert "2 of 4 trainable parameters" in out[0]
    assert out[1].startswith("try: hand them to the optimizer")


def test_own_watchpoint(tmp_path: Path) -> None:
    needs("torch")
    out = run(str(EXAMPLES / "own_watchpoint.py"), cwd=tmp_path).splitlines()
    assert [line.split(" at ")[0] for line in out] == ["large-head-gradient since step 0"]
    assert "set to be at most 5" in out[0]


def test_own_rule(tmp_path: Path) -> None:
    needs("torch")
    out = run(str(EXAMPLES / "own_rule.py"), cwd=tmp_path).splitlines()
    assert len(out) == 1
    assert re.match(r"XX101 uneven-update: 2\.(weight|bias) moves \d+ times as fast as the slowest weight; try: give the parts", out[0])


def test_abort(tmp_path: Path) -> None:
    needs("torch")
    out = run(str(EXAMPLES / "abort.py"), cwd=tmp_path).splitlines()
    assert out[1:3] == ["ran to the end", "weights are destroyed after 100 steps, 100 of them applied"]
    assert out[4].startswith("aborted: IN101 non-finite-input at input, step 30: ")
    assert "Last good step: 29" in out[4]
    assert out[5] == "weights are finite after 31 steps, 30 of them applied"
    assert out[7:9] == ["ran to the end", "weights are finite after 100 steps, 99 of them applied"]


def test_every_example_is_tested_and_short() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {name.removeprefix("test_") for name in globals() if name.startswith("test_")} - {"every_example_is_tested_and_short"}
    assert {path.name: lines for path in EXAMPLES.glob("*.py") if (lines := len(path.read_text().splitlines())) > 60} == {}
