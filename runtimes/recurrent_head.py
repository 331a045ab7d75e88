"""Heads that draft token by token with attention to the text (EAGLE: Li et al., arXiv:2401.15077; EAGLE-3; MTP).

Slot i of the head's cache is of token i + 1 and of the state after token i: of the target's hidden states, where
they are known, or the state that the head gave itself in slot i - 1. Its row predicts token i + 2.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np

from edgespec.decoding.decoder import Cache, Can, CorrectableHead, Pass, Rows, reusable_prefix, rows_by_branch
from edgespec.decoding.head_rows import contexts_in, contexts_in_tree, correct
from edgespec.decoding.hidden_states import States
from edgespec.decoding.tree import NO_DRAFT, attention_mask
from edgespec.errors import require_context
from edgespec.runtimes.attention_bias import TreeLayout
from edgespec.runtimes.head_parts import HeadDecoder, HeadFolder
from edgespec.runtimes.kv_caches import SharedCache
from edgespec.runtimes.passes import Passes
from edgespec.runtimes.session import SessionOptions, translate_memory_errors
from edgespec.runtimes.tree import tree_manifest
from edgespec.types import Logits, TokenIds, append

_CHUNK_TOKENS = 256
# The most tokens after the known hidden states whose states a draft begins by guessing, one pass after another.
_MAX_GUESSED = 16
_MOST_STATES = 64  # of a pass that are kept to go on from, as a tree does from each
# Of a longer text that is not read yet a head reads the end alone. One that was trained well attends to all that
# it has read: with 64 tokens of long prompts it lost a third of its drafts (docs/log/training.md).
MAX_UNREAD = 4096


class RecurrentHead(HeadDecoder, Cache, CorrectableHead):
    """A recurrent head as a function from tokens to logits, which reads a target's hidden states from their store.

    Slots whose tokens all have known hidden states are exact; the others are run again once these are known and a
    draft begins. Where more tokens are unread than a draft may read it starts anew before the last of them, and a
    row is that of the text from there on, until a draft may read more; so it does behind tokens whose states were
    not asked for. A row after the first token, which has no state before it, is of zeros. In deterministic mode a
    row is equal to the bit however what is read is cut into passes, but for trees.
    """

    def __init__(self, folder: HeadFolder, *, has_trees: bool = False, **options: Unpack[SessionOptions]) -> None:
        """Load the graphs; raises as open_session does.

        has_trees: Run trees, over the graph that takes positions and a mask; raises as tree_manifest.
        """
        super().__init__(folder, **options)
        manifest, device = folder.manifest, folder.device
        if has_trees:
            manifest = tree_manifest(manifest, device)
        self._device, self._has_trees = device, has_trees
        self._is_deterministic = options.get("deterministic", False)
        own = replace(manifest, vocab_size=self._whole.num_columns)
        self._passes = Passes(folder.path / own.graph, own, device, ["state"], **options)
        self._state_size = folder.head.state_size
        self._own = OwnStates(self._state_size)
        self._held = np.zeros(0, np.int32)  # tokens of the text; slots for all but the first
        self._num_exact = 0  # slots from the first on
        self._max_unread = MAX_UNREAD  # in the draft that began last
        self._held_unread = MAX_UNREAD  # in the one with which the text that is held began
        self._tree = NO_DRAFT  # in the slots after those of the text
        self._try_out(folder.device)

    @property
    def can(self) -> Can:
        return Can(trees=self._has_trees, max_unread=None if self._head.reads_all else MAX_UNREAD)

    @property
    def cache(self) -> Cache:
        return self

    @property
    def correctable(self) -> CorrectableHead | None:
        return self if self._head.mask_token_id is None else None

    def begin(self, tokens: TokenIds, num_tokens: int, max_unread: int | None = None) -> int:
        if len(tokens) < 2 or len(tokens) > self.context_length:
            return 0
        with self._lock:
            self._max_unread = MAX_UNREAD if max_unread is None else min(max_unread, MAX_UNREAD)
            tokens = self._read_part(tokens, 1)
            num_slots = len(tokens) - 1
            if len(tokens) > len(self._held):
                self._settle(tokens)
            known = self._features.num_known(tokens)
            if known >= num_slots:
                self._drop_guessed(tokens)
            same = reusable_prefix(self._held, tokens, 0)
            self._own.drop_before(num_slots - 3)  # the last two slots may be run again
            return num_tokens if known > 0 and num_slots - max(known, same - 1) <= _MAX_GUESSED else 0

    def _rows_after(self, tokens: TokenIds, num_last: int) -> Logits:
        tokens = self._read_part(tokens, num_last)
        self._passes.begin()
        self._settle(tokens)
        rows = self._rows(tokens, num_last)
        return correct(self.correction, rows, contexts_in(tokens, num_last))

    def known_rows(self, tokens: TokenIds, num_last: int) -> Logits | None:
        assert 1 <= num_last < len(tokens)
        with self._lock, translate_memory_errors("running a head"):
            self._max_unread = MAX_UNREAD
            tokens = self._read_part(tokens, num_last)
            num_slots = len(tokens) - 1
            if self._features.num_known(tokens) < num_slots:
                return None
            self._passes.begin()
            self._settle(tokens)
            self._drop_guessed(tokens)
            rows = self._rows(tokens, num_last)
            # Otherwise the target has gone on to another text meanwhile.
            return rows if self._num_exact == num_slots else None

    def interrupt(self) -> None:
        self._passes.interrupt()

    def pretend(self, tokens: TokenIds) -> None:
        require_context(len(tokens), self.context_length)
        with self._lock, translate_memory_errors("making room for a text"):
            self._start_anew(tokens[:0])
            num_slots = max(0, len(tokens) - 1)
            self._passes.cache.pretend(num_slots)
            self._own.reset(num_slots - 1, np.zeros((1, self._state_size), np.float32))
            self._hold(tokens)
            self._num_exact = num_slots

    def forget(self) -> None:
        with self._lock:
            self._start_anew(self._held[:0])
            self._passes.cache.clear()

    def _read_part(self, tokens: TokenIds, num_last: int) -> TokenIds:
        """A text from where it is read on, which is before the last num_last tokens."""
        skipped, first = self._features.skipped, self._store.first
        start = 0 if self._head.reads_all else max(0, len(tokens) - num_last - self._max_unread)
        if first < len(tokens) - num_last:
            start = max(start, first)
        is_within = not len(skipped) or len(tokens) - num_last > len(skipped)
        # A text that was cut may go on with half of what it might read, unless that is more than before.
        spared = self._max_unread // 2 if self._max_unread <= self._held_unread else 0
        is_enough = len(skipped) <= start + spared
        may_go_on = is_within and is_enough and len(skipped) >= first and len(self._held) > 0
        if may_go_on and np.array_equal(tokens[: len(skipped)], skipped):
            part = tokens[len(skipped) :]
            if start <= len(skipped) + reusable_prefix(self._held, part, 0):
                return part
        self._start_anew(tokens[:start])
        self._held_unread = self._max_unread
        return tokens[start:]

    def _start_anew(self, skipped: TokenIds) -> None:
        """Hold nothing of a text, whose first tokens are not read."""
        self._hold(self._held[:0])
        self._own.reset(0, np.zeros((0, self._state_size), np.float32))
        self._features.skipped = skipped

    def _hold(self, tokens: TokenIds) -> None:
        """Count tokens as those that are held, without a tree after them."""
        self._tree, self._held = NO_DRAFT, tokens
        self._num_exact = min(self._num_exact, max(0, len(tokens) - 1))

    def _drop_guessed(self, tokens: TokenIds) -> None:
        """Forget the slots of a text that were run with states of the head's own."""
        same = reusable_prefix(self._held, tokens, 0)
        if min(same - 1, len(tokens) - 1) > self._num_exact:
            self._hold(tokens[: self._num_exact + 1])

    def _rows(self, tokens: TokenIds, num_last: int) -> Logits:
        """Rows after the last num_last tokens, over the head's own columns."""
        num_slots = len(tokens) - 1
        first_wanted = num_slots - min(num_last, num_slots)
        start = min(max(0, reusable_prefix(self._held, tokens, 0) - 1), first_wanted)
        rows = np.zeros((num_last, self._whole.num_columns), np.float32)
        while start < num_slots:
            start, states, is_exact = self._next_states(tokens, start)
            if self._is_deterministic:
                start, states = self._whole_pass(tokens, start, states)
            stop = start + len(states)
            num_rows = max(0, stop - max(start, first_wanted))
            self._hold(tokens[: start + 1])
            found = self._run(tokens[start + 1 : stop + 1], start, states, max(1, num_rows))
            if num_rows:
                last = num_last - num_slots + stop
                rows[last - num_rows : last] = found
            self._held = tokens[: stop + 1]
            if is_exact and self._num_exact == start:
                self._num_exact = stop
            start = stop
        self._hold(tokens)
        return rows

    def _next_states(self, tokens: TokenIds, start: int) -> tuple[int, States, bool]:
        """Where the next pass begins, the states that go into it, and whether these are the target's."""
        num_slots = len(tokens) - 1
        known = min(self._features.num_known(tokens), num_slots)
        if not known:  # nobody drafts there: a pass to learn what it takes
            return start, np.zeros((min(num_slots - start, _CHUNK_TOKENS), self._state_size), np.float32), False
        if start >= known and not self._own.has(start - 1):
            start = known - 1
        if start < known:
            states = self._features.read(tokens, start, min(num_slots - start, _CHUNK_TOKENS))
            if len(states):  # else the target has gone on to another text meanwhile
                return start, states, True
        if self._own.has(start - 1):
            return start, self._own.of([start - 1]), False
        return start, np.zeros((1, self._state_size), np.float32), False

    def _whole_pass(self, tokens: TokenIds, start: int, states: States) -> tuple[int, States]:
        """The part of a pass that keeps rows equal to the bit (pass_shapes.py), once padded to even width."""
        first, stop, *_ = self._passes.rule.next_pass(start, start + len(states), self.context_length)
        if first < start:
            known = self._features.num_known(tokens)
            if first >= known and not self._own.has(first - 1):
                return start, states
            before = self._features.read(tokens, first, 1) if first < known else self._own.of([first - 1])
            states = np.concatenate([before, states])
        return first, states[: stop - first]

    def _run(
        self, tokens: TokenIds, start: int, states: States, num_rows: int, layout: TreeLayout | None = None
    ) -> Logits:
        """Run tokens in the slots from `start` on, with the states before them; the last num_rows rows."""
        num_tokens = len(tokens)
        has_room = start + num_tokens < self.context_length
        num_padded = num_tokens % 2 if self._is_deterministic and layout is None and has_room else 0
        given = {"hidden": states[None]}
        rows = self._passes.run(tokens, start, num_rows, layout, inputs=given, num_padded=num_padded)
        self.num_fed += num_tokens
        # The last states are enough to go on from. Graphs of Gemma's assistants give those of all tokens.
        made = self._passes.token_rows["state"][-_MOST_STATES:]
        self._own.drop_from(start)  # of tokens that were there before
        self._own.put(start + num_tokens - len(made), made)
        return rows

    def run(self, given: Pass) -> Rows:
        if not given.is_tree:
            return super().run(given)
        tokens, nodes = given.text, given.tree.tokens
        require_context(len(tokens) + given.tree.depth, self.context_length)
        with self._lock, translate_memory_errors("running a tree"):
            tokens = self._read_part(tokens, 1)
            self._passes.begin()
            if len(tokens) < 2 or len(tokens) + len(nodes) > self.context_length:
                rows = rows_by_branch(self._rows, given._replace(text=tokens))
            else:
                rows = self._tree_rows(given._replace(text=tokens))
            contexts = contexts_in_tree(tokens, nodes, given.tree.above)
            rows = correct(self.correction, rows, contexts[-len(rows) :])
            return Rows(self._whole(rows[-given.num_rows :]))

    def _settle(self, tokens: TokenIds) -> None:
        """Hold the branch of the last tree that tokens run through."""
        tree, held, can_move = self._tree, self._held, self._device.memory == "cpu"
        self._tree = NO_DRAFT
        path = tree.path_behind(held, tokens, can_move=can_move)
        if path and can_move:
            start = len(held) - 1
            slots = [start + node for node in path]
            assert isinstance(self._passes.cache, SharedCache)
            self._passes.cache.move(slots, start)
            self._own.put(start, self._own.of(slots))
        self._held = append(held, tree.tokens[path]) if path else held

    def _tree_rows(self, given: Pass) -> Logits:
        """Rows after all nodes, or at least after those that are wanted or lie in no slot yet."""
        tokens, nodes, parents = given.text, given.tree.tokens, given.tree.above
        can_go_on = self._own.has(len(tokens) - 2)
        num_held = given.num_held(self._held, self._tree) if can_go_on else 0
        rows = []
        if not num_held:
            self._settle(tokens)
            rows.append(self._rows(tokens, 1))
        self._hold(tokens)
        text_slot, below = len(tokens) - 2, np.array([0, *given.tree.depths])
        while num_held < len(nodes):
            stop = _end_of_level(parents, num_held)
            layout = TreeLayout(text_slot + below[: stop + 1], attention_mask(parents[:stop]))
            # The slot of a node is its number after that of the last token.
            states = self._own.of([text_slot + 1 + parent for parent in parents[num_held:stop]])
            start = text_slot + 1 + num_held
            rows.append(self._run(nodes[num_held:stop], start, states, stop - num_held, layout).copy())
            num_held = stop
            self._tree = given.tree.cut(num_held)
        return np.concatenate(rows)


