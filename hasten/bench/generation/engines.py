"""What each contender is made of: opened once, then greedy answers of a fixed length to prompts of tokens.

No engine stops at an end token, so that all do the same work. Each imports its own packages when it opens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread
from typing import Any

from hasten.base.errors import HastenError
from hasten.bench.generation.llama import LlamaCpp
from hasten.bench.generation.names import CONTENDERS, REST, About, Answer, Engine, Spec


def open_engine(spec: Spec) -> Engine:
    """Opens the contender of `spec`.

    Raises:
        HastenError: it cannot be opened; says why.
    """
    makers: dict[str, Callable[[Spec], Engine]] = {
        "eager": Transformers,
        "compile": Transformers,
        "llama.cpp": LlamaCpp,
        "hasten": Hasten,
    }
    return makers[CONTENDERS[spec.contender].engine](spec)


class Transformers:
    """`model.generate`, as a user of transformers writes it; `compile` with a static cache."""

    def __init__(self, spec: Spec) -> None:
        import torch
        from transformers import GenerationConfig

        from hasten.models import open_model

        torch.set_num_threads(spec.threads)
        self.about = About()
        self._torch = torch
        self._model = open_model(spec.model, dtype=getattr(torch, spec.weights)).model.eval()
        # A fresh configuration: no end token, nothing that a model's own defaults sample with.
        self._model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        self._settings: dict[str, Any] = {}
        if CONTENDERS[spec.contender].engine == "compile":
            from transformers import CompileConfig

            compiled: Any = CompileConfig(mode="default")
            # Without this transformers compiles for accelerators alone.
            compiled._compile_all_devices = True
            self._settings = {"cache_implementation": "static", "compile_config": compiled}

    def prepare(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Compiles for this number of prompts."""
        if self._settings:
            self.answer([[1] * len(prompt) for prompt in prompts], new_tokens, logprobs=False)

    def answer(self, prompts: list[list[int]], new_tokens: int, logprobs: bool) -> list[Answer]:
        """See `Engine`."""
        torch = self._torch
        answers = [Answer() for _ in prompts]

        class Streamer:
            """Notes when tokens come; transformers hands it the prompts first."""

            begun = False

            def put(self, tokens: Any) -> None:
                now_s = time.perf_counter()
                if self.begun:
                    for answer, token in zip(answers, tokens.tolist(), strict=True):
                        answer.tokens.append(token)
                        answer.at_s.append(now_s)
                self.begun = True

            def end(self) -> None:
                pass

        def note_logprobs(input_ids: Any, scores: Any) -> Any:
            best = scores.float().log_softmax(-1).max(-1).values
            for answer, value in zip(answers, best.tolist(), strict=True):
                answer.logprobs.append(value)
            return scores

        ids = torch.tensor(prompts)
        with torch.no_grad():
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                streamer=Streamer(),
                logits_processor=[note_logprobs] if logprobs else [],
                **self._settings,
            )
        return answers

    def where(self, prompt: list[int], new_tokens: int) -> None:
        """torch's profiler would take longer than what it shows."""

    def close(self) -> None:
        """Nothing to end."""


class Hasten:
    """hasten's engine, one request for each prompt."""

    def __init__(self, spec: Spec) -> None:
        from hasten.serve.engine import EngineSettings
        from hasten.serve.open import DEFAULT_CONTEXT_TOKENS
        from hasten.serve.open import open_engine as open_hasten
        from hasten.serve.sampling import SamplingParams
        from hasten.serve.stream import Request

        kind = CONTENDERS[spec.contender]
        settings = EngineSettings(draft_tokens=kind.draft_tokens)
        # Programs are kept on disk by context: one serves all lengths up to the default.
        context_tokens = spec.context_tokens if spec.context_tokens > DEFAULT_CONTEXT_TOKENS else None
        opened: Any = open_hasten(
            spec.model,
            settings=settings,
            weights=spec.weights,
            cache=kind.cache,
            context_tokens=context_tokens,
        )
        self._engine, served = opened
        self._runner = served.runner
        reason = served.about.ordinary
        self.about = About(
            served.about.weight_bytes, f"runs the model's ordinary forward pass: {reason}" if reason else None
        )
        self._errors: list[str] = []
        self._request: Any = Request
        self._params: Any = SamplingParams

    def prepare(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Nothing: requests come and go."""

    def answer(self, prompts: list[list[int]], new_tokens: int, logprobs: bool) -> list[Answer]:
        """See `Engine`."""
        params = self._params(
            max_tokens=new_tokens, temperature=0, ignore_eos=True, logprobs=0 if logprobs else None
        )
        streams = [
            self._engine.submit(self._request(prompt_tokens=prompt, params=params)) for prompt in prompts
        ]
        answers = [Answer() for _ in prompts]
        if len(streams) == 1:
            self._collect(streams[0], answers[0])
        else:
            threads = [Thread(target=self._collect, args=pair) for pair in zip(streams, answers, strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for answer in answers:
            if len(answer.tokens) != new_tokens:
                reason = self._errors[0] if self._errors else "it stopped by itself"
                raise HastenError(f"hasten gave {len(answer.tokens)} tokens of {new_tokens}: {reason}")
        return answers

    def _collect(self, stream: Any, answer: Answer) -> None:
        for delta in stream:
            if delta.error is not None:
                self._errors.append(delta.error)
            now_s = time.perf_counter()
            answer.tokens += [int(token) for token in delta.tokens]
            answer.at_s += [now_s] * len(delta.tokens)
            answer.logprobs += [float(sampled.logprob) for sampled in delta.logprobs or ()]

    def where(self, prompt: list[int], new_tokens: int) -> dict[str, dict[str, float]] | None:
        """See `Engine`. The second answer finds its prompt in the cache of prefixes, so it only decodes."""
        timed = getattr(self._runner, "timed", None)
        if timed is None:
            return None
        found = {}
        for stage, tokens in (("prefill", 1), ("decode", new_tokens)):
            begin = time.perf_counter()
            with timed() as seconds:
                self.answer([prompt], tokens, logprobs=False)
            wall_s = time.perf_counter() - begin
            seconds[REST] = max(0.0, wall_s - sum(seconds.values()))
            found[stage] = {name: value / tokens for name, value in seconds.items()}
        return found

    def close(self) -> None:
        """Ends the engine's thread."""
        self._engine.stop(0)
