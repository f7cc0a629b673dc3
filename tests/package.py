"""Builds wheel and sdist and tries them as a user would: ``python tests/package.py``.

Both wheels (the one built here and the one built from the sdist) must hold the same files. The wheel is installed in an empty environment,
without any framework: the command line must work there and the framework's absence must be said by the framework's own import.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run to the end, output captured."""
    return subprocess.run([str(part) for part in command], cwd=cwd, text=True, capture_output=True, check=False)


def must(done: subprocess.CompletedProcess[str], said: str = "") -> None:
    """Stop with the command's output unless it ended well and its output holds ``said``."""
    if done.returncode != 0 or said not in done.stdout:
        sys.exit(f"{' '.join(done.args)}\nexit code {done.returncode}, {said!r} expected in:\n{done.stdout}\n{done.stderr}")


def contents(wheel: Path) -> dict[str, int]:
    """The files of a wheel and their checksums, but for the record of them."""
    with zipfile.ZipFile(wheel) as archive:
        return {item.filename: item.CRC for item in archive.infolist() if not item.filename.endswith("/RECORD")}


def main() -> None:
    """Build, compare, install, try."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        for kind in ("--wheel", "--sdist"):
            must(run(sys.executable, "-m", "build", kind, "--outdir", here / "built", ROOT, cwd=here))
        wheel, sdist = next((here / "built").glob("*.whl")), next((here / "built").glob("*.tar.gz"))
        must(run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", here / "again", sdist, cwd=here))
        again = next((here / "again").glob("*.whl"))
        if contents(wheel) != contents(again):
            sys.exit(f"the wheel from the sdist differs from the wheel: {set(contents(wheel).items()) ^ set(contents(again).items())}")
        for name in ("trainvet/py.typed", "trainvet/callbacks/lightning.py", "trainvet/integrations/jsonl.py"):
            if name not in contents(wheel):
                sys.exit(f"{name} is missing in {wheel.name}")

        venv.create(here / "empty", with_pip=True)
        scripts = here / "empty" / ("Scripts" if sys.platform == "win32" else "bin")
        python = scripts / "python"
        must(run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel, cwd=here))
        must(run(scripts / "trainvet", "rules", cwd=here), "NF101")
        must(run(python, "-m", "trainvet", "rule", "NF101", cwd=here), "What it checks")
        for edge in ("lightning", "loop", "keras"):
            refused = run(python, "-c", f"import trainvet.callbacks.{edge}", cwd=here)
            if not re.search(r"ModuleNotFoundError: No module named '(torch|pytorch_lightning|keras|tensorflow)'\s*$", refused.stderr):
                sys.exit(f"without a framework, importing trainvet.callbacks.{edge} said:\n{refused.stderr}")
        print(f"{wheel.name} and {sdist.name}: built, equal, installed without a framework, command line works")


if __name__ == "__main__":
    main()
