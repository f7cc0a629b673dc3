"""A rule of your own: a dataclass with a code, what it reads, its numbers as fields, and ``check``. A package can register it under the entry
point "trainvet.rules"; here it is handed over."""

import dataclasses

import numpy as np
import torch
from torch import nn

from trainvet import Rule, Severity
from trainvet.callbacks.loop import watch


@dataclasses.dataclass
class UnevenUpdate(Rule):
    """
    ## What it checks
    The largest update ratio of a weight is more than ``factor`` times the smallest.
    ## Why it matters
    One learning rate does not fit all parts of the model.
    ## What to do
    Give the parts parameter groups with rates of their own.
    ## Known limits
    Weights that start at 0 have no ratio and are left out.
    """

    code = "XX101"
    reads = frozenset({"update.ratio"})
    severity = Severity.WARNING
    fixes = ("give the parts parameter groups with learning rates of their own",)

    factor: float = 100.0
    told: bool = dataclasses.field(default=False, init=False)

    def check(self, snapshot):
        names, ratios = snapshot.column("update.ratio") or ((), np.empty(0))
        usable = np.isfinite(ratios) & (ratios > 0)
        if usable.sum() >= 2 and not self.told and (uneven := ratios[usable].max() / ratios[usable].min()) > self.factor:
            self.told = True
            fast = names[int(np.argmax(np.where(usable, ratios, 0)))]
            yield self.finding(snapshot.step, f"{fast} moves {uneven:.0f} times as fast as the slowest weight", subjects=[fast])


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
    slow_and_fast = [{"params": model[0].parameters(), "lr": 1e-5}, {"params": model[2].parameters(), "lr": 1e-1}]
    optimizer = torch.optim.SGD(slow_and_fast)
    with watch(model, optimizer, log_dir="runs/own_rule", steps=50, rules=[UnevenUpdate(factor=50)]) as vet:
        for _ in range(50):
            loss = nn.functional.mse_loss(model(torch.randn(16, 20)), torch.randn(16, 1))
            optimizer.zero_grad()
            loss.backward()
            vet.step(loss)
            optimizer.step()
    print(*(f"{finding.code} {finding.name}: {finding.message}; try: {finding.fixes[0]}" for finding in vet.report.findings), sep="\n")


if __name__ == "__main__":
    main()
