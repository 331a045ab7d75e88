"""The document of a benchmark, as `edgespec bench --json` prints it, and reading it back.

Documents of older versions lack some fields. Bounds keep hostile figures out of the charts.
"""

import json
from pathlib import Path
from typing import Annotated, NotRequired, Required, TypedDict

from msgspec import Meta

from edgespec.errors import UsageError
from edgespec.system.typed_json import read_as

_LARGEST_BYTES = 1 << 26

Figure = Annotated[float, Meta(ge=0, le=1e12)]
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


class Figures(TypedDict, total=False):
    tokens_per_pass: Figure | None
    acceptance_rate: Figure | None
    acceptance_by_position: list[Position]
    time_to_first_token_s: FirstToken
    sources: dict[str, dict[str, Count]]  # counts of each source of drafts, such as rounds and accepted
    ratios: Summary | None


class Category(Figures):
    plain_tokens_per_second: Figure
    speculative_tokens_per_second: Figure
    ratio: Figure
    drafters: NotRequired[list[str]]


class WidthPasses(TypedDict):
    passes: Annotated[int, Meta(ge=1, le=1 << 48)]
    seconds: Figure


class Passes(TypedDict):
    """What passes took by their width."""

    step_s: Annotated[float, Meta(ge=1e-9, le=1e12)] | None  # seconds of a pass of plain decoding
    ratios: dict[Width, Figure]  # cost of a pass in steps, as the draft policy estimates it
    widths: dict[Width, WidthPasses]


class Work(TypedDict):
    """What a lane, the target or a drafter, did from start_s to end_s."""

    lane: str
    what: str
    start_s: Figure
    end_s: Figure
    num_tokens: Count


class Sample(TypedDict):
    category: str
    prompt: str
    answer: str
    ratio: Figure
    plain: list[Work]
    speculative: list[Work]


class Memory(TypedDict):
    process_peak_rss_bytes: Count
    target_weights_bytes: Count
    target_kv_cache_bytes_per_token: Count


class PeerRow(TypedDict):
    name: str
    way: str
    version: str
    file: NotRequired[str]
    categories: dict[str, Figure]
    mean_ratio: Figure | None
    time_to_first_token_s: Figure | None
    answers: Count
    same_answers: Count
    peak_rss_bytes: Count
    failure: str | None


class BenchDocument(Figures, total=False):
    model: Required[str]
    categories: Required[dict[str, Category]]
    mean_ratio: Required[Figure | None]
    worst_ratio: Required[Figure | None]
    machine: Required[str]
    answers: Count
    same_answers: Count
    passes: Passes
    version: int
    drafter: str
    devices: list[str]
    deterministic: bool
    prompts: Count
    rounds: Count
    max_tokens: Count
    temperature: Figure
    memory: Memory
    sample: Sample | None
    peers: list[PeerRow]
    measured_at: str
    host: dict[str, str]


def read_document(path: Path) -> BenchDocument:
    """Raises UsageError: The file cannot be read, or is not what `edgespec bench --json` prints."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
        if len(content) > _LARGEST_BYTES:
            raise ValueError(f"it holds more than {_LARGEST_BYTES >> 20} MiB")
        return read_as(BenchDocument, json.loads(content.decode("utf-8-sig")))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no document of edgespec bench --json: {error}") from None
