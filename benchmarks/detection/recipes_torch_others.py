"""Healthy PyTorch recipes with models that others wrote: torch.nn, Lightning's demos, and transformers with random weights."""

from __future__ import annotations

import functools
import os

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.detection import data
from benchmarks.detection.recipes_torch import cosine, flat_entropy, setup, warm_cosine
from benchmarks.detection.setup import Book, Setup

BOOK = Book("lightning", "loop")
LETTERS = functools.cache(lambda: len(data.alphabet()))


def hub(config: str, model: str, **fields):
    """A model of the transformers package, from a small configuration, with random weights."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_TELEMETRY="1")
    import transformers

    transformers.logging.set_verbosity_error()
    return getattr(transformers, model)(getattr(transformers, config)(**fields))


def speaks(seed: int, config: str, model: str, rate: float = 3e-3, **fields) -> Setup:
    """A causal language model that computes its own loss from labels."""
    made = setup(data.characters(seed), hub(config, model, vocab_size=LETTERS(), **fields), flat_entropy, kind="tokens", classes=LETTERS())
    made.loss = lambda model, ids, following: model(input_ids=ids, labels=ids).loss
    made.forward = lambda model, ids: model(input_ids=ids).logits
    made.optimizer, made.rate, made.clip, made.schedule, made.epochs, made.own, made.learnt = "adamw", rate, 1.0, warm_cosine, 6, False, 0.12
    return made


def reads(seed: int, config: str, model: str, rate: float = 1e-3, **fields) -> Setup:
    """A sequence classifier: which documentation is the piece from."""
    made = setup(data.authors(seed, 32, 1200), hub(config, model, vocab_size=LETTERS(), num_labels=2, **fields), F.cross_entropy, classes=2)
    made.forward = lambda model, ids: model(input_ids=ids).logits
    made.optimizer, made.rate, made.epochs, made.own = "adamw", rate, 6, False
    made.clip = 1.0
    return made


def sees(seed: int, config: str, model: str, rate: float = 2e-3, size: int = 8, **fields) -> Setup:
    """An image classifier for the digits, enlarged to ``size`` and scaled to -1 to 1 as the package's image processors do."""
    x, y, held, held_y = data.digits(seed, (1, 8, 8))
    x, held = (2 * value.repeat(size // 8, 2).repeat(size // 8, 3) - 1 for value in (x, held))
    made = setup((x, y, held, held_y), hub(config, model, num_channels=1, num_labels=10, **fields), F.cross_entropy, classes=10)
    made.forward = lambda model, x: model(pixel_values=x).logits
    made.optimizer, made.rate, made.epochs, made.own, made.schedule = "adamw", rate, 5, False, cosine
    made.clip = 1.0
    return made


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@BOOK.add(origin="transformers")
def gpt2_characters(seed):
    return speaks(seed, "GPT2Config", "GPT2LMHeadModel", rate=1e-2, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)


@BOOK.add(origin="transformers")
def llama_characters(seed):
    return speaks(seed, "LlamaConfig", "LlamaForCausalLM", max_position_embeddings=32, num_key_value_heads=2, **SMALL)


@BOOK.add(origin="transformers")
def mixtral_characters(seed):
    fields = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "output_router_logits": True, "max_position_embeddings": 32}
    return speaks(seed, "MixtralConfig", "MixtralForCausalLM", **SMALL, **fields)


@BOOK.add(origin="transformers")
def gpt_neox_characters(seed):
    return speaks(seed, "GPTNeoXConfig", "GPTNeoXForCausalLM", max_position_embeddings=32, bos_token_id=0, eos_token_id=0, **SMALL)


@BOOK.add(origin="transformers")
def opt_characters(seed):
    fields = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 48}
    return speaks(
        seed, "OPTConfig", "OPTForCausalLM", rate=3e-3, max_position_embeddings=32, pad_token_id=0, bos_token_id=0, eos_token_id=0, **fields
    )


@BOOK.add(origin="transformers")
def bert_authors(seed):
    return reads(seed, "BertConfig", "BertForSequenceClassification", max_position_embeddings=32, **SMALL)


@BOOK.add(origin="transformers")
def distilbert_authors(seed):
    fields = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 32}
    return reads(seed, "DistilBertConfig", "DistilBertForSequenceClassification", **fields)


@BOOK.add(origin="transformers")
def albert_authors(seed):
    return reads(seed, "AlbertConfig", "AlbertForSequenceClassification", rate=3e-3, embedding_size=24, max_position_embeddings=32, **SMALL)


@BOOK.add(origin="transformers")
def electra_authors(seed):
    return reads(seed, "ElectraConfig", "ElectraForSequenceClassification", embedding_size=24, max_position_embeddings=32, **SMALL)


