"""The gain of a drafter for its target, estimated on a few prompts, and a verdict.

Speed is not timed end to end, which would take long runs. The acceptance rate and the costs of a pass and of a
drafted token are measured; the best draft length and its gain follow (Leviathan et al., 2023, section 3.3).
"""

from collections.abc import Sequence
from itertools import islice, repeat
from statistics import median

from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.scheduler import Block, speculative_decode
from edgespec.engine.engine import Engine
from edgespec.errors import MemoryExhausted
from edgespec.models.pair import PairCheck
from edgespec.policy.expected import best_length, expected_tokens
from edgespec.policy.fixed import FixedLength
from edgespec.policy.limits import MIN_GAIN_OF_PAIR
from edgespec.types import Drafter, Report, TokenIds

PROMPTS = (
    "What should I look at when I buy a used bicycle?",
    "Write a Python function that merges two sorted lists into one, with a docstring.",
    "Translate into French: The library closes at six, but the reading room stays open until nine.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel, and how fast if it covers 246 km?",
    "Summarise in one sentence: The town council voted on Monday to turn the old tram depot into a covered "
    "market. Work begins in spring and is to take two years. Shopkeepers nearby had asked for it since 2019.",
    "Write a polite note to a neighbour whose dog barks at night.",
)
_MAX_TOKENS = 48  # of each answer
_NUM_DRAFT = 4
_LONGEST = 8
_USUAL_BREAK_EVEN = 0.55


def measure_pair(
    engine: Engine,
    *,
    names: tuple[str, str],
    same_special_tokens: bool,
    same_chat_template: bool,
    same_tokens: bool,
    is_head: bool = False,
    longest: int | None = None,
    report: Report = lambda line: None,
) -> PairCheck:
    """Measure an engine with its drafter.

    names: Names of target and drafter.
    same_tokens: Whether the drafter has the target's vocabulary; otherwise its drafts are translated.
    is_head: Whether the drafter is a drafting head.
    longest: The most tokens that the drafter can draft; None where nothing bounds them.

    Raises MemoryExhausted: The drafter was not opened for lack of memory, so that nothing can be measured.
    """
    with engine.speculation.hold():
        if all(each.is_free for each in engine.speculation.drafters()):
            raise MemoryExhausted(
                f"{names[1]} cannot be measured: there was no memory to open it beside {names[0]}; close other "
                "programs, raise the memory limit, or use a smaller drafter"
            )
        alike = same_special_tokens, same_chat_template, same_tokens
        return _measure(engine, names, *alike, is_head, longest, report)


def _measure(
    engine: Engine,
    names: tuple[str, str],
    same_special_tokens: bool,
    same_chat_template: bool,
    same_tokens: bool,
    is_head: bool,
    longest: int | None,
    report: Report,
) -> PairCheck:
    greedy, sampled = SamplingParams(), SamplingParams(temperature=1.0, seed=1)
    plain: list[Block] = []
    drafted: dict[SamplingParams, list[Block]] = {greedy: [], sampled: []}
    drafters = engine.speculation.drafters()
    for i, prompt in enumerate(PROMPTS, start=1):
        report(f"prompt {i} of {len(PROMPTS)}")
        tokens = engine.encode(prompt)
        plain += _decode(engine, tokens, (), 0, greedy, _MAX_TOKENS // 2)
        for sampling, blocks in drafted.items():
            blocks += _decode(engine, tokens, drafters, _NUM_DRAFT, sampling, _MAX_TOKENS)
    both = [*drafted[greedy], *drafted[sampled]]
    step_s = median(block.verify_s for block in plain)
    pass_s = median(block.verify_s for block in both)
    draft_s = median(block.draft_s for block in both) / _NUM_DRAFT
    acceptance = _acceptance(drafted[greedy])
    gain, num_draft = best_gain(acceptance, pass_s / step_s, draft_s / step_s, longest)
    verdict, reason = _judge(acceptance, gain, draft_s / step_s, is_head=is_head)
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
        pays=gain >= MIN_GAIN_OF_PAIR,
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
    """Blocks of an answer without the first, which reads the prompt."""
    sampler = GumbelSampler(sampling, len(tokens))
    blocks = speculative_decode(tokens, engine.target, sampler, FixedLength(drafters, num_draft))
    found: list[Block] = []
    num_tokens = 0
    for block in islice(blocks, 1, None):
        found.append(block)
        num_tokens += len(block.tokens)
        if num_tokens >= max_tokens or set(block.tokens.tolist()) & set(engine.manifest.eos_token_ids):
            break
    return found


def _acceptance(blocks: Sequence[Block]) -> float:
    """The share accepted of the drafted tokens up to the first rejected one of each draft."""
    kept = sum(block.num_accepted for block in blocks)
    judged = sum(min(block.num_accepted + 1, block.num_draft) for block in blocks)
    return kept / judged if judged else 0.0


def best_gain(
    acceptance: float, pass_cost: float, draft_cost: float, longest: int | None = None
) -> tuple[float, int]:
    """The highest gain over plain decoding, and the draft length that has it.

    Args:
        acceptance: Chance that a drafted token is accepted.
        pass_cost: Cost of a pass of 1 + _NUM_DRAFT tokens, in steps of plain decoding; other widths lie on a line.
        draft_cost: Cost of a drafted token, in steps of plain decoding.
        longest: The most tokens of a draft; None for those that are usual.
    """
    # A pass that was measured to be cheaper than a step was disturbed, or the step was.
    token_cost = max(0.0, pass_cost - 1) / _NUM_DRAFT + draft_cost
    totals = expected_tokens(repeat(acceptance, min(_LONGEST, longest or _LONGEST)))
    return best_length(totals, lambda num_draft: 1 + num_draft * token_cost)


def _judge(acceptance: float, gain: float, draft_cost: float, *, is_head: bool) -> tuple[str, str]:
    kept = f"{acceptance:.0%} of drafted tokens are accepted"
    cost = f"drafting one costs {draft_cost:.0%} of a step of the target"
    if gain >= MIN_GAIN_OF_PAIR:
        link = ", below the usual break-even of 55 %, but" if acceptance < _USUAL_BREAK_EVEN else " and"
        return "this pair pays", f"{kept}{link} {cost}"
    if acceptance < _USUAL_BREAK_EVEN:
        kept = f"only {kept}, where 55 % is the usual break-even"
        advice = (
            "a head trained for longer or with prompts like yours (edgespec train), or n-gram drafting"
            if is_head
            else "a drafter trained on the same data or distilled from the target, or n-gram drafting"
        )
    else:
        kept = f"{kept}, but {cost}"
        advice = (
            "a head in fewer bits or with fewer tokens to draft (--vocab-subset), or a larger target"
            if is_head
            else "a smaller drafter, one in fewer bits, a larger target, or a separate device for the drafter"
        )
    return "this pair is unlikely to pay", f"{kept}; more likely to pay: {advice}"
