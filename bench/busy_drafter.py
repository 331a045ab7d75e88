"""A model that drafts all the time and that nobody waits for: in a lane here, or in a process of its own.

python bench/busy_drafter.py MODEL    # begins at a line "start" and ends at a line "stop"; answers "done"
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from edgespec import SamplingParams, load
from edgespec.decoding.decoder import Decoder
from edgespec.decoding.sampling import GumbelSampler
from edgespec.draft.drafter import DraftRequest
from edgespec.draft.lanes import Job, ThreadLane
from edgespec.draft.model_drafter import ModelDrafter
from edgespec.system.cancel import Flag

SAMPLING = SamplingParams(temperature=0.8, top_k=40, seed=1)
NUM_PROMPT, NUM_DRAFT = 500, 64


class BusyDrafter:
    """Drafts in a lane."""

    def __init__(self, decoder: Decoder) -> None:
        self._drafter = ModelDrafter(decoder, decoder.vocab_size)
        self._prompt = np.arange(NUM_PROMPT, dtype=np.int32) % decoder.vocab_size
        self._lane = ThreadLane("drafter")

    @contextmanager
    def working(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()

    def start(self) -> None:
        sampler = GumbelSampler(SAMPLING)

        def steps(cancel: Flag) -> Iterator[object]:
            while not cancel.is_set():
                yield from self._drafter.guesses(self._prompt, DraftRequest(NUM_DRAFT, cancel=cancel), sampler)

        self._lane.start(Job(steps, interrupt=self._drafter.decoder.interrupt))
        self._lane.wait(1)  # it has read the prompt

    def stop(self) -> None:
        self._lane.stop()


class BusyProcess:
    """A BusyDrafter in a process of its own; close it."""

    def __init__(self, model: str) -> None:
        self._child = subprocess.Popen(
            [sys.executable, __file__, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @contextmanager
    def working(self) -> Iterator[None]:
        self._tell("start")
        try:
            yield
        finally:
            self._tell("stop")

    def close(self) -> None:
        self._child.communicate()

    def _tell(self, line: str) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        print(line, file=self._child.stdin, flush=True)
        if self._child.stdout.readline() != "done\n":
            raise RuntimeError("the drafter's process has ended; its error is above")


def main() -> None:
    with load(sys.argv[1], drafter="none", num_threads=1) as engine:
        drafter = BusyDrafter(engine.target)
        for line in sys.stdin:
            drafter.start() if line == "start\n" else drafter.stop()
            print("done", flush=True)


if __name__ == "__main__":
    main()
