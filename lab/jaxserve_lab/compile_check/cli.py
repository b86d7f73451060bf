"""Do the kernels and the model's steps compile for these devices, and fit them?

    jaxserve compile-check
    jaxserve compile-check --target=a100,v5e:4 --model=opt-13b
    jaxserve compile-check --model=llama-3-8b --programs=steps --lora=8:16 --json

A target is a kind of device, with a number as in `v5e:4`, of devices that share each layer's heads;
without a number as few as the model fits. Without --target and --programs each known model has its
own. Only the devices' compilers are needed: `make compile-check` installs them into a separate
environment and runs this there, with ARGS. A target
whose compiler is not installed is reported as not checked. Exit codes: 0 all compiled and fit, 1
something did not, 2 a wrong command line, 3 nothing failed but something was not checked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxserve.command_line import Parser
from jaxserve.config.sections import CACHE_DTYPES, LORA_RANKS, MAX_LORAS
from jaxserve.models.lora import LoraSlots
from jaxserve.pallas_kernels import resolve_backend
from jaxserve.pallas_kernels.pool import WIDE_DTYPES
from jaxserve.writable import check_file
from jaxserve_lab.compile_check import report, toolchain
from jaxserve_lab.compile_check.case import Sizes, quantized_model
from jaxserve_lab.compile_check.check import AUTO, Checked, Wish, check_model
from jaxserve_lab.compile_check.compiling import NOT_CHECKED, Result
from jaxserve_lab.compile_check.programs import choose
from jaxserve_lab.compile_check.targets import Target, load_target, target_names

_EVERY = ",".join([*target_names(), "a100:2", "v5e:4"])
_LARGE = "a100:2,h200,v5p,v6e"
# Models that are compiled by default, with targets and programs.
MODELS = {
    "opt-13b": (_EVERY, "all"),
    "llama-3-8b": (_EVERY, "all"),
    "gemma-3-27b": (_LARGE, "steps"),
    "qwen3-30b-a3b": (_LARGE, "steps"),
    "mixtral-8x7b": (_LARGE, "steps"),
}
_OTHERS = (_EVERY, "all")


class Asked(NamedTuple):
    """What is to be compiled of one model.

    Attributes:
        model: As for `model_shape`.
        targets: Each with the number of devices, or AUTO.
        wish: The programs.
    """

    model: str
    targets: list[tuple[Target, int]]
    wish: Wish


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (None: this process's) and prints the results. Returns the exit code,
    see above."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args, asked = parse(arguments)
    toolchain.quiet_start(loops=args.loops)
    out = sys.stderr if args.json else sys.stdout

    def tell(result: Result) -> None:
        print(report.line(result), file=out, flush=True)

    print(report.header(), file=out, flush=True)
    checked = [
        check_model(item.model, target, count, item.wish, tell)
        for item in asked
        for target, count in item.targets
    ]
    results = [result for item in checked for result in item.results]
    if args.write_doc:
        command = [
            flag for flag in arguments if flag != "--json" and not flag.startswith("--write_doc")
        ]
        command.append(f"--write_doc={args.write_doc}")
        _write(Path(args.write_doc), checked, asked[0].wish.sizes, command)
    if args.json:
        print(json.dumps(report.as_json(checked), allow_nan=False), flush=True)
    else:
        print("\n".join(report.summary(checked)))
    return exit_code(results)


def _write(path: Path, checked: Sequence[Checked], sizes: Sizes, command: Sequence[str]) -> None:
    """Writes the page, and in figures/ beside it the table of all programs."""
    table = path.parent / "figures" / f"{path.stem}.csv"
    table.parent.mkdir(exist_ok=True)
    was, rows = (
        file.read_text(encoding="utf-8") if file.is_file() else "" for file in (path, table)
    )
    path.write_text(report.page(checked, sizes, command, was), encoding="utf-8")
    table.write_text(report.programs(checked, sizes, rows), encoding="utf-8")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Asked]]:
    """Parses and checks the command line; returns it with what to compile, at least one model.
    argparse exits on errors."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        limits = (args.block_size, args.max_rows, args.max_batch_tokens, args.dtype)
        sizes = Sizes(*limits, args.quantization, args.cache_dtype, _lora(args.lora))
        asked = [_asked(model, args, sizes) for model in args.model.split(",")]
        if args.backend != "auto":
            resolve_backend(args.backend)
        for name, least in (("block_size", 0), ("max_rows", 1), ("max_batch_tokens", 1)):
            if getattr(args, name) < least:
                raise ValueError(f"--{name} must be at least {least}, got {getattr(args, name)}")
        if args.write_doc:
            check_file("write_doc", Path(args.write_doc))
    except ValueError as error:
        parser.error(str(error))
    return args, asked


