"""One contender in one process: `python -m hasten.bench.generation.measure SPEC.json OUT.json`.

Opens the model, answers the first prompt cold, then the others warm, then the groups of streams. What it
writes has the fields of `report.Round`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from hasten.bench.child import Emit, work
from hasten.bench.generation.engines import Answer, open_engine
from hasten.bench.generation.names import Spec
from hasten.bench.memory import peak_resident_bytes


def run(spec: Spec, emit: Emit) -> dict[str, Any]:
    """Runs one contender in this process.

    Raises:
        HastenError: it cannot be opened, or gives fewer tokens than it was asked for.
    """
    begin = time.perf_counter()
    engine = open_engine(spec)
    open_s = time.perf_counter() - begin
    emit(event="opened", seconds=open_s)

    begin = time.perf_counter()
    (cold,) = engine.answer([spec.prompts[0]], spec.new_tokens, logprobs=True)
    # perf_counter starts anywhere; the wall clock is the same for parent and child.
    start_to_first_token_s = time.time() - spec.started_at - (time.perf_counter() - cold.at_s[0])
    answers = [cold]
    runs = [_single(begin, cold)]
    emit(event="answered", done=1, seconds=runs[0]["first_token_s"])
    for prompt in spec.prompts[1:]:
        begin = time.perf_counter()
        (answer,) = engine.answer([prompt], spec.new_tokens, logprobs=False)
        answers.append(answer)
        runs.append(_single(begin, answer))
        emit(event="answered", done=len(answers), seconds=runs[-1]["first_token_s"])
    peak = peak_resident_bytes()

    streams = []
    for group in spec.streams:
        engine.prepare(group, spec.new_tokens)
        begin = time.perf_counter()
        together = engine.answer(group, spec.new_tokens, logprobs=False)
        answers += together
        streams.append(_together(begin, together))
        emit(event="answered", done=len(answers), seconds=streams[-1]["first_token_s"])
    where = None
    if spec.where:
        # A prompt that no cache of prefixes knows: the last one backwards.
        where = engine.where(spec.prompts[-1][::-1], spec.new_tokens)
    engine.close()
    return {
        "open_s": open_s,
        "start_to_first_token_s": start_to_first_token_s,
        "runs": runs,
        "streams": streams,
        "peak_rss_bytes": peak,
        "tokens": [answer.tokens for answer in answers],
        "logprobs": cold.logprobs,
        "held_weight_bytes": engine.about.weight_bytes,
        "note": engine.about.note,
        "where": where,
    }


def _single(begin_s: float, answer: Answer) -> dict[str, float]:
    return {"first_token_s": answer.at_s[0] - begin_s, "decode_s": answer.at_s[-1] - answer.at_s[0]}


def _together(begin_s: float, answers: list[Answer]) -> dict[str, Any]:
    """The rate is that of all streams at once: from the first token of the last to begin to the last token of
    the first to end; None where they never ran together.
    """
    first = sorted(answer.at_s[0] - begin_s for answer in answers)
    begin, end = max(answer.at_s[0] for answer in answers), min(answer.at_s[-1] for answer in answers)
    counted = sum(begin < at <= end for answer in answers for at in answer.at_s)
    total_s = max(answer.at_s[-1] for answer in answers) - begin_s
    return {
        "streams": len(answers),
        "first_token_s": first[len(first) // 2],
        "last_first_token_s": first[-1],
        "decode_tokens_per_s": counted / (end - begin) if end > begin else None,
        "total_s": total_s,
        "tokens_per_s": sum(len(answer.tokens) for answer in answers) / total_s,
        "peak_rss_bytes": peak_resident_bytes(),
    }


def main(arguments: list[str]) -> int:
    """Entry point; see `child.work`."""
    return work(arguments, lambda text, emit: json.dumps(run(Spec.load(text), emit)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
