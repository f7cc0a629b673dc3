"""Two processes that train together: both end at the same step although one alone saw the fault, and nobody waits for the other."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

PROGRAM = """
    import sys, warnings
    warnings.filterwarnings("ignore")
    import lightning.pytorch as pl
    import torch
    from tests.lightning.runs import Net, data
    from trainvet.callbacks.lightning import Diagnostics

    class OneIsBad(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.all_gather(loss)  # a replay on one process alone would wait here for ever
            bad = self.global_rank == 1 and self.batches == 6
            return loss * float("nan") if bad else loss

    class Tells(pl.Callback):
        def on_exception(self, trainer, module, error):
            head = vet.report.findings[0]
            weights = all(bool(torch.isfinite(value).all()) for value in module.parameters())
            told = (type(error).__name__, head.code, head.step, vet.report.steps, weights, vet.log_dir is not None, "processes" in str(head.evidence))
            print("told", trainer.global_rank, *told, flush=True)

    if __name__ == "__main__":
        vet = Diagnostics(select=["NF101"], abort_on="error")
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=[vet, Tells()], default_root_dir=sys.argv[1],
                             enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
        trainer.fit(OneIsBad(), data(16))
"""


def test_both_processes_end_at_the_same_step(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM))
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=150, cwd=tmp_path, env=environment, check=False
    )
    told = sorted(line for line in result.stdout.splitlines() if line.startswith("told"))
    assert torch.distributed.is_gloo_available()
    assert told == [f"told {rank} TrainingAborted NF101 5 6 True {rank == 0} True" for rank in (0, 1)], result.stdout + result.stderr