@BOOK.add(origin="transformers")
def roberta_masked_letters(seed):
    fields = {"max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, **SMALL}
    made = speaks(seed, "RobertaConfig", "RobertaForMaskedLM", rate=2e-3, **fields)

    def masked(model, ids, _):
        hidden = torch.rand(ids.shape) < 0.15
        labels = torch.where(hidden, ids, torch.full_like(ids, -100))
        return model(input_ids=torch.where(hidden, torch.zeros_like(ids), ids), labels=labels).loss

    made.loss, made.y, made.val_y, made.kind, made.epochs, made.learnt = masked, made.x[0], made.val_x[0], "other", 8, 0.18
    made.val_x = (np.where(np.arange(32) % 7, made.val_y, 0),)
    made.score = lambda logits, held: float((logits.argmax(2) == held.val_y)[:, ::7].mean())
    return made


@BOOK.add(origin="transformers")
def t5_reversed_text(seed):
    model = hub(
        "T5Config", "T5ForConditionalGeneration", vocab_size=LETTERS(), d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4,
        pad_token_id=0, decoder_start_token_id=0, eos_token_id=0,
    )  # fmt: skip
    x, _, held, _ = data.characters(seed, length=8, pieces=1200)
    made = Setup(model, flat_entropy, (x,), x[:, ::-1].copy(), (held,), held[:, ::-1].copy(), kind="tokens", classes=LETTERS())
    made.loss = lambda model, ids, labels: model(input_ids=ids, labels=labels).loss
    made.forward = lambda model, ids: model(input_ids=ids, labels=ids.flip(1)).logits
    made.optimizer, made.rate, made.epochs, made.own, made.learnt, made.clip = "adamw", 5e-3, 6, False, 0.15, 1.0
    return made


@BOOK.add(origin="transformers")
def vit_digits(seed):
    return sees(seed, "ViTConfig", "ViTForImageClassification", image_size=8, patch_size=2, **SMALL)


@BOOK.add(origin="transformers")
def resnet_of_transformers_digits(seed):
    fields = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return sees(seed, "ResNetConfig", "ResNetForImageClassification", rate=3e-3, size=16, **fields)


@BOOK.add(origin="transformers")
def convnext_digits(seed):
    return sees(
        seed, "ConvNextConfig", "ConvNextForImageClassification", patch_size=2, hidden_sizes=[16, 32], depths=[1, 2], num_stages=2, size=16, rate=4e-3
    )


@BOOK.add(origin="torch")
def transformer_encoder_authors(seed):
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.place = nn.Embedding(LETTERS(), 48), nn.Parameter(0.02 * torch.randn(48, 48))
            layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(48, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.encoder(self.embedding(ids) + self.place).mean(1))

    made = setup(data.authors(seed), Reader(), F.cross_entropy, classes=2, optimizer="adamw", rate=1e-3, schedule=warm_cosine, epochs=6)
    made.own = False
    return made


@BOOK.add(origin="lightning")
def lightning_demo_transformer(seed):
    from lightning.pytorch.demos.transformer import Transformer

    model = Transformer(vocab_size=LETTERS(), ninp=48, nhead=4, nhid=96, nlayers=1)
    made = setup(data.characters(seed, length=24, pieces=1000), model, None, kind="other", classes=LETTERS())
    made.loss = lambda model, ids, target: F.nll_loss(model(ids, target), target.reshape(-1))
    made.forward = lambda model, ids: model(ids, ids).view(*ids.shape, -1)
    made.optimizer, made.rate, made.epochs, made.own, made.learnt, made.clip = "sgd", 0.1, 6, False, 0.05, 0.25
    made.momentum = 0.9
    made.score = lambda logits, held: float((logits.argmax(2) == held.val_x[0]).mean())
    return made


@BOOK.add(origin="lightning")
def lightning_demo_convolutions(seed):
    from lightning.pytorch.demos.boring_classes import Net

    x, y, held, held_y = data.digits(seed, (1, 8, 8))
    x, held = (F.interpolate(torch.from_numpy(value), (28, 28), mode="bilinear").numpy() for value in (x, held))
    made = setup((x, y, held, held_y), Net(), F.nll_loss, classes=10, optimizer="adagrad", rate=2e-3, epochs=2, batch=32)
    made.own = False
    return made


@BOOK.add(origin="lightning")
def lightning_demo_lstm(seed):
    from lightning.pytorch.demos.lstm import SimpleLSTM

    model = SimpleLSTM(vocab_size=LETTERS(), ninp=48, nhid=48, nlayers=1, dropout=0.0)
    made = setup(data.characters(seed), model, None, kind="tokens", classes=LETTERS(), optimizer="sgd", rate=5.0, clip=0.5, epochs=8)
    made.forward = lambda model, ids: model(ids, model.init_hidden(len(ids)))[0].view(*ids.shape, -1)
    made.criterion = lambda logs, following: F.nll_loss(logs.reshape(-1, logs.shape[-1]), following.reshape(-1))
    made.own, made.learnt = False, 0.1
    return made
