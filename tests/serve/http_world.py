"""A whole server in this process for tests: the real engine over a runner that plays a scripted model.

The scripted model sees only what it reads back through its block tables, so an answer depends on the whole
prompt and on nothing else. In a chat the last message decides: `say TEXT` answers TEXT, `forever` never ends,
anything else gets a text made from the prompt. Outside a chat the next character is a function of all tokens
before it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hasten.serve.engine import Engine, EngineSettings
from hasten.serve.http.limits import HttpSettings
from hasten.serve.http.metrics import Metrics
from hasten.serve.http.server import Server, bind, run_server, url_of
from hasten.serve.http.state import State, TextModel
from hasten.serve.http.template import ChatTemplate
from hasten.serve.runner import BLOCK_TOKENS, Group, Step

MODEL = "scripted"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_OPENING = "<|im_start|>assistant\n"


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and ChatML's two marks."""
    alphabet = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")])
    return tokenizer


TOKENIZER = byte_tokenizer()
END = TOKENIZER.token_to_id("<|im_end|>")
VOCAB = TOKENIZER.get_vocab_size()


def digest(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()[:12]


def answer_to(prompt: str) -> str | None:
    """What the scripted model says to a rendered chat; None: it never stops."""
    last = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    if last.startswith("say "):
        return last.removeprefix("say ")
    return None if last == "forever" else f"I read {digest(prompt)}."


def next_token(tokens: Sequence[int]) -> int:
    text = TOKENIZER.decode(list(tokens), skip_special_tokens=False)
    prompt, opening, _ = text.rpartition(_OPENING)
    if not opening:
        return TOKENIZER.token_to_id(chr(ord("a") + int(digest(repr(tuple(tokens))), 16) % 26))
    prompt += opening
    said = tokens[len(TOKENIZER.encode(prompt).ids) :]
    answer = answer_to(prompt)
    if answer is None:
        return TOKENIZER.token_to_id("abcd"[len(said) % 4])
    wanted = TOKENIZER.encode(answer).ids
    return wanted[len(said)] if len(said) < len(wanted) else END


class ScriptedRunner:
    """Stores tokens where the tables say, and gives the scripted next token the highest logit.

    `gate`: cleared, it holds every step. `fail_on`: a sequence with this text makes the step raise.
    """

    def __init__(self, context_tokens: int = 2048, blocks: int = 512, step_tokens: int = 256) -> None:
        self.vocab_size, self.context_tokens = VOCAB, context_tokens
        self.step_tokens, self.step_logits = step_tokens, 32
        self.groups = (Group(None, blocks),)
        self.gate = threading.Event()
        self.gate.set()
        self.held = False
        self.step_s = 0.0
        self.fail_on: str | None = None
        self.steps = 0
        self._stored = np.full((blocks, BLOCK_TOKENS), -1, np.int32)

    def run(self, step: Step) -> np.ndarray:
        self.held = not self.gate.is_set()
        self.gate.wait(10)
        self.held = False
        time.sleep(self.step_s)
        self.steps += 1
        logits = np.zeros((len(step.wanted), self.vocab_size), np.float32)
        table = step.tables[0]
        owner = np.searchsorted(step.starts, np.arange(len(step.tokens)), side="right") - 1
        for row, token in enumerate(step.tokens):
            place = int(step.positions[row])
            self._stored[table[owner[row], place // BLOCK_TOKENS], place % BLOCK_TOKENS] = token
        for index, row in enumerate(step.wanted):
            length = int(step.positions[row]) + 1
            blocks = table[owner[row], : -(-length // BLOCK_TOKENS)]
            tokens = self._stored[blocks].reshape(-1)[:length].tolist()
            if self.fail_on is not None and self.fail_on in TOKENIZER.decode(tokens):
                raise RuntimeError("the runner was told to fail")
            chosen = next_token(tokens)
            # A second and a third candidate give log-probabilities something to list.
            logits[index, [chosen, (chosen + 1) % VOCAB, (chosen + 2) % VOCAB]] = 12.0, 6.0, 3.0
        return logits

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._stored[target] = self._stored[source]


@dataclass
class World:
    """A running server, with everything behind it."""

    url: str
    runner: ScriptedRunner
    engine: Engine
    state: State
    server: Server
    _open: list[Any] = field(default_factory=list)

    def client(self, **settings: Any) -> Any:
        """An official client, closed with the world."""
        import openai

        client = openai.OpenAI(**(self._settings() | settings))
        self._open.append(client)
        return client

    @cached_property
    def http(self) -> Any:
        """A bare HTTP client, closed with the world."""
        import httpx2

        client = httpx2.Client(base_url=self.url, timeout=20)
        self._open.append(client)
        return client

    def close(self) -> None:
        for client in self._open:
            client.close()

    def async_client(self, **settings: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(**(self._settings() | settings))

    def _settings(self) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 20}

    def idle(self, within_s: float = 5.0) -> bool:
        """Waits until the engine has nothing to do and holds no block."""
        return until(lambda: self._counts() == (0, 0, 0.0), within_s)

    def _counts(self) -> tuple[int, int, float]:
        stats = self.engine.stats()
        return stats.running, stats.waiting, stats.cache_usage


def until(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return condition()


@contextmanager
def serving(
    settings: HttpSettings | None = None,
    *,
    runner: ScriptedRunner | None = None,
    engine_settings: EngineSettings | None = None,
    grammar: Any = None,
    template: str | None = CHATML,
    embedder: Any = None,
    defaults: dict[str, Any] | None = None,
) -> Iterator[World]:
    """A server on a free port of this machine, in a thread of its own."""
    runner = runner or ScriptedRunner()
    metrics = Metrics(MODEL)
    engine_settings = engine_settings or EngineSettings(eos_tokens=(END,), max_queue=64)
    engine = Engine(runner, TOKENIZER, engine_settings, metrics)
    text = TextModel(
        MODEL,
        engine,
        TOKENIZER,
        runner.context_tokens,
        VOCAB,
        ChatTemplate(template, {"eos_token": "<|im_end|>"}) if template else None,
        defaults=defaults or {"temperature": 0.0},
        grammar=grammar,
    )
    state = State(settings or HttpSettings(drain_s=2.0), text, embedder, metrics)
    with running(state) as (url, server):
        world = World(url, runner, engine, state, server)
        try:
            yield world
        finally:
            world.close()
            runner.gate.set()
            runner.step_s = 0.0


@contextmanager
def running(state: State) -> Iterator[tuple[str, Server]]:
    """A server over `state` alone."""
    ready = threading.Event()
    bound = bind("127.0.0.1", 0)
    url = url_of(bound)
    server = Server(state, ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        assert ready.wait(10)
        yield url, server
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def main(drain_s: float, step_s: float) -> None:
    """A server in a process of its own; prints its address when it is ready."""
    runner = ScriptedRunner()
    runner.step_s = step_s
    metrics = Metrics(MODEL)
    engine = Engine(runner, TOKENIZER, EngineSettings(eos_tokens=(END,)), metrics)
    greedy = {"temperature": 0.0}
    text = TextModel(MODEL, engine, TOKENIZER, runner.context_tokens, VOCAB, ChatTemplate(CHATML), greedy)
    bound = bind("127.0.0.1", 0)
    state = State(HttpSettings(drain_s=drain_s), text, None, metrics)
    run_server(state, bound, lambda: print(url_of(bound), flush=True))
