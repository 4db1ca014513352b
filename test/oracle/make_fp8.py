#!/usr/bin/env python3
"""Writes test/golden/fp8.json: casts between float32 and fp8 as ml_dtypes makes them.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install numpy ml_dtypes
    /tmp/venv/bin/python test/oracle/make_fp8.py

Per format: `decode`, the float32 of each of the 256 codes; `input` and `code`, float32 values and the code each is rounded
to. Values beyond the largest finite one are clipped to it first: our casts saturate, and are never asked for NaN or
infinity. All hex, floats little endian.
"""
import json
import pathlib

import ml_dtypes
import numpy as np


def inputs(finite: np.ndarray) -> np.ndarray:
    """Every code, every tie and its neighbours, the edges of both formats, and floats of every magnitude."""
    grid = np.unique(np.abs(finite))
    ties = ((grid[1:].astype(np.float64) + grid[:-1]) / 2).astype(np.float32)
    top = grid[-1]
    beyond = top + (grid[-1] - grid[-2]) * np.array([0.25, 0.5, 0.75, 1, 1.5], np.float32)
    edges = np.array([0, 1e-45, 1e-42, 1.1754942e-38, 1.1754944e-38, 3.4028235e38, 1e30], np.float32)
    rng = np.random.default_rng(1)
    random = np.exp2(rng.uniform(-24, 17, 400)).astype(np.float32)
    inside = np.exp2(rng.uniform(np.log2(grid[1]) - 2, np.log2(top), 400)).astype(np.float32)
    sharp = np.concatenate([grid, ties, beyond])
    around = [np.nextafter(sharp, np.float32(0)), np.nextafter(sharp, np.float32(3e38))]
    x = np.concatenate([sharp, *around, edges, random, inside])
    return np.unique(np.concatenate([x, -x]).view(np.uint32)).view(np.float32)  # by bits: -0 is kept


def main() -> None:
    table = {}
    for name, dtype in [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)]:
        decoded = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        x = inputs(decoded[np.isfinite(decoded)])
        top = np.float32(ml_dtypes.finfo(dtype).max)
        codes = np.clip(x, -top, top).astype(dtype).view(np.uint8)
        table[name] = {"decode": decoded.tobytes().hex(), "input": x.tobytes().hex(), "code": codes.tobytes().hex()}
    path = pathlib.Path(__file__).parent.parent / "golden" / "fp8.json"
    path.write_text(json.dumps(table, indent=0) + "\n")
    print(path, {name: len(t["code"]) // 2 for name, t in table.items()})


if __name__ == "__main__":
    main()
