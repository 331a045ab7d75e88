"""The arithmetic of draft trees, where a node comes after its parent and -1 is the last committed token. Pure."""

from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from edgespec.types import Decoder, Logits, TokenIds, append


def depths(parents: Sequence[int]) -> npt.NDArray[np.int64]:
    """How far each node lies behind the last committed token, from 1, [num_nodes]."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return np.array(found, np.int64)


def seen(parents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """What each row sees of the others: itself and its ancestors, [num_nodes + 1, num_nodes + 1].

    Row 0 is the last committed token, which all see.
    """
    sees = np.eye(len(parents) + 1, dtype=bool)
    sees[:, 0] = True
    for node, parent in enumerate(parents):
        sees[node + 1] |= sees[parent + 1]
    return sees


def num_held(
    held: TokenIds,
    behind: tuple[TokenIds, Sequence[int]],
    tokens: TokenIds,
    nodes: TokenIds,
    parents: Sequence[int],
) -> int:
    """How many nodes of a tree behind tokens lie where they would in a cache, from the first on.

    Args:
        held: The tokens in its first places; those behind tokens are a chain.
        behind: The tree in the places behind them: nodes and parents.
    """
    if len(held) < len(tokens) or not np.array_equal(held[: len(tokens)], tokens):
        return 0
    chain = held[len(tokens) :]
    placed = [*zip(chain.tolist(), range(-1, len(chain) - 1), strict=True)]
    placed += [(int(node), len(chain) + parent) for node, parent in zip(*behind, strict=True)]
    wanted = zip(nodes.tolist(), parents, strict=True)
    is_held = (one == other for one, other in zip(placed, wanted, strict=False))
    return sum(takewhile(bool, is_held))


def followed(nodes: TokenIds, parents: Sequence[int], tokens: Iterable[int]) -> list[int]:
    """The nodes that tokens run through from the root on, as far as they do."""
    through: list[int] = []
    for token in tokens:
        above = through[-1] if through else -1
        child = next((i for i, parent in enumerate(parents) if parent == above and nodes[i] == token), None)
        if child is None:
            break
        through.append(child)
    return through


def judged(nodes: TokenIds, parents: Sequence[int], tokens: Sequence[int] | TokenIds) -> list[tuple[int, bool]]:
    """The nodes of which tokens tell whether they were right, and whether they were."""
    path = followed(nodes, parents, tokens)
    seen_from = [-1, *path][: len(tokens)]
    said = dict(zip(seen_from, tokens, strict=False))
    return [(node, bool(nodes[node] == said[parent])) for node, parent in enumerate(parents) if parent in said]


def expected(parents: Sequence[int], chances: Sequence[float]) -> float:
    """Tokens that a pass over a tree yields: one, and the chance that each node is reached and kept."""
    reached: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        reached.append(chance * (reached[parent] if parent >= 0 else 1.0))
    return 1.0 + sum(reached)


def branches(parents: Sequence[int]) -> list[list[int]]:
    """The path from the root to each node that has no child; one empty path where there is no node."""
    inner = set(parents)
    return [path(parents, node) for node in range(len(parents)) if node not in inner] or [[]]


def path(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root to a node and with it; none for -1."""
    above: list[int] = []
    while node >= 0:
        above.append(node)
        node = parents[node]
    return above[::-1]


def logits_by_branch(decoder: Decoder, tokens: TokenIds, nodes: TokenIds, parents: Sequence[int]) -> Logits:
    """The rows of a tree, [num_nodes + 1, vocab_size], from a pass for each of its branches."""
    rows = np.empty((len(nodes) + 1, decoder.vocab_size), np.float32)
    done: set[int] = set()
    for branch in branches(parents):
        new = [row for row in (-1, *branch) if row not in done]
        rows[np.array(new) + 1] = decoder.logits(append(tokens, nodes[branch]), len(new))
        done.update(new)
    return rows
