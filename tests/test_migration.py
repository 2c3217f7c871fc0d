"""docs/migration.md: its tables agree with the code and with the published layers."""

import re
from typing import Any

import pytest

from capsfast import kinds

from .support.published import PUBLISHED, Published
from .test_docs import ROOT, table_rows

PAGE = ROOT / kinds.TABLE
CLASSES = table_rows(PAGE, "| arguments | parameters |")
OPTIONS = ("softmax", "gradient", "squash", "squash_last", "leaky", "averaged", "eps")


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def options_of(cell: str) -> dict[str, Any]:
    """The options that the cell shows as code with a value, such as eps=1e-9."""
    found = re.findall(r'(\w+)=("\w+"|[\w.-]+)', " ".join(code(cell)))
    return {name: eval(value) for name, value in found}


def deviations(row: Published) -> dict[str, Any]:
    """The options of a published layer that are not capsfast's defaults."""
    default = Published._field_defaults
    return {name: getattr(row, name) for name in OPTIONS if getattr(row, name) != default[name]}


FORMS = [form for form in kinds.FORMS if not form.instead]


def test_every_class_is_in_the_table_with_its_arguments() -> None:
    listed = [(code(name)[0], code(arguments)[0].split(", ")) for arguments, _, name, _ in CLASSES]
    assert listed == [(form.name, list(form.published().parameters)) for form in FORMS]


@pytest.mark.parametrize(("row", "form"), [*zip(CLASSES, FORMS, strict=True)], ids=[kind[2] for kind in CLASSES])
def test_its_parameters_and_options_are_those_of_the_published_layer(row: list[str], form: kinds.Form) -> None:
    _, parameters, _, options = row
    weight, axes = form.layout.weight or None, [*form.layout.loads(), form.layout.shared]
    assert weight is None or f"`{weight} {kinds.spelled(form.layout.axes)}`" in parameters or form.layout.shared
    assert not form.layout.shared or f"{kinds.spelled(form.layout.shared)}`" in parameters
    published = min(
        (
            each
            for each in PUBLISHED
            if each.compat and re.split(r" of votes|,", each.name)[0] == form.name
            if (each.weight or each.logits) == weight and (each.order is None or kinds.axes(each.order) in axes)
        ),
        key=lambda each: axes.index(kinds.axes(each.order)) if each.order else 0,
    )
    assert options_of(options) == deviations(published)
    assert ("`logits`" in options) == (published.logits is not None)


def test_weights_are_those_that_errors_speak_of() -> None:
    rows = table_rows(PAGE, "| weight `w` of the other layer")
    found = {code(order)[0]: code(conversion)[0] for order, _, conversion in rows}
    assert found == {kinds.spelled(order): how for order, how in kinds.CONVERSIONS.items() if order != "IJDK"}
