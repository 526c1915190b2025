"""`hasten serve`: a model behind OpenAI's API.

Light on purpose: nothing heavy is imported for `--help`, and the port is taken before a model is opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hasten.serve.embed import Embedder
    from hasten.serve.engine import EngineSettings
    from hasten.serve.http.limits import HttpSettings
    from hasten.serve.http.metrics import Metrics
    from hasten.serve.http.state import State, TextModel

HELP = """Serve a model behind the API that OpenAI's clients speak.

Paths: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models,
/health, /metrics (Prometheus), and a chat page on /.

Without --host only this machine can connect. SIGTERM or Ctrl-C refuses new
requests, lets running ones finish for --drain seconds, and leaves with 0.

Examples:

  hasten serve smollm2-135m

  hasten serve my-model.gguf --port 9000 --context 4096 --weights int4

  hasten serve smollm2-135m --embeddings minilm-l6

  HASTEN_API_KEY=secret hasten serve my-folder/ --host 0.0.0.0
"""

# A model's own recommendation for sampling, for requests that say nothing.
_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

MODEL = Annotated[
    str, typer.Argument(help="Preset, hub id, folder or GGUF file; a sentence model serves embeddings alone.")
]
HOST = Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")]
PORT = Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free port.")]
NAME = Annotated[
    str | None, typer.Option("--name", help="What clients call the model.", show_default="MODEL")
]
EMBEDDINGS = Annotated[
    str | None, typer.Option("--embeddings", help="A sentence model: preset (minilm-l6) or folder.")
]
API_KEY = Annotated[
    list[str] | None,
    typer.Option("--api-key", envvar="HASTEN_API_KEY", help="Ask for this key on /v1; may be repeated."),
]
CONTEXT = Annotated[
    int | None, typer.Option("--context", min=1, help="Longest prompt and answer together, tokens.")
]
MAX_QUEUE = Annotated[
    int, typer.Option("--max-queue", min=1, help="Requests that may wait; more get a 429 with Retry-After.")
]
MAX_SEQUENCES = Annotated[int, typer.Option("--max-sequences", min=1, help="Answers made at the same time.")]
WEIGHTS = Annotated[
    str,
    typer.Option(
        "--weights",
        help="auto, stored, int4, int8, bfloat16, float32, bits a weight, or a format of all matrices "
        "(int4r); int4:200 learns for 200 steps.",
    ),
]
CACHE = Annotated[str, typer.Option("--cache", help="Keys and values: bfloat16, int8 or float32.")]
CACHE_GIB = Annotated[
    float | None,
    typer.Option("--cache-gib", min=0.001, help="Memory for keys and values.", show_default="a quarter"),
]
DRAFT = Annotated[
    int, typer.Option("--draft", min=0, help="Guess up to this many tokens from the prompt; same answers.")
]
DRAIN = Annotated[float, typer.Option("--drain", min=0, help="Seconds that running requests get at the end.")]
TEMPLATE = Annotated[
    Path | None, typer.Option("--chat-template", help="A Jinja file instead of the model's own.")
]
ORIGINS = Annotated[
    list[str] | None,
    typer.Option("--allow-origin", help="Let web pages of this origin call (CORS); may be repeated."),
]
MAX_BODY = Annotated[float, typer.Option("--max-body-mib", min=0.001, help="Larger requests get a 413.")]
CHECK = Annotated[
    bool, typer.Option("--check", help="Compare with the model's own weights on a text before serving.")
]
MAX_RATIO = Annotated[
    float, typer.Option("--max-perplexity-ratio", help="Refuse weights that raise perplexity by more.")
]
STRICT = Annotated[bool, typer.Option("--strict", help="Refuse fields that are not known, with a 400.")]
ACCESS_LOG = Annotated[
    bool, typer.Option("--access-log", help="A line on stderr for each request: client, path, status.")
]


def serve(
    model: MODEL,
    host: HOST = "127.0.0.1",
    port: PORT = 8000,
    name: NAME = None,
    embeddings: EMBEDDINGS = None,
    api_key: API_KEY = None,
    context: CONTEXT = None,
    max_queue: MAX_QUEUE = 256,
    max_sequences: MAX_SEQUENCES = 64,
    weights: WEIGHTS = "auto",
    cache: CACHE = "bfloat16",
    cache_gib: CACHE_GIB = None,
    draft: DRAFT = 0,
    drain: DRAIN = 30.0,
    chat_template: TEMPLATE = None,
    allow_origin: ORIGINS = None,
    max_body_mib: MAX_BODY = 8.0,
    check: CHECK = False,
    max_perplexity_ratio: MAX_RATIO = 1.05,
    strict: STRICT = False,
    access_log: ACCESS_LOG = False,
) -> None:
    from hasten.serve.engine import EngineSettings
    from hasten.serve.http.limits import HttpSettings, Limits

    try:
        from hasten.serve.http.server import bind, run_server, url_of
    except ModuleNotFoundError as error:
        from hasten.base.errors import ConfigError

        raise ConfigError(f"hasten serve needs {error.name}: pip install 'hasten[serve]'") from error

    settings = HttpSettings(
        limits=Limits(body_bytes=int(max_body_mib * 2**20)),
        api_keys=tuple(api_key or ()),
        allow_origins=tuple(allow_origin or ()),
        strict=strict,
        drain_s=drain,
        access_log=access_log,
    )
    _check_exposure(settings, host)
    bound = bind(host, port)
    opening = _Opening(
        model,
        name or _short(model),
        chat_template,
        EngineSettings(max_sequences=max_sequences, max_queue=max_queue, draft_tokens=draft),
        {
            "weights": weights,
            "cache": cache,
            "context_tokens": context,
            "cache_bytes": None if cache_gib is None else int(cache_gib * 2**30),
        },
        max_perplexity_ratio if check else None,
    )
    state = _open(opening, embeddings, settings)
    url = url_of(bound)

    def ready() -> None:
        typer.echo(f"ready: {url} (chat page), {url}/v1 (API), {url}/metrics", err=True)

    run_server(state, bound, ready)


serve.__doc__ = HELP


@dataclass(frozen=True)
class _Opening:
    """What was asked for. `runner`: arguments of `open_runner`. `most_ratio`: compare with the model's own
    weights first, and refuse a larger ratio of perplexities."""

    model: str
    name: str
    template: Path | None
    engine: EngineSettings
    runner: dict[str, Any]
    most_ratio: float | None


def _check_exposure(settings: HttpSettings, host: str) -> None:
    """Says so where everybody who reaches the address may use the model."""
    if settings.api_keys or host in ("127.0.0.1", "::1", "localhost"):
        return
    typer.echo(f"note: whoever reaches {host} can use this server; --api-key asks for a key", err=True)


def _open(opening: _Opening, embeddings: str | None, settings: HttpSettings) -> State:
    """Opens what was named and says what came of it."""
    from hasten.base.errors import ConfigError
    from hasten.serve.http.metrics import Metrics
    from hasten.serve.http.state import State

    metrics = Metrics(opening.name)
    if _is_sentence_model(opening.model):
        if embeddings is not None:
            raise ConfigError(f"{opening.model!r} makes embeddings itself; give no --embeddings beside it")
        return State(settings, None, _embedder(opening.model, opening.name), metrics)
    text = _text_model(opening, metrics)
    embedder = None if embeddings is None else _embedder(embeddings, None)
    if embedder is not None and embedder.id == text.id:
        raise ConfigError(f"both models are called {text.id!r}; give --name")
    return State(settings, text, embedder, metrics)


def _is_sentence_model(model: str) -> bool:
    from hasten.models.presets import SENTENCE_PRESETS

    folder = Path(model).expanduser()
    return (folder / "modules.json").is_file() or (model in SENTENCE_PRESETS and not folder.exists())


def _short(model: str) -> str:
    """A file's or folder's own name; ids and presets as they are."""
    path = Path(model).expanduser()
    return (path.resolve().stem if path.is_file() else path.resolve().name) if path.exists() else model


def _text_model(opening: _Opening, metrics: Metrics) -> TextModel:
    from hasten.base.screen import Screen, spell_bytes
    from hasten.serve.grammar import Grammars
    from hasten.serve.http.state import TextModel
    from hasten.serve.http.template import ChatTemplate
    from hasten.serve.open import checked, open_engine

    screen = Screen()
    engine, served = open_engine(
        opening.model, settings=opening.engine, observer=metrics, screen=screen, **opening.runner
    )
    if opening.most_ratio is not None:
        checked(served, opening.model, opening.most_ratio, screen)
    words, vocab_size = served.words, served.runner.vocab_size
    tokenizer = words.tokenizer()
    eos = tuple(words.eos_token_ids)
    text = words.chat_template if opening.template is None else _template_text(opening.template)
    about = served.about
    typer.echo(
        f"{opening.name}: context {engine.context_tokens} tokens, weights {spell_bytes(about.weight_bytes)}, "
        f"cache {spell_bytes(about.cache_bytes_per_token)} a token, {_memory()}",
        err=True,
    )
    return TextModel(
        opening.name,
        engine,
        tokenizer,
        engine.context_tokens,
        vocab_size,
        ChatTemplate(text, words.special_tokens) if text else None,
        {key: value for key in _DEFAULTS if (value := words.generation.get(key)) is not None},
        Grammars(tokenizer, eos, vocab_size).compile if eos else None,
    )


def _template_text(path: Path) -> str:
    from hasten.base.errors import InputError

    try:
        return path.expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the chat template {path}: {error}") from error


def _embedder(model: str, name: str | None) -> Embedder:
    from hasten.serve.embed import open_embedder

    embedder = open_embedder(model, name)
    typer.echo(
        f"{embedder.id}: embeddings of {embedder.dimensions} numbers, texts of at most "
        f"{embedder.most_tokens} tokens, {_memory()}",
        err=True,
    )
    return embedder


def _memory() -> str:
    import psutil

    from hasten.base.screen import spell_bytes

    return f"process {spell_bytes(psutil.Process().memory_info().rss)}"
