"""The command that installs capsfast, for messages. No package index has capsfast."""


def in_the_checkout(extra: str = "") -> str:
    """The command, with an optional extra such as "train"."""
    what = f'".[{extra}]"' if extra else "."
    return f"in the checkout: pip install --no-build-isolation --editable {what}"
