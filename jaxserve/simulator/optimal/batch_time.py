"""The time of a batch as an expression of the constraint program, in whole units of time.

Equals `LinearCostModel.batch_time` and `InferMaxCostModel.batch_time`, scaled: see `ScaledCost`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ortools.sat.python import cp_model

from jaxserve.simulator.optimal.cells import Sums
from jaxserve.simulator.optimal.cost import ScaledCost
from jaxserve.simulator.optimal.problem import Problem


@dataclass(frozen=True)
class BatchTime:
    """Adds the constraints that define batch times to a program.

    Attributes:
        model: CP-SAT's model, which receives the constraints.
        cost: The cost model, in units.
        problem: The scheduling problem.
        longest: Upper bound of a batch time, units.
        most_cached: Upper bound of a request's cached tokens.
    """

    model: cp_model.CpModel
    cost: ScaledCost
    problem: Problem
    longest: int
    most_cached: int

    def seconds_of(self, batch: Sums, active: Any, has_prefill: Any, has_decode: Any) -> Any:
        """Adds a variable for the time of one batch.

        Args:
            batch: Its features.
            active: Literal, whether it computes anything.
            has_prefill: Literal, whether it has prefills.
            has_decode: Literal, whether it has decodes.

        Returns:
            The variable, in units of time; 0 unless active.
        """
        cost, k = self.cost, self.cost.coefficients
        kv = self._mean_rounded_down(batch) if cost.rounds_kv else batch.kv
        time = k["per_token"] * batch.tokens + k["token_bias"] * active
        time += k["decode_bias"] * has_decode + k["decode_kv"] * kv
        time += k["per_decode"] * batch.decodes
        time += k["prefill_bias"] * has_prefill + k["prefill_quad"] * batch.quad
        time += k["per_prefill"] * batch.prefills + k["prefill_m"] * batch.before
        if k["batch_bias"]:
            time += k["batch_bias"] * self._several(batch.tokens)
        if cost.residual is not None:
            time += self._residual(batch.tokens)
        if cost.extra:
            x = cost.extra
            time += self._if_several(batch.decodes, x["decode_bias"] + x["decode_kv"] * kv)
            part = x["prefill_quad"] * batch.quad + x["prefill_m"] * batch.before
            time += self._if_several(batch.prefills, x["prefill_bias"] + part)
        return self._variable(time, "time")

    def _residual(self, tokens: Any) -> Any:
        most = -(-min(self.problem.max_batch_tokens, self.problem.kv_tokens) // 8)
        table = [self.cost.residuals(eights) for eights in range(most + 1)]
        eights = self.model.new_int_var(0, most, "eights")
        self.model.add(8 * eights >= tokens)
        self.model.add(8 * eights <= tokens + 7)
        found = self.model.new_int_var(0, max(table), "residual")
        self.model.add_element(eights, table, found)
        return found

    def _mean_rounded_down(self, batch: Sums) -> Any:
        """Number of decodes times floor(KV / decodes)."""
        model, requests = self.model, len(self.problem.workload)
        mean = model.new_int_var(0, self.most_cached, "mean")
        product = model.new_int_var(0, self.most_cached * requests, "product")
        rest = model.new_int_var(0, max(requests - 1, 0), "rest")
        several = self._several(batch.decodes)
        model.add_multiplication_equality(product, [mean, self._variable(batch.decodes, "n")])
        model.add(batch.kv == product + rest)
        model.add(rest <= batch.decodes - 1).only_enforce_if(several)
        model.add(rest == 0).only_enforce_if(~several)
        return product

    def _several(self, count: Any) -> Any:
        several = self.model.new_bool_var("several")
        self.model.add(count >= 2).only_enforce_if(several)
        self.model.add(count <= 1).only_enforce_if(~several)
        return several

    def _if_several(self, count: Any, amount: Any) -> Any:
        several = self._several(count)
        amount = self._variable(amount, "amount")
        found = self.model.new_int_var(0, self.longest, "extra")
        self.model.add(found == amount).only_enforce_if(several)
        self.model.add(found == 0).only_enforce_if(~several)
        return found

    def _variable(self, expression: Any, name: str) -> Any:
        found = self.model.new_int_var(0, self.longest, name)
        self.model.add(found == expression)
        return found
