"""Made-up result rows for the tests of `bench compare`."""

from pathlib import Path

from mlx_phase.bench import compare, record

M4_MAX = {"chip": "m4-max-40", "device": "Apple M4 Max", "executor": "apple"}
M1 = {"chip": "m1-8", "device": "Apple M1", "executor": "apple"}


def pair(**change):
    """The prefill and the decode row of one made-up run."""
    shared = {
        "suite": "e2e",
        "model": "llama-8b",
        "prompt_tokens": 512,
        "tokens": 128,
        "dtype": "bfloat16",
        "bits": 4,
        "group": 64,
        "mode": "affine",
        "repeats": 5,
        "delay_s": 0.0,
        "comparable": "yes",
        "os": "macOS 26.2",
        "mlx": "0.32.4",
        "mlx_lm": "0.32.2",
        "mlx_phase": "0.1.0",
        "date": "2026-11-29T12:00:00+00:00",
        **M4_MAX,
        **change,
    }
    shared.pop("speed", None)
    speed = change.get("speed", 80.0)
    decode = {
        "phase": "decode",
        "tok_s": speed,
        "stock_tok_s": 70.0,
        "bytes_per_token": 4_500_000_000,
        "gbps": 360.0,
        "frac_peak": 0.66,
    }
    prefill = {"phase": "prefill", "tok_s": 800.0, "stock_tok_s": 790.0}
    return [record.row(**shared, **prefill), record.row(**shared, **decode)]


class Files:
    """`files(rows, ...)` writes rows to a new results file and returns its path."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0

    def __call__(self, *pairs) -> Path:
        self.count += 1
        path = self.folder / f"{self.count}.jsonl"
        record.append(path, [row for rows in pairs for row in rows])
        return path


def tables(*argv):
    return compare.tables(compare.parser().parse_args([str(a) for a in argv]))


def one(*argv):
    (table,) = tables(*argv)
    return table
