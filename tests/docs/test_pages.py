"""The README and docs/ agree with the code: tables, links, figures."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve import __version__
from jaxserve.config import Config
from jaxserve.sched.registry import policies
from jaxserve.sched.request import (
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from jaxserve.sched.request import MAX_TOP_LOGPROBS as MAX_LOGPROBS
from jaxserve.server.batches.batch_lines import MAX_LINE_BYTES
from jaxserve.server.batches.journal import MAX_LINES
from jaxserve.server.proto import batches_pb2
from jaxserve.server.proto import generation_pb2 as pb
from jaxserve.server.requests.slo_classes import slo_classes
from jaxserve.simulator.simulate.runs import system

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *ROOT.glob("tools/*/README.md"),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def test_the_policy_table_is_the_registry() -> None:
    rows = [f"| `{p.name}` | {p.summary} | {p.source} |" for p in policies().values()]
    table = re.findall(r"^\| `.*$", (ROOT / "docs/policies.md").read_text(), re.MULTILINE)
    assert table == rows, "docs/policies.md's table of policies should be:\n" + "\n".join(rows)


def test_the_preset_table_has_every_preset() -> None:
    page = (ROOT / "docs" / "serve.md").read_text()
    listed = re.findall(r"^\| \[(\w+)\]\(\.\./configs/\1\.py\)", page, re.MULTILINE)
    presets = {path.stem for path in (ROOT / "configs").glob("*.py")}
    assert sorted(listed) == sorted(presets - {"base", "__init__"})


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", prose(page)):
        if target.startswith("http"):
            continue
        there = page.parent / target if target else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), f"{target}#{anchor}"


@functools.cache
def tracked() -> frozenset[str]:
    """All files of the project, each behind a slash."""
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
    return frozenset(f"/{name}" for name in listed.splitlines())


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone")
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_files_that_are_named_exist(page: Path) -> None:
    """By their whole path, or by the end of it; those of the changelog did when it was written."""
    named = set(re.findall(r"`([\w/.-]+\.py)`", prose(page))) - {"aged.py"}  # a reader's own
    named = {re.sub("^jaxserve/(?=(sched|pallas_kernels|configs)/)", "", name) for name in named}
    lost = {name for name in named if not any(one.endswith(f"/{name}") for one in tracked())}
    assert page.name == "CHANGELOG.md" or not {name for name in lost if "NAME" not in name}


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(page for page in pages if f"]({page})" not in index) == []


def test_the_site_has_the_pages_of_the_index() -> None:
    listed = re.findall(r"^      - (.*)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    index, cookbook = (ROOT / "docs" / name for name in ("README.md", "cookbook/README.md"))
    named = re.findall(r"\]\((?:\.\./)?([^)#]+\.md)\)", index.read_text())
    families = re.findall(r"^- .*\]\((.*)\)", cookbook.read_text(), re.MULTILINE)
    first = named.index("cookbook/README.md") + 1
    named[first:first] = [f"cookbook/{page}" for page in families]
    assert listed == [*dict.fromkeys(named)]


def test_the_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None and first[1] == __version__


def test_the_readme_is_on_one_screen() -> None:
    assert (ROOT / "README.md").read_text().count("\n") <= 120


@pytest.mark.parametrize("name", ["sizing", "upgrades"])
def test_pages_to_work_from_are_short(name: str) -> None:
    assert len((ROOT / "docs" / f"{name}.md").read_text().split()) <= 500


def test_the_sizing_page_has_the_rooms_of_the_simulator() -> None:
    page = (ROOT / "docs" / "sizing.md").read_text()
    rooms = [system(f"llama-3-8b{bits}@l4", "auto").kv_tokens for bits in ("", ":int8")]
    assert re.findall(r"([\d,]+) (?:tokens )?beside", page) == [
        f"{room // 1000},000" for room in rooms
    ]


def prose(page: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_the_api_page_names_every_field() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    asked = (pb.GenerateRequest, pb.SamplingParams, pb.Slo)
    for message in (*asked, pb.Timings, pb.SloVerdict, pb.SloProblem):
        for field in message.DESCRIPTOR.fields:
            if not field.GetOptions().deprecated:
                assert f"`{field.name}`" in page, field.full_name
    for kind in pb.SloProblemKind.keys()[1:]:
        assert f"`{kind.removeprefix('SLO_PROBLEM_KIND_')}`" in page


def test_the_api_page_has_the_slo_classes() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for name, one in slo_classes(Config().server.slo_classes).items():
        targets = (one.slo.ttft, one.slo.tbt, one.slo.jct)
        times = [t and (f"{t:g} s" if t >= 1 else f"{t * 1e3:g} ms") for t in targets]
        tier = one.tier.name.lower().replace("_", " ")
        row = " | ".join([f"`{name}`", *(time or "" for time in times), tier])
        assert f"| {row} |".replace("|  |", "| |").replace("|  |", "| |") in page


def test_the_batches_page_names_every_call_field_and_option() -> None:
    page = (ROOT / "docs" / "batches.md").read_text()
    calls = batches_pb2.DESCRIPTOR.services_by_name["Batches"].methods
    asked = (batches_pb2.SubmitBatchRequest, batches_pb2.GetBatchRequest, batches_pb2.BatchStatus)
    fields = [field.name for message in asked for field in message.DESCRIPTOR.fields]
    options = [
        f"server.{name}" for name in Config().as_dict()["server"] if name.startswith("batch_")
    ]
    for name in (*(call.name for call in calls), *fields, *options):
        assert f"`{name}`" in page, name
    words = " ".join(page.split())
    assert f"at most {MAX_LINES:,} lines of at most {MAX_LINE_BYTES >> 20} MiB" in words


@pytest.mark.parametrize(
    ("field", "limit"),
    [
        ("logprobs", f"0 to {MAX_LOGPROBS}"),
        ("prompt_logprobs", f"0 to {MAX_LOGPROBS}, and see below"),
        ("stop_token_ids", f"{MAX_STOP_TOKEN_IDS}"),
        ("stop", f"{MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters"),
        ("n", f"1 to {MAX_N}"),
        ("logit_bias", f"{MAX_LOGIT_BIAS} tokens"),
    ],
)
def test_the_api_page_has_the_limits(field: str, limit: str) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert re.search(rf"^\| `{field}` .*\| {limit}[^|0-9]*", page, re.MULTILINE), field


def test_the_figures_are_what_the_script_draws(tmp_path: Path) -> None:
    folder = ROOT / "docs" / "figures"
    subprocess.run([sys.executable, folder / "draw.py", tmp_path], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn == {name: (folder / name).read_text() for name in drawn}
