"""One script for a machine with an H200: are the results right on CUDA, and how fast is it?

    python -m benchmarks.h200 --out DIR            at most ten minutes
    python -m benchmarks.h200 --dry-run --out DIR  the same on a CPU with a small shape: no speeds

It needs torch and transformers, pydantic, rich and typer; no network, no model files (weights are
random). Parts run in a process of their own, each under a time limit: what a part has found is on
the disk at once, a part that fails or hangs is noted, and the next ones go on. DIR then holds
h200.jsonl (everything, as it came), h200.json and h200.md.
"""
