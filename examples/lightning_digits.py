"""Lightning: one callback. Trains a small net on handwritten digits, then prints what trainvet measured and what it thinks of it."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainvet.callbacks.lightning import Diagnostics


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, index):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    L.seed_everything(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    diagnostics = Diagnostics(log_dir="runs/lightning_digits")
    trainer = L.Trainer(max_epochs=8, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[diagnostics])
    trainer.fit(Classifier(), DataLoader(data, batch_size=64, shuffle=True))

    print(diagnostics.report.verdict())
    ratio = diagnostics.history("update.ratio")  # steps [T], subjects (S names), values [T, S]
    for name, first, last in zip(ratio.subjects, ratio.values[0], ratio.values[-1], strict=True):
        print(f"{name:<14} update / weight: {first:.1e} at step {ratio.steps[0]}, {last:.1e} at step {ratio.steps[-1]}")


if __name__ == "__main__":
    main()
