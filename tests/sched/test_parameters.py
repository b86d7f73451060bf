"""Policies' parameters as text: what each has, what is taken, what is refused."""

from __future__ import annotations

import enum
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.sched import registry
from jaxserve.sched.parameters import parameters, text_of, with_parameters
from jaxserve.sched.plan import BatchPlan
from jaxserve.sched.policy import Policy, View
from jaxserve.sched.registry import PolicyName, full_name, make_policy, policies
from jaxserve.sched.unified.unified_policy import Reserve, UnifiedPolicy
from jaxserve.simulator.simulator import RULES, policy_under


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass(frozen=True)
class Sample(Policy):
    """One parameter of every kind."""

    share: float = 0.5
    count: int = 3
    switch: bool = True
    colour: Colour = Colour.RED
    most: int | None = None
    table: tuple[int, ...] = ()
    hypothetical: bool = False
    chunked = True

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count must be at least 0, got {self.count}")

    def plan(self, view: View, now: float) -> BatchPlan:
        raise NotImplementedError


def made(**values: Any) -> Sample:
    policy = with_parameters("sample", Sample(), values)
    assert isinstance(policy, Sample)
    return policy


def test_parameters_are_those_that_text_can_set() -> None:
    assert [str(one) for one in parameters(Sample()).values()] == [
        "share=0.5", "count=3", "switch=true", "colour=red", "most=none",
    ]  # fmt: skip


def test_text_is_converted_to_the_fields_type() -> None:
    found = made(share="1", count="7", switch="False", colour="BLUE", most="9")
    assert found == Sample(1.0, 7, False, Colour.BLUE, 9)
    assert type(found.share) is float
    assert made(most="none") == made(most=None) == Sample()
    assert made(share=2, colour=Colour.BLUE, table=(1,)) == Sample(
        2.0, colour=Colour.BLUE, table=(1,)
    )


@given(
    st.builds(
        Sample,
        st.floats(allow_nan=False, allow_infinity=False),
        st.integers(0, 2**63 - 1),
        st.booleans(),
        st.sampled_from(Colour),
        st.none() | st.integers(-(2**63) + 1, 2**63 - 1),
    )
)
def test_what_is_shown_sets_the_same(wanted: Sample) -> None:
    texts = {name: text_of(one.default) for name, one in parameters(wanted).items()}
    assert made(**texts) == wanted


