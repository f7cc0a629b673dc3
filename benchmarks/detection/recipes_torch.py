"""Healthy PyTorch recipes with models of one's own, on small real data."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.detection import data
from benchmarks.detection.setup import Book, Setup

BOOK = Book("lightning", "loop")


def cosine(optimizer, setup):
    """To zero over the whole run, per step."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=setup.steps)


def one_cycle(optimizer, setup):
    """Up for 30 %, then down."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=setup.rate, total_steps=setup.steps)


def warm_cosine(optimizer, setup):
    """Linear for 10 %, then a cosine."""
    warm = max(1, setup.steps // 10)
    up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 1.0, warm)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [up, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, setup.steps - warm)], [warm])


def tenfold_steps(optimizer, setup):
    """A tenth after two thirds of the epochs."""
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [setup.epochs * 2 // 3], 0.1)


def flat_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy over all places of a sequence."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def setup(split, model, criterion, **fields) -> Setup:
    """A setup with one input."""
    x, y, val_x, val_y = split
    return Setup(model, criterion, (x,), y, (val_x,), val_y, **fields)


@BOOK.add()
def mlp_digits(seed):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    return setup(data.digits(seed), model, F.cross_entropy, classes=10, epochs=6, rate=2e-3)


@BOOK.add()
def mlp_wine_tanh(seed):
    model = nn.Sequential(nn.Linear(13, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    return setup(data.table("wine", seed), model, F.cross_entropy, classes=3, optimizer="sgd", rate=0.01, momentum=0.9, batch=16, epochs=20)


@BOOK.add()
def mlp_diabetes(seed):
    model = nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1), nn.Flatten(0))
    fields = {"kind": "values", "optimizer": "adamw", "batch": 32, "epochs": 15, "learnt": 0.2}
    return setup(data.table("diabetes", seed), model, F.mse_loss, **fields)


@BOOK.add()
def mlp_iris(seed):
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    return setup(data.table("iris", seed), model, F.cross_entropy, classes=3, rate=5e-3, batch=8, epochs=15)


@BOOK.add()
def logistic_cancer(seed):
    model = nn.Sequential(nn.Linear(30, 1), nn.Flatten(0))
    criterion = lambda logits, labels: F.binary_cross_entropy_with_logits(logits, labels.float())  # noqa: E731
    return setup(data.table("breast_cancer", seed), model, criterion, kind="binary", optimizer="sgd", rate=0.1, batch=32, epochs=12)


@BOOK.add()
def mlp_cancer_rmsprop(seed):
    model = nn.Sequential(nn.Linear(30, 32), nn.LeakyReLU(), nn.BatchNorm1d(32), nn.Linear(32, 1), nn.Flatten(0))
    criterion = lambda logits, labels: F.binary_cross_entropy_with_logits(logits, labels.float())  # noqa: E731
    return setup(data.table("breast_cancer", seed), model, criterion, kind="binary", optimizer="rmsprop", rate=1e-3, batch=16, epochs=8)


@BOOK.add()
def cnn_digits(seed):
    def block(inner, outer):
        return [nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU()]

    model = nn.Sequential(*block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    fields = {"optimizer": "nesterov", "rate": 0.05, "momentum": 0.9, "decay": 5e-4, "schedule": cosine}
    return setup(data.digits(seed, (1, 8, 8)), model, F.cross_entropy, classes=10, epochs=5, **fields)


@BOOK.add()
def cnn_digits_epoch_schedule(seed):
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    )  # fmt: skip
    fields = {"optimizer": "sgd", "rate": 0.05, "momentum": 0.9, "schedule": tenfold_steps, "interval": "epoch"}
    return setup(data.digits(seed, (1, 8, 8)), model, F.cross_entropy, classes=10, epochs=6, **fields)


class Residual(nn.Module):
    """Two convolutions around a skip path; the second normalisation starts at 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])
        nn.init.zeros_(self.norms[1].weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))))


@BOOK.add()
def resnet_digits(seed):
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)]
    model = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), *[Residual(24) for _ in range(3)], *head)
    fields = {"optimizer": "sgd", "rate": 0.1, "momentum": 0.9, "decay": 1e-4, "schedule": one_cycle}
    return setup(data.digits(seed, (1, 8, 8)), model, F.cross_entropy, classes=10, epochs=5, **fields)


