"""The networks of full size that --train trains, and their commands."""

from pathlib import Path

# Words of `capsfast train` by name of the run: networks of the papers, whose training takes hours on a CPU.
RUNS: dict[str, list[str]] = {
    "capsnet-mnist": ["--data", "mnist", "--epochs", "5"],
    "capsnet-fashion": ["--data", "fashion-mnist", "--epochs", "5"],
    "capsnet-overlapping": ["--data", "multi:mnist", "--epochs", "5"],
    "deepcaps-mnist": ["--data", "mnist", "--model", "deepcaps", "--epochs", "2"],
    "em-mnist": ["--data", "mnist", "--routing", "em", "--epochs", "3"],
    "matrix-mnist": ["--data", "mnist", "--model", "matrixcapsnet", "--loss", "spread", "--epochs", "2"],
    "efficient-mnist": ["--data", "mnist", "--model", "efficientcapsnet", "--epochs", "10"],
    "stacked-mnist": ["--data", "mnist", "--model", "stacked", "--epochs", "20"],
}
REHEARSAL = ["--max-steps", "2", "--limit-val-batches", "1", "--batch-size", "8", "--conv-channels", "8"]


def words(name: str, device: str, out: Path, rehearse: bool) -> list[str]:
    """The arguments of ``capsfast`` for a run; rehearsed are two steps on small images, with all other words as they
    are."""
    own = list(RUNS[name])
    if rehearse:
        data, epochs = (own.index(option) + 1 for option in ("--data", "--epochs"))
        kind, colon, _ = own[data].rpartition(":")
        own[data], own[epochs] = f"{kind}{colon}digits", "1"
        own += REHEARSAL
    accelerator = "gpu" if device == "cuda" else "cpu"
    return ["train", *own, "--accelerator", accelerator, "--no-progress", "--out", str(out / "training" / name)]


def data_of(name: str) -> str:
    """The data set that a run needs."""
    own = RUNS[name]
    return own[own.index("--data") + 1].rpartition(":")[2]
