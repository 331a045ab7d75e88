"""The document of a benchmark, as `edgespec bench --json` prints it, and reading it back.

Bounds keep hostile figures out of the charts.
"""

import json
from pathlib import Path
from typing import Annotated, Literal, NotRequired, Required, TypedDict

from msgspec import Meta

from edgespec.system.text_files import explain_unreadable, read_text
from edgespec.system.typed_json import read_as

_LARGEST_BYTES = 1 << 26

LARGEST_FIGURE = 1e12
OWN_NAME = "edgespec"  # of this program among the peers

Figure = Annotated[float, Meta(ge=0, le=LARGEST_FIGURE)]
Count = Annotated[int, Meta(ge=0, le=1 << 48)]
Width = Annotated[int, Meta(ge=1, le=1 << 16)]  # tokens of a pass


class Summary(TypedDict):
    """The five-number summary of some ratios, and how many they are."""

    count: Count
    min: Figure
    quartile_1: Figure
    median: Figure
    quartile_3: Figure
    max: Figure


class Position(TypedDict):
    """Drafts that have a token at this position, and how many of them were kept up to it."""

    drafted: Count
    kept: Count


class FirstToken(TypedDict):
    """Median seconds to the first token, of answers whose whole prompt was read."""

    plain: Figure | None
    speculative: Figure | None


# The two ends of a 95 % interval; null where it cannot be known, as from a single answer.
RatioInterval = tuple[Figure, Figure] | None


class WidthPasses(TypedDict):
    """How many passes of a width were run, and their seconds together."""

    passes: Annotated[int, Meta(ge=1, le=1 << 48)]
    seconds: Figure


class AnswerRecord(TypedDict):
    """Times and counts of an answer. Times are those of its reader; the first token and its time are no decoding.

    pass_tokens_per_second: Speed in the time of drafts and passes alone.
    passes: Without the first, which reads the prompt.
    """

    decoded: Count
    decode_s: Figure
    first_token_s: Figure
    pass_tokens_per_second: NotRequired[Figure | None]
    passes: NotRequired[Count]
    sources: NotRequired[dict[str, dict[str, Count]]]
    positions: NotRequired[list[Position]]
    widths: NotRequired[dict[Width, WidthPasses]]


class JudgedTokens(TypedDict, total=False):
    """How many tokens were judged, and how many of them are plausible, as exactness.Plausible has them."""

    judged: Count
    plausible: Count


class PeerAnswer(AnswerRecord, JudgedTokens):
    """is_equal: Its text is that of plain decoding."""

    is_equal: bool


Text = Literal["equal", "near_tie", "different", "not_judged"]


class TurnRecord(TypedDict):
    """A turn of a conversation, answered by all: prompt is an index of the prompts, first who answered first."""

    category: str
    prompt: Count
    turn: Count
    round: Count
    first: Literal["plain", "speculative"]
    text: Text
    plain: AnswerRecord
    speculative: AnswerRecord
    peers: dict[str, PeerAnswer]


class Figures(TypedDict):
    """ratios are those of answers; ratio_in_passes is in the time of passes and drafts alone."""

    tokens_per_pass: Figure | None
    acceptance_rate: Figure | None
    acceptance_by_position: list[Position]
    time_to_first_token_s: FirstToken
    sources: dict[str, dict[str, Count]]  # counts of each source of drafts, such as rounds and accepted
    ratios: Summary | None
    ratio_in_passes: Figure | None


class Category(Figures):
    plain_tokens_per_second: Figure
    speculative_tokens_per_second: Figure
    ratio: Figure
    ratio_interval: RatioInterval
    prompts: Count
    drafters: list[str]


class PromptRatio(TypedDict):
    """The ratio of one prompt, and its interval by the rounds."""

    category: str
    prompt: Count
    answers: Count
    ratio: Figure
    ratio_interval: RatioInterval


class Worst(TypedDict):
    """The category of the lowest ratio; its interval holds for the lowest of that many categories."""

    category: str
    ratio: Figure
    ratio_interval: RatioInterval


class Texts(TypedDict):
    """Answers of speculation by what their text is, next to that of plain decoding."""

    equal: Count
    near_tie: Count
    different: Count
    not_judged: Count


