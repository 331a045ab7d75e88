import numpy as np
import pytest

from edgespec.decoding.acceptance import equality
from edgespec.decoding.sampling import GumbelSampler, SamplingParams
from edgespec.decoding.tree import NO_DRAFT, Tree
from edgespec.draft.verified_rows import (
    NUM_LIKELY,
    AnswerLog,
    column_of,
    likely_tokens,
    no_rows,
    verify_rows,
)
from edgespec.types import TokenIds, append

VOCAB = 90
GREEDY = GumbelSampler(SamplingParams())


def row_after(tokens: TokenIds) -> np.ndarray:
    """A target's row, which depends on the whole text."""
    return np.random.default_rng(tokens.tolist()).normal(0, 3, VOCAB).astype(np.float32)


def logits_of(tokens: TokenIds, draft: Tree) -> np.ndarray:
    texts = [tokens]
    for node, token in enumerate(draft.tokens.tolist()):
        parent = node - 1 if draft.parents is None else draft.parents[node]
        texts.append(append(texts[parent + 1], [token]))
    return np.stack([row_after(text) for text in texts])


def test_a_log_has_the_rows_behind_the_tokens_of_the_answer_alone() -> None:
    """Whatever was drafted: nothing, a chain that is right for a while, a tree one branch of which is right."""
    prompt, log = np.array([3, 5, 7], np.int32), AnswerLog()
    accept, text = log.noting(equality), prompt
    for kind in ("none", "chain", "tree", "wrong"):
        right: list[int] = []
        for _ in range(3):
            right.append(int(row_after(append(text, right)).argmax()))
        draft = {
            "none": NO_DRAFT,
            "chain": Tree(np.array([*right[:2], (right[2] + 1) % VOCAB], np.int32)),
            "tree": Tree(np.array([(right[0] + 1) % VOCAB, right[0], right[1]], np.int32), parents=(-1, -1, 1)),
            "wrong": Tree(np.array([(right[0] + 1) % VOCAB], np.int32)),
        }[kind]
        text = append(text, accept(text, draft, logits_of(text, draft), GREEDY))
    assert np.array_equal(log.text, text)
    assert (log.first, len(log.rows)) == (len(prompt) - 1, len(text) - len(prompt))
    for place, said in enumerate(log.rows, log.first):
        row = row_after(text[: place + 1])
        assert int(said.ids[said.logits.argmax()]) == int(row.argmax()) == text[place + 1]
        assert np.array_equal(row[said.ids], said.logits)


def test_the_likeliest_tokens_are_those_of_a_sorted_row() -> None:
    row = np.random.default_rng(0).normal(0, 1, 500).astype(np.float32)
    said = likely_tokens(row)
    assert sorted(said.ids.tolist()) == sorted(np.argsort(row)[-NUM_LIKELY:].tolist())
    assert likely_tokens(np.array([0, 50, -np.inf, 48], np.float32)).ids.tolist() == [1, 3]


@pytest.mark.parametrize("is_trimmed", [False, True])
def test_kept_columns_and_the_rest_have_the_probabilities_of_the_whole_row(is_trimmed: bool) -> None:
    rng = np.random.default_rng(1)
    columns = np.sort(rng.permutation(VOCAB)[:60]).astype(np.int32) if is_trimmed else None
    num_columns = VOCAB if columns is None else len(columns)
    logits = rng.normal(0, 2, (5, num_columns)).astype(np.float32)
    tokens = rng.integers(0, VOCAB, 6).astype(np.int32)
    target = [likely_tokens(row_after(tokens[: i + 1])) for i in range(5)]
    rows = verify_rows(logits, target, tokens, columns)
    for i, said in enumerate(target):
        kept = rows.columns[i] >= 0
        weights = np.exp(rows.logits[i][kept].astype(np.float64))
        whole = weights.sum() + np.exp(rows.rest[i])
        assert whole == pytest.approx(np.exp(logits[i].astype(np.float64)).sum(), rel=1e-2)
        places = column_of(said.ids, columns)
        found = {int(c): float(p) for c, p in zip(rows.columns[i], rows.chances[i], strict=True) if p > 0}
        chances = np.exp(said.logits - said.logits.max())
        wanted = {int(c): float(p) for c, p in zip(places, chances / chances.sum(), strict=True) if c >= 0}
        assert found == pytest.approx(wanted, abs=1e-3)
        assert len(set(rows.columns[i][kept].tolist())) == kept.sum()
        assert (rows.wanted[i] == -1) == (columns is not None and tokens[i + 1] not in columns)


def test_the_oldest_rows_go_where_there_are_too_many() -> None:
    target = [likely_tokens(row_after(np.array([i], np.int32))) for i in range(4)]
    found = np.zeros((4, VOCAB), np.float32)
    rows = verify_rows(found, target, np.arange(5, dtype=np.int32), None)
    assert no_rows().followed_by(rows, 10).contexts[:, 0].tolist() == [0, 1, 2, 3]
    assert rows.followed_by(rows, 5).contexts[:, 0].tolist() == [3, 0, 1, 2, 3]
