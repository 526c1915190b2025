"""From what people call a model to something that serves it: a program from disk, a new one, or the model.

A program and its packed weights are kept on disk (`store.py`). When they are there, neither torch nor
transformers is imported. Otherwise the model is opened without its weights, captured and lowered, its weights
are packed one by one, and the result is stored. A model that cannot be lowered, or whose program no kernels
run here, is served through its ordinary forward pass, and the reason is in `About`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hasten.base import allocator
from hasten.base.errors import CaptureError, ConfigError, nearest
from hasten.base.facts import detect
from hasten.base.screen import Screen
from hasten.ops import level
from hasten.ops.panels import named
from hasten.serve.engine import Engine, EngineSettings, Observer
from hasten.serve.runner import BLOCK_TOKENS, Runner
from hasten.serve.store import Store, Stored, store_key
from hasten.serve.words import Words, words_of

DENSE = ("float32", "bfloat16")
BUDGETS = ("int8", "int4")
WEIGHTS = ("auto", "stored", *DENSE, *BUDGETS)
CACHES = ("bfloat16", "int8", "float32")
DEFAULT_CONTEXT_TOKENS = 8192
STEP_TOKENS = 512
STEP_LOGITS = 128
CALIBRATION_CHUNKS = 24
_CACHE_SHARE = 0.25
_MOST_SEQUENCES = 64


@dataclass(frozen=True)
class About:
    """What was opened, for people and for reports. Bytes; `ordinary` is why there is no program, or empty."""

    model: str
    weights: str
    weight_bytes: int
    cache_bytes_per_token: int
    context_tokens: int
    ordinary: str = ""
    from_disk: bool = False
    open_s: float = 0.0
    note: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """A runner with the text side of its model."""

    runner: Runner
    words: Words
    about: About


def open_runner(
    model: str | Path,
    *,
    weights: str = "auto",
    cache: str = "bfloat16",
    context_tokens: int | None = None,
    cache_bytes: int | None = None,
    step_tokens: int = STEP_TOKENS,
    screen: Screen | None = None,
    keep: bool = True,
) -> Served:
    """Opens a GGUF file, a Hugging Face folder, a preset or a hub id for serving.

    Args:
        weights: "stored" keeps a GGUF file's own blocks and a folder's own dtype, "int4" and "int8" choose
            bits for each matrix within that budget, a number asks for so many bits a
            weight over the whole, a format (`hasten.ops.panels.named`: "int4r") is that of all matrices,
            "bfloat16" and "float32" are dense; "auto" is "stored" for a GGUF file
            and "bfloat16" for all else. "int4:200": what was quantised then learns from the model as it was
            for 200 steps (`hasten.serve.distil`); it takes minutes, once.
        cache: of keys and values: "bfloat16", "int8" (half the memory; a scale for each token and head) or
            "float32".
        context_tokens: longest sequence; default: the model's own, at most 8192.
        cache_bytes: memory for keys and values; default: a quarter of the machine's, at most what 64
            sequences of the longest length need. Pages are taken when they are first written.
        step_tokens: most tokens of one step: long prompts are cut.
        keep: whether a new program is stored for the next time.

    Raises:
        ConfigError: a name or a number that is not allowed.
        InputError: as `hasten.models.open_model`.
    """
    check_formats(weights, cache)
    screen = screen or Screen(enabled=False)
    started = time.perf_counter()
    path, fingerprint = _locate(model)
    if weights == "auto":
        weights = "stored" if str(path).endswith(".gguf") else "bfloat16"
    choice = {"weights": weights, "context": context_tokens}
    store = Store()
    key = store_key(fingerprint, choice) if fingerprint else ""
    found = store.load(key) if key and not level.refusal() else None
    from_disk = isinstance(found, Stored)
    if isinstance(found, Stored):
        stored = found
    else:
        made = _make(path, weights, context_tokens, screen, step_tokens)
        if isinstance(made, Served):
            return made
        stored = made
        if key and keep:
            store.save(key, stored.program, stored.panels, stored.tables, stored.words, stored.note)
    runner, sizes = _linked(stored, cache, cache_bytes, step_tokens)
    about = About(
        str(model), weights, sizes["weight_bytes"], sizes["cache_bytes_per_token"], runner.context_tokens, "",
        from_disk, time.perf_counter() - started, dict(stored.note),
    )  # fmt: skip
    return Served(runner, stored.words or Words(""), about)


def check_formats(weights: str, cache: str) -> None:
    """Whether `open_runner` takes these.

    Raises:
        ConfigError: a name or a number that is not allowed.
    """
    format, steps = parse_weights(weights)
    quantised = _is_quantised(format)
    if format not in WEIGHTS and not quantised:
        raise ConfigError(
            f"weights = {weights!r}: {nearest(format, WEIGHTS)}, bits a weight, for example 4.5, or a format "
            "of all matrices, for example int4r or int5m"
        )
    if steps is not None and not quantised:
        raise ConfigError(
            f"weights = {weights!r}: steps are for weights that are quantised here, {', '.join(BUDGETS)}, "
            f"bits a weight, or a format of all matrices, for example int4:{steps}"
        )
    if cache not in CACHES:
        raise ConfigError(f"cache = {cache!r}: {nearest(cache, CACHES)}")


def parse_weights(weights: str) -> tuple[str, int | None]:
    """`"int4:200"` as the format and the steps of distillation; None without steps.

    Raises:
        ConfigError: steps that are no whole number from 1 on.
    """
    format, colon, steps = weights.partition(":")
    if not colon:
        return format, None
    if not (steps.isascii() and steps.isdecimal()) or len(steps) > 6 or int(steps) == 0:
        raise ConfigError(
            f"weights = {weights!r}: steps are a whole number from 1 to 999999, for example {format}:200"
        )
    return format, int(steps)


def open_engine(
    model: str | Path,
    *,
    settings: EngineSettings | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> tuple[Engine, Served]:
    """`open_runner` with an engine around it, which ends the model's answers at its own end tokens.

    Raises as `open_runner`; ConfigError too where the cache is too small for one sequence.
    """
    served = open_runner(model, **options)
    settings = replace(settings or EngineSettings(), eos_tokens=tuple(served.words.eos_token_ids))
    tokenizer = served.words.tokenizer() if served.words.tokenizer_json else None
    engine = Engine(served.runner, tokenizer, settings, observer)
    # Reading a tokenizer of 50,000 words leaves 25 MB behind that nothing asks for again.
    allocator.give_back()
    return engine, served


def _is_quantised(format: str) -> bool:
    """Whether it is a budget, bits a weight (a positive number), or the format with codes of all matrices."""
    if format in BUDGETS:
        return True
    try:
        return 0 < float(format) < math.inf
    except ValueError:
        pass
    try:
        return not named(format).dense
    except ConfigError:
        return False


def _locate(model: str | Path) -> tuple[Any, str]:
    """The model's place and the fingerprint of its files; empty for one on the hub that is not here yet."""
    from hasten.models.locate import locate
    from hasten.serve.fingerprint import model_fingerprint

    place = locate(model)
    return (model, "") if place is None else (place, model_fingerprint(place))


