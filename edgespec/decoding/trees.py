"""The arithmetic of draft trees, where a node comes after its parent and -1 is the last committed token. Pure."""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from edgespec.decoding.decoder import Pass
from edgespec.decoding.tree import Tree
from edgespec.types import Logits, Row, TokenIds, append


def depths(parents: Sequence[int]) -> npt.NDArray[np.int64]:
    """Depth of each node below the last committed token, from 1, [num_nodes]."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent < 0 else found[parent] + 1)
    return np.array(found, np.int64)


def attention_mask(parents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """A mask in which each row attends to itself and its ancestors, [num_nodes + 1, num_nodes + 1].

    Row 0 is the last committed token, to which all rows attend.
    """
    mask = np.eye(len(parents) + 1, dtype=bool)
    mask[:, 0] = True
    for node, parent in enumerate(parents):
        mask[node + 1] |= mask[parent + 1]
    return mask


def num_held(held: TokenIds, behind: Tree, given: Pass) -> int:
    """How many nodes of a pass over a tree, counted from the first, a cache holds in their places and none wants.

    Args:
        held: The tokens in the cache's first places; whatever of them lies after the text of the pass is a chain.
        behind: The tree in the places after held.
    """
    tokens, nodes = given.text, given.tree.tokens
    if given.num_last is None or len(held) < len(tokens) or not np.array_equal(held[: len(tokens)], tokens):
        return 0
    chain = held[len(tokens) :]
    placed = [*zip(chain.tolist(), range(-1, len(chain) - 1), strict=True)]
    above = behind.above if not len(chain) else [len(chain) + parent for parent in behind.above]
    placed += zip(behind.tokens.tolist(), above, strict=True)
    wanted = [*zip(nodes.tolist(), given.parents, strict=True)][: max(0, len(nodes) - given.num_last)]
    shared = min(len(placed), len(wanted))
    if placed[:shared] == wanted[:shared]:  # a tree that grows: at once, as it may have a thousand nodes
        return shared
    is_held = (one == other for one, other in zip(placed, wanted, strict=False))
    return sum(takewhile(bool, is_held))


def path_behind(held: TokenIds, behind: Tree, tokens: TokenIds, *, can_move: bool = True) -> list[int]:
    """The nodes in the places after held that tokens run through, from the root down.

    Args:
        can_move: Those in other places than their path's count too.
    """
    if not len(behind.tokens) or not np.array_equal(held, tokens[: len(held)]):
        return []
    path = matching_path(behind.tokens, behind.above, tokens[len(held) :])
    in_place = takewhile(bool, (node == place for place, node in enumerate(path)))
    return path if can_move else path[: sum(in_place)]


def matching_path(nodes: TokenIds, parents: Sequence[int], tokens: Iterable[int]) -> list[int]:
    """The nodes from the root down that agree with tokens."""
    found: list[int] = []
    for token in tokens:
        above = found[-1] if found else -1
        child = next((i for i, parent in enumerate(parents) if parent == above and nodes[i] == token), None)
        if child is None:
            break
        found.append(child)
    return found


def judge_nodes(
    nodes: TokenIds, parents: Sequence[int], tokens: Sequence[int] | TokenIds
) -> list[tuple[int, bool]]:
    """The children of all nodes that agree with tokens, and whether each child agrees too."""
    accepted = [-1, *matching_path(nodes, parents, tokens)]
    wanted = dict(zip(accepted, tokens, strict=False))  # the token that follows each of them
    return [(node, bool(nodes[node] == wanted[parent])) for node, parent in enumerate(parents) if parent in wanted]


def expected_tokens(parents: Sequence[int], chances: Sequence[float]) -> float:
    """Tokens that a pass over a tree yields: one, and the chance that each node is reached and accepted."""
    reached: list[float] = []
    for parent, chance in zip(parents, chances, strict=True):
        reached.append(chance * (reached[parent] if parent >= 0 else 1.0))
    return 1.0 + sum(reached)


def branches(parents: Sequence[int]) -> list[list[int]]:
    """The path from the root to each leaf; one empty path where there is no node."""
    inner = set(parents)
    return [path(parents, node) for node in range(len(parents)) if node not in inner] or [[]]


def path(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root to a node, the node included; none for -1."""
    above: list[int] = []
    while node >= 0:
        above.append(node)
        node = parents[node]
    return above[::-1]


def rows_by_branch(run: Callable[[TokenIds, int], Logits], given: Pass) -> Logits:
    """The rows of a tree, [num_rows, vocab_size], from one call of Decoder.logits for each branch."""
    nodes = given.tree.tokens
    found: dict[int, Row] = {}
    for branch in branches(given.parents):
        new = [node for node in (-1, *branch) if node not in found]
        rows = run(append(given.text, nodes[branch]), len(new))
        found.update(zip(new, rows.copy(), strict=True))
    return np.stack([found[node] for node in range(len(nodes) - given.num_rows, len(nodes))])
