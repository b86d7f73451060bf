"""The command line of `python -m jaxserve.client`."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from jaxserve.client.client import DEFAULT_ADDRESS, TIERS, Client, ServerError

CONCURRENCY = 16
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
    ("logprobs", int, "report that many alternatives (with --file)"),
    ("n", int, "how many continuations (1)"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for what server or file refused, 2 for usage, 130 for ^C."""
    parser = _parser()
    args = parser.parse_args(argv)
    if [args.prompt is not None, args.file is not None, args.info].count(True) != 1:
        parser.error("give one prompt, --file with one a line, or --info")
    if args.file is None and (args.output, args.concurrency) != ("-", None):
        parser.error("--output and --concurrency go with --file")
    if args.concurrency is not None and args.concurrency < 1:
        parser.error(f"--concurrency must be at least 1, got {args.concurrency}")
    try:
        with Client(args.address) as client:
            if args.info:
                return _info(client, args)
            if args.file is None:
                return _one(client, args.prompt, _options(args))
            return _many(client, args)
    except ServerError as error:
        print(f"jaxserve.client: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"jaxserve.client: {where}{error.strerror}", file=sys.stderr)
        return 1
    except UnicodeDecodeError as error:
        print(f"jaxserve.client: {args.file} is not UTF-8: {error}", file=sys.stderr)
        return 1
    except ValueError as error:  # a value that its protobuf field cannot hold
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


def _one(client: Client, prompt: str, options: dict[str, Any]) -> int:
    """Streams to stdout. Several continuations come one after the other, each with its number.
    Log-probabilities, if asked for, follow on stderr, one token a line."""
    if (options["n"] or 1) > 1:
        for completion in client.complete(prompt, **options):
            print(f"[{completion.index}] {prompt}{completion.text}")
            _print_logprobs(completion.logprobs)
        return 0
    entries: list[Any] = []
    shown = prompt  # with the first piece, so that a refusal shows nothing else
    try:
        for message in client.generate(prompt, **options):
            print(shown + message.text, end="", flush=True)
            shown = ""
            entries.extend(message.logprobs)
    finally:
        if not shown:
            print(flush=True)
    _print_logprobs(entries)
    return 0


def _info(client: Client, args: argparse.Namespace) -> int:
    """All that the server says of itself, one field a line."""
    for field, value in client.info(timeout=args.timeout).ListFields():
        print(f"{field.name:<18} {value}")
    return 0


def _print_logprobs(entries: Iterable[Any]) -> None:
    for entry in entries:
        top = " ".join(f"{other.token_id}:{other.logprob:.4f}" for other in entry.top)
        print(f"{entry.token_id}:{entry.logprob:.4f}  {top}".rstrip(), file=sys.stderr)


def _many(client: Client, args: argparse.Namespace) -> int:
    lines = Path(args.file).read_text(encoding="utf-8").splitlines()
    prompts = [line for line in lines if line.strip()]
    client.info(timeout=args.timeout)  # one clear line if nobody is there, not one a prompt
    options = _options(args)
    failed = 0
    with (
        _output(args.output) as output,
        tqdm(total=len(prompts), unit="prompt", file=sys.stderr) as bar,
        ThreadPoolExecutor(max_workers=args.concurrency or CONCURRENCY) as pool,
    ):
        futures = [pool.submit(_record, client, prompt, options) for prompt in prompts]
        try:
            for future in futures:
                future.add_done_callback(lambda _: bar.update())
            for future in futures:
                record = future.result()
                failed += "error" in record
                print(json.dumps(record, ensure_ascii=False), file=output, flush=True)
        except BaseException:
            for future in futures:
                future.cancel()
            client.close()  # ends the calls that run
            raise
    if failed:
        print(f"jaxserve.client: {failed} of {len(prompts)} prompts failed", file=sys.stderr)
    return 1 if failed else 0


def _record(client: Client, prompt: str, options: dict[str, Any]) -> dict[str, Any]:
    """One line of the answer file."""
    try:
        completions = client.complete(prompt, **options)
    except ServerError as error:
        return {"prompt": prompt, "error": {"code": error.code, "message": str(error)}}
    return {
        "prompt": prompt,
        "completions": [
            {
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "logprobs": [
                    {
                        "token_id": entry.token_id,
                        "logprob": entry.logprob,
                        "top": [[top.token_id, top.logprob] for top in entry.top],
                    }
                    for entry in completion.logprobs
                ],
                "usage": {
                    "prompt_tokens": completion.usage.prompt_tokens,
                    "output_tokens": completion.usage.output_tokens,
                    "preemptions": completion.usage.preemptions,
                },
                "timings": {
                    "queue_ms": completion.timings.queue_ms,
                    "ttft_ms": completion.timings.ttft_ms,
                    "total_ms": completion.timings.total_ms,
                },
            }
            for completion in completions
        ],
    }


@contextlib.contextmanager
def _output(path: str) -> Iterator[TextIO]:
    if path == "-":
        yield sys.stdout
    else:
        with open(path, "w", encoding="utf-8") as file:
            yield file


def _options(args: argparse.Namespace) -> dict[str, Any]:
    options = {name: getattr(args, name) for name, _, _ in _NUMBERS}
    options |= {"timeout": args.timeout, "tier": args.tier, "ignore_eos": args.ignore_eos or None}
    options |= {"stop": args.stop, "stop_token_ids": args.stop_token_id}
    options["logit_bias"] = dict(args.logit_bias) or None
    options["slo"] = {name: getattr(args, name) for name in ("ttft_ms", "tbt_ms", "jct_ms")}
    return options


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition(":")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN_ID:BIAS") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxserve.client",
        description="Continues a prompt, or many, on a jaxserve server.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("prompt", nargs="?", help="the text to continue")
    add("--info", action="store_true", help="show what is served instead")
    add("--address", default=DEFAULT_ADDRESS, help="host:port of the server (%(default)s)")
    add("--timeout", type=float, help="seconds until a call is given up")
    many = parser.add_argument_group("many prompts")
    many.add_argument("--file", help="prompts, one a line; answers are JSON lines in that order")
    many.add_argument("--output", default="-", help="where the answers go (- is stdout)")
    many.add_argument("--concurrency", type=int, help=f"calls at once ({CONCURRENCY})")
    sampling = parser.add_argument_group("sampling", "Absent ones have the server's default.")
    for name, kind, text in _NUMBERS:
        sampling.add_argument(f"--{name}", type=kind, help=text)
    sampling.add_argument("--stop", action="append", help="end before this string; repeatable")
    sampling.add_argument("--stop_token_id", action="append", type=int, help="repeatable")
    sampling.add_argument("--ignore_eos", action="store_true", help="go on after end of sequence")
    sampling.add_argument(
        "--logit_bias", action="append", type=_bias, default=[], metavar="TOKEN_ID:BIAS"
    )
    service = parser.add_argument_group("service level")
    service.add_argument("--tier", choices=tuple(TIERS), default="realtime")
    service.add_argument("--ttft_ms", type=float, help="target: arrival to first token")
    service.add_argument("--tbt_ms", type=float, help="target: between two tokens")
    service.add_argument("--jct_ms", type=float, help="target: arrival to last token")
    return parser
