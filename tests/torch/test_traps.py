"""Healthy training that trips naive rules: each program really holds its trap, trains, and no rule says more than INFO."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainvet.callbacks.loop import watch
from trainvet.finding import Severity

STEPS = 240
GENERATOR = torch.Generator().manual_seed(7)
CENTRES = 2.0 * torch.randn(4, 16, generator=GENERATOR)
LABELS = torch.randint(0, 4, (512,), generator=GENERATOR)
POINTS = CENTRES[LABELS] + torch.randn(512, 16, generator=GENERATOR)
POINTS = (POINTS - POINTS.mean(0)) / POINTS.std(0)
TARGETS = torch.tanh(POINTS @ torch.randn(16, 1, generator=GENERATOR) / 4)
WORDS = torch.randint(1, 400, (512, 6), generator=GENERATOR)


def batches(*data, size=32, steps=STEPS):
    chooser = torch.Generator().manual_seed(3)
    for _ in range(steps):
        chosen = torch.randint(0, len(data[0]), (size,), generator=chooser)
        yield tuple(tensor[chosen] for tensor in data)


def train(model, optimizer, loss_of, *data, scheduler=None, scaler=None, steps=STEPS, size=32, accumulation=1, clip=None, tmp_path, **arguments):
    """Losses of a watched run, and its report."""
    losses = []
    with watch(model, optimizer, scheduler=scheduler, scaler=scaler, steps=steps, log_dir=tmp_path, **arguments) as vet:
        for batch in batches(*data, size=size, steps=steps):
            optimizer.zero_grad()
            loss = loss_of(model, *batch)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            vet.step(loss)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            if scheduler is not None:
                scheduler.step()
            losses.append(loss.item())
    assert not vet.report.errors
    return losses, vet.report


def quiet(losses, report):
    """It learns, and nothing of at least a warning is said."""
    assert sum(losses[-20:]) < sum(losses[:20])
    told = [(item.code, item.step, item.where, item.message) for item in report.findings if item.severity >= Severity.WARNING]
    assert told == []


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def regress(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


def mlp(*between, width=48, out=4):
    return nn.Sequential(nn.Linear(16, width), *between, nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, out))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_loss_scale_still_calibrating_and_one_skip_per_growth(tmp_path):
    class HalfGradient(torch.autograd.Function):
        """What float16 does to a gradient on its way back."""

        @staticmethod
        def forward(context, value):
            return value.view_as(value)

        @staticmethod
        def backward(context, gradient):
            return gradient.half().float()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            return HalfGradient.apply(self.body(x))

    model = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=100)
    scales = []
    losses, report = train(
        model,
        torch.optim.Adam(model.parameters(), 2e-3),
        lambda model, x, y: scales.append(scaler.get_scale()) or classify(model, x, y),
        POINTS,
        LABELS,
        scaler=scaler,
        tmp_path=tmp_path,
    )
    assert scales[10] < scales[0]  # it did overflow
    quiet(losses, report)


def test_units_that_are_silent_on_a_batch_and_sparse_feed_forward_nets(tmp_path):
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 4))
    with torch.no_grad():
        model[0].bias.fill_(-0.9)
    assert float((F.relu(model[0](POINTS[:32])) == 0).float().mean()) > 0.7
    quiet(*train(model, torch.optim.Adam(model.parameters(), 2e-3), classify, POINTS, LABELS, tmp_path=tmp_path))


class Residual(nn.Module):
    def __init__(self, width=32, blocks=4, zero=True):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(blocks)
        )
        self.head = nn.Linear(width, 4)
        if zero:
            for block in self.blocks:
                nn.init.zeros_(block[3].weight)
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_residual_branches_and_a_head_that_start_at_zero(tmp_path):
    model = Residual()
    losses, report = train(model, torch.optim.AdamW(model.parameters(), 2e-3), classify, POINTS, LABELS, tmp_path=tmp_path)
    assert losses[0] == pytest.approx(math.log(4), abs=1e-5)
    quiet(losses, report)


class LowRank(nn.Module):
    """A frozen layer with a trainable low-rank addition that starts at zero."""

    def __init__(self, layer, rank=4):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T


def test_low_rank_adapters_on_a_frozen_backbone(tmp_path):
    model = nn.Sequential(LowRank(nn.Linear(16, 64)), nn.ReLU(), LowRank(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], 5e-3)
    quiet(*train(model, optimizer, classify, POINTS, LABELS, tmp_path=tmp_path, profile="finetune"))


def test_a_bias_in_front_of_a_normalisation(tmp_path):
    model = mlp(nn.BatchNorm1d(48))
    before = model[0].bias.detach().clone()
    losses, report = train(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), classify, POINTS, LABELS, tmp_path=tmp_path)
    assert float((model[0].bias - before).detach().abs().max()) < 1e-3  # it hardly moves: its gradient is rounding noise
    quiet(losses, report)


def test_embeddings_most_of_whose_rows_no_batch_names(tmp_path):
    table = nn.Sequential(nn.Embedding(400, 16, padding_idx=0), nn.Flatten(), nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 2))
    labels = (WORDS[:, 0] % 2).long()
    quiet(*train(table, torch.optim.Adam(table.parameters(), 5e-3), classify, WORDS, labels, tmp_path=tmp_path))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 24)
        self.body = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 24))
        self.head = nn.Linear(24, 30, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.2)

    def forward(self, x):
        return self.head(self.body(self.words(x)))


def test_tied_input_and_output_embeddings(tmp_path):
    model, words = Tied(), WORDS[:, 0] % 30
    quiet(*train(model, torch.optim.AdamW(model.parameters(), 3e-3), classify, words, (words * 7 + 3) % 30, tmp_path=tmp_path))


def test_a_frozen_backbone_in_evaluation_mode_under_a_new_head(tmp_path):
    body = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2))
    for points in POINTS.split(32):
        body(points)
    model = nn.Sequential(body.requires_grad_(False).eval(), nn.Linear(64, 4))
    losses, report = train(model, torch.optim.Adam(model[1].parameters(), 5e-3), classify, POINTS, LABELS, tmp_path=tmp_path, profile="finetune")
    quiet(losses, report)


def test_a_warm_up_from_zero_and_a_decay_to_zero(tmp_path):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 40, max(0.0, (STEPS - step) / (STEPS - 40))))
    assert ramp.get_last_lr() == [0]
    quiet(*train(model, optimizer, classify, POINTS, LABELS, scheduler=ramp, tmp_path=tmp_path))


def test_a_loss_near_zero(tmp_path):
    model = mlp(width=96)
    losses, report = train(model, torch.optim.Adam(model.parameters(), 3e-3), classify, POINTS[:64], LABELS[:64], steps=500, tmp_path=tmp_path)
    assert losses[-1] < 1e-2
    quiet(losses, report)


def test_a_heavy_tailed_loss_of_single_samples(tmp_path):
    model, tail = mlp(out=1), torch.distributions.StudentT(2.5).sample((512, 1)) * 0.3
    losses, report = train(model, torch.optim.Adam(model.parameters(), 1e-3), regress, POINTS, TARGETS + tail, size=4, steps=400, tmp_path=tmp_path)
    assert max(losses) > 10 * sorted(losses)[200]
    quiet(losses, report)


def test_attention_with_a_causal_mask_of_minus_infinity(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(400, 24)
            self.qkv, self.out, self.head = nn.Linear(24, 72), nn.Linear(24, 24), nn.Linear(24, 2)

        def forward(self, x):
            x = self.words(x)
            query, key, value = self.qkv(x).chunk(3, -1)
            scores = query @ key.transpose(1, 2) / 24**0.5
            scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
            return self.head((x + self.out(scores.softmax(-1) @ value))[:, -1])

    model = Net()
    quiet(*train(model, torch.optim.AdamW(model.parameters(), 3e-3), classify, WORDS, (WORDS[:, -1] % 2).long(), tmp_path=tmp_path))


class Experts(nn.Module):
    """A top-1 mixture: an expert sees the samples that the gate sends to it, often none."""

    def __init__(self, experts=8):
        super().__init__()
        self.gate = nn.Linear(16, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)) for _ in range(experts))

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        weight, chosen = share.max(-1)
        out = x.new_zeros(len(x), 4)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any():
                out[mine] = expert(x[mine]) * weight[mine, None]
        return out


def test_experts_without_samples(tmp_path):
    model = Experts()
    quiet(*train(model, torch.optim.Adam(model.parameters(), 3e-3), classify, POINTS, LABELS, size=8, tmp_path=tmp_path))


def test_gated_recurrent_nets_saturate_in_health(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.cell, self.head = nn.Embedding(400, 12), nn.LSTM(12, 24, batch_first=True), nn.Linear(24, 2)

        def forward(self, x):
            return self.head(self.cell(self.words(x))[0][:, -1])

    model = Net()
    quiet(*train(model, torch.optim.Adam(model.parameters(), 5e-3), classify, WORDS, (WORDS[:, 0] % 2).long(), clip=1.0, tmp_path=tmp_path))


def test_a_run_that_goes_on_from_a_checkpoint(tmp_path):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    train(model, optimizer, classify, POINTS, LABELS, tmp_path=tmp_path / "first")
    again = mlp()
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    other = torch.optim.Adam(again.parameters(), 2e-4)
    other.load_state_dict(optimizer.state_dict())
    _, report = train(again, other, classify, POINTS, LABELS, tmp_path=tmp_path / "second", profile="finetune")
    assert [item.code for item in report.findings if item.severity >= Severity.WARNING] == []


def test_dropout_makes_training_look_worse_than_validation(tmp_path):
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 4))
    quiet(*train(model, torch.optim.Adam(model.parameters(), 3e-3), classify, POINTS, LABELS, tmp_path=tmp_path))


def test_an_auto_encoder_with_a_sigmoid_output(tmp_path):
    pixels = torch.sigmoid(2 * POINTS)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16), nn.Sigmoid())
    quiet(*train(model, torch.optim.Adam(model.parameters(), 5e-3), regress, pixels, pixels, tmp_path=tmp_path))


def test_deep_sigmoid_nets_with_a_small_gradient_scale(tmp_path):
    """A mean over many outputs makes every gradient small, and nothing is wrong with it."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 512))
    wide = torch.tanh(POINTS @ torch.randn(16, 512, generator=GENERATOR) / 4)
    losses, report = train(
        model, torch.optim.Adam(model.parameters(), 2e-3, eps=1e-15), lambda model, x, y: 1e-6 * regress(model, x, y), POINTS, wide, tmp_path=tmp_path
    )
    quiet(losses, report)


def test_adversarial_nets_with_two_optimizers(tmp_path):
    maker, judge = (
        nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16)),
        nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)),
    )
    both = nn.ModuleDict({"maker": maker, "judge": judge})
    makes, judges = torch.optim.Adam(maker.parameters(), 2e-3, (0.5, 0.999)), torch.optim.Adam(judge.parameters(), 2e-3, (0.5, 0.999))
    source = torch.Generator().manual_seed(1)
    with watch(both, [judges, makes], log_dir=tmp_path, steps=2 * STEPS, profile="gan") as vet:
        for (real,) in batches(POINTS):
            fake = maker(torch.randn(32, 8, generator=source))
            judges.zero_grad()
            loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
            loss.backward()
            vet.step(loss, judges)
            judges.step()
            makes.zero_grad()
            loss = F.softplus(-judge(fake)).mean()
            loss.backward()
            vet.step(loss, makes)
            makes.step()
    assert not vet.report.errors
    assert [(item.code, item.message) for item in vet.report.findings if item.severity >= Severity.WARNING] == []
