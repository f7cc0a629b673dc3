"""A hand-written PyTorch loop: ``watch`` and one call per step. The net is broken: the optimizer was built before a layer was replaced."""

import torch
from torch import nn

from trainvet.callbacks.loop import watch


def main():
    torch.manual_seed(0)
    images, labels = torch.randn(1000, 20), torch.randint(0, 5, (1000,))
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model[2] = nn.Linear(32, 5)  # too late: the optimizer still holds the old layer

    with watch(model, optimizer, log_dir="runs/plain_loop", steps=200) as vet:
        for step in range(200):
            chosen = torch.arange(step * 50, step * 50 + 50) % 1000
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            vet.step(loss)
            optimizer.step()

    for finding in vet.report.findings:
        print(f"{finding.code} {finding.name} at {finding.where}: {finding.message}")
        print(f"try: {finding.fixes[0]}")


if __name__ == "__main__":
    main()
