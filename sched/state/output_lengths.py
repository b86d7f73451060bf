"""Output lengths, learned from finished outputs (InferMax section 6).

An output cut by its limit would have continued to an unknown length. Leaving it out would bias
lengths down, since long outputs are cut; so would counting it as ended there. It is censored: it
shows that an output got that long, but not where it ends, as in the estimator of Kaplan and Meier
("Nonparametric estimation from incomplete observations", 1958). If no output got longer, it counts
as ended (Efron's tail correction).
"""

from __future__ import annotations

import math

import numpy as np

BINS_PER_OCTAVE = 8
BINS = 32 * BINS_PER_OCTAVE
ENOUGH = 32  # least ended outputs for their lengths to be used
HALF_LIFE = 4096  # outputs after which an earlier one has half the weight
DECAY = 0.5 ** (1 / HALF_LIFE)


def bin_of(length: int) -> int:
    """The bin of an output of that length, at least 1."""
    return int(BINS_PER_OCTAVE * math.log2(length))


def bins_above(generated: np.ndarray) -> np.ndarray:
    """The first bin of the outputs that are longer than `generated`, int64 [n]."""
    return np.ceil(BINS_PER_OCTAVE * np.log2(generated + 1)).astype(np.int64)


class OutputLengths:
    """A histogram of output lengths in tokens, whose bins grow by a tenth. An output that ended
    HALF_LIFE outputs ago has half the weight.

    Attributes:
        count: Outputs so far.
    """

    def __init__(self) -> None:
        self._reached = np.zeros(BINS)  # weight of outputs that ended, or were cut, in the bin
        self._ended = np.zeros(BINS)  # weight of outputs that ended there by themselves
        self._mean = np.zeros(BINS)  # mean length of outputs that ended or were cut there
        self._expected: np.ndarray | None = None
        self.count = 0

    def add(self, length: int, cut: bool = False) -> None:
        """Counts one output of `length` tokens, at least 1. cut: whether its limit ended it."""
        index = bin_of(length)
        self._reached *= DECAY
        self._ended *= DECAY
        self._reached[index] += 1
        self._ended[index] += not cut
        self._mean[index] += (length - self._mean[index]) / self._reached[index]
        self._expected = None
        self.count += 1

    def expected(self, generated: np.ndarray) -> np.ndarray:
        """Mean length of outputs longer than `generated`, to a bin's width, float64 [n]; one more
        than `generated` if there were none."""
        if self._expected is None:
            self._expected = self._by_bin()
        return np.maximum(self._expected[bins_above(generated)], generated + 1)

    def counted(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the weights by bin, float64 [bins]: of outputs that ended or were cut there,
        and of those that ended there by themselves."""
        return self._reached.copy(), self._ended.copy()

    def _by_bin(self) -> np.ndarray:
        """Mean length of the outputs that reach each bin, float64 [bins]; 0 if none has.

        From the last bin down: a share of the outputs that reach a bin ended there, and the others
            are as long as those that got further.
        """
        expected = np.zeros(len(self._mean))
        at_risk = mean = 0.0
        last = int(np.max(np.flatnonzero(self._reached), initial=-1))
        every = zip(self._reached.tolist(), self._ended.tolist(), self._mean.tolist(), strict=True)
        for index, (reached, ended, length) in reversed(list(enumerate(every))[: last + 1]):
            if reached:
                share = ended / (at_risk + reached) if at_risk else 1.0
                at_risk += reached
                mean += share * (length - mean)
            expected[index] = mean
        return expected


class Survival:
    """The survival function of output lengths. Unfinished outputs are included as censored, like
    those that were cut; otherwise short outputs, which end first, would count too much.

    Args:
        reached, ended: From `OutputLengths.counted`.
        going: int64 [n], tokens so far of each unfinished output.

    Attributes:
        mean: Mean length of an output, tokens, at least 1.
    """

    def __init__(self, reached: np.ndarray, ended: np.ndarray, going: np.ndarray) -> None:
        bins = np.floor(BINS_PER_OCTAVE * np.log2(np.maximum(going, 1))).astype(np.int64)
        reached = reached + np.bincount(bins, minlength=BINS)
        at_risk = np.cumsum(reached[::-1])[::-1]
        share = ended / np.where(at_risk > 0, at_risk, 1.0)
        share[int(np.max(np.flatnonzero(reached), initial=0)) :] = 1.0
        # At the ends of the bins; every output has at least one token.
        self._longer = np.concatenate([[1.0], np.cumprod(1.0 - share)])
        widths = np.diff(_EDGES, prepend=0.0)
        between = (self._longer + np.concatenate([[1.0], self._longer[:-1]])) / 2
        self._tokens = np.concatenate([[0.0], np.cumsum(widths * between)])
        self.mean = max(1.0, float(self._tokens[-1]))

    def longer(self, tokens: np.ndarray) -> np.ndarray:
        """Share of outputs that are longer than `tokens`, float64 of the same shape."""
        at = BINS_PER_OCTAVE * np.log2(np.maximum(tokens, 1.0))
        return np.interp(at, np.arange(BINS + 1), self._longer)

    def within(self, limits: np.ndarray) -> np.ndarray:
        """Mean length of outputs cut at these limits, float64 of the same shape."""
        return np.interp(limits, np.concatenate([[0.0], _EDGES]), self._tokens)


_EDGES = 2.0 ** (np.arange(BINS + 1) / BINS_PER_OCTAVE)  # tokens, between the bins
