"""Loads a model: from what a user names to an engine with its decoders and drafters."""

import logging
from collections.abc import Callable
from pathlib import Path

from edgespec.engine.engine import Engine
from edgespec.engine.open_engine import open_engine
from edgespec.errors import DeviceUnavailable, EdgeSpecError, MemoryExhausted
from edgespec.setup.resolve import Resolved, resolve
from edgespec.setup.row_proof import RowsDiffer
from edgespec.setup.setup import decide, read_tables
from edgespec.setup.wish import Wish
from edgespec.system.progress import LoadProgress

_LOG = logging.getLogger(__name__)


def load(
    model: str | Path,
    *,
    drafter: str = "auto",
    draft_length: int | str = "auto",
    acceptance: str = "equality",
    schedule: str = "auto",
    device: str = "auto",
    drafter_device: str = "auto",
    num_threads: int | None = None,
    drafter_threads: int | None = None,
    allow_fallback: bool = False,
    deterministic: bool | None = None,
    exact: bool = False,
    offline: bool = False,
    answer_cache: bool = False,
    learn: str | None = None,
    memory_limit: int | str | None = None,
    max_parallel: int | None = None,
    context: int | None = None,
    home: str | Path | None = None,
    report: Callable[[str], None] = lambda line: None,
    progress: Callable[[LoadProgress], None] = lambda progress: None,
) -> Engine:
    """Load a model, preparing it first if need be.

        with load("smollm2-135m", drafter="suffix") as engine:
            print(engine.generate("Why is the sky blue?", max_tokens=60).text)

    Args:
        model: A model folder, a pair folder, a name of the catalogue, a .gguf file, a safetensors folder or a hub
            id (org/name).
        drafter: auto, none, ngram, suffix, lookahead, self, or a model like the first argument. auto drafts from
            the text, with the drafter of a pair folder, and by lookahead where measured costs let it pay.
            lookahead has the target guess at several places in each pass; self is the graph with fewer layers in
            the model's folder. "suffix+model" uses both drafters; in "medium,tiny,suffix" each drafts for the
            one before it.
        draft_length: Tokens a draft; auto to draft what is expected to pay.
        acceptance: Which drafted tokens stay: equality gives one text for a seed, whatever drafts; rejection
            accepts more tokens of a drafter model at a temperature. Both keep the target's distribution.
        schedule: When a drafter model works: serial, between passes of the target; pipelined, also during them;
            hedged, also on other outcomes of the pass; auto, whichever was measured to be fastest.
        device: Where the target runs, and for which it is prepared: gpu, npu or a name that edgespec devices
            prints. auto is the CPU, or on a machine with a GPU or an NPU the device that is measured to be
            fastest, and never an emulator.
        drafter_device: Where a drafter model runs.
        num_threads: Threads of the target; by default all physical cores.
        drafter_threads: Threads of a drafter model; by default as many as the target has, or separate cores where
            these were measured to be faster.
        allow_fallback: Use the CPU where a named device cannot run the model; the figures' downgrades report it.
        deterministic: Have one text, to the byte, whatever drafts. By default wherever that is proved for the
            model on its device, which takes seconds once; True refuses a device where it does not hold, False
            gives it up for some speed.
        exact: Also where it does not hold, have the greedy text of plain decoding: what a near-tie of two tokens
            decides is decided again in passes of one token, which can cost more than drafting saves.
        offline: Never connect.
        answer_cache: Store the tokens of answers in the model home, and draft from answers of earlier sessions, if
            drafter is auto or suffix.
        learn: Let a drafting head learn from answers while none is made, under this name, which stands for a use
            such as mail or code. What was learned lies beside the head; the text stays the same.
        memory_limit: The most memory that this process may hold, in bytes or as 2G or 512M. It never takes more
            than is free: where memory is short fewer drafters are open, and the text stays the same.
        max_parallel: How many answers are made at once, from threads or tasks of the program; by default four, or
            as many as there is memory for. Further ones wait.
        context: The most tokens of a prompt and its answer; by default the model's own context. A shorter one
            takes less memory.
        home: The model home; by default EDGESPEC_HOME or the platform's data folder.
        report: Takes a line for each stage of a preparation, and for drafters that are closed or opened again.
        progress: Takes numbers for a bar of progress: how much is downloaded, exported, and read to be opened. It
            is called from the thread that does it; what it raises ends the loading.

    Raises:
        ModelError: The model is missing or invalid, or the drafter has too few of its tokens.
        IntegrityError: A file differs from its recorded hash.
        DeviceUnavailable: A device cannot be used, or would not run the model.
        MemoryExhausted: The target does not fit.
        UsageError: An argument makes no sense.
    """
    return _open_on_a_device_that_runs(Wish(**locals()))


def _open_on_a_device_that_runs(wish: Wish) -> Engine:
    """Open the models; where a device that auto chose does not run them, auto chooses again without it."""
    refused: dict[str, EdgeSpecError] = {}
    while True:
        found = resolve(wish, refused)
        _LOG.debug("%s is %s on %s", wish.model, found.target.folder, found.placement.device.name)
        try:
            return _open_or_fall_back(wish, found)
        except (DeviceUnavailable, MemoryExhausted) as error:
            refused[found.without(error)] = error


def _open_or_fall_back(wish: Wish, found: Resolved) -> Engine:
    """Open the models; on the CPU if a device that the user named fails and allow_fallback is set."""
    while True:
        try:
            return open_engine(decide(wish, found, read_tables(wish, found)))
        except RowsDiffer:
            found = found.with_differing_rows()
        except DeviceUnavailable as error:
            found = found.on_cpu(error, wish)
