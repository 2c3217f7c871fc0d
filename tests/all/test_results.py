"""The tables of trained networks in the docs agree with the records."""

import json
from typing import Any

import capsfast

from ..test_docs import ROOT, table_rows

PAGE = ROOT / "docs" / "results.md"


def record_of(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "records" / name).read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def number(cell: str) -> int:
    return int(cell.replace(" ", ""))


def test_results_are_those_of_the_records() -> None:
    rows = table_rows(PAGE, "| data | network | parameters |")
    assert rows
    for data, _, parameters, epochs, accuracy, seconds, link in rows:
        record = record_of(link[link.index("records/") + len("records/") : -1])
        assert record["images"]["data"] == data.strip("`")
        assert number(parameters) == record["parameters"]
        assert (int(epochs), int(seconds)) == (record["epochs"], round(record["seconds"]))
        assert accuracy == percent(record["results"]["test_accuracy"])


def test_pretrained_networks_are_those_of_the_records() -> None:
    shown = {}
    for _, _, parameters, epochs, trained, rounded, seconds, link in table_rows(PAGE, "| `--pretrained` |"):
        record = record_of(link[link.index("records/") + len("records/") : -1])
        assert (number(parameters), int(epochs)) == (record["parameters"], record["epochs"])
        assert int(seconds) == round(record["seconds"])
        assert trained == percent(record["results"]["test_accuracy"])
        assert rounded == percent(record["shipped"]["right"] / record["shipped"]["images"])
        shown[record["shipped"]["file"].split("/")[-2]] = rounded
    rows = table_rows(ROOT / "docs" / "training.md", "| class, `--model` | name |")
    assert {f"{row[0].split('`')[-2]}-{row[1].strip('`')}": row[-1] for row in rows} == shown


def test_routings_side_by_side_are_those_of_the_record() -> None:
    record = record_of("digits-routings.json")
    rows = table_rows(PAGE, "| network | parameters | test accuracy | seconds | in the record |")
    assert set(capsfast.nn.ROUTINGS) <= set(record) == {row[-1].strip("`") for row in rows}
    for _, parameters, accuracy, seconds, name in rows:
        found = record[name.strip("`")]
        assert number(parameters) == found["parameters"]
        assert (accuracy, seconds) == (percent(found["results"]["test_accuracy"]), f"{found['seconds']:.1f}")


def test_networks_on_four_data_sets_are_those_of_the_record() -> None:
    record = record_of("small-networks.json")
    data = {"mnist": "mnist", "fashion": "fashion-mnist", "affine": "affine:mnist", "multi": "multi:mnist"}
    rows = table_rows(PAGE, "| network | in the record | parameters |")
    named = set()
    for _, name, parameters, *cells in rows:
        name = name.strip("`")
        assert number(parameters) == record[f"mnist-{name}"]["parameters"]
        for (short, full), cell in zip(data.items(), cells, strict=True):
            if cell == "-":
                assert f"{short}-{name}" not in record
                continue
            named.add(f"{short}-{name}")
            found = record[f"{short}-{name}"]
            assert (found["images"]["data"], cell) == (full, percent(found["results"]["test_accuracy"]))
    for iterations, accuracy, seconds in table_rows(PAGE, "| iterations |"):
        named.add(f"mnist-iterations-{iterations}")
        found = record[f"mnist-iterations-{iterations}"]
        assert (accuracy, int(seconds)) == (percent(found["results"]["test_accuracy"]), round(found["seconds"]))
    assert named == set(record)


def test_clusters_are_those_of_the_record() -> None:
    rows = table_rows(ROOT / "docs" / "unsupervised.md", "| data | parameters |")
    for data, parameters, epochs, seconds, error, accuracy in rows:
        record, found = record_of("stacked-mnist.json"), record_of("stacked-mnist-clusters.json")
        assert (record["images"]["data"], record["model"]["model"]) == (data.strip("`"), "stacked")
        assert (number(parameters), int(epochs), int(seconds)) == (
            record["parameters"],
            record["epochs"],
            round(record["seconds"]),
        )
        assert error == f"{record['results']['test_reconstruction']:.1f}"
        assert accuracy == percent(found["accuracy"]) and found["images"] == 10_000
    assert len(rows) == 1


def test_speed_of_routings_is_that_of_the_record() -> None:
    path = ROOT / "benchmarks" / "results" / "amd-epyc-zen-4-2-threads-routings.json"
    seconds: dict[tuple[int, str], dict[str, dict[str, float]]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        case = row["case"]
        of_case = seconds.setdefault((case["B"], case["direction"]), {}).setdefault(case["routing"], {})
        of_case[row["contender"]] = row["seconds"]["median"]
    rows = table_rows(ROOT / "docs" / "published-routings.md", "| B | forward |")
    assert len(rows) == 4
    for batch, *cells in rows:
        for direction, cell in zip(("forward", "forward+backward"), cells, strict=True):
            found = seconds[int(batch), direction]
            assert set(found) == set(capsfast.nn.ROUTINGS)
            gains = [each["torch.compile einsum"] / each["capsfast cpp"] for each in found.values()]
            assert cell == f"{min(gains):.1f}x to {max(gains):.1f}x"


def test_speed_of_matrix_routing_is_that_of_the_record() -> None:
    measured = record_of("matrix-routing.json")["rows"]
    rows = table_rows(ROOT / "docs" / "layers.md", "| B | I | J | matrices |")
    for (batch, *_, matrices, forward, both), found in zip(rows, measured, strict=True):
        assert (int(batch), matrices) == (found["B"], found["matrices"])
        for cell, direction in ((forward, "forward"), (both, "forward+backward")):
            times = found[direction]
            assert cell == f"{times['author'] / times['capsfast']:.1f}x"
