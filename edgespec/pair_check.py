"""What a drafter gains its target, measured on a few prompts and put into words.

Speed is not timed end to end, which would need long runs: the acceptance and the cost of a pass and of a drafted
token are measured, and the best draft length follows from them (Leviathan et al., 2023, section 3.3).
"""

from collections.abc import Callable, Sequence
from itertools import islice
from statistics import median

from edgespec.engine import Engine
from edgespec.gate import FixedGate
from edgespec.pair import PairCheck
from edgespec.sampling import GumbelSampler, SamplingParams
from edgespec.scheduler import Block, serial
from edgespec.types import Drafter, TokenIds

PROMPTS = (
    "What should I look at when I buy a used bicycle?",
    "Write a Python function that merges two sorted lists into one, with a docstring.",
    "Translate into French: The library closes at six, but the reading room stays open until nine.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel, and how fast if it covers 246 km?",
    "Summarise in one sentence: The town council voted on Monday to turn the old tram depot into a covered "
    "market. Work begins in spring and is to take two years. Shopkeepers nearby had asked for it since 2019.",
    "Write a polite note to a neighbour whose dog barks at night.",
)
_NUM_DRAFT = 4
_LONGEST = 8
_GAIN_WORTH_IT = 1.05  # less is within the noise of a run
_USUAL_BREAK_EVEN = 0.55


def check_pair(
    engine: Engine,
    *,
    names: tuple[str, str],
    same_special_tokens: bool,
    same_chat_template: bool,
    same_tokens: bool = True,
    max_tokens: int = 48,
    report: Callable[[str], None] = lambda line: None,
) -> PairCheck:
    """Measure an engine whose drafter is the one in question.

    Args:
        names: Of target and drafter.
        same_tokens: Whether the drafter has the target's vocabulary and not one that is translated.
        max_tokens: Tokens of each answer.
    """
    greedy, sampled = SamplingParams(), SamplingParams(temperature=1.0, seed=1)
    plain: list[Block] = []
    drafted: dict[SamplingParams, list[Block]] = {greedy: [], sampled: []}
    drafters = engine.speculation.drafters()
    for i, prompt in enumerate(PROMPTS, start=1):
        report(f"prompt {i} of {len(PROMPTS)}")
        tokens = engine.encode(prompt)
        plain += _decode(engine, tokens, (), 0, greedy, max_tokens // 2)
        for sampling, blocks in drafted.items():
            blocks += _decode(engine, tokens, drafters, _NUM_DRAFT, sampling, max_tokens)
    both = [*drafted[greedy], *drafted[sampled]]
    step_s = median(block.verify_s for block in plain)
    pass_s = median(block.verify_s for block in both)
    draft_s = median(block.draft_s for block in both) / _NUM_DRAFT
    acceptance = _acceptance(drafted[greedy])
    num_draft, gain = best_length(acceptance, pass_s / step_s, draft_s / step_s)
    verdict, reason = _judged(acceptance, gain, draft_s / step_s)
    if not same_tokens:
        verdict += ", translated between two vocabularies"
    return PairCheck(
        target=names[0],
        drafter=names[1],
        same_special_tokens=same_special_tokens,
        same_chat_template=same_chat_template,
        greedy_acceptance=acceptance,
        sampled_acceptance=_acceptance(drafted[sampled]),
        draft_cost=draft_s / step_s,
        expected_gain=gain,
        num_draft=num_draft,
        pays=gain >= _GAIN_WORTH_IT,
        verdict=verdict,
        reason=reason,
    )


def _decode(
    engine: Engine,
    tokens: TokenIds,
    drafters: Sequence[Drafter],
    num_draft: int,
    sampling: SamplingParams,
    max_tokens: int,
) -> list[Block]:
    """Blocks of an answer; the first, which reads the prompt, is left out."""
    sampler = GumbelSampler(sampling, len(tokens))
    blocks = serial(tokens, engine.target, sampler, FixedGate(drafters, num_draft))
    found: list[Block] = []
    num_tokens = 0
    for block in islice(blocks, 1, None):
        found.append(block)
        num_tokens += len(block.tokens)
        if num_tokens >= max_tokens or set(block.tokens.tolist()) & set(engine.manifest.eos_token_ids):
            break
    return found


def _acceptance(blocks: Sequence[Block]) -> float:
    """Drafted tokens kept, among those judged: past the first rejection none is."""
    kept = sum(block.num_accepted for block in blocks)
    judged = sum(min(block.num_accepted + 1, block.num_draft) for block in blocks)
    return kept / judged if judged else 0.0


def best_length(acceptance: float, pass_cost: float, draft_cost: float) -> tuple[int, float]:
    """The draft length with the most tokens per second, and the gain over plain decoding.

    Args:
        acceptance: Chance that a drafted token is kept.
        pass_cost: Of a pass of five rows, in steps of plain decoding; widths between are interpolated.
        draft_cost: Of a drafted token, likewise.
    """
    a_row = (pass_cost - 1) / _NUM_DRAFT
    best, best_gain = 0, 1.0
    expected = 1.0
    for num_draft in range(1, _LONGEST + 1):
        expected += acceptance**num_draft
        gain = expected / (1 + num_draft * (a_row + draft_cost))
        if gain > best_gain:
            best, best_gain = num_draft, gain
    return best, best_gain


def _judged(acceptance: float, gain: float, draft_cost: float) -> tuple[str, str]:
    """A verdict and its reason."""
    kept = f"{acceptance:.0%} of drafted tokens are kept"
    cost = f"drafting one costs {draft_cost:.0%} of a step of the target"
    if gain >= _GAIN_WORTH_IT:
        low = ", below the usual break-even of 55 %, but" if acceptance < _USUAL_BREAK_EVEN else " and"
        return "this pair pays", f"{kept}{low} {cost}"
    if acceptance < _USUAL_BREAK_EVEN:
        kept = f"only {kept}, where 55 % is the usual break-even"
        wanted = "a drafter trained on the same data or distilled from the target, or n-gram drafting"
    else:
        kept = f"{kept}, but {cost}"
        wanted = "a smaller drafter, one in fewer bits, a larger target, or a device of the drafter's own"
    return "this pair is unlikely to pay", f"{kept}; what would pay is {wanted}"
