"""The page for those who come from other tools names rules that exist and watchpoints that can be made."""

from __future__ import annotations

import re

import pytest

from tests.examples.programs import ROOT
from trainvet import Watchpoint
from trainvet.rule import catalogue

PAGE = (ROOT / "examples" / "migration.md").read_text(encoding="utf-8")
WATCHPOINTS = re.findall(r"`(Watchpoint\([^`]*\))`", PAGE)


@pytest.mark.parametrize("code", WATCHPOINTS)
def test_every_watchpoint_can_be_made(code):
    assert isinstance(eval(code, {"Watchpoint": Watchpoint}), Watchpoint)


def test_every_rule_named_is_there():
    codes = set(re.findall(r"\b[A-Z]{2}\d{3}\b", PAGE))
    assert len(codes) > 20
    assert codes <= catalogue().keys()


def test_what_the_other_tools_have_is_listed():
    for name in (
        *("DeadRelu", "ExplodingTensor", "PoorWeightInitialization", "SaturatedActivation", "VanishingGradient", "WeightUpdateRatio", "AllZero"),
        *(
            "ClassImbalance",
            "Confusion",
            "LossNotDecreasing",
            "Overfit",
            "Overtraining",
            "SimilarAcrossRuns",
            "StalledTrainingRule",
            "TensorVariance",
        ),
        *("UnchangedTensor", "CheckInputImages", "NLPSequenceRatio", "TreeDepth", "StepOutlier", "weight_initialization", "weight_overflow"),
        *("weight_too_large", "weight_too_small", "weight_not_changed", "weight_change_too_large", "weight_change_too_small", "gradient_vanishing"),
        *("gradient_too_large", "gradient_exploding", "activation_range", "tensor_overflow", "tensor_too_large", "tensor_range", "tensor_all_zero"),
    ):
        assert name in PAGE
    assert len(WATCHPOINTS) >= 22
