"""How near two tokens have to be for --exact to decide between them in passes of one token: measured once."""

from dataclasses import replace

from edgespec.decoders import Decoder
from edgespec.engine.setup import Setup
from edgespec.errors import EdgeSpecError
from edgespec.planning.measured_placements import known_stats
from edgespec.profiling.learned_stats import write_learned_stats
from edgespec.profiling.width_change import measure_width_change
from edgespec.tokenization.prompt_encoder import PromptEncoder
from edgespec.types import TokenIds

# Times the largest change that was measured, on some hundred places of a few texts; an answer has more of them.
_SAFETY = 1.5
_PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that counts the words of a text.",
    "Translate into French: The library closes at six, but the reading room stays open until nine.",
    "List ten animals, one on each line, and say of each where it lives.",
)


def find_near_tie(setup: Setup, decoder: Decoder, encoder: PromptEncoder) -> float | None:
    """The lead below which other passes may choose another token; None without --exact.

    It is measured once and saved in the target's folder.
    """
    target, placement, report = setup.memory.target, setup.placement, setup.wish.report
    if not placement.decides_near_ties:
        return None
    known = setup.known.width_changes.get(placement.machine)
    if known is None:
        report(f"measuring how much the width of passes changes: {target.manifest.name}")
        known = measure_width_change(decoder, _texts(encoder, decoder.context_length))
        if target.manifest.is_ours:
            stats = known_stats(target)
            changes = {**stats.width_changes, placement.machine: known}
            write_learned_stats(target.folder, replace(stats, width_changes=changes), report)
    return _SAFETY * known


def _texts(encoder: PromptEncoder, context_length: int) -> list[TokenIds]:
    """Prompts that leave most of the context to their answers."""
    texts = []
    for prompt in _PROMPTS:
        try:
            tokens = encoder.encode(prompt)
        except EdgeSpecError:  # the template of a tiny context
            continue
        texts.append(tokens[: max(1, context_length // 2)])
    return texts
