"""The names of this copy of capsfast. One process may hold several copies, as builds from a kernel hub are."""

# What it was imported as.
PACKAGE = __name__.removesuffix(".environment.names")
# torch.ops.<NAMESPACE> holds its ops; the extension defines them by this name. .ci/hub.py writes another.
NAMESPACE = "capsfast"


def ours(kind: type) -> bool:
    """Whether a class is part of this copy."""
    return kind.__module__.startswith(f"{PACKAGE}.")
