"""The trial of a decoder on its device: how wide its passes are, who chooses tokens, and if passes are replayed.

What an earlier trial has found is read from the folder.
"""

import logging
from dataclasses import replace
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from edgespec.errors import Cancelled, EdgeSpecError
from edgespec.runtimes.cuda_graph import CudaGraphs, is_as_plain
from edgespec.runtimes.device_checks import (
    WIDTHS,
    DeviceCheck,
    DeviceChecks,
    find_sound_passes,
    is_argmax_sound,
    is_same_row,
    probe_tokens,
    row_sample,
)
from edgespec.runtimes.device_rows import to_argmax
from edgespec.runtimes.devices import Device
from edgespec.runtimes.pass_shapes import PassShapes, choose_same_shapes, choose_shapes, same_cost
from edgespec.runtimes.passes import Passes
from edgespec.runtimes.session import refuse_device
from edgespec.types import Logits, TokenIds

if TYPE_CHECKING:
    from edgespec.runtimes.onnx import OnnxDecoder

_NUM_CHOSEN = WIDTHS[-1]  # tokens of which the device's choice is compared
_REPEATS = 4  # of a pass that is timed
_LONG_CACHE = 2048  # tokens
_RECORDING_PASSES = 4  # after so many the cache has grown, the pass was recorded, and it was replayed twice
_log = logging.getLogger(__name__)


