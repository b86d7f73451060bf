"""What the pages of docs/cookbook/ say beside numbers: a recipe for each model family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """A model family's page.

    Attributes:
        title: Of the page.
        commands: Shell commands that serve such models, each with a comment.
        presets: Names of `jaxserve.models.presets` whose memory the page lists.
        measured: Those whose speed is measured, small enough for a laptop.
        unmeasured: What the page says of speed where there are none.
        notes: What to know before, in sentences.
        limits: What does not work, in sentences.
    """

    title: str
    commands: tuple[tuple[str, str], ...]
    presets: tuple[str, ...]
    measured: tuple[str, ...]
    notes: tuple[str, ...]
    limits: tuple[str, ...]
    unmeasured: str = "These models are too large for the two cores that other pages measure on."


_WINDOWS = (
    "Layers with a sliding window give blocks behind it back if others have none; the log at start "
    "says how much is kept."
)
_NO_HIDDEN = "Hidden caches ([aptserve.md](../aptserve.md)) are refused."
_EXPERTS = (
    "On CPUs and NVIDIA GPUs (16 bits) a kernel reads only the experts that tokens go to; "
    "elsewhere it is XLA's `ragged_dot`.",
    "Experts are quantised at load on CPUs only, on one device; GPUs and TPUs refuse "
    "`model.quantization`.",
)

RECIPES: dict[str, Recipe] = {
    "llama": Recipe(
        title="Llama 2 and 3, Yi, SmolLM 2",
        commands=(
            ("jaxserve serve smollm2", "a chat model of 135M, downloaded once"),
            ("jaxserve serve meta-llama/Llama-3.1-8B-Instruct", "from the Hugging Face Hub"),
            (
                "jaxserve serve /path/to/llama-3.1-8b --config.model.quantization=int4",
                "weights of 4 bits on a laptop",
            ),
        ),
        presets=(
            *("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b"),
            *("llama-3.1-8b", "llama-3.1-70b", "yi-6b", "yi-34b"),
        ),
        measured=(),
        notes=(
            "The family that everything here is tried with first: hidden caches, adapters, drafts, "
            "quantised weights, meshes.",
            "GPTQ, AWQ, compressed-tensors and fp8 load as they are stored: see "
            "[quantization.md](../quantization.md).",
        ),
        limits=(
            "`rope_scaling` may be linear, dynamic, llama3, yarn or longrope; others are refused.",
        ),
        unmeasured="SmolLM2's is on [performance.md](../performance.md), beside llama.cpp's.",
    ),
    "qwen": Recipe(
        title="Qwen 2, 2.5 and 3",
        commands=(
            ("jaxserve serve Qwen/Qwen2.5-0.5B-Instruct", "from the Hugging Face Hub"),
            (
                "jaxserve serve Qwen/Qwen3-8B --config.model.quantization=int8",
                "weights of 8 bits",
            ),
        ),
        presets=("qwen2-7b", "qwen2.5-0.5b", "qwen2.5-7b", "qwen2.5-32b", "qwen3-0.6b", "qwen3-8b"),
        measured=("qwen2.5-0.5b", "qwen3-0.6b"),
        notes=(
            "Thoughts of Qwen 3 are told from answers, and both are bounded: see "
            "[http.md](../http.md).",
            "A sliding window is used where `use_sliding_window` says so. " + _WINDOWS,
        ),
        limits=("YaRN takes the factor of config.json, as transformers does.",),
    ),
    "mistral": Recipe(
        title="Mistral and Ministral",
        commands=(
            ("jaxserve serve mistralai/Mistral-7B-Instruct-v0.3", "from the Hugging Face Hub"),
        ),
        presets=("mistral-7b",),
        measured=(),
        notes=(
            "Of `mistral3`, a model with images, the language model is served; images are refused.",
            _WINDOWS,
        ),
        limits=("`layer_types` is read for Ministral only, as in transformers.",),
    ),
    "gemma": Recipe(
        title="Gemma 2 and 3",
        commands=(
            ("jaxserve serve google/gemma-3-270m-it", "from the Hugging Face Hub"),
            ("jaxserve serve /path/to/gemma-3-270m-it.gguf", "a GGUF file"),
        ),
        presets=("gemma-3-27b",),
        measured=(),
        notes=(
            "Of `gemma3`, a model with images, the language model is served; images are refused.",
            _WINDOWS,
        ),
        limits=(_NO_HIDDEN,),
    ),
    "opt": Recipe(
        title="OPT",
        commands=(
            ("jaxserve serve facebook/opt-125m", "from the Hugging Face Hub"),
            ("jaxserve serve opt_125m_cpu", "its shape with random weights, to measure"),
        ),
        presets=(
            *("opt-125m", "opt-350m", "opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b", "opt-30b"),
            *("opt-66b", "opt-175b"),
        ),
        measured=("opt-125m",),
        notes=("The models of the four papers, and of the model in the box.",),
        limits=("llama.cpp has no such architecture, so there are no GGUF files.",),
    ),
    "experts": Recipe(
        title="Mixtures of experts: Mixtral, Qwen 2 and 3",
        commands=(
            ("jaxserve serve Qwen/Qwen3-30B-A3B", "from the Hugging Face Hub"),
            (
                "jaxserve serve /path/to/mixtral-8x7b --config.model.quantization=int4",
                "weights of 4 bits, on a CPU",
            ),
        ),
        presets=("mixtral-8x7b", "qwen3-30b-a3b"),
        measured=(),
        notes=(
            "No token is dropped, and a request's text does not depend on the batch.",
            *_EXPERTS,
        ),
        limits=(
            "GPTQ, AWQ and other packed weights of such models, and experts of GGUF files, are "
            "made wide as they are read.",
        ),
    ),
    "qwen3-next": Recipe(
        title="Qwen3-Next and Qwen 3.5",
        commands=(
            (
                "jaxserve serve Qwen/Qwen3-Next-80B-A3B-Instruct --config.mesh.tensor=4",
                "on four H100",
            ),
        ),
        presets=("qwen3-next-80b",),
        measured=(),
        notes=(
            "Three of four layers keep a state of fixed size in place of K and V: 75 MiB a request "
            "of Qwen3-Next-80B, beside the K and V below. See [models.md](../models.md).",
            "Of Qwen 3.5 only texts are served.",
            *_EXPERTS,
        ),
        limits=(
            "On GPUs and TPUs the states of a prompt are updated token by token, which is slow and "
            "was not run on one.",
            "Drafts (`+spec`), `bros` and adapters are refused. Tensors `mtp.*` are not used.",
            _NO_HIDDEN,
        ),
    ),
    "gpt-oss": Recipe(
        title="gpt-oss",
        commands=(
            (
                "jaxserve serve openai/gpt-oss-20b --config.model.quantization=int4",
                "on a CPU; the checkpoint's MXFP4 is rounded again",
            ),
            ("jaxserve serve openai/gpt-oss-20b --config.mesh.tensor=2", "wide, on two devices"),
        ),
        presets=("gpt-oss-20b", "gpt-oss-120b"),
        measured=(),
        notes=("MXFP4 is made wide as it is read; the log says what memory that takes.", _WINDOWS),
        limits=(
            "The kernels `mosaic-gpu` refuse the model: they have no sinks.",
            "`jaxserve convert` writes Orbax only.",
            _NO_HIDDEN,
        ),
    ),
    "deepseek": Recipe(
        title="DeepSeek V2 and V3, Kimi K2",
        commands=(
            ("jaxserve serve deepseek-ai/DeepSeek-V2-Lite-Chat", "from the Hugging Face Hub"),
            ("jaxserve serve deepseek-ai/DeepSeek-V3 --config.mesh.tensor=16", "on 16 H200"),
        ),
        presets=("deepseek-v2-lite", "deepseek-v3", "kimi-k2"),
        measured=(),
        notes=(
            "The cache has latent vectors, a tenth of what K and V of each head would take: see "
            "[models.md](../models.md).",
            *_EXPERTS,
        ),
        limits=(
            "Weights of 8 bits are made wide as they are read, and take twice their memory.",
            "Layers for multi-token prediction are skipped.",
            "Kimi K2 needs a `tokenizer.json`; its own tokenizer is a tiktoken file.",
            _NO_HIDDEN,
        ),
    ),
    "glm": Recipe(
        title="GLM 4.5",
        commands=(
            ("jaxserve serve zai-org/GLM-4.5-Air --config.mesh.tensor=2", "on two H200"),
            ("jaxserve serve zai-org/GLM-4.5 --config.mesh.tensor=8", "on eight"),
        ),
        presets=("glm-4.5-air", "glm-4.5"),
        measured=(),
        notes=_EXPERTS,
        limits=("Layers for multi-token prediction are skipped.", _NO_HIDDEN),
    ),
}