def _make(
    path: Any, weights: str, context_tokens: int | None, screen: Screen, step_tokens: int
) -> Stored | Served:
    """A new program with its weights, or the ordinary model where it cannot be lowered or run."""
    from hasten.graph.whole import capture_whole
    from hasten.serve.lowering import lower
    from hasten.serve.weights import open_source

    with screen.bar("opening", 1):
        source = open_source(path)
    skeleton = source.skeleton()
    config = skeleton.config.get_text_config()
    words = words_of(skeleton, source.tokenizer())
    longest = getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT_TOKENS
    context = min(longest, context_tokens or DEFAULT_CONTEXT_TOKENS)
    if context_tokens is not None and context_tokens > longest:
        raise ConfigError(f"context of {context_tokens} tokens; {path} has positions for {longest}")
    started = time.perf_counter()
    try:
        if reason := level.refusal():
            raise CaptureError(f"a program needs native kernels, and there are none: {reason}")
        with screen.bar("capturing", 1):
            program = lower(capture_whole(skeleton), source.dense, config.vocab_size, context)
    except CaptureError as error:
        screen.warn(f"{path} is served by its ordinary forward pass, which is slow: {error}")
        return _ordinary(path, str(error), words, context, step_tokens)
    captured_s = time.perf_counter() - started
    panels, note = _pack(path, source, program, weights, screen)
    tables = {f"v{i}": array for i, array in enumerate(program.vectors)}
    tables |= {f"t{i}": array for i, array in enumerate(program.tables)}
    note |= {"capture_s": captured_s, "instructions": len(program.instructions)}
    return Stored(Path(), program.as_dict(), {f"m{i}": p for i, p in enumerate(panels)}, tables, words, note)


