"""The command line of `python -m jaxserve.client`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxserve.client.access_flags import add_access_flags, read_key, read_tls
from jaxserve.client.answers import Answers
from jaxserve.client.batch_prompts import PromptError, read_prompts
from jaxserve.client.batch_results import ResultsError, ResultsFile, state_path
from jaxserve.client.batch_run import PATIENCE_S, BatchCancelled, BatchRun
from jaxserve.client.client import DEFAULT_ADDRESS, Client
from jaxserve.client.errors import ServerError
from jaxserve.client.grammar_flags import add_grammar_flags, read_grammar
from jaxserve.client.many import ManyPrompts, ServerAway
from jaxserve.client.messages import TIERS
from jaxserve.client.prompt_lines import read_lines
from jaxserve.client.verdicts import verdict_line
from jaxserve.command_line import Parser
from jaxserve.server.proto import batches_pb2 as pb
from jaxserve.writable import check_file

CONCURRENCY = 16
STDOUT = "-"
MAX_TIMEOUT_S = 1e9  # gRPC takes deadlines that are further away as past ones
_NUMBERS = (
    ("max_tokens", int, "at most that many tokens (128)"),
    ("min_tokens", int, "no end before that many tokens (0)"),
    ("temperature", float, "0 is greedy (0)"),
    ("top_k", int, "0 is off (0)"),
    ("top_p", float, "1 is off (1)"),
    ("min_p", float, "0 is off (0)"),
    ("seed", int, "same seed, same text"),
    ("repetition_penalty", float, "1 is off (1)"),
    ("presence_penalty", float, "0 is off (0)"),
    ("frequency_penalty", float, "0 is off (0)"),
    ("logprobs", int, "report that many alternatives"),
    ("prompt_logprobs", int, "the same of the prompt"),
    ("n", int, "how many continuations (1)"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for what server or file refused, 2 for usage, 130 for ^C."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _check(args)
        with Client(args.address, api_key=read_key(args), tls=read_tls(args)) as client:
            if args.info:
                return _info(client, args)
            if args.batch is not None:
                return _batch(client, args)
            if args.file is None:
                return _one(client, args.prompt, _options(args))
            return _many(client, args)
    except (ServerError, PromptError, ResultsError, BatchCancelled) as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    except UnicodeDecodeError as error:
        return _failed(f"{args.file or args.batch} is not UTF-8: {error}")
    except ValueError as error:  # flags that do not go together, what a protobuf field cannot hold
        parser.error(str(error))
    except KeyboardInterrupt:
        if args.file is not None and args.out not in (None, STDOUT):
            _failed("interrupted; the same command with --resume goes on")
        if args.batch is not None:
            _failed("interrupted; the same command goes on, with --cancel it ends the batch")
        return 130


def _failed(problem: str | None) -> int:
    print(f"jaxserve.client: {problem}", file=sys.stderr)
    return 1


def _check(args: argparse.Namespace) -> None:
    """ValueError for flags that do not go together."""
    given = (args.prompt is not None, args.file is not None, args.batch is not None, args.info)
    if given.count(True) != 1:
        raise ValueError("give one prompt, --file or --batch with many, or --info")
    if args.timeout is not None and not 0 < args.timeout <= MAX_TIMEOUT_S:
        limits = f"must be more than 0 and at most {MAX_TIMEOUT_S:g} seconds"
        raise ValueError(f"--timeout {limits}, got {args.timeout:g}")
    if args.file is None and args.concurrency is not None:
        raise ValueError("--concurrency goes with --file")
    if args.concurrency is not None and args.concurrency < 1:
        raise ValueError(f"--concurrency must be at least 1, got {args.concurrency}")
    if args.resume and (args.file is None or args.out in (None, STDOUT)):
        raise ValueError("--resume goes with --file and --out=FILE")
    if args.batch is None:
        if args.file is None and args.out is not None:
            raise ValueError("--out goes with --file and --batch")
        if args.file is not None and args.out not in (None, STDOUT):
            _check_answers(Path(args.file), Path(args.out), resume=args.resume)
        if args.cancel:
            raise ValueError("--cancel goes with --batch")
        return
    if args.out is None or args.out == STDOUT:
        raise ValueError("--batch needs a file for its results, --out=FILE")
    slo = (args.ttft_ms, args.tbt_ms, args.jct_ms)
    named = args.tier == "realtime" or args.slo_class or args.serve_late
    if named or slo.count(None) < len(slo):
        raise ValueError("--batch is best-effort: --tier, --slo_class and targets are not for it")
    path, out = Path(args.batch), Path(args.out)
    check_file("out", out)
    if out.exists() and not out.is_file():
        raise ValueError(f"--out: {out} is not a file")
    _check_other(path, out, state_path(out))


def _check_answers(prompts: Path, out: Path, *, resume: bool) -> None:
    """Nothing that is there is lost."""
    check_file("out", out)
    _check_other(prompts, out)
    if resume and out.exists() and not out.is_file():
        raise ValueError(f"--resume: {out} is not a file")
    if not resume and out.is_file() and out.stat().st_size:
        raise ValueError(f"--out: {out} is there; --resume goes on with it, or name another")


def _check_other(prompts: Path, *written: Path) -> None:
    there = (place for place in written if place.exists())
    if prompts.exists() and any(place.samefile(prompts) for place in there):
        raise ValueError(f"--out: {written[0]} would be written over the prompts")


def _batch(client: Client, args: argparse.Namespace) -> int:
    """Results go to a file, which any later call goes on with."""
    defaults = {name: value for name, value in _sampling(args).items() if value is not None}
    prompts = read_prompts(Path(args.batch), defaults)
    with ResultsFile(Path(args.out), prompts) as results:
        if args.cancel:
            if results.batch is None:
                raise ResultsError(f"--cancel: there is no batch that {args.out} waits for")
            status = client.cancel_batch(results.batch.batch_id)
            over = "done already" if status.state == pb.BATCH_STATE_ENDED else "cancelled"
            print(f"{over}; {args.out} has {results.done} of {len(prompts.lines)} results")
            return 0
        patience_s = PATIENCE_S if args.timeout is None else args.timeout
        BatchRun(client, prompts, results, patience_s).run()
        if results.failed:
            return _failed(f"{results.failed} of {results.done} prompts failed")
    return 0


def _one(client: Client, prompt: str, options: dict[str, Any]) -> int:
    """Streams to stdout. Several continuations come one after the other, each with its number.
    What was asked for beside follows on stderr: log-probabilities, one token a line, and whether
    the targets were met."""
    if (options["n"] or 1) > 1:
        for completion in client.complete(prompt, **options):
            print(f"[{completion.index}] {prompt}{completion.text}")
            _print_logprobs(completion.prompt_logprobs + completion.logprobs)
            _print_verdict(completion.slo, completion.timings)
        return 0
    finish = None
    entries: list[Any] = []
    shown = prompt  # with the first piece, so that a refusal shows nothing else
    try:
        for message in client.generate(prompt, **options):
            print(shown + message.text, end="", flush=True)
            shown = ""
            entries += [*message.prompt_logprobs, *message.logprobs]
            finish = message.finish if message.HasField("finish") else None
    finally:
        if not shown:
            print(flush=True)
    _print_logprobs(entries)
    if finish is not None and finish.HasField("slo"):
        _print_verdict(finish.slo, finish.timings)
    return 0


def _print_verdict(verdict: Any, timings: Any) -> None:
    if verdict is not None:
        print(verdict_line(verdict, timings), file=sys.stderr)


def _info(client: Client, args: argparse.Namespace) -> int:
    """All that the server says of itself, one field a line."""
    for field, value in client.info(timeout=args.timeout).ListFields():
        if field.name == "slo_classes":
            value = ", ".join(map(_class_text, value))
        print(f"{field.name:<18} {value}")
    return 0


def _class_text(one: Any) -> str:
    """As `interactive (ttft_ms 1000, tbt_ms 187.5)`."""
    asked = [f"{field.name} {value:g}" for field, value in one.targets.ListFields()]
    best_effort = ["best_effort"] if one.tier == TIERS["best_effort"] else []
    return f"{one.name} ({', '.join(asked + best_effort)})"


def _print_logprobs(entries: Iterable[Any]) -> None:
    for entry in entries:
        top = " ".join(f"{other.token_id}:{other.logprob:.4f}" for other in entry.top)
        print(f"{entry.token_id}:{entry.logprob:.4f}  {top}".rstrip(), file=sys.stderr)


def _many(client: Client, args: argparse.Namespace) -> int:
    prompts = read_lines(args.file)
    client.info(timeout=args.timeout)  # one clear line if nobody is there, before the first prompt
    options = _options(args)
    timeout = options.pop("timeout")
    path = None if args.out in (None, STDOUT) else Path(args.out)
    run = ManyPrompts(client, options, timeout, args.concurrency or CONCURRENCY)
    with Answers(path, prompts, resume=args.resume) as answers:
        try:
            failed = run.run(prompts, answers)
        except ServerAway as error:
            goes_on = "; the same command with --resume goes on" if path else ""
            return _failed(f"{error} ({len(answers.done)} of {len(prompts)} prompts done{goes_on})")
    return _failed(f"{failed} of {len(prompts)} prompts failed") if failed else 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    slo = {name: getattr(args, name) for name in ("ttft_ms", "tbt_ms", "jct_ms")}
    service = {"tier": args.tier, "slo_class": args.slo_class, "slo": slo}
    service["serve_late"] = args.serve_late
    return {**_sampling(args), "timeout": args.timeout, **service}


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    options = {name: getattr(args, name) for name, _, _ in _NUMBERS}
    options |= {"ignore_eos": args.ignore_eos or None, "stop": args.stop}
    options |= {"stop_token_ids": args.stop_token_id, "logit_bias": dict(args.logit_bias) or None}
    return {**options, "grammar": read_grammar(args)}


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN_ID:BIAS") from None


def _parser() -> Parser:
    parser = Parser(
        prog="python -m jaxserve.client",
        description="Continues a prompt, or many, on a jaxserve server.",
    )
    add = parser.add_argument
    add("prompt", nargs="?", help="the text to continue")
    add("--info", action="store_true", help="show what is served instead")
    add("--address", default=DEFAULT_ADDRESS, help="host:port of the server (%(default)s)")
    wait = f"with --batch, until a server that is away is ({PATIENCE_S:g})"
    add("--timeout", type=float, help=f"seconds until a call is given up; {wait}")
    add_access_flags(parser)
    many = parser.add_argument_group("many prompts")
    many.add_argument(
        "--file", help="prompts, one a line (- is stdin); answers are JSON lines in that order"
    )
    many.add_argument("--concurrency", type=int, help=f"with --file, calls at once ({CONCURRENCY})")
    many.add_argument(
        "--batch",
        metavar="FILE",
        help="prompts as JSON lines, which the server does whenever it has time: "
        '{"prompt": "Once upon a time"} or {"token_ids": [5, 6]}, if you like with "id": "a" and '
        '"sampling": {"max_tokens": 64}; interrupted, the same command goes on',
    )
    many.add_argument(
        "--out",
        metavar="FILE",
        help="where the answers go (stdout); --batch needs one",
    )
    many.add_argument(
        "--resume", action="store_true", help="with --file, keep the answers that --out has already"
    )
    many.add_argument("--cancel", action="store_true", help="end the --batch that --out waits for")
    sampling = parser.add_argument_group(
        "sampling",
        "Absent ones have the server's default. With --batch, for lines that do not say.",
    )
    for name, kind, text in _NUMBERS:
        sampling.add_argument(f"--{name}", type=kind, help=text)
    sampling.add_argument("--stop", action="append", help="end before this string; repeatable")
    sampling.add_argument("--stop_token_id", action="append", type=int, help="repeatable")
    sampling.add_argument("--ignore_eos", action="store_true", help="go on after end of sequence")
    sampling.add_argument(
        "--logit_bias", action="append", type=_bias, default=[], metavar="TOKEN_ID:BIAS"
    )
    add_grammar_flags(parser)
    service = parser.add_argument_group("service level")
    service.add_argument(
        "--slo_class", default="", help="one of the server's (--info), for what is not given here"
    )
    service.add_argument("--tier", choices=tuple(TIERS), help="realtime; --batch: best_effort")
    service.add_argument("--ttft_ms", type=float, help="target: arrival to first token")
    service.add_argument("--tbt_ms", type=float, help="target: between two tokens")
    service.add_argument("--jct_ms", type=float, help="target: arrival to last token")
    service.add_argument(
        "--serve_late", action="store_true", help="not refused though the first token will be late"
    )
    return parser
