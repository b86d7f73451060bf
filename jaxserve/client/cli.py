"""The command lines of `jaxserve complete`, `jaxserve embed` and `jaxserve batch`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxserve.client.answers import Answers
from jaxserve.client.batch_results import ResultsError, ResultsFile, state_path
from jaxserve.client.batch_run import PATIENCE_S, BatchCancelled, BatchRun
from jaxserve.client.client import DEFAULT_ADDRESS, Client
from jaxserve.client.errors import ServerError
from jaxserve.client.flags import (
    add_access_flags,
    add_grammar_flags,
    read_grammar,
    read_key,
    read_tls,
)
from jaxserve.client.http_calls import DEFAULT_HTTP_ADDRESS, HttpCalls
from jaxserve.client.many import Ask, ManyPrompts, ServerAway
from jaxserve.client.messages import POOLING_TYPES, TIERS
from jaxserve.client.openai_batch import OpenAiBatch, is_openai
from jaxserve.client.prompts import PromptError, read_lines, read_prompts
from jaxserve.client.records import (
    EXPECTED_MISSED,
    TARGETS,
    completion_records,
    embedding_record,
    verdict_line,
)
from jaxserve.command_line import Parser
from jaxserve.server.proto import batches_pb2 as pb
from jaxserve.writable import check_file

CONCURRENCY = 16
STDOUT = "-"
MAX_TIMEOUT_S = 1e9  # gRPC takes later deadlines for past ones
_NUMBERS = (
    ("max_tokens", int, "at most that many tokens (128)"),
    ("min_tokens", int, "no end before that many tokens (0)"),
    ("temperature", float, "0 is greedy (default: the server's)"),
    ("top_k", int, "0 is off (default: the server's)"),
    ("top_p", float, "1 is off (default: the server's)"),
    ("min_p", float, "0 is off (default: the server's)"),
    ("seed", int, "same seed, same text"),
    ("repetition_penalty", float, "1 is off (default: the server's)"),
    ("presence_penalty", float, "0 is off (0)"),
    ("frequency_penalty", float, "0 is off (0)"),
    ("logprobs", int, "report that many alternatives"),
    ("prompt_logprobs", int, "the same of the prompt"),
    ("n", int, "how many continuations (1)"),
)


def complete(argv: Sequence[str] | None = None) -> int:
    """Continues a prompt, or a file of them. Returns the exit code: 0, 1 for an error of server or
    file, 2 for usage, 130 for ^C."""
    return _run(_complete_parser(), argv, _check_complete, _complete)


def batch(argv: Sequence[str] | None = None) -> int:
    """Completes a file of prompts as a batch, when the server has time. Exit codes as for
    `complete`."""
    return _run(_batch_parser(), argv, _check_batch, _batch)


def embed(argv: Sequence[str] | None = None) -> int:
    """Prints the vector of a text, or of each text of a file. Exit codes as for `complete`."""
    return _run(_embed_parser(), argv, _check_embed, _embed)


def _run(
    parser: Parser,
    argv: Sequence[str] | None,
    check: Callable[[argparse.Namespace], None],
    work: Callable[[argparse.Namespace], int],
) -> int:
    args = parser.parse_args(argv)
    try:
        if args.timeout is not None and not 0 < args.timeout <= MAX_TIMEOUT_S:
            limits = f"must be more than 0 and at most {MAX_TIMEOUT_S:g} seconds"
            raise ValueError(f"--timeout {limits}, got {args.timeout:g}")
        check(args)
        return work(args)
    except (ServerError, PromptError, ResultsError, BatchCancelled) as error:
        return _failed(args, str(error))
    except OSError as error:
        return _failed(
            args, f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        )
    except UnicodeDecodeError as error:
        return _failed(args, f"{args.file} is not UTF-8: {error}")
    except ValueError as error:  # contradicting flags, or invalid field values
        parser.error(str(error))
    except KeyboardInterrupt:
        if args.file is not None and args.out not in (None, STDOUT):
            _failed(args, f"interrupted; the same command {args.resumes}")
        return 130


def _failed(args: argparse.Namespace, problem: str | None) -> int:
    print(f"{args.prog}: {problem}", file=sys.stderr)
    return 1


def _check_complete(args: argparse.Namespace) -> None:
    """Raises ValueError for contradicting flags."""
    if (args.prompt is not None, args.file is not None, args.info).count(True) != 1:
        raise ValueError("give one prompt, --file with many, or --info")
    _check_many(args)


def _check_embed(args: argparse.Namespace) -> None:
    """Raises ValueError for contradicting flags."""
    if (args.text is None) == (args.file is None):
        raise ValueError("give one text, or --file with many")
    _check_many(args)


def _check_many(args: argparse.Namespace) -> None:
    """Raises ValueError for contradicting flags of files."""
    if args.file is None and args.concurrency is not None:
        raise ValueError("--concurrency goes with --file")
    if args.concurrency is not None and args.concurrency < 1:
        raise ValueError(f"--concurrency must be at least 1, got {args.concurrency}")
    if args.resume and (args.file is None or args.out in (None, STDOUT)):
        raise ValueError("--resume goes with --file and --out=FILE")
    if args.file is None and args.out is not None:
        raise ValueError("--out goes with --file")
    if args.file is not None and args.out not in (None, STDOUT):
        _check_answers(Path(args.file), Path(args.out), resume=args.resume)


def _check_batch(args: argparse.Namespace) -> None:
    """Raises ValueError for contradicting flags."""
    if args.out == STDOUT:
        raise ValueError("--out: a batch needs a file for its results")
    path, out = Path(args.file), Path(args.out)
    check_file("out", out)
    if out.exists() and not out.is_file():
        raise ValueError(f"--out: {out} is not a file")
    _check_other(path, out, state_path(out))


def _check_answers(prompts: Path, out: Path, *, resume: bool) -> None:
    """Checks that no existing file is overwritten."""
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


def _client(args: argparse.Namespace) -> Client:
    return Client(args.address or DEFAULT_ADDRESS, api_key=read_key(args), tls=read_tls(args))


def _batch(args: argparse.Namespace) -> int:
    """Runs a batch. Its results go to a file, which later calls can resume."""
    defaults = {name: value for name, value in _sampling(args).items() if value is not None}
    if is_openai(Path(args.file)):
        if defaults:
            raise ValueError(f"--{next(iter(defaults))}: OpenAI's lines say that in their body")
        return _openai_batch(args)
    prompts = read_prompts(Path(args.file), defaults)
    with _client(args) as client, ResultsFile(Path(args.out), prompts) as results:
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
            return _failed(args, f"{results.failed} of {results.done} prompts failed")
    return 0


def _openai_batch(args: argparse.Namespace) -> int:
    patience_s = PATIENCE_S if args.timeout is None else args.timeout
    address = args.address or DEFAULT_HTTP_ADDRESS
    calls = HttpCalls(address, read_key(args), read_tls(args), timeout=patience_s)
    with OpenAiBatch(calls, Path(args.file), Path(args.out), patience_s) as batch:
        if args.cancel:
            print(batch.cancel())
            return 0
        batch.run()
        if batch.failed:
            return _failed(args, f"{batch.failed} of {batch.count} lines failed")
    return 0


def _complete(args: argparse.Namespace) -> int:
    with _client(args) as client:
        if args.info:
            return _info(client, args)
        options = _options(args)
        if args.file is None:
            return _one(client, args.prompt, {**options, "timeout": args.timeout})

        def ask(prompt: str, timeout: float | None) -> dict[str, Any]:
            return completion_records(client.complete(prompt, timeout=timeout, **options))

        return _many(client, args, ask)


def _one(client: Client, prompt: str, options: dict[str, Any]) -> int:
    """Streams to stdout. Several continuations come one after the other, each with its number.
    stderr says if the targets are given up meanwhile, followed by log-probabilities, one token per
    line, and whether the targets were met, if asked for."""
    if (options["n"] or 1) > 1:
        for completion in client.complete(prompt, **options):
            print(f"[{completion.index}] {prompt}{completion.text}")
            _print_logprobs(completion.prompt_logprobs + completion.logprobs)
            _print_verdict(completion.slo, completion.timings)
        return 0
    finish = None
    entries: list[Any] = []
    shown = prompt  # printed with the first piece, so not if the request is refused
    try:
        for message in client.generate(prompt, **options):
            print(shown + message.text, end="", flush=True)
            shown = ""
            if message.expected_missed:
                print(f"\n{EXPECTED_MISSED}", file=sys.stderr)
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
    """Prints the server's description, one field per line."""
    for field, value in client.info(timeout=args.timeout).ListFields():
        if field.name == "slo_classes":
            value = ", ".join(map(_class_text, value))
        print(f"{field.name:<18} {value}")
    return 0