def _pack(
    path: Any, source: Any, program: Any, weights: str, screen: Screen
) -> tuple[list[Any], dict[str, Any]]:
    """Panels of every matrix, in the formats of `weights`, and what a report says of them."""
    plan, note = None, dict[str, Any]()
    format, steps = parse_weights(weights)
    if _is_quantised(format):
        source, plan, note = _planned(path, format, steps or 0, screen)
    panels = []
    with screen.bar("packing weights", len(program.matrices)) as bar:
        for i, use in enumerate(program.matrices):
            form = named(format) if format in DENSE else None if plan is None else plan.format(use.weight)
            panels.append(source.panels(use.weight, form))
            bar.update(i + 1, use.weight.name)
    return panels, note


def _planned(path: Any, budget: str, steps: int, screen: Screen) -> tuple[Any, Any, dict[str, Any]]:
    """A source that knows how to pack for a budget, the plan of its formats, and a note for reports."""
    import torch

    from hasten.models import open_model
    from hasten.serve.calibrate import calibrate
    from hasten.serve.distil import check_memory
    from hasten.serve.gate import model_chunks
    from hasten.serve.plan import plan_bits
    from hasten.serve.weights import open_source

    model, tokenizer = open_model(
        path, dtype=torch.bfloat16 if detect().bf16_in_hardware.value else torch.float32
    )
    if steps and tokenizer is None:
        raise ConfigError(f"{path} has no tokenizer, so there is no text to distil on; leave out :{steps}")
    if steps:
        check_memory(sum(p.numel() for p in model.parameters()), model.config.get_text_config().vocab_size)
    calibration = None
    if tokenizer is not None:
        chunks = model_chunks(model, tokenizer, 0, CALIBRATION_CHUNKS)
        with screen.bar("calibrating", 1):
            calibration = calibrate(model, chunks)
    del model
    source = open_source(path)
    source.calibration = calibration
    with screen.bar("choosing bits", 1):
        plan = plan_bits(source, budget)
    if steps and all(row.format.dense for row in plan.rows):
        raise ConfigError(f"with {budget} bits a weight nothing is quantised; leave out :{steps}")
    note: dict[str, Any] = {"plan": plan.as_dict()}
    if steps:
        note["distilled"] = _distil(path, source, plan, steps, screen)
    return source, plan, note


def _distil(path: Any, source: Any, plan: Any, steps: int, screen: Screen) -> dict[str, Any]:
    """Gives the source matrices that have learnt, and returns what a report says of it."""
    import torch

    from hasten.models import open_model
    from hasten.serve import distil
    from hasten.serve.gate import model_chunks

    matrices = plan.quantised(source, screen)
    model, tokenizer = open_model(path, dtype=torch.float32)
    pieces = model_chunks(model, tokenizer, 0, distil.PIECES, distil.PIECES_OF_EACH)
    pieces = [piece for piece in pieces if len(piece) == max(map(len, pieces))]
    found = distil.distil(model, matrices, [row.matrix for row in plan.rows], pieces, steps, screen)
    if found.helped:
        screen.note(f"KL to the original {found.before:.4f} before, {found.after:.4f} after {steps} steps")
    else:
        screen.warn(f"{path}: {steps} steps of distillation did not help; the weights stay as rounded")
    source.quantised = found.matrices
    after = found.after if math.isfinite(found.after) else None
    return {"steps": steps, "kl_before": found.before, "kl_after": after, "helped": found.helped}


