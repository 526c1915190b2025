"""`hasten generate`: one prompt to streamed text, and how fast that was."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from hasten.base.errors import InputError

DRAFT_TOKENS = 8
HELP = """Continue a prompt, or answer it where the model has a chat template.

The first call captures the model and packs its weights, which takes some
seconds; both are kept on disk, and later calls start from there.

Examples:

  hasten generate smollm2-135m "What is a tensor?"

  hasten generate model.gguf --raw "def fibonacci(n):" --max-tokens 64

  hasten generate ./my-model --weights int4:200 --check "Hello"
"""

MODEL = Annotated[str, typer.Argument(help="Preset, hub id, folder or GGUF file.")]
PROMPT = Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")]
MAX_TOKENS = Annotated[int, typer.Option("--max-tokens", "-n", help="Most new tokens.")]
WEIGHTS = Annotated[
    str,
    typer.Option(
        "--weights",
        help="auto, stored, int4, int8, bfloat16, float32, bits a weight: 4.5, or a format of all matrices: "
        "int4r. int4:200 learns from the original for 200 steps, once.",
        show_default=True,
    ),
]
CACHE = Annotated[str, typer.Option("--cache", help="Keys and values: bfloat16, int8 or float32.")]
CONTEXT = Annotated[int | None, typer.Option("--context", help="Longest sequence, tokens.")]
TEMPERATURE = Annotated[float, typer.Option("--temperature", "-t", help="0 takes the likeliest token.")]
TOP_P = Annotated[float, typer.Option("--top-p", help="Share of the probability that is kept.")]
TOP_K = Annotated[int, typer.Option("--top-k", help="Tokens that are kept; 0 keeps all.")]
MIN_P = Annotated[float, typer.Option("--min-p", help="Least probability, as a share of the largest.")]
SEED = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same text.")]
STOP = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the answer; may be repeated.")]
SYSTEM = Annotated[str | None, typer.Option("--system", help="A system message before the prompt.")]
RAW = Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")]
IGNORE_EOS = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's own end.")]
SPECULATE = Annotated[
    bool,
    typer.Option(
        "--speculate/--no-speculate",
        help="Draft tokens by looking them up in the prompt: for answers that repeat it.",
    ),
]
CHECK = Annotated[
    bool, typer.Option("--check", help="Compare with the model's own weights on a text, before the answer.")
]
MAX_RATIO = Annotated[
    float, typer.Option("--max-perplexity-ratio", help="Refuse weights that raise perplexity by more.")
]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print the result as JSON; no progress.")]


def generate(
    model: MODEL,
    prompt: PROMPT,
    max_tokens: MAX_TOKENS = 256,
    weights: WEIGHTS = "auto",
    cache: CACHE = "bfloat16",
    context: CONTEXT = None,
    temperature: TEMPERATURE = 0.0,
    top_p: TOP_P = 1.0,
    top_k: TOP_K = 0,
    min_p: MIN_P = 0.0,
    seed: SEED = None,
    stop: STOP = None,
    system: SYSTEM = None,
    raw: RAW = False,
    ignore_eos: IGNORE_EOS = False,
    speculate: SPECULATE = False,
    check: CHECK = False,
    max_perplexity_ratio: MAX_RATIO = 1.05,
    as_json: AS_JSON = False,
) -> None:
    started = time.perf_counter()
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise InputError("the prompt is empty; give some text")
    from hasten.base.screen import Screen
    from hasten.serve.engine import EngineSettings
    from hasten.serve.open import checked, open_engine
    from hasten.serve.sampling import SamplingParams
    from hasten.serve.stream import Request

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed,
        stop=tuple(stop or ()), ignore_eos=ignore_eos,
    )  # fmt: skip
    screen = Screen(enabled=not as_json)
    settings = EngineSettings(draft_tokens=DRAFT_TOKENS if speculate else 0)
    engine, served = open_engine(
        model, settings=settings, weights=weights, cache=cache, context_tokens=context, screen=screen
    )
    gate = checked(served, model, max_perplexity_ratio, screen) if check else None
    words = served.words
    template = None if raw else words.chat_template
    chat = bool(template)
    if system is not None and not chat:
        raise InputError(
            "a system message needs a chat template, which this model has not or --raw turns off"
        )
    if template:
        from hasten.serve.http.template import ChatTemplate

        messages = [
            *([{"role": "system", "content": system}] if system else []),
            {"role": "user", "content": text},
        ]
        text = ChatTemplate(template, words.special_tokens).render(messages)
    with engine:
        stream = engine.submit(Request(prompt=text, params=params, add_special_tokens=not chat))
        pieces: list[str] = []
        tokens: list[int] = []
        first_s, last_s, usage, reason = None, 0.0, None, None
        for delta in stream:
            if delta.error is not None:
                raise InputError(delta.error)
            last_s = time.perf_counter()
            first_s = first_s if first_s is not None or not delta.tokens else last_s
            tokens += delta.tokens
            pieces.append(delta.text)
            if not as_json:
                print(delta.text, end="", flush=True)
            usage, reason = delta.usage or usage, delta.finish_reason or reason
    found = _figures(served, usage, started, first_s, last_s, len(tokens))
    if as_json:
        about = {**served.about.__dict__, "gate": None if gate is None else gate.as_dict()}
        print(json.dumps({
            "text": "".join(pieces), "tokens": tokens, "finish_reason": reason, **found, "about": about,
        }, default=str))  # fmt: skip
        return
    print()
    screen.note(_line(found, served))


generate.__doc__ = HELP


def _figures(
    served: Any, usage: Any, started: float, first_s: float | None, last_s: float, tokens: int
) -> dict[str, Any]:
    """Seconds and rates of one answer. The share of the limit counts the bytes that each token must read."""
    from hasten.ops.limits import read_bytes_per_s

    first_token_s = usage.first_token_s if usage is not None else 0.0
    decode_s = last_s - (first_s or last_s)
    rate = (tokens - 1) / decode_s if tokens > 1 and decode_s > 0 else None
    about = served.about
    prompt_tokens = usage.prompt_tokens if usage is not None else 0
    per_token = about.weight_bytes + about.cache_bytes_per_token * (prompt_tokens + tokens // 2)
    return {
        "prompt_tokens": prompt_tokens,
        "new_tokens": tokens,
        "first_token_s": first_token_s,
        "start_to_first_token_s": None if first_s is None else first_s - started,
        "prefill_tokens_per_s": prompt_tokens / first_token_s if first_token_s else None,
        "decode_tokens_per_s": rate,
        "bytes_per_token": per_token,
        "share_of_limit": rate * per_token / read_bytes_per_s() if rate else None,
        "drafted_tokens": usage.drafted_tokens if usage is not None else 0,
        "accepted_tokens": usage.accepted_tokens if usage is not None else 0,
    }


def _line(found: dict[str, Any], served: Any) -> str:
    parts = [
        f"{found['prompt_tokens']} tokens read, the first new one after {found['first_token_s']:.2f} s "
        f"({found['start_to_first_token_s'] or 0:.2f} s from the start)"
    ]
    if found["decode_tokens_per_s"]:
        parts.append(
            f"then {found['decode_tokens_per_s']:.1f} tokens/s, {found['share_of_limit']:.0%} of what "
            f"reading {found['bytes_per_token'] / 1e6:.0f} MB a token allows"
        )
    if found["accepted_tokens"]:
        parts.append(f"{found['accepted_tokens']} of {found['drafted_tokens']} drafted tokens accepted")
    if served.about.ordinary:
        parts.append(f"by the ordinary forward pass: {served.about.ordinary}")
    return "; ".join(parts)