def _class_text(slo_class: Any) -> str:
    """An SLO class as text, such as `interactive (ttft_ms 1000, tbt_ms 187.5)`."""
    asked = [f"{field.name} {value:g}" for field, value in slo_class.targets.ListFields()]
    best_effort = ["best_effort"] if slo_class.tier == TIERS["best_effort"] else []
    return f"{slo_class.name} ({', '.join(asked + best_effort)})"


def _print_logprobs(entries: Iterable[Any]) -> None:
    for entry in entries:
        top = " ".join(f"{other.token_id}:{other.logprob:.4f}" for other in entry.top)
        print(f"{entry.token_id}:{entry.logprob:.4f}  {top}".rstrip(), file=sys.stderr)


def _embed(args: argparse.Namespace) -> int:
    wanted = {"pooling": args.pooling, "normalize": args.normalize, "dimensions": args.dimensions}
    options = {**_service(args), **wanted}

    def ask(text: str, timeout: float | None) -> dict[str, Any]:
        (found,) = client.embed(text, timeout=timeout, **options)
        return embedding_record(found)

    with _client(args) as client:
        if args.file is not None:
            return _many(client, args, ask)
        print(json.dumps(ask(args.text, args.timeout)["embedding"]))
    return 0


def _many(client: Client, args: argparse.Namespace, ask: Ask) -> int:
    prompts = read_lines(args.file)
    client.info(timeout=args.timeout)  # fails with a clear message if no server answers
    path = None if args.out in (None, STDOUT) else Path(args.out)
    run = ManyPrompts(client, ask, args.timeout, args.concurrency or CONCURRENCY)
    with Answers(path, prompts, resume=args.resume) as answers:
        try:
            failed = run.run(prompts, answers)
        except ServerAway as error:
            goes_on = "; the same command with --resume goes on" if path else ""
            done = f"{len(answers.done)} of {len(prompts)} prompts done{goes_on}"
            return _failed(args, f"{error} ({done})")
    return _failed(args, f"{failed} of {len(prompts)} prompts failed") if failed else 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {**_sampling(args), **_service(args), "prediction": args.prediction}


