"""Which parts of a model compute in float16 or bfloat16, as far as the plan tells."""

from __future__ import annotations

from trainvet.statistics import Facts

SHORT = ("float16", "bfloat16")


def computes_in(facts: Facts) -> str:
    """ "float16", "bfloat16" or "": the narrow type that modules with trainable parameters were seen, or are configured, to compute in.

    What was seen (autocast, dtypes of activations and parameters) goes before the name of the configured precision. A frozen part in float16
    (a teacher, a loaded text encoder) does not count, since no gradient passes through its weights.
    """
    if facts.autocast in SHORT:
        return facts.autocast
    trainable = trained_modules(facts)
    seen = {item.dtype for item in facts.of("activation").values() if not trainable or belongs(item.module, trainable)}
    seen |= {item.dtype for item in facts.parameters.values() if item.trainable}
    found = next((dtype for dtype in SHORT if dtype in seen), "")
    if found:
        return found
    name = facts.precision.lower()
    return "bfloat16" if "bf16" in name or "bfloat16" in name else "float16" if "16" in name and "transformer" not in name else ""


def trained_modules(facts: Facts) -> frozenset[str]:
    """Dotted paths of the modules that own trainable parameters."""
    return frozenset(item.module for item in facts.parameters.values() if item.trainable)


def belongs(module: str, modules: frozenset[str]) -> bool:
    """Is ``module`` one of ``modules``, or does it lie in one that is not the whole model?"""
    parts = module.split(".")
    return any(".".join(parts[:count]) in modules for count in range(1, len(parts) + 1))