HAS = r"It has share=0.5, count=3, switch=true, colour=red, most=none$"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"share": "much"}, "policy 'sample': share must be a number, got 'much'"),
        ({"share": "nan"}, "share must be a number"),
        ({"share": float("inf")}, "share must be a number, got inf"),
        ({"share": True}, "share must be a number, got True"),
        ({"count": "2.5"}, r"count must be a whole number below 2\*\*63, got '2.5'"),
        ({"count": str(2**63)}, r"count must be a whole number below 2\*\*63, got '9223"),
        ({"most": 2**63}, "most must be a whole number below 2.* or none, got 9223"),
        ({"most": str(-(2**63))}, "most must be a whole number below 2"),
        ({"share": 10**400}, "share must be a number, got inf"),
        ({"count": 2.5}, "count must be a whole number"),
        ({"switch": "1"}, "switch must be true or false, got '1'"),
        ({"switch": 1}, "switch must be true or false"),
        ({"colour": "green"}, "colour must be one of red, blue, got 'green'"),
        ({"most": "x"}, "most must be a whole number below 2.* or none, got 'x'"),
        ({"share": "none"}, "share must be a number"),
        ({"count": "-1"}, "policy 'sample': count must be at least 0, got -1"),
        ({"coun": "1"}, rf"'sample' has no parameter 'coun'; did you mean count\? {HAS}"),
        ({"zzz": 1}, rf"has no parameter 'zzz'. {HAS}"),
        ({"table": "1"}, rf"'sample': table cannot be set from text. {HAS}"),
        ({"hypothetical": "true"}, "hypothetical cannot be set from text"),
    ],
)
def test_wrong_parameters_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        made(**values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", policies())
def test_every_policy_takes_what_it_shows(name: str) -> None:
    plain = make_policy(name)
    texts = {key: text_of(one.default) for key, one in parameters(plain).items()}
    again = make_policy(full_name(name, texts))
    for key in texts:
        assert getattr(again, key) == getattr(plain, key)
    assert not {"groups", "key", "hypothetical"} & texts.keys()
    if isinstance(plain, UnifiedPolicy):
        assert {"reserve", "watermark", "max_rows", "requeue"} <= texts.keys()


def test_parameters_follow_the_name() -> None:
    policy: Any = make_policy("aptserve:slo_decay=0.4:watermark=0.02")
    assert (policy.slo_decay, policy.watermark) == (0.4, 0.02)
    # After what the variant sets, whatever that is.
    variant: Any = make_policy("sarathi+ef:watermark=0.25")
    assert (variant.watermark, variant.reserve) == (0.25, Reserve.WHOLE)
    chunk: Any = make_policy("sarathi:reserve=chunk:max_rows=4")
    assert (chunk.reserve, chunk.max_rows) == (Reserve.CHUNK, 4)
    both: Any = make_policy("sarathi:max_rows=4", watermark="0.5")
    assert (both.max_rows, both.watermark) == (4, 0.5)


def test_parameters_follow_the_name_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies()
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    code = """
        from __future__ import annotations
        from dataclasses import dataclass
        from typing import TYPE_CHECKING
        from jaxserve.sched.registry import register
        from jaxserve.sched.unified.unified_policy import UnifiedPolicy
        from jaxserve.sched.policies.sarathi import DECODE_FIRST
        if TYPE_CHECKING:
            from nowhere import Nothing

        @register("tuned", summary="a", source="b")
        @dataclass(frozen=True)
        class Tuned(UnifiedPolicy):
            groups: tuple = DECODE_FIRST
            mixed_batches: bool = True
            chunked: bool = True
            gain: float = 1.0
            other: Nothing = None
    """
    folder = tmp_path / "a:b=c"
    folder.mkdir()
    path = folder / "mine.py"
    path.write_text(textwrap.dedent(code))
    policy: Any = make_policy(f"{path}:tuned+ef:gain=2.5:watermark=0.1")
    assert (policy.gain, policy.watermark, policy.reserve) == (2.5, 0.1, Reserve.WHOLE)
    with pytest.raises(ValueError, match="policy 'tuned': other cannot be set from text"):
        make_policy(f"{path}:tuned:other=1")


def test_the_parts_of_a_name() -> None:
    assert PolicyName.parse("dir/x.py:mine+ef:a=1:b=c=d") == PolicyName(
        "dir/x.py", "mine", ("ef",), {"a": "1", "b": "c=d"}
    )
    assert PolicyName.parse("vllm") == PolicyName("", "vllm", (), {})
    assert PolicyName.parse("dir/x.py") == PolicyName("dir/x.py", "", (), {})
    assert PolicyName.parse("x.py+ef:a=1") == PolicyName("x.py", "", ("ef",), {"a": "1"})
    assert PolicyName.parse("x.py:a=1") == PolicyName("x.py", "", (), {"a": "1"})


@pytest.mark.parametrize(
    ("name", "more", "problem"),
    [
        ("sarathi+eff", {}, r"no policy variant 'eff'; did you mean 'ef'\?"),
        ("sarathi:watermark", {}, "parameters are :NAME=VALUE after the name, got 'watermark'"),
        ("sarathi:=1", {}, "parameters are :NAME=VALUE"),
        ("sarathi:", {}, "parameters are :NAME=VALUE"),
        ("sarathi:watermark=0:watermark=1", {}, "watermark is given twice"),
        ("sarathi:watermark=0", {"watermark": 0.5}, "watermark is given twice"),
        ("sarathi:groups=all", {}, "groups cannot be set from text"),
        ("vllm:key=x", {}, "policy 'vllm': key cannot be set from text"),
        ("rank_o:hypothetical=false", {}, "hypothetical cannot be set"),
        (f"infermax:enough={2**63}", {}, "policy 'infermax': enough must be a whole number below"),
        (f"sarathi:max_rows={2**64}", {}, "policy 'sarathi': max_rows must be a whole number"),
        ("fastserve:queues=1000:ratio=9", {}, "of the last queue, is not a finite number"),
    ],
)
def test_wrong_names_are_refused(name: str, more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_policy(name, **more)


OUT_OF_RANGE = [
    ("accelgen:ttft=0", "ttft must be more than 0, got 0.0"),
    ("accelgen:tbt=-1", "tbt must be more than 0, got -1.0"),
    ("accelgen:long=0", "long must be at least 1, got 0"),
    ("accelgen:late_turn=-1", "late_turn must be at least 0, got -1"),
    ("accelgen:pivot=0", "pivot must be at least 1, got 0"),
    ("accelgen:gamma=-1", "gamma must be at least 0, got -1.0"),
    ("accelgen:watermark=1", "watermark must be at least 0 and below 1, got 1.0"),
    ("aptserve:slo_decay=1.5", "slo_decay must be between 0 and 1, got 1.5"),
    ("aptserve:headroom=-0.1", "headroom must be between 0 and 1, got -0.1"),
    ("aptserve:watermark=2", "watermark must be between 0 and 1, got 2.0"),
    ("aptserve_kv:penalty=step", "penalty is for variants that choose kinds"),
    ("aptserve_fcfs:penalty=remaining", "penalty is for variants that choose kinds"),
    ("aptserve_s:penalty=redecide", "penalty=redecide needs whole prompts"),
    ("bros:ttft=0", "ttft must be more than 0, got 0.0"),
    ("bros:tbt=-1", "tbt must be more than 0, got -1.0"),
    ("bros:max_age=0", "max_age must be more than 0, got 0.0"),
    ("bros:floor=0", "floor must be more than 0, got 0.0"),
    ("bros:initial=0", "initial must be at least 1, got 0"),
    ("bros:growth=-1", "growth must be at least 0, got -1"),
    ("bros:late_turn=-1", "late_turn must be at least 0, got -1"),
    ("bros:watermark=1", "watermark must be at least 0 and below 1, got 1.0"),
    ("bros:late_watermark=-1", "late_watermark must be at least 0 and below 1, got -1.0"),
    ("edf:patience=-1", "patience must be at least 0, got -1.0"),
    ("edf:watermark=-0.1", "watermark must be at least 0 and below 1, got -0.1"),
    ("fastserve:queues=1001", "queues must be 1 to 1000, got 1001"),
    ("fastserve:queues=0", "queues must be 1 to 1000, got 0"),
    ("fastserve:quantum=0", "quantum must be more than 0, got 0.0"),
    ("fastserve:ratio=1", "ratio must be more than 1, got 1.0"),
    ("fastserve:patience=-1", "patience must be more than 0, got -1.0"),
    ("fastserve:max_rows=0", "max_rows must be at least 1, got 0"),
    ("goodput:ttft=0", "ttft must be more than 0, got 0.0"),
    ("goodput:tbt=-1", "tbt must be more than 0, got -1.0"),
    ("goodput:patience=0", "patience must be more than 0, got 0.0"),
    ("goodput:share=2", "share must be between 0 and 1, got 2.0"),
    ("goodput:hidden_above=-1", "hidden_above must be between 0 and 1, got -1.0"),
    ("infermax:enough=-1", "enough must be at least 0, got -1"),
    ("oracle:seconds=-1", "seconds must be at least 0, got -1.0"),
    ("oracle:runs=-1", "runs must be at least 0, got -1"),
    ("qoserve:alpha=-1", "alpha must be at least 0, got -1.0"),
    ("qoserve:margin=0", "margin must be more than 0, got 0.0"),
    ("fairbatching:share=2", "share must be from 0 to 1, got 2.0"),
    ("fairbatching:ttlt=0", "ttlt must be more than 0, got 0.0"),
    ("slidingserve:watermark=1", "watermark must be at least 0 and below 1, got 1.0"),
    ("slidingserve:least=-1", "least must be at least 0, got -1"),
    ("vllm:max_rows=0", "max_rows must be at least 1, got 0"),
    ("vllm:watermark=1", "watermark must be at least 0 and below 1, got 1.0"),
]


@pytest.mark.parametrize(("name", "problem"), OUT_OF_RANGE)
def test_values_out_of_range_are_refused(name: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"policy '{name.partition(':')[0]}': {problem}"):
        make_policy(name)


def test_rules_leave_what_the_name_says() -> None:
    paper = RULES["infermax_paper"]
    said: Any = policy_under("sarathi:watermark=0.25", paper)
    assert (said.watermark, said.requeue) == (0.25, True)
    plain: Any = policy_under("sarathi", paper)
    assert (plain.watermark, plain.requeue) == (0.0, True)
