"""`POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from hasten.base.errors import ContextError, UserError
from hasten.serve.http.errors import bad_request, draining
from hasten.serve.http.protocol import EmbeddingBody
from hasten.serve.http.responses import unless_gone
from hasten.serve.http.state import State


async def embed(state: State, body: EmbeddingBody, http: HttpRequest) -> Response:
    """A vector for each input, in order; `base64` is little-endian fp32."""
    embedder = state.embedding_model(body.model)
    if state.draining:
        raise draining()
    inputs = body.inputs(state.settings.limits)
    dimensions = embedder.dimensions
    if body.dimensions is not None:
        if body.dimensions > dimensions or (body.dimensions < dimensions and not embedder.may_truncate):
            allowed = f"1 to {dimensions}" if embedder.may_truncate else f"only {dimensions}"
            raise bad_request(
                f"dimensions: {embedder.id!r} allows {allowed}, got {body.dimensions}", "dimensions"
            )
        dimensions = body.dimensions
    try:
        tokens = await asyncio.to_thread(embedder.encode, inputs)
    except ContextError as error:
        raise bad_request(str(error), "input", "context_length_exceeded") from error
    except UserError as error:
        raise bad_request(str(error), "input") from error
    vectors = await unless_gone(http, asyncio.wrap_future(embedder.submit(tokens)))
    if dimensions < vectors.shape[1]:
        vectors = vectors[:, :dimensions]
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    shown: list[Any]
    if body.encoding_format == "base64":
        shown = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    else:
        shown = vectors.tolist()
    count = sum(map(len, tokens))
    state.metrics.embedded.labels(embedder.id).inc(count)
    return JSONResponse(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": vector}
                for index, vector in enumerate(shown)
            ],
            "model": embedder.id,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
    )
