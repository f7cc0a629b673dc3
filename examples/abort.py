"""Ending a run early. Batch 30 is damaged: with ``abort_on`` the update that would have destroyed the weights is held back and the run ends;
with ``skip_bad_updates`` it is dropped and the run goes on."""

import torch
from torch import nn

from trainvet import TrainingAborted
from trainvet.callbacks.loop import watch


def train(**arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer, steps=100, **arguments) as vet:
        try:
            for step in range(100):
                inputs, targets = torch.randn(16, 20), torch.randn(16, 1)
                if step == 30:
                    inputs[3] = float("nan")
                loss = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                vet.step(loss)
                optimizer.step()
            print("ran to the end")
        except TrainingAborted as aborted:
            print(f"aborted: {aborted}")
    sound = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    print(f"weights are {'finite' if sound else 'destroyed'} after {vet.report.steps} steps, {vet.report.applied} of them applied")


def main():
    print("-- only watching")
    train(log_dir="runs/abort/watching")
    print("-- abort_on")
    train(log_dir="runs/abort/aborting", abort_on="error")
    print("-- skip_bad_updates")
    train(log_dir="runs/abort/skipping", skip_bad_updates=3)


if __name__ == "__main__":
    main()
