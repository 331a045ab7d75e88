"""Heads without attention, with a graph for each token of a draft (Medusa: Cai et al., arXiv:2401.10774; MLP
speculators: Wertheimer et al., arXiv:2404.19124; Hydra).

The first step takes the last token and the state of the target after the one before it; each next one takes the
token that was drafted and the state that the step before gave.
"""

from itertools import takewhile
from typing import Unpack

import numpy as np

from edgespec.decoding.decoder import Can, CorrectableHead
from edgespec.decoding.head_rows import contexts_in, correct
from edgespec.decoding.hidden_states import States
from edgespec.runtimes.head_parts import HeadDecoder, HeadFolder, HeadGraph, place_in_draft
from edgespec.runtimes.session import SessionOptions
from edgespec.types import Logits, TokenIds


class StepHead(HeadDecoder, CorrectableHead):
    """A head of steps as a function from tokens to logits, which reads a target's hidden states from their store.

    After the text that was begun, a row comes from the step of its place in the draft. Any other row comes from
    the first step, whose rows are corrected; where no hidden state is known for it, from a state of zeros.
    """

    def __init__(self, folder: HeadFolder, **options: Unpack[SessionOptions]) -> None:
        """Load the graphs; raises as open_session does."""
        super().__init__(folder, **options)
        head = folder.head
        names = dict.fromkeys(head.step_graphs)
        graphs = {name: HeadGraph(folder.path / name, folder.device, **options) for name in names}
        for graph in graphs.values():
            graph.require({"input_ids", "hidden"}, {"logits", "state"})
        self._steps = [graphs[name] for name in head.step_graphs]
        self._begun = np.zeros(0, np.int32)  # the text whose last token the first step takes
        self._drafted: list[int] = []  # tokens after it that steps have taken
        self._states: list[States] = []  # which each step takes, [1, 1, width]; of the next one too
        self._try_out(folder.device)

    @property
    def can(self) -> Can:
        return Can(max_unread=1)

    @property
    def correctable(self) -> CorrectableHead:
        return self

    def begin(self, tokens: TokenIds, num_tokens: int, max_unread: int | None = None) -> int:
        num_states = len(tokens) - 1
        with self._lock:
            known = min(self._features.num_known(tokens, is_last=True), num_states)
            num_left = len(self._steps) - (num_states - known)  # others take tokens of the text
            if known < 1 or num_left < 1 or len(tokens) > self.context_length:
                return 0
            begun = tokens[: known + 1]
            if not np.array_equal(begun, self._begun):
                self._start(begun, self._features.read(begun, known - 1, 1))
            return min(num_tokens, num_left) if self._states else 0

    def _rows_after(self, tokens: TokenIds, num_last: int) -> Logits:
        return np.concatenate([self._row(tokens[: len(tokens) - num_last + 1 + i]) for i in range(num_last)])

    def known_rows(self, tokens: TokenIds, num_last: int) -> Logits | None:
        first = len(tokens) - num_last
        assert 1 <= first < len(tokens)
        with self._lock:
            before = self._features.read(tokens, first - 1, num_last)
            if len(before) < num_last:
                return None
            pairs = zip(tokens[first:].tolist(), before, strict=True)
            return np.concatenate([self._run(0, token, state[None, None])[0] for token, state in pairs])

    def forget(self) -> None:
        with self._lock:
            self._start(self._begun[:0], self._features.none)

    def _start(self, tokens: TokenIds, state: States) -> None:
        self._begun, self._drafted = tokens, []
        self._states = [state[None]] if len(state) else []

    def _row(self, tokens: TokenIds) -> Logits:
        """The row after tokens, [1, columns]."""
        begun, drafted = self._begun, tokens[len(self._begun) :].tolist()
        if not self._states or place_in_draft(begun, tokens, len(self._steps)) is None:
            place = len(tokens) - 2
            known = self._features.read(tokens, place, 1) if place >= 0 else self._features.none
            state = known[None] if len(known) else np.zeros((1, 1, self._head.state_size), np.float32)
            rows = self._run(0, int(tokens[-1]), state)[0]
            return correct(self.correction, rows, contexts_in(tokens, 1))
        taken, before = [int(begun[-1]), *drafted], [int(begun[-1]), *self._drafted]
        same = sum(takewhile(bool, (one == other for one, other in zip(taken, before, strict=False))))
        # The state that a step takes follows from the tokens that earlier steps took.
        step = min(same, len(self._states) - 1, len(taken) - 1)
        del self._states[step + 1 :]
        self._drafted = drafted
        for place in range(step, len(taken)):
            rows, state = self._run(place, taken[place], self._states[place])
            self._states.append(state)
        return rows if drafted else correct(self.correction, rows, contexts_in(tokens, 1))

    def _run(self, step: int, token: int, state: States) -> tuple[Logits, States]:
        found = self._steps[step](input_ids=np.array([[token]], np.int64), hidden=state)
        self.num_fed += 1
        return found["logits"][0].astype(np.float32, copy=False), found["state"]