class DeviceTrial:
    """Runs passes of a decoder that nobody else uses yet, and leaves it with those that are right and fastest."""

    def __init__(
        self, decoder: "OnnxDecoder", passes: Passes, device: Device, checks: DeviceChecks, *, is_exact: bool
    ) -> None:
        """Try nothing yet; is_exact: In deterministic mode."""
        self._decoder, self._passes, self._device, self._checks = decoder, passes, device, checks
        self._names, self._is_exact = checks.names, is_exact

    def run(self) -> None:
        """Find out which passes the device computes correctly, or look up what an earlier trial has found.

        Raises DeviceUnavailable: The device computes the model wrongly, or not at all.
        """
        with refuse_device(self._device):  # what a graph needs of an adapter shows only in its first pass
            first = self._fresh_rows(probe_tokens(self._decoder.vocab_size, 1), 0, 1)[0]
            found = self._checks.read()
            if found is None or not is_same_row(first, found.sample):
                found = self._compare_passes(row_sample(first))
                self._checks.write(found)
        self._decoder.chunk_tokens, self._decoder.has_argmax = found.max_pass_tokens, found.has_argmax
        self._decoder.shapes = found.shapes[self._is_exact]
        self.run_shapes()
        if graphs := self._passes.graphs:
            mode = int(self._is_exact)
            while found.replays[mode] is None:
                self._passes.wait_for_openings()
                is_sound = self._decoder.shapes is not None and self._compare_replays(graphs, self._decoder.shapes)
                found = replace(
                    found, replays=(found.replays[0], is_sound) if mode else (is_sound, found.replays[1])
                )
                self._checks.write(found)
            if found.replays[mode] and self._decoder.shapes:
                self._record(graphs, self._decoder.shapes)

    def _compare_passes(self, sample: tuple[float, ...]) -> DeviceCheck:
        decoder, name = self._decoder, self._device.name
        sound = find_sound_passes(
            self._fresh_rows, decoder.vocab_size, decoder.context_length, name, tolerance=self._checks.tolerance
        )
        if sound.max_width < WIDTHS[0] and not sound.is_cut_short:
            _log.warning(
                "'%s' computes passes of more than %d tokens wrongly; longer ones are split", name, sound.max_width
            )
        decoder.has_argmax = (
            self._names.best is not None
            and self.can_choose(sound.rows[:_NUM_CHOSEN])
            and self._checks.chooses_the_first()
        )
        seconds_of, widest = cache(self._seconds_of), min(sound.max_width, decoder.context_length // 2)
        fast = same = None
        if not self._device.is_software:
            fast = choose_shapes(seconds_of, widest)
            same = choose_same_shapes(seconds_of, widest, self._reads_alike)
        return DeviceCheck(
            max_pass_tokens=sound.max_width,
            num_compared=len(sound.rows),
            has_argmax=decoder.has_argmax,
            shapes=(fast, same),
            same_cost=same_cost(seconds_of, same, fast),
            sample=sample,
        )

    def _reads_alike(self, shapes: PassShapes) -> bool:
        """True if rows after a prompt have the same bits wherever the passes that read it begin."""
        tokens, self._decoder.shapes = self._probe_tokens(), shapes
        num_rows = shapes.rows[0]
        num_prompt = len(tokens) - num_rows + 1
        found = []
        for cut in (0, num_prompt // 3, num_prompt // 2 + 1):
            self._decoder.hold(tokens[:0])
            if cut:
                self._rows(tokens[:cut], 1, cut)
            found.append(self._rows(tokens, num_rows, num_prompt))
        return all(np.array_equal(rows, found[0]) for rows in found)

    def run_shapes(self) -> None:
        """Run a pass of each width and number of rows, at the beginning and behind others."""
        for width, num_rows in self._decoder.shapes.all() if self._decoder.shapes else ():
            self._run_shape(width, num_rows, num_past=0)
            self._run_shape(width, num_rows, num_past=min(width, self._decoder.context_length - width))

    def _record(self, graphs: CudaGraphs, shapes: PassShapes) -> None:
        """Have passes of the narrowest width recorded, beginning with one of these."""
        width = shapes.rows[0]
        self._passes.begin()
        self._run_shape(width, width, num_past=0)
        graphs.width = width
        for _ in range(_RECORDING_PASSES):
            self._passes.begin()
            num_past = min(width, self._decoder.context_length - width)
            self._run_shape(width, width, num_past)
            # Sampling without a draft wants logits, of the first token alone.
            first = np.zeros(1, np.int32)
            self._passes.run(first, num_past, 1, num_padded=width - 1, num_given=width)

    def _compare_replays(self, graphs: CudaGraphs, shapes: PassShapes) -> bool | None:
        """True if replays give the rows of plain passes, at several lengths and after the cache has grown.

        In deterministic mode, to the bit, also in a cache of which most is empty: a recording knows the cache's
        length, and not that of the text. None where not all were made, as another model was being opened.
        """
        width, num_put_off = shapes.rows[0], graphs.num_put_off
        tokens = self._probe_tokens()
        lengths = [num for num in (2 * width, 2 * width + 1, 5 * width, len(tokens)) if num <= len(tokens)]
        self._decoder.hold(tokens[:0])
        graphs.width = 0
        expected = [self._rows(tokens[:length], width) for length in lengths]
        self._passes.forget()
        self._decoder.hold(tokens[:0])
        graphs.width = width
        for capacity in (0, min(_LONG_CACHE, self._decoder.context_length)) if self._is_exact else (0,):
            try:
                if capacity:
                    self._decoder.hold(tokens[:0])
                    self._passes.reserve(0, capacity)
                for length, rows in zip(lengths, expected, strict=True):
                    for _ in range(_RECORDING_PASSES):
                        self._passes.begin()
                        if not self._has_rows(tokens[:length], rows):
                            graphs.stop()
            except EdgeSpecError as error:
                if isinstance(error, Cancelled):
                    raise
                graphs.stop(str(error))
        if self._is_exact:
            self._passes.forget()
        is_whole = num_put_off == graphs.num_put_off
        return self._passes.is_recording if is_whole or not self._passes.is_recording else None

    def _has_rows(self, tokens: TokenIds, expected: Logits) -> bool:
        """True if passes give the last rows of tokens, and choose the tokens that these say."""
        counts = len(expected), 1
        is_close = all(
            is_as_plain(self._rows(tokens, num), expected[-num:], is_exact=self._is_exact) for num in counts
        )
        if not is_close or not self._decoder.has_argmax or not self._names.best:
            return is_close
        best = self._decoder.rows(tokens, len(expected), self._names.best)
        return is_argmax_sound(expected, to_argmax(best, self._decoder.vocab_size))

    def _seconds_of(self, width: int, num_rows: int) -> float:
        """The shortest of a few equal passes, in seconds, each after width tokens and with its kernels loaded."""
        self._run_shape(width, num_rows, num_past=0)
        taken_s = []
        for _ in range(_REPEATS):
            started_s = perf_counter()
            self._run_shape(width, num_rows, num_past=width)
            taken_s.append(perf_counter() - started_s)
        return min(taken_s)

    def _run_shape(self, width: int, num_rows: int, num_past: int) -> None:
        """Run a pass that means nothing after num_past slots, which the pass before has filled."""
        output = self._names.best if self._decoder.has_argmax and self._names.best else self._names.logits
        self._passes.run(np.zeros(width, np.int32), num_past, num_rows, output=output)

    def _rows(self, tokens: TokenIds, num_last: int, num_prompt: int = 0) -> Logits:
        return self._decoder.rows(tokens, num_last, self._names.logits, num_prompt).copy()

    def _probe_tokens(self) -> TokenIds:
        return probe_tokens(self._decoder.vocab_size, self._decoder.context_length)

    def _fresh_rows(self, tokens: TokenIds, start: int, width: int) -> Logits:
        """Rows after all tokens but the first `start`, which the call before has run, in passes of a width."""
        self._decoder.hold(tokens[:start])
        self._decoder.chunk_tokens = width
        return self._rows(tokens, len(tokens) - start)

    def can_choose(self, rows: Logits) -> bool:
        """True if the device chooses the tokens of the rows of the first probe tokens."""
        assert self._names.best is not None
        tokens = self._probe_tokens()[: len(rows)]
        self._decoder.hold(tokens[:0])
        self._decoder.chunk_tokens = len(tokens)
        best = to_argmax(self._decoder.rows(tokens, len(tokens), self._names.best), self._decoder.vocab_size)
        if not is_argmax_sound(rows, best):
            _log.warning(
                "'%s' chooses other tokens than its rows say; whole rows are copied from it", self._device.name
            )
            return False
        return True
