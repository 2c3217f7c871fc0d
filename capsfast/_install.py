"""How capsfast is installed: what every message that recommends it says. No package index has it."""


def in_the_checkout(extra: str = "") -> str:
    """The command, with an extra such as "train"."""
    what = f'".[{extra}]"' if extra else "."
    return f"in the checkout: pip install --no-build-isolation --editable {what}"
