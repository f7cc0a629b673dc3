"""From what a user sees ("my loss is NaN") to the rules that look for its causes, in the order in which an expert would look."""

from __future__ import annotations

import dataclasses
import difflib

from trainvet.rule import Rule, catalogue, defect


@dataclasses.dataclass(frozen=True)
class Symptom:
    """What is seen, other words for it, and the codes to look at: exact and structural facts first, statistics after, advice last."""

    text: str
    words: tuple[str, ...]
    codes: tuple[str, ...]

    def rules(self) -> list[type[Rule]]:
        """The rules that are in the catalogue, in order."""
        return [catalogue()[code] for code in self.codes if code in catalogue()]


SYMPTOMS = (
    Symptom(
        "my loss is NaN or infinite",
        ("nan", "inf", "infinite", "non-finite", "overflow"),
        (
            "IN101",
            "NF101",
            "NF103",
            "IN111",
            "IN103",
            "LS102",
            "LS101",
            "LS104",
            "NF102",
            "WT104",
            "LR101",
            "LR105",
            "GR101",
            "LO101",
            "IN102",
            "IN109",
        ),
    ),
    Symptom(
        "my loss does not fall",
        ("fall", "flat", "stuck", "learn", "constant", "decrease", "decreasing", "plateau"),
        (
            *(
                "WT102",
                "GR104",
                "GR108",
                "MO101",
                "MO103",
                "LO109",
                "LO110",
                "IN103",
                "LR101",
                "LR105",
                "LS102",
                "LS103",
                "WT107",
                "WT108",
                "WT103",
                "WT101",
            ),
            *("AC101", "AC102", "AC103", "AC104", "AC105", "MO108", "GR102", "WT104", "WT106", "GR105", "WT109", "LR102", "IN102", "IN109", "IN110"),
            *("LO108", "LO107", "LO104", "LO105", "FT102"),
        ),
    ),
    Symptom(
        "my loss explodes or jumps",
        ("explode", "explodes", "exploding", "spike", "spikes", "jump", "jumps", "diverge", "diverges", "grows", "rises", "oscillates", "unstable"),
        (
            *(
                "IN103",
                "LO110",
                "GR106",
                "WT102",
                "LR105",
                "LR101",
                "WT108",
                "WT104",
                "WT105",
                "GR101",
                "LO101",
                "IN109",
                "IN102",
                "LR103",
                "GR103",
                "GR107",
            ),
            *("LO102", "LO103", "LO106", "AC106", "AC107", "WT110", "LS101"),
        ),
    ),
    Symptom(
        "validation is bad although training is good",
        ("validation", "val", "test", "evaluation", "generalise", "generalize", "overfit", "overfitting"),
        ("MO104", "MO109", "IN106", "MO110", "FT103", "MO108", "FT101", "IN104", "IN112"),
    ),
    Symptom(
        "the model always predicts the same",
        ("same", "class", "predict", "predicts", "prediction", "degenerate", "collapse", "collapsed"),
        ("LO110", "AC105", "LO109", "IN104", "AC104", "AC101", "MO108", "WT109", "GR104", "LO107"),
    ),
    Symptom(
        "some layers do not train",
        ("layer", "layers", "train", "frozen", "freeze", "unchanged", "weights", "gradient"),
        ("WT102", "MO101", "GR108", "GR104", "MO103", "WT101", "WT103", "AC101", "AC102", "AC103", "GR102", "WT107", "MO102"),
    ),
    Symptom(
        "training is slow or stands still",
        ("slow", "hang", "hangs", "freezes", "stalled", "wait", "gpu"),
        ("RN102", "RN103", "FT104", "WT106", "LR102", "GR105"),
    ),
    Symptom(
        "mixed precision makes trouble",
        ("mixed", "precision", "fp16", "float16", "bf16", "bfloat16", "amp", "scaler", "half", "underflow"),
        ("LS104", "LS102", "LS101", "LS103", "WT103", "NF102", "NF101"),
    ),
    Symptom(
        "runs differ from one another",
        ("differ", "reproduce", "reproducible", "seed", "random", "ranks"),
        ("RN101", "MO105", "IN107", "MO110", "MO102"),
    ),
)


def find(text: str) -> list[Symptom]:
    """The symptoms that ``text`` describes, best first. Raises ValueError, with what can be asked, where none does."""
    asked = [word.strip(".,;:!?'\"").lower() for word in text.split()]
    scored = []
    for symptom in SYMPTOMS:
        known = {*symptom.words, *(word.lower() for word in symptom.text.split() if len(word) > 3)}
        hits = sum(
            2 if word in symptom.words else word in known or bool(difflib.get_close_matches(word, known, 1, 0.87)) for word in asked if len(word) > 2
        )
        if hits:
            scored.append((hits, symptom))
    if not scored:
        raise ValueError(f"no symptom is known for {text!r}; ask for one of: {'; '.join(symptom.text for symptom in SYMPTOMS)}")
    best = max(hits for hits, _ in scored)
    return [symptom for hits, symptom in scored if hits == best]


def page(symptom: Symptom) -> list[str]:
    """The symptom as Markdown: each rule with the first thing to try."""
    lines = [f"## {symptom.text[0].upper()}{symptom.text[1:]}", "", "Look in this order:", ""]
    for number, kind in enumerate(symptom.rules(), 1):
        lines.append(f"{number}. **{kind.code}** `{defect(kind)}`: {kind.causes[0]}. Try: {kind.fixes[0]}.")
    return lines
