"""A step: which backends there are once the extension is built."""

import argparse

import capsfast
from capsfast.bench.measure import without_paths

from .common import fused_backends, publish


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    found = fused_backends(device)
    absent = {name: without_paths(state.reason) for name, state in capsfast.backends().items() if not state.available}
    publish({"fused": found, "absent": absent})
    for name, state in capsfast.backends().items():
        print(f"{name}: {state.reason or 'available'}", flush=True)
    if not found:
        raise SystemExit(f"no fused backend for {device}")


if __name__ == "__main__":
    main()