def _end_of_level(parents: Sequence[int], first: int) -> int:
    """The end of the nodes from the first on whose parents lie before it."""
    stop = first + 1
    while stop < len(parents) and parents[stop] < first:
        stop += 1
    return stop


class OwnStates:
    """A row of each slot, one after the other."""

    def __init__(self, state_size: int) -> None:
        self._first = 0
        self._rows = np.zeros((0, state_size), np.float32)

    def has(self, slot: int) -> bool:
        return self._first <= slot < self._first + len(self._rows)

    def of(self, slots: list[int]) -> States:
        rows: States = self._rows[np.array(slots, np.intp) - self._first]
        return rows

    def reset(self, slot: int, rows: States) -> None:
        """Hold states of the slots from `slot` on alone."""
        self._first, self._rows = slot, rows

    def put(self, slot: int, rows: States) -> None:
        """Hold states of the slots from `slot` on after those of the slots before, as far as these are held."""
        if not self._first <= slot <= self._first + len(self._rows):
            self.reset(slot, rows)
        else:
            self._rows = np.concatenate([self._rows[: slot - self._first], rows])

    def drop_from(self, slot: int) -> None:
        self._rows = self._rows[: max(0, slot - self._first)]

    def drop_before(self, slot: int) -> None:
        skipped = min(max(0, slot - self._first), len(self._rows))
        self._first, self._rows = self._first + skipped, self._rows[skipped:]
