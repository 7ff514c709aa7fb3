"""The server that people write around transformers: FastAPI, one request at a time.

fp32, a tokenizer that pads, one forward pass for the sequences of a request, means over residues as JSON. Its process
has as many threads as torch takes by default.
"""

import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.peers.transformers_embedding import TransformersEmbedder, documented


class Body(BaseModel):
    """Sequences."""

    sequences: list[str]


def main(folder: str, port: str) -> None:
    """Serve until the process ends."""
    app = FastAPI()
    embedder = TransformersEmbedder(Path(folder), "cpu", documented("cpu"))

    # Async though it computes, as in many tutorials: requests are then answered one after the other.
    @app.post("/embed")
    async def embed(body: Body) -> list[list[float]]:
        vectors: list[list[float]] = embedder(body.sequences).tolist()
        return vectors

    @app.get("/ready")
    async def ready() -> str:
        return "ready"

    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="error")


if __name__ == "__main__":
    main(*sys.argv[1:])
