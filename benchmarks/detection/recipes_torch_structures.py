"""Healthy PyTorch recipes whose structure is less plain: generative, siamese, adapted, mixed, attending."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.detection import data
from benchmarks.detection.recipes_torch import cosine, flat_entropy, setup, warm_cosine
from benchmarks.detection.setup import Book, Setup

BOOK = Book("lightning", "loop")


def images(seed: int, shape: tuple[int, ...] = (64,)):
    """Digits that are their own targets."""
    x, _, held, _ = data.digits(seed, shape)
    return x, x, held, held


@BOOK.add()
def autoencoder_digits(seed):
    # a ReLU at the code kills two thirds of its units and costs a quarter of the score: that would be a fault, not a recipe
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 12), nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 64), nn.Sigmoid())
    return setup(images(seed), model, F.binary_cross_entropy, kind="images", rate=2e-3, epochs=8)


@BOOK.add()
def denoising_convolutions(seed):
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose2d(24, 16, 2, stride=2), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1),
    )  # fmt: skip
    x, y, held, held_y = images(seed, (1, 8, 8))
    noise = np.random.default_rng(seed)
    x, held = (value + noise.normal(0, 0.2, value.shape).astype(np.float32) for value in (x, held))
    return setup((x, y, held, held_y), model, F.mse_loss, kind="images", rate=3e-3, epochs=5)


class Variational(nn.Module):
    """Encoder to mean and log-variance, a sample, a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.to_code = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 16)
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.to_code(self.encoder(x)).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if self.training else mean
        return torch.cat([self.decoder(code), mean, log_variance], 1)


@BOOK.add()
def vae_digits(seed):
    def elbo(outputs, x):
        mean, log_variance = outputs[:, 64:72], outputs[:, 72:]
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.binary_cross_entropy_with_logits(outputs[:, :64], x, reduction="sum") / len(x) + 0.5 * divergence

    made = setup(images(seed), Variational(), elbo, kind="other", rate=2e-3, epochs=8)
    made.score = lambda out, held: float(
        1 - np.square(1 / (1 + np.exp(-out[:, :64])) - held.val_y).mean() / np.square(held.val_y - held.y.mean(0)).mean()
    )
    made.learnt = 0.2
    return made


class Adversaries(nn.Module):
    """A generator of digits and its critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
        self.critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)


@BOOK.add()
def gan_digits(seed):
    def judge(model, x, _):
        real = model.critic(x)
        made = model.critic(model(torch.randn(len(x), 16)).detach())
        return F.binary_cross_entropy_with_logits(real, torch.ones_like(real)) + F.binary_cross_entropy_with_logits(made, torch.zeros_like(made))

    def forge(model, x, _):
        judged = model.critic(model(torch.randn(len(x), 16)))
        return F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))

    made = setup(images(seed), Adversaries(), None, kind="other", rate=1e-3, epochs=8, players=[("critic", judge), ("generator", forge)])
    noise = np.random.default_rng(seed).normal(size=(len(made.val_y), 16)).astype(np.float32)
    made.val_x = (noise,)
    spread = float(np.square(made.y.mean(0) - 0.5).mean())
    made.score = lambda out, held: float(1 - np.square(out.mean(0) - held.y.mean(0)).mean() / spread)
    made.loss = lambda model, *batch: forge(model, batch[0], None)
    return made


def pairs(seed: int):
    """Pairs of digits; the target says whether they are of one kind."""
    x, y, held, held_y = data.digits(seed)
    generator = np.random.default_rng(seed)

    def couple(values, labels):
        first, second = generator.integers(0, len(values), (2, len(values)))
        alike = np.array([generator.choice(np.flatnonzero(labels == labels[index])) for index in first])
        second = np.where(generator.random(len(values)) < 0.5, alike, second)
        return (values[first], values[second]), (labels[first] == labels[second]).astype(np.int64)

    return *couple(x, y), *couple(held, held_y)


class Siamese(nn.Module):
    """One encoder for both; the distance decides."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 24))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return F.pairwise_distance(self.encoder(first), self.encoder(second))


@BOOK.add()
def siamese_digits(seed):
    def contrastive(distance, alike):
        return (alike * distance.square() + (1 - alike) * F.relu(1.5 - distance).square()).mean()

    x, y, held, held_y = pairs(seed)
    made = Setup(Siamese(), contrastive, x, y, held, held_y, kind="other", rate=2e-3, epochs=8)
    made.score = lambda distance, held: float(((distance < 0.75) == held.val_y).mean())
    made.learnt = 0.7
    return made


