"""A threshold of your own, without writing a class: any statistic, any part of the model, as patient as you like."""

from collections import OrderedDict

import torch
from torch import nn

from trainvet import Watchpoint
from trainvet.callbacks.loop import watch

WATCHPOINTS = (
    Watchpoint("gradient.norm", above=5.0, where="head", patience=3, severity="error", name="large-head-gradient"),
    Watchpoint("weight.rms", outside=(0.01, 2.0), where="words"),
)


def main():
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(words=nn.EmbeddingBag(100, 16), head=nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    words, targets = torch.randint(0, 100, (500, 8)), 20 + torch.randn(500, 1)  # targets far from 0 make large gradients

    with watch(model, optimizer, log_dir="runs/own_watchpoint", steps=100, rules=WATCHPOINTS) as vet:
        for step in range(100):
            chosen = torch.arange(step * 25, step * 25 + 25) % 500
            loss = nn.functional.mse_loss(model(words[chosen]), targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            vet.step(loss)
            optimizer.step()

    for finding in vet.report.findings:
        print(f"{finding.name} since step {finding.first_step} at {finding.where}: {finding.message}")


if __name__ == "__main__":
    main()