def _service(args: argparse.Namespace) -> dict[str, Any]:
    slo = {name: getattr(args, name) for name in TARGETS}
    service = {"tier": args.tier, "slo_class": args.slo_class, "slo": slo}
    service |= {"serve_late": args.serve_late, "cache_salt": args.cache_salt}
    return {**service, "prompt_cache_key": args.prompt_cache_key, "model": args.model}


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    options = {name: getattr(args, name) for name, _, _ in _NUMBERS}
    options |= {"ignore_eos": args.ignore_eos or None, "stop": args.stop}
    options |= {"deterministic": args.deterministic or None}
    options |= {"stop_token_ids": args.stop_token_id, "logit_bias": dict(args.logit_bias) or None}
    return {**options, "grammar": read_grammar(args)}


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN_ID:BIAS") from None


def _complete_parser() -> Parser:
    parser = _parser(
        "jaxserve complete",
        "Continues a prompt, or a file of them, on a jaxserve server.",
        resumes="with --resume goes on",
    )
    add = parser.add_argument
    add("prompt", nargs="?", help="the text to continue")
    add("--info", action="store_true", help="show what is served instead")
    _add_files(parser, "prompts")
    _add_sampling(parser, "Absent ones have the server's default.")
    add = _add_service(parser)
    add("--prediction", default="", help="what the answer is likely to be, to draft from")
    return parser