class PassFigures(TypedDict):
    """Times of passes by their width."""

    step_s: Annotated[float, Meta(ge=1e-9, le=1e12)] | None  # seconds of a pass of plain decoding
    ratios: dict[Width, Figure]  # cost of a pass in steps, as the draft policy estimates it
    widths: dict[Width, WidthPasses]


class Work(TypedDict):
    """Work of a lane, the target or a drafter, from start_s to end_s."""

    lane: str
    what: str
    start_s: Figure
    end_s: Figure
    num_tokens: Count


class Sample(TypedDict):
    """One answer, shown pass by pass."""

    category: str
    prompt: str
    answer: str
    ratio: Figure
    tokens_per_pass: Figure
    plain: list[Work]
    speculative: list[Work]


class BenchMemory(TypedDict):
    """Memory of the process and of the target, in bytes."""

    process_peak_rss_bytes: Count
    target_weights_bytes: Count
    target_kv_cache_bytes_per_token: Count


class PeerInfo(TypedDict):
    """Another runtime, in one of its ways to decode; failure is why it answers no more."""

    name: str
    way: str
    version: str
    file: str
    peak_rss_bytes: Count
    failure: str | None


class PeerCategory(TypedDict):
    """A peer in one category. Its ratio is to plain decoding of the same prompts, as that of speculation is."""

    tokens_per_second: Figure
    ratio: Figure
    ratio_interval: RatioInterval
    tokens_per_pass: Figure | None
    acceptance_rate: Figure | None
    sources: dict[str, dict[str, Count]]


class PeerRow(PeerInfo):
    """A peer beside plain decoding of the same turns.

    categories: Tokens per second, by category.
    speculative_ratio: The speed of speculation over that of the peer.
    """

    categories: dict[str, Figure]
    by_category: dict[str, PeerCategory]
    mean_ratio: Figure | None
    mean_ratio_interval: RatioInterval
    speculative_ratio: Figure | None
    speculative_ratio_interval: RatioInterval
    time_to_first_token_s: Figure | None
    answers: Count
    same_answers: Count


class BenchSetup(TypedDict, total=False):
    """The models, the machine and the options of a run.

    plain: "own session" where plain decoding has a session of its own, as with --drafter none; "shared session"
        where there was no memory for one.
    mode: "deterministic" where the text does not depend on the drafter to the byte; else "not deterministic".
    learned: Acceptance rates at the start of each round: "fresh", or "stored" as earlier sessions left them.
    weights_sha256: Of the model; empty where its folder records none.
    drafter_sha256: Of the weights of the drafter models, then of those of --compare.
    """

    model: Required[str]
    weights_sha256: str
    drafter_sha256: list[str]
    machine: Required[str]
    version: int
    drafter: str
    devices: list[str]
    deterministic: bool
    prompts: Count
    rounds: Count
    max_tokens: Count
    temperature: Figure
    plain: str
    mode: str
    learned: str
    memory: BenchMemory
    pass_ratios: dict[Width, Figure]
    measured_at: str
    host: dict[str, str]


class BenchDocument(Figures, BenchSetup):
    """ratio, mean_ratio and the like are geometric means over prompts of speculative over plain speed."""

    categories: dict[str, Category]
    mean_ratio: Figure | None
    mean_ratio_interval: RatioInterval
    enough_prompts: Count | None  # so many would decide whether drafting is faster, as far as these tell
    worst_ratio: Figure | None
    worst_ratio_interval: RatioInterval
    worst: Worst | None
    below_one: list[str]  # categories whose interval lies below 1
    by_prompt: list[PromptRatio]
    texts: Texts
    answers: Count
    same_answers: Count
    passes: PassFigures
    sample: Sample | None
    peers: list[PeerRow]
    turns: list[TurnRecord]


def read_document(path: Path) -> BenchDocument:
    """Read the document in a file.

    Raises UsageError: The file cannot be read, or is not what `edgespec bench --json` prints.
    """
    with explain_unreadable(path, "a document of edgespec bench --json"):
        return read_as(BenchDocument, json.loads(read_text(path, _LARGEST_BYTES)))
