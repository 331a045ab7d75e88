"""Acceptance rates to start from where nothing was drafted for a model yet, as counted on other models."""

from collections.abc import Mapping

# By source and bucket. Of the suffix automaton: greedy answers of SmolLM2-135M (75) and of Qwen2.5-Coder-1.5B (19)
# to prompts of Spec-Bench and code edits. First answers of SmolLM2 are 3.3 % faster with Qwen's, and Qwen's 0.6 %
# with those of SmolLM2 (docs/log/draft-policy.md).
_SUFFIX = dict(
    enumerate(
        (0.16, 0.26, 0.6, 0.35, 0.5, 0.8, 0.35, 0.65, 0.82, 0.25, 0.78, 0.9, 0.38, 0.83, 0.95, 0.9, 0.95, 0.97)
    )
)
# A prediction has the same buckets, and its user expects the answer to follow it. What a grammar forces comes
# true, but for the way in which a few texts are cut into tokens.
STARTING_RATES: Mapping[str, Mapping[int, float]] = {
    "suffix": _SUFFIX,
    "prediction": _SUFFIX,
    "grammar": {0: 0.98},
}
STARTING_WEIGHT = 12.0  # tokens that such a rate counts as