def _embed_parser() -> Parser:
    parser = _parser(
        "jaxserve embed",
        "Prints the vector of a text, or of each text of a file, from a jaxserve server.",
        resumes="with --resume goes on",
    )
    parser.add_argument("text", nargs="?", help="the text; its vector is printed as JSON")
    _add_files(parser, "texts")
    add = parser.add_argument_group("vectors", "Absent ones are the checkpoint's.").add_argument
    add("--pooling", choices=tuple(POOLING_TYPES), help="which hidden states make the vector")
    add("--normalize", action=argparse.BooleanOptionalAction, help="whether its length is 1")
    add("--dimensions", type=int, help="only so many of its first numbers")
    _add_service(parser)
    return parser


def _add_files(parser: Parser, what: str) -> None:
    add = parser.add_argument_group(f"many {what}").add_argument
    add("--file", help=f"{what}, one a line (- is stdin); answers are JSON lines in that order")
    add("--concurrency", type=int, help=f"with --file, calls at once ({CONCURRENCY})")
    add("--out", metavar="FILE", help="where the answers go (stdout)")
    add(
        "--resume", action="store_true", help="with --file, keep the answers that --out has already"
    )


def _add_service(parser: Parser) -> Callable[..., Any]:
    """Adds the flags of the service level, and returns what adds more to their group."""
    add: Callable[..., Any] = parser.add_argument_group("service level").add_argument
    add("--slo_class", default="", help="one of the server's (--info), for what is not given here")
    add("--tier", choices=tuple(TIERS), help="realtime")
    add("--ttft_ms", type=float, help="target: arrival to first token")
    add("--tbt_ms", type=float, help="target: between two tokens, the 99th percentile")
    add("--jct_ms", type=float, help="target: arrival to last token")
    add(
        "--max_tbt_ms", type=float, help="target: between any two tokens (10 x --tbt_ms, from 2000)"
    )
    add("--serve_late", action="store_true", help="not refused though the first token will be late")
    add(
        "--cache_salt",
        default="",
        help="share computed prompts only with calls that have this salt",
    )
    add(
        "--prompt_cache_key",
        default="",
        help="go to the replica that calls with this key go to",
    )
    add("--model", default="", help="an adapter of the server's, by name")
    return add


def _batch_parser() -> Parser:
    parser = _parser(
        "jaxserve batch",
        "Has a jaxserve server do a file of prompts whenever it has time. Interrupted, the same\n"
        "command goes on.",
        resumes="goes on, with --cancel it ends the batch",
        timeout=f"; until a server that is away is ({PATIENCE_S:g})",
        elsewhere=f"; its HTTP, {DEFAULT_HTTP_ADDRESS}, for OpenAI's lines",
    )
    add = parser.add_argument
    add(
        "file",
        metavar="FILE",
        help='prompts as JSON lines: {"prompt": "Once upon a time"} or {"token_ids": [5, 6]}, if '
        'you like with "id": "a" and "sampling": {"max_tokens": 64}; or OpenAI\'s lines, '
        '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}',
    )
    add("--out", metavar="FILE", required=True, help="where the results go")
    add("--cancel", action="store_true", help="end the batch that --out waits for")
    _add_sampling(parser, "For lines that do not say. Absent ones have the server's default.")
    return parser


def _parser(
    prog: str, description: str, *, resumes: str, timeout: str = "", elsewhere: str = ""
) -> Parser:
    """A parser with the common flags. resumes: help on repeating an interrupted command. timeout:
    more help on --timeout. elsewhere: more help on the address."""
    parser = Parser(prog=prog, description=description)
    parser.set_defaults(prog=prog, resumes=resumes)
    parser.add_argument("--address", help=f"host:port of the server ({DEFAULT_ADDRESS}{elsewhere})")
    parser.add_argument("--timeout", type=float, help=f"seconds until a call is given up{timeout}")
    add_access_flags(parser)
    return parser


def _add_sampling(parser: Parser, description: str) -> None:
    add = parser.add_argument_group("sampling", description).add_argument
    for name, kind, text in _NUMBERS:
        add(f"--{name}", type=kind, help=text)
    add("--stop", action="append", help="end before this string; repeatable")
    add("--stop_token_id", action="append", type=int, help="repeatable")
    add("--ignore_eos", action="store_true", help="go on after end of sequence")
    add("--deterministic", action="store_true", help="the same bits whatever else is served")
    add("--logit_bias", action="append", type=_bias, default=[], metavar="TOKEN_ID:BIAS")
    add_grammar_flags(parser)
