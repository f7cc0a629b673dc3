from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import os
import platform
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

from trainvet import environment
from trainvet.environment import describe, git_state, plain, strike_out


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git checkout with one committed file, as the working directory."""
    monkeypatch.chdir(tmp_path)
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
    (tmp_path / "train.py").write_text("lr = 1\n")
    for command in (["init", "-q"], ["add", "train.py"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], check=True, capture_output=True)
    return tmp_path


# ---- what is described


def test_it_is_plain_json_and_names_no_host():
    found = describe({"lr": 1e-3}, seed=7)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert set(found) == {"trainvet", "python", "platform", "versions", "git", "command", "hyper_parameters", "seed", "hash"}
    assert found["python"] == platform.python_version()
    assert (found["hyper_parameters"], found["seed"]) == ({"lr": 1e-3}, 7)
    if len(platform.node()) > 3:
        assert platform.node() not in json.dumps(found)


def test_only_what_is_loaded_is_named_and_nothing_is_imported():
    program = (
        "import sys, types; import trainvet.environment as e;"
        "fake = types.ModuleType('torch'); fake.__version__ = '9.9'; sys.modules['torch'] = fake;"
        "before = set(sys.modules); found = e.describe(); print(found['versions']['torch'], sorted(found['versions']));"
        "print([name for name in set(sys.modules) - before if name.split('.')[0] in e.PACKAGES])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    first, second = done.stdout.strip().splitlines()
    assert first == "9.9 ['numpy', 'torch']"
    assert second == "[]"


def test_a_loaded_module_without_a_version():
    sys.modules["accelerate"] = types.ModuleType("accelerate")
    try:
        assert describe()["versions"]["accelerate"]
    finally:
        del sys.modules["accelerate"]


def test_the_hash_is_equal_for_equal_environments_only():
    first, again = describe({"b": 1, "a": {"x", "y", "z"}}), describe({"a": {"z", "y", "x"}, "b": 1})
    assert first["hash"] == again["hash"]
    assert describe({"b": 2})["hash"] != first["hash"]
    assert describe(seed=1)["hash"] != describe(seed=2)["hash"]


def test_the_hash_is_equal_in_another_process():
    program = (
        "import sys; sys.argv = ['train.py']; from trainvet.environment import describe; print(describe({'a': {'x', 'y', 'z'}}, seed=3)['hash'])"
    )
    hashes = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1


# ---- git


def test_commit_and_dirty_flag(checkout):
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert git_state() == {"commit": commit, "dirty": False}
    (checkout / "notes.txt").write_text("not tracked")
    assert git_state()["dirty"] is False
    (checkout / "train.py").write_text("lr = 2\n")
    assert git_state() == {"commit": commit, "dirty": True}


def test_the_checkout_is_not_written_to(checkout):
    past = time.time() - 1000
    os.utime(checkout / "train.py", (past, past))
    before = (checkout / ".git" / "index").read_bytes()
    assert git_state()["dirty"] is False
    assert (checkout / ".git" / "index").read_bytes() == before


def test_outside_a_checkout_or_without_git_there_is_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state() == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state() == {}
    assert describe()["git"] == {}


def fake_git(folder: Path, script: str) -> None:
    (folder / "git").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "git").chmod(0o755)


def test_a_slow_git_is_not_waited_for(tmp_path, monkeypatch):
    fake_git(tmp_path, "exec sleep 30")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(environment, "GIT_SECONDS", 0.2)
    started = time.monotonic()
    assert git_state() == {}
    assert time.monotonic() - started < 5


def test_a_status_that_takes_too_long_is_not_called_clean(tmp_path, monkeypatch):
    fake_git(tmp_path, 'case "$*" in *rev-parse*) echo abc;; *) exit 1;; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert git_state() == {"commit": "abc", "dirty": None}


# ---- secrets


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("train.py --lr 3 data/x.csv", "train.py --lr 3 data/x.csv"),
        ("t --api-key SECRET --lr 3", "t --api-key *** --lr 3"),
        ("t --api_key=SECRET", "t --api_key=***"),
        ("t --hf-token SECRET", "t --hf-token ***"),
        ("t -token SECRET", "t -token ***"),
        ("t --MY_PASSWORD SECRET", "t --MY_PASSWORD ***"),
        ("t --client-secret SECRET", "t --client-secret ***"),
        ("t --mytokenfile SECRET", "t --mytokenfile ***"),
        ("t WANDB_API_KEY=SECRET", "t WANDB_API_KEY=***"),
        ("t --env WANDB_API_KEY=SECRET", "t --env WANDB_API_KEY=***"),
        ("t logger.wandb.key=SECRET", "t logger.wandb.key=***"),
        ("t +user.password=SECRET", "t +user.password=***"),
        ("t https://me:SECRET@example.org/d", "t https://***@example.org/d"),
        ("t --remote=s3://SECRET@bucket/x", "t --remote=s3://***@bucket/x"),
        ("t --url=https://h/?token=SECRET&page=2", "t --url=https://h/?token=***&page=2"),
        ("t --password -SECRET!", "t --password ***"),
        ("t --use-auth --lr 3", "t --use-auth --lr 3"),
        ("t --tokenizer gpt2 --keypoints 17 --author me", "t --tokenizer gpt2 --keypoints 17 --author me"),
        ("t --tokenizer-token SECRET", "t --tokenizer-token ***"),
    ],
)
def test_a_command_line_without_secrets(arguments, shown):
    assert " ".join(strike_out(arguments.split())) == shown


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("--password=my SECRET phrase", "--password=***"),
        ('{"api_key": "SECRET SECRET", "lr": 2}', '{"api_key": ***, "lr": 2}'),
        ("Authorization: Bearer SECRET", "Authorization: Bearer ***"),
        ("{token: SECRET, lr: 2}", "{token: ***, lr: 2}"),
    ],
)
def test_secrets_inside_one_argument(argument, shown):
    assert strike_out([argument]) == [shown]


def test_the_home_directory_is_not_named():
    assert strike_out([f"{Path.home()}/code/train.py"]) == ["~/code/train.py"]


def test_the_command_is_this_processes(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", "SECRET"])
    assert describe()["command"] == ["train.py", "--token", "***"]


def test_hyper_parameters_without_secrets():
    given = {
        "lr": 0.1,
        "wandb_key": "SECRET",
        "key_dim": 64,
        "max_tokens": 512,
        "tokenizer": "gpt2",
        "password": 1234,
        "logger": {"api_token": "SECRET", "name": "run"},
        "secrets": {"db": "SECRET", "port": 5432},
        "keys": ["SECRET", 3],
        "url": "https://me:SECRET@example.org",
        "config": argparse.Namespace(token="SECRET", lr=2),
    }
    shown = plain(given)
    assert "SECRET" not in json.dumps(shown)
    assert "1234" not in json.dumps(shown)
    assert "5432" not in json.dumps(shown)
    assert (shown["key_dim"], shown["max_tokens"], shown["tokenizer"], shown["keys"][1]) == (64, 512, "gpt2", 3)
    assert shown["logger"] == {"api_token": "***", "name": "run"}
    assert shown["config"] == {"token": "***", "lr": 2}


# ---- plain values


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Config:
    lr: float
    sizes: tuple[int, ...]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.array([1, 2]), [1, 2]),
        (np.zeros(1000), "numpy.ndarray"),
        (Path("data") / "x", "data/x"),
        (Colour.RED, "red"),
        (Config(0.1, (1, 2)), {"lr": 0.1, "sizes": [1, 2]}),
        (Config, f"{__name__}.Config"),
        ({3: None, "b": True}, {"3": None, "b": True}),
        ({"b", "a"}, ["a", "b"]),
        (object(), "builtins.object"),
        (b"bytes", "builtins.bytes"),
    ],
)
def test_values_become_plain(value, shown):
    assert plain(value) == shown
    assert describe({"x": value})["hyper_parameters"] == {"x": shown}


def test_large_deep_and_circular_values_are_cut():
    circle: dict[str, object] = {}
    circle["self"] = circle
    assert json.dumps(plain(circle)).count("self") <= environment.DEEPEST
    assert plain({str(index): index for index in range(1005)})["…"] == "5 more"
    assert len(plain("x" * 10_000)) == environment.LONGEST_TEXT


def test_a_mapping_that_cannot_be_read_is_named_by_its_type():
    class Odd(dict):
        def items(self):
            raise RuntimeError("missing value")

    assert plain(Odd(a=1)).endswith("Odd")
    assert describe({"odd": Odd(a=1), "lr": 1})["hyper_parameters"]["lr"] == 1