class Recurrent(nn.Module):
    """Embedding, one recurrent layer, and a reading of every place or of the last one."""

    def __init__(self, kind, letters: int, width: int, outputs: int, last: bool = False) -> None:
        super().__init__()
        self.embedding, self.recurrent, self.head = nn.Embedding(letters, width), kind(width, width, batch_first=True), nn.Linear(width, outputs)
        self.last = last

    def forward(self, ids: Tensor) -> Tensor:
        states = self.recurrent(self.embedding(ids))[0]
        return self.head(states[:, -1] if self.last else states)


@BOOK.add(origin="torch")
def lstm_characters(seed):
    letters = len(data.alphabet())
    fields = {"kind": "tokens", "classes": letters, "rate": 5e-3, "clip": 1.0, "epochs": 5, "learnt": 0.25}
    return setup(data.characters(seed), Recurrent(nn.LSTM, letters, 64, letters), flat_entropy, **fields)


@BOOK.add(origin="torch")
def gru_authors(seed):
    return setup(data.authors(seed), Recurrent(nn.GRU, len(data.alphabet()), 48, 2, last=True), F.cross_entropy, classes=2, rate=3e-3, epochs=6)


@BOOK.add(origin="torch")
def rnn_digit_rows(seed):
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.head = nn.RNN(8, 64, batch_first=True), nn.Linear(64, 10)

        def forward(self, rows: Tensor) -> Tensor:
            return self.head(self.recurrent(rows)[1][-1])

    return setup(data.digits(seed, (8, 8)), Rows(), F.cross_entropy, classes=10, rate=2e-3, clip=5.0, epochs=6)


class Bag(nn.Module):
    """The mean of embeddings, as in fastText."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.EmbeddingBag(letters**2, 16), nn.Linear(16, 2)
        self.letters = letters

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids[:, :-1] * self.letters + ids[:, 1:]))


@BOOK.add(origin="torch")
def embedding_bag_authors(seed):
    return setup(data.authors(seed), Bag(len(data.alphabet())), F.cross_entropy, classes=2, rate=0.02, epochs=6)


@BOOK.add()
def label_smoothing_digits(seed):
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.3), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 10))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    return setup(data.digits(seed), model, criterion, classes=10, optimizer="adamw", rate=2e-3, schedule=warm_cosine, epochs=6)


@BOOK.add()
def accumulated_digits(seed):
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    return setup(data.digits(seed), model, F.cross_entropy, classes=10, rate=3e-3, batch=16, accumulate=4, epochs=8)


@BOOK.add()
def half_precision_digits(seed):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return setup(data.digits(seed), model, F.cross_entropy, classes=10, precision="16-mixed", epochs=5)


@BOOK.add()
def bfloat_cnn_digits(seed):
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
    return setup(data.digits(seed, (1, 8, 8)), model, F.cross_entropy, classes=10, precision="bf16-mixed", epochs=5, optimizer="adamw")


@BOOK.add()
def quantile_diabetes(seed):
    def pinball(predicted, target):
        error = target[:, None] - predicted
        levels = torch.tensor([0.1, 0.5, 0.9])
        return torch.maximum(levels * error, (levels - 1) * error).mean()

    made = setup(data.table("diabetes", seed), nn.Sequential(nn.Linear(10, 32), nn.ELU(), nn.Linear(32, 3)), pinball, kind="other", learnt=0.15)
    made.score = lambda predicted, held: float(1 - np.square(predicted[:, 1] - held.val_y).mean() / held.val_y.var())
    made.epochs, made.rate = 20, 3e-3
    return made


@BOOK.add()
def two_tasks_digits(seed):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(64, 96), nn.ReLU())
            self.digit, self.parity = nn.Linear(96, 10), nn.Linear(96, 1)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.trunk(x)
            return torch.cat([self.digit(hidden), self.parity(hidden)], 1)

    def both(outputs, labels):
        return F.cross_entropy(outputs[:, :10], labels) + 0.5 * F.binary_cross_entropy_with_logits(outputs[:, 10], (labels % 2).float())

    made = setup(data.digits(seed), Two(), both, kind="other", classes=10, epochs=6)
    made.score = lambda outputs, held: float((outputs[:, :10].argmax(1) == held.val_y).mean())
    return made
