"""Who uses most of what is left of both resources: the Euclidean choice of Algorithm 2."""

from __future__ import annotations

import numpy as np


def nearest(
    tokens: np.ndarray, blocks: np.ndarray, left_tokens: int, left_blocks: int, places: int
) -> np.ndarray:
    """Indices of those chosen, in order (AccelGen section 4.4, Algorithm 2, lines 7 to 13).

    tokens, blocks: int64 [n], what each takes. Again and again the one whose demand is the nearest
    to what is left of both is taken, of those that still fit; the first of several such. Both are
    divided by what there was at the beginning, so that as much of either counts the same.
    """
    index = np.flatnonzero((tokens <= left_tokens) & (blocks <= left_blocks))
    tokens, blocks = tokens[index], blocks[index]
    total = int(tokens.sum()), int(blocks.sum())
    if total[0] <= left_tokens and total[1] <= left_blocks and len(index) <= places:
        return index
    unit = np.array([max(left_tokens, 1), max(left_blocks, 1)], np.float64)
    demand = np.stack([tokens, blocks], axis=1) / unit
    # |A - D|^2 is |A|^2 - 2 A.D + |D|^2, of which the first is the same for all.
    terms = np.column_stack([-2 * demand, (demand**2).sum(axis=1)])
    chosen: list[int] = []
    while len(index) and len(chosen) < places:
        distance = terms @ np.array([left_tokens / unit[0], left_blocks / unit[1], 1.0])
        i = int(distance.argmin())
        if distance[i] == np.inf:
            break
        if tokens[i] > left_tokens or blocks[i] > left_blocks:
            fits = (tokens <= left_tokens) & (blocks <= left_blocks) & (terms[:, 2] < np.inf)
            index, tokens, blocks, terms = (part[fits] for part in (index, tokens, blocks, terms))
            continue
        chosen.append(int(index[i]))
        left_tokens -= int(tokens[i])
        left_blocks -= int(blocks[i])
        terms[i] = 0.0, 0.0, np.inf
    return np.array(chosen, np.int64)
