"""Checks of a model on a device: which passes it computes rightly, and if it picks the right tokens.

Each is done once, and saved beside the model. A saved check counts for one device with its drivers, one version of
ONNX Runtime and one graph with its weights.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from time import perf_counter
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from edgespec.decoding.decoder import Argmax
from edgespec.errors import DeviceUnavailable
from edgespec.manifest import Manifest
from edgespec.runtimes.cuda import opening
from edgespec.runtimes.device_rows import choice_graph, rows_with_ties, to_argmax
from edgespec.runtimes.devices import Device, device_key, import_onnxruntime
from edgespec.runtimes.pass_shapes import PassShapes
from edgespec.runtimes.session import fast_model, load_graph
from edgespec.system.context_managers import contextmanager
from edgespec.system.system_info import processor_name
from edgespec.system.typed_json import RecordFile
from edgespec.types import Logits, TokenIds

FILE_NAME = "device_checks.json"
_VERSION = 3  # raised when what is checked changes
_SAMPLE = 64  # numbers of a row that are saved
# Share of the spread of the rows. Half floats move a row by some thousandths of it, a wrong kernel by most; in a
# layer with a short window by hundredths, which in single floats (0.00001) is seen too.
_TOLERANCE, _TOLERANCE_OF_SINGLES = 0.05, 0.005
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCheck:
    """Passes that a device computes correctly, of one graph.

    max_pass_tokens: the widest. num_compared: how many tokens were compared.
    has_argmax: the tokens that it chooses are those of its rows. runs_trees: None where that was not tried.
    replays: recorded passes give the rows of others, and in deterministic mode their bits; None where that was not
        tried.
    shapes: the widths that passes are padded to, and those of deterministic mode; None where padding does not pay.
    same_cost: how many times as long a pass over one token takes in that mode as without it.
    sample: numbers of the row after the first token, evenly spread, by which another driver is noticed.
    """

    max_pass_tokens: Annotated[int, Meta(ge=1, le=4096)]
    num_compared: Annotated[int, Meta(ge=1, le=4096)]
    has_argmax: bool
    runs_trees: bool | None = None
    replays: tuple[bool | None, bool | None] = (None, None)
    shapes: tuple[PassShapes | None, PassShapes | None] = (None, None)
    same_cost: Annotated[float, Meta(gt=0)] = 1.0
    sample: Annotated[tuple[float, ...], Meta(min_length=1, max_length=_SAMPLE)]


class DeviceChecks:
    """The saved check of one graph on one device."""

    def __init__(self, folder: Path, manifest: Manifest, device: Device) -> None:
        self._file = RecordFile(folder / FILE_NAME, dict[str, DeviceCheck], "checks", version=_VERSION, most=32)
        self._key = _key(manifest, device) if manifest.is_ours else None
        self._graph, self._manifest, self._device = folder / manifest.graph, manifest, device
        self.names = manifest.signature
        self.tolerance = _TOLERANCE_OF_SINGLES if manifest.kv_cache.dtype == "float32" else _TOLERANCE

    def read(self) -> DeviceCheck | None:
        """None where there is none, or none that can be used: a check is repeated then."""
        return self._file.read().get(self._key) if self._key else None

    def write(self, check: DeviceCheck) -> None:
        """Save a check, in place of the oldest where there are many; not into a folder that is read-only."""
        if self._key is None:
            return
        try:
            self._file.write(self._key, check)
        except OSError as error:
            path = self._file.path
            _log.info("%s cannot be written (%s), so the check is repeated each time", path, error.strerror)

    def chooses_the_first(self) -> bool:
        """True if the graph finds on the device the first of equally likely tokens, and NaN, as the host does."""
        with opening(self._device):
            is_right = self._chooses_the_first()
        if not is_right:
            _log.warning(
                "'%s' does not choose the first of equally likely tokens; whole rows are copied from it",
                self._device.name,
            )
        return is_right

    def _chooses_the_first(self) -> bool:
        graph, names = self._graph, self.names
        content = fast_model(graph, self._manifest, self._device) or graph.read_bytes()
        session = load_graph(graph, self._device, choice_graph(content, names))
        for rows in rows_with_ties(self._manifest.vocab_size):
            damaged = rows.copy()
            damaged[-1, 1] = np.nan
            for given, is_sound in ((rows, True), (damaged, False)):
                (best,) = session.run([names.best], {names.logits: given[None]})
                found = to_argmax(best[0], self._manifest.vocab_size)
                if found.is_sound[-1] != is_sound or (is_sound and (found.ids != given.argmax(1)).any()):
                    return False
        return True


def row_sample(row: Logits) -> tuple[float, ...]:
    """Numbers of a row, [vocab_size], evenly spread."""
    places = np.linspace(0, len(row) - 1, min(_SAMPLE, len(row))).astype(np.int64)
    return tuple(float(number) for number in np.nan_to_num(row[places]))


def is_same_row(row: Logits, sample: tuple[float, ...]) -> bool:
    """True if a sample is that of a row, apart from the rounding between two versions of a kernel."""
    found = np.asarray(row_sample(row))
    if len(found) != len(sample):
        return False
    return bool(np.sqrt(np.square(found - sample).mean()) <= _TOLERANCE * found.std())


def _key(manifest: Manifest, device: Device) -> str:
    files = [
        manifest.files[name].sha256[:16] for name in (manifest.graph, manifest.weights) if name in manifest.files
    ]
    processor = [processor_name()] if device.is_software else []
    runtime = f"onnxruntime {import_onnxruntime().__version__}"
    return ", ".join([device_key(device), *processor, runtime, *files, f"{manifest.context_length} tokens"])


WIDTHS = (256, 64, 16)
_NARROW = 8
_LEAST_TOKENS = 2 * WIDTHS[-1]  # so that a pass has others before it
# Of the passes that are compared: a GPU of an old laptop takes less for all, a GPU in software hours.
_BUDGET_S = 30.0
_SLOW = "checking that '%s' computes this model correctly, which is done once"
_QUIET_S = 2.0  # a check that takes longer is reported

RowsOf = Callable[[TokenIds, int, int], Logits]
"""Tokens, how many of them the call before has run, and how many a pass may run → the rows after the others."""


class SoundPasses(NamedTuple):
    """The widest pass that gives the right rows, and these rows, [num_compared, vocab_size].

    is_cut_short: No wider passes were tried, for the device is too slow for that; else they are wrong, if not all
    of WIDTHS are right.
    """

    max_width: int
    rows: Logits
    is_cut_short: bool


def find_sound_passes(
    rows_of: RowsOf,
    vocab_size: int,
    context_length: int,
    device: str,
    clock: Callable[[], float] = perf_counter,
    tolerance: float = _TOLERANCE,
) -> SoundPasses:
    """The widest of WIDTHS whose passes give the rows of passes of eight tokens.

    All of WIDTHS are tried, over as many tokens as the widest has, unless this takes longer than a budget: then
    fewer tokens are compared, and passes that are wider than what was compared are not trusted.

    Raises DeviceUnavailable: No width gives the right rows.
    """
    tokens = probe_tokens(vocab_size, context_length)
    first = rows_of(tokens[:_NARROW], 0, _NARROW)  # takes longer: it compiles
    started_s = clock()
    begun = tokens[:_LEAST_TOKENS]
    parts = [first, rows_of(begun, len(first), _NARROW)] if len(begun) > len(first) else [first]
    token_s = (clock() - started_s) / max(1, len(begun) - len(first))
    num_tokens = _num_affordable(token_s, len(tokens))
    widths: tuple[int, ...] = WIDTHS
    if num_tokens < len(tokens):
        widths = tuple(width for width in WIDTHS if width <= num_tokens)
        _log.info(
            "'%s' takes %.2f s for each token, so that only passes of up to %d tokens are checked, on %d tokens "
            "in about %.0f s; longer passes are split",
            device, token_s, widths[0], num_tokens, _num_passed(num_tokens) * token_s,
        )  # fmt: skip
    if num_tokens > len(begun):
        parts.append(rows_of(tokens[:num_tokens], len(begun), _NARROW))
    expected = np.concatenate(parts)
    for width in widths:
        if are_close(rows_of(tokens[:num_tokens], 0, width), expected, tolerance):
            return SoundPasses(width, expected, widths[0] < WIDTHS[0] and width == widths[0])
    raise DeviceUnavailable(
        f"'{device}' gives other logits in passes of {WIDTHS[-1]} tokens than in passes of {_NARROW}: it computes "
        "this model wrongly; use --device cpu",
        device=device,
    )


def _num_affordable(token_s: float, num_tokens: int) -> int:
    """How many tokens can be compared within the budget, if each width has to be tried."""
    for num in (num_tokens, *(width for width in WIDTHS[1:] if _LEAST_TOKENS < width < num_tokens)):
        if _num_passed(num) * token_s <= _BUDGET_S:
            return num
    return min(_LEAST_TOKENS, num_tokens)


def _num_passed(num_tokens: int) -> int:
    """Tokens that are run at most to compare num_tokens, after the first ones."""
    num_widths = sum(width <= num_tokens for width in WIDTHS)
    return max(0, num_tokens - _LEAST_TOKENS) + num_tokens * max(1, num_widths)


@contextmanager
def report_slow_check(device: str) -> Iterator[None]:
    """Log what the block does where it takes longer than some seconds, as on a GPU in software."""
    timer = Timer(_QUIET_S, _log.info, (_SLOW, device))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def probe_tokens(vocab_size: int, context_length: int) -> TokenIds:
    """Distinct tokens, far apart, so that a row that sees too few of them is wrong by much."""
    return (np.arange(min(WIDTHS[0], context_length)) * 7919 % vocab_size).astype(np.int32)


def is_argmax_sound(rows: Logits, found: Argmax) -> bool:
    """True if tokens that a device chose are the likeliest of rows, apart from the rounding between two passes."""
    missed = rows.max(1) - rows[np.arange(len(rows)), found.ids]
    return bool(found.is_sound.all() and missed.max() <= _TOLERANCE * rows.std())


def are_close(rows: Logits, expected: Logits, tolerance: float = _TOLERANCE) -> bool:
    """True if rows are those expected, apart from the rounding between two passes."""
    # Of the worst row, in standard deviations of all; NaN, which is not less, where rows have it.
    difference = np.sqrt(np.square(rows.astype(np.float64) - expected).mean(1)).max() / expected.std()
    return bool(difference < tolerance)
