"""The cost of watching a PyTorch training on the CPU: a plain loop and Lightning, bare against default settings with all default rules.

python benchmarks/overhead/torch.py [--rounds 8] [--quick]
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
here = str(Path(__file__).parent)
sys.path = [entry for entry in sys.path if entry != here]  # this file's name would hide the torch package
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

sys.path.append(here)
from measure import Arm, interleave, machine, report  # noqa: E402

from trainvet.callbacks.lightning import Diagnostics  # noqa: E402
from trainvet.callbacks.loop import watch  # noqa: E402

EVERY = 50  # the default interval of runs of 3,000 steps and more


def mlp() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """20 tensors."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(10):
        layers += [nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), (torch.randn(128, 128), torch.randn(128, 128))


def transformer() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """About 10 million parameters, 256 tokens a step."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), (torch.randn(4, 64, 384), torch.randn(4, 64, 384))


class Loop:
    """A plain loop that can go on where it stopped."""

    def __init__(self, make, watched: bool, directory: str) -> None:
        self.model, (self.x, self.y) = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.vet = watch(self.model, self.optimizer, log_dir=directory, every=EVERY, steps=100_000) if watched else None
        self.taken = 0
        self.dense = 0.0
        if self.vet is not None:
            self.vet.__enter__()
            self.run(10)
            self.dense = self.spent() / 10
            self.start, self.before = self.taken, self.spent()

    def spent(self) -> float:
        return self.vet._session.monitor.own_seconds

    def own(self) -> float:
        return (self.spent() - self.before) / (self.taken - self.start)

    def run(self, steps: int) -> float:
        started = time.process_time()
        for _ in range(steps):
            loss = nn.functional.mse_loss(self.model(self.x), self.y)
            loss.backward()
            if self.vet is not None:
                self.vet.step(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.taken += steps
        return (time.process_time() - started) / steps


def loop(title: str, make, steps: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        arms = {name: Loop(make, name.startswith("watch"), directory) for name in ("bare", "bare again", "watch()")}
        table = [Arm(name, lambda it=it: it.run(steps), it.own if it.vet else None) for name, it in arms.items()]
        interleave(table, rounds)
        report(f"plain loop, {title}", table, steps, arms["watch()"].dense)
        arms["watch()"].vet.__exit__(None, None, None)


def lightning(title: str, make, steps: int, rounds: int) -> None:
    import lightning as L

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.data = make()

        def training_step(self, batch, index):
            return nn.functional.mse_loss(self.net(self.data[0]), self.data[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-4)

    class Clock(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            if index == 10:
                self.started = time.process_time()

        def on_train_end(self, trainer, module):
            self.seconds = (time.process_time() - self.started) / (steps - 10)

    spent: list[float] = []

    def fit(watched: bool, directory: str) -> float:
        clock, callback = Clock(), Diagnostics(log_dir=directory, every=EVERY) if watched else None
        trainer = L.Trainer(
            accelerator="cpu",
            max_steps=steps,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[clock, *([callback] if callback else [])],
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(range(steps)))
        if callback is not None:
            spent.append(callback.report.cost["seconds"] / steps)
        return clock.seconds

    with tempfile.TemporaryDirectory() as directory:
        arms = [
            Arm("bare", lambda: fit(False, directory)),
            Arm("bare again", lambda: fit(False, directory)),
            Arm("Diagnostics()", lambda: fit(True, directory), lambda: sum(spent) / len(spent)),
        ]
        interleave(arms, rounds)
        report(f"Lightning, {title} (own time with the dense start)", arms, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds, factor = (2, 10) if options.quick else (options.rounds, 1)
    print(f"torch {torch.__version__}")
    machine()
    loop("MLP of 20 tensors", mlp, 500 // factor, rounds)
    loop("transformer of 10 M parameters", transformer, 100 // factor, rounds)
    lightning("MLP of 20 tensors", mlp, 510 // factor + 10, rounds)
    lightning("transformer of 10 M parameters", transformer, 100 // factor + 10, max(2, rounds // 2))


if __name__ == "__main__":
    main()
