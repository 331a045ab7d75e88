"""Trees in a pass and in a cache, where a node lies in the place after its parent or a later one. Pure."""

from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from edgespec.decoding.decoder import Pass
from edgespec.decoding.tree import Tree
from edgespec.types import Logits, Row, TokenIds, append


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
        held: The tokens in the cache's first places; those after the text of the pass are a chain.
        behind: The tree in the places after held.
    """
    tokens, nodes = given.text, given.tree.tokens
    if given.num_last is None or len(held) < len(tokens) or not np.array_equal(held[: len(tokens)], tokens):
        return 0
    chain = held[len(tokens) :]
    placed = [*zip(chain.tolist(), range(-1, len(chain) - 1), strict=True)]
    above = behind.above if not len(chain) else [len(chain) + parent for parent in behind.above]
    placed += zip(behind.tokens.tolist(), above, strict=True)
    wanted = [*zip(nodes.tolist(), given.tree.above, strict=True)][: max(0, len(nodes) - given.num_last)]
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
    path = behind.matching(tokens[len(held) :])
    in_place = takewhile(bool, (node == place for place, node in enumerate(path)))
    return path if can_move else path[: sum(in_place)]


def rows_by_branch(run: Callable[[TokenIds, int], Logits], given: Pass) -> Logits:
    """The rows of a tree, [num_rows, vocab_size], from one call of Decoder.logits for each branch."""
    tree, found = given.tree, dict[int, Row]()
    nodes, inner = tree.tokens, set(tree.above)
    for leaf in [node for node in range(len(nodes)) if node not in inner] or [-1]:
        branch = tree.path(leaf)
        new = [node for node in (-1, *branch) if node not in found]
        rows = run(append(given.text, nodes[branch]), len(new))
        found.update(zip(new, rows.copy(), strict=True))
    return np.stack([found[node] for node in range(len(nodes) - given.num_rows, len(nodes))])