@BOOK.add()
def triplet_digits(seed):
    x, y, held, held_y = data.digits(seed)
    generator = np.random.default_rng(seed)

    def triples(values, labels):
        alike = np.array([generator.choice(np.flatnonzero(labels == label)) for label in labels])
        other = np.array([generator.choice(np.flatnonzero(labels != label)) for label in labels])
        return values, values[alike], values[other]

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    forward = lambda model, anchor, near, far: torch.stack([model(anchor), model(near), model(far)], 1)  # noqa: E731
    criterion = lambda codes, _: F.triplet_margin_loss(codes[:, 0], codes[:, 1], codes[:, 2])  # noqa: E731
    made = Setup(model, criterion, triples(x, y), y, triples(held, held_y), held_y, kind="other", forward=forward, epochs=6)
    far = lambda codes, other: np.linalg.norm(codes[:, 0] - codes[:, other], axis=1)  # noqa: E731
    made.score = lambda codes, held: float((far(codes, 1) < far(codes, 2)).mean())
    made.learnt = 0.8
    return made


class Experts(nn.Module):
    """Four experts; a gate sends each sample to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate = nn.Linear(64, 48), nn.Linear(48, 4)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 48)) for _ in range(4)])
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.stem(x))
        share = self.gate(hidden).softmax(1)
        weight, chosen = share.max(1)
        mixed = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(hidden[rows]) * weight[rows, None])
        counts = torch.stack([(chosen == number).float().mean() for number in range(4)])
        self.balance = 4 * (counts * share.mean(0)).sum()
        return self.head(hidden + mixed)


@BOOK.add()
def mixture_of_experts_digits(seed):
    made = setup(data.digits(seed), Experts(), F.cross_entropy, classes=10, rate=2e-3, epochs=6)
    made.loss = lambda model, x, y: F.cross_entropy(model(x), y) + 0.01 * model.balance
    return made


def pretrained(seed: int) -> nn.Sequential:
    """A net that has learnt the digits 0 to 4."""
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 5))
    x, y, _, _ = data.digits(seed)
    x, y = torch.from_numpy(x[y < 5]), torch.from_numpy(y[y < 5])
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@BOOK.add()
def finetuned_head_digits(seed):
    model = pretrained(seed)
    for value in model[:-1].parameters():
        value.requires_grad = False
    model[4] = nn.Linear(64, 10)
    return setup(data.digits(seed), model, F.cross_entropy, classes=10, rate=3e-3, epochs=6)


@BOOK.add()
def finetuned_digits(seed):
    model = pretrained(seed)
    model[4] = nn.Linear(64, 10)
    return setup(data.digits(seed), model, F.cross_entropy, classes=10, optimizer="adamw", rate=3e-4, schedule=warm_cosine, epochs=7)


class LowRank(nn.Module):
    """A frozen layer and a product of two small matrices beside it; the second starts at 0."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2.0 * (x @ self.lora_a.T) @ self.lora_b.T


@BOOK.add()
def lora_digits(seed):
    model = pretrained(seed)
    model[0], model[2], model[4] = LowRank(model[0]), LowRank(model[2]), nn.Linear(64, 10)
    return setup(data.digits(seed), model, F.cross_entropy, classes=10, rate=2e-3, epochs=6)


class Block(nn.Module):
    """Pre-norm attention and feed-forward; the projections back into the stream start small."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(count, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Gpt(nn.Module):
    """A small GPT with the head tied to the embedding."""

    def __init__(self, letters: int, width: int = 48, length: int = 32) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(letters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)
        for name, value in self.named_parameters():
            if value.dim() > 1:
                nn.init.normal_(value, std=0.02 / (2 if name.endswith(("out.weight", "down.weight")) else 1))
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(ids) + self.places.weight[: ids.shape[1]])))


@BOOK.add()
def gpt_characters(seed):
    letters = len(data.alphabet())
    fields = {"kind": "tokens", "classes": letters, "optimizer": "adamw", "rate": 5e-3, "clip": 1.0, "schedule": warm_cosine, "learnt": 0.15}
    return setup(data.characters(seed), Gpt(letters), flat_entropy, epochs=8, **fields)


@BOOK.add()
def vision_patches_bfloat(seed):
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = nn.Conv2d(1, 32, 2, 2), nn.Parameter(0.02 * torch.randn(1, 16, 32))
            layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.encoder(self.embed(x).flatten(2).transpose(1, 2) + self.place).mean(1))

    fields = {"optimizer": "adamw", "rate": 2e-3, "precision": "bf16-mixed", "schedule": cosine}
    return setup(data.digits(seed, (1, 8, 8)), Patches(), F.cross_entropy, classes=10, epochs=5, **fields)