def _asked(model: str, args: argparse.Namespace, sizes: Sizes) -> Asked:
    """Raises ValueError for unknown names."""
    targets, programs = MODELS.get(model, _OTHERS)
    wanted = [_target(name, args.tensor) for name in (args.target or targets).split(",")]
    quantized_model(model, args.quantization)
    wish = Wish(choose(args.programs or programs), sizes, args.backend)
    return Asked(model, wanted, wish)


def _lora(text: str) -> LoraSlots | None:
    """The room for adapters in "8:16"; None for none."""
    if not text:
        return None
    slots, _, rank = text.partition(":")
    numbers = slots.isdecimal() and rank.isdecimal()
    if not numbers or not 0 < int(slots) <= MAX_LORAS or int(rank) not in LORA_RANKS:
        ranks = ", ".join(map(str, LORA_RANKS))
        raise ValueError(f"--lora must be slots (1 to {MAX_LORAS}):rank ({ranks}), got {text}")
    return LoraSlots(int(slots), int(rank))


def _target(text: str, tensor: int) -> tuple[Target, int]:
    """The device and the count in "v5e:4"; without one, --tensor."""
    name, _, number = text.partition(":")
    target = load_target(name)
    if not (number or "0").isdecimal() or tensor < AUTO:
        raise ValueError(f"--tensor must be at least 1 (0: as needed), got {number or tensor}")
    count = int(number or tensor)
    target.topology(max(count, 1))
    return target, count


def exit_code(results: Sequence[Result]) -> int:
    """The exit code, 0, 1 or 3; failures take precedence over targets that were not checked."""
    if any(result.is_bad for result in results):
        return 1
    return 3 if any(result.status == NOT_CHECKED for result in results) else 0


def _parser() -> Parser:
    parser = Parser(
        prog="jaxserve compile-check",
        description=__doc__,
    )

    def flag(name: str, default: str | int, text: str) -> None:
        kind = type(default)
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (%(default)s)")

    flag("target", "", "devices to compile for; empty: those of the model's section in the page")
    flag(
        "model",
        ",".join(MODELS),
        "presets, tiny for the model in the box, or folders with a config.json",
    )
    flag(
        "programs",
        "",
        "all, steps, kernels, or names as printed; empty: all, of the largest models only steps",
    )
    flag("tensor", AUTO, "devices for targets without a number; 0: as few as fit")
    flag("backend", "auto", "attention backend; auto: the platform's own")
    flag("block_size", 0, "tokens of a block; 0: the engine's default for the device")
    flag(
        "quantization",
        "",
        "weights: int8, int4 or fp8 as model.quantization, GGUF's q8_0, q4_0, q4_1 or q4_k; "
        "empty: none",
    )
    flag("lora", "", "room for adapters, slots:rank such as 8:16; empty: none")
    flag("max_rows", 128, "requests of a batch")
    flag("max_batch_tokens", 2048, "tokens of a batch")
    parser.add_argument("--dtype", choices=WIDE_DTYPES, default="bfloat16", help="(%(default)s)")
    parser.add_argument(
        "--cache_dtype",
        choices=CACHE_DTYPES,
        default=CACHE_DTYPES[0],
        help="dtype of the pool; auto: that of the weights (%(default)s)",
    )
    parser.add_argument(
        "--loops", action="store_true", help="also count the cycles of TPU kernels' loops"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument(
        "--write_doc",
        metavar="FILE",
        help="write the result into a Markdown page and figures/NAME.csv beside it; their "
        "other models are kept",
    )
    return parser