def checked(served: Served, model: str | Path, max_perplexity_ratio: float, screen: Screen) -> Any:
    """The distance of what is served from the model's own weights on a text; see `hasten.serve.gate`.

    Raises:
        GateError: the perplexity ratio is above the limit.
    """
    from hasten.models import open_model
    from hasten.serve.gate import compare, model_chunks, model_logits

    original, tokenizer = open_model(model)
    chunks = model_chunks(original, tokenizer, 1)
    with screen.bar("comparing with the model's own weights", 1):
        gate = compare(model_logits(original), runner_logits(served.runner), chunks, served.about.weights)
    screen.note(str(gate))
    gate.refuse(max_perplexity_ratio)
    return gate


def runner_logits(runner: Runner) -> Any:
    """Logits [T, V] of a sequence of its own, in the first blocks of the runner's cache, which is idle."""
    import numpy as np
    import torch

    from hasten.serve.runner import Step

    def logits(tokens_T: torch.Tensor) -> torch.Tensor:
        tokens = tokens_T.numpy().astype(np.int32)
        blocks = np.arange(-(-len(tokens) // BLOCK_TOKENS), dtype=np.int32)[None]
        found = []
        for begin in range(0, len(tokens), most):
            rows = np.arange(min(most, len(tokens) - begin), dtype=np.int32)
            starts = np.array([0, len(rows)], np.int32)
            step = Step(tokens[begin : begin + most].copy(), rows + begin, starts, (blocks,) * groups, rows)
            found.append(torch.from_numpy(runner.run(step).copy()))
        return torch.cat(found)

    most, groups = min(runner.step_tokens, runner.step_logits), len(runner.groups)
    return logits


def _linked(stored: Any, cache: str, cache_bytes: int | None, step_tokens: int) -> tuple[Any, dict[str, int]]:
    from hasten.serve.link import CacheSettings, Linked
    from hasten.serve.native_runner import NativeRunner
    from hasten.serve.program import Program

    count = lambda prefix: sum(name.startswith(prefix) for name in stored.tables)  # noqa: E731
    program = Program.from_dict(
        stored.program,
        [stored.tables[f"v{i}"] for i in range(count("v"))],
        [stored.tables[f"t{i}"] for i in range(count("t"))],
    )
    panels = [stored.panels[f"m{i}"] for i in range(len(program.matrices))]
    per_token = sum(layer.heads * (layer.key_size + layer.value_size) for layer in program.layers)
    heads = sum(layer.heads for layer in program.layers)
    # int8: a byte each, and an fp32 scale for each key and each value.
    per_token = {"bfloat16": 2 * per_token, "int8": per_token + 8 * heads, "float32": 4 * per_token}[cache]
    wanted = min(
        detect().memory_bytes.value * _CACHE_SHARE, per_token * program.context_tokens * _MOST_SEQUENCES
    )
    blocks = max(int((cache_bytes or wanted) / per_token) // BLOCK_TOKENS, 1)
    settings = CacheSettings(cache, tuple(blocks for _ in program.windows()))
    linked = Linked(program, panels, settings, step_tokens, STEP_LOGITS)
    distinct = {id(p): p.nbytes for p in panels}
    return NativeRunner(linked), {"weight_bytes": sum(distinct.values()), "cache_bytes_per_token": per_token}


def _ordinary(path: Any, reason: str, words: Words, context: int, step_tokens: int) -> Served:
    import torch

    from hasten.models import open_model
    from hasten.serve.model_runner import ModelRunner

    opened, _ = open_model(path, dtype=torch.bfloat16 if detect().bf16_in_hardware.value else torch.float32)
    blocks = -(-context // BLOCK_TOKENS) * 16
    runner = ModelRunner(opened.eval(), context, blocks, step_tokens, STEP_LOGITS)
    size = sum(p.nbytes for p in opened.parameters())
    return Served(runner, words, About(str(path), "the model's own", size, 0, context, reason))
