"""README.md and docs/*.md: every Python block runs, every link has a target, the tables are true."""

import ast
import doctest
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import capsfast
from capsfast.bench import record
from capsfast.bench.cases import Case
from capsfast.bench.contenders import COMPILED, EAGER
from capsfast.bench.results import Results

from .support.published_layers import DenseCapsule

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [README, *(ROOT / name for name in ("CHANGELOG.md", "SECURITY.md", "benchmarks/README.md"))]
PAGES += sorted(ROOT.glob("docs/*.md"))
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    """The Python blocks, each after as many empty lines as give it the line numbers of the page."""
    text = page.read_text(encoding="utf-8")
    return ["\n" * text[: found.start(1)].count("\n") + found[1] for found in FENCE.finditer(text)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def table_rows(page: Path, header: str) -> list[list[str]]:
    """The cells of the table whose header line starts with ``header``."""
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    next(line for line in lines if line.startswith(header))
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def run(page: Path, texts: list[str]) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for text in texts:
        exec(compile(text, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page) and page != README], ids=name_of)
def test_python_blocks_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In order and in one namespace, as a reader would type them."""
    run(page, blocks(page))


@pytest.mark.parametrize("block", blocks(README), ids=lambda block: f"line {len(block) - len(block.lstrip())}")
def test_python_blocks_of_the_readme_run_alone(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(README, [block])


class Adopted(torch.nn.Module):
    """The network of the examples of identify and accelerate."""

    def __init__(self) -> None:
        super().__init__()
        self.digits = DenseCapsule(200, 8, 5, 16)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.digits(images.unflatten(1, (200, 8)))  # type: ignore[no-any-return]


EXAMPLES = [
    *(capsfast.dynamic_routing, capsfast.route_votes, capsfast.routing_pass, capsfast.DynamicRouting),
    *(capsfast.nn.RoutedCaps, capsfast.models.CapsNet, capsfast.accelerate, capsfast.identify, capsfast.diagnose),
]


@pytest.mark.parametrize("thing", EXAMPLES, ids=lambda thing: str(thing.__name__))
def test_examples_of_main_entries_run(thing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model, images = Adopted(), torch.randn(32, 1600)
    names = {"torch": torch, "capsfast": capsfast, "model": model, "images": images}
    names |= {"layer": model.digits, "u": images.unflatten(1, (200, 8))}
    parsed = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", names, thing.__name__, None, None)
    assert parsed.examples and doctest.DocTestRunner().run(parsed).failed == 0, capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)} links to {target}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in headings]
            assert heading in anchors, f"{name_of(page)}: {target}"


def test_nothing_recommends_a_capsfast_of_the_package_index() -> None:
    """The index has no capsfast, and anybody could take the name."""
    files = [*PAGES, ROOT / "setup.py", ROOT / "Makefile", ROOT / "pyproject.toml"]
    for folder in ("capsfast", "examples", "benchmarks", "tests", ".ci", ".github"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yml", ".ipynb", "")]
    asked = re.compile(r"pip3? install (?:-\S+ )*[\"']?capsfast\b")
    found = [name_of(path) for path in files if path.is_file() and asked.search(path.read_text(errors="replace"))]
    assert found == []


def test_the_program_in_the_form_for_wrong_values_runs(capsys: pytest.CaptureFixture[str]) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "wrong-value.yml").read_text(encoding="utf-8"))
    (text,) = [each["attributes"]["value"] for each in form["body"] if "value" in each["attributes"]]
    run(ROOT / ".github", [text])
    assert re.fullmatch(r"tensor\(\d\.\d+e-\d\d, dtype=torch\.float64\)\n", capsys.readouterr().out)


def test_tables_and_lists_name_every_option_backend_and_routing() -> None:
    cells = [option for option, *_ in table_rows(ROOT / "docs" / "routing.md", "| option |")]
    parameters = inspect.signature(capsfast.dynamic_routing).parameters
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == set(parameters) - {"u", "weight"}
    assert [row[0].strip("`") for row in table_rows(README, "| backend |")] == list(capsfast.backends())
    listed = README.read_text(encoding="utf-8").partition("any of these routings: ")[2].partition(". Their votes")[0]
    assert sorted(re.findall(r"`([a-z-]+)`", listed)) == sorted(capsfast.nn.ROUTINGS)


CONVERSIONS = table_rows(ROOT / "docs" / "migration.md", "| weight `w` of the other layer")


@pytest.mark.parametrize("row", CONVERSIONS, ids=[row[0] for row in CONVERSIONS])
def test_weight_conversions(row: list[str]) -> None:
    """A row: a layout, the votes of a layer with this layout, the conversion to [I, J, D, K]. The votes must agree."""
    layout, votes, conversion = (cell.strip("`") for cell in row)
    sizes = {"B": 2, "I": 3, "J": 4, "D": 5, "K": 6}
    u = torch.randn(sizes["B"], sizes["I"], sizes["K"], dtype=torch.float64)
    w = torch.randn(eval(layout, {}, sizes), dtype=torch.float64)
    names = {"einsum": torch.einsum, "u": u, "w": w, **sizes}
    ours = torch.einsum("ijdk,bik->bijd", eval(conversion, {}, names), u)
    torch.testing.assert_close(eval(votes, {}, names), ours)


def test_squash_table_is_what_squash_computes() -> None:
    rows = table_rows(ROOT / "docs" / "routing.md", "| `kind` |")
    s, eps = torch.randn(7, 5, dtype=torch.float64), 1e-3
    n = s.square().sum(-1, keepdim=True)
    names = {"n": n, "m": torch.sqrt(n + eps), "eps": eps, "sqrt": torch.sqrt, "exp": torch.exp}
    for kind, factor, _ in rows:
        want = eval(re.findall(r"`(.*?)`", factor)[0], {}, names) * s
        torch.testing.assert_close(want, capsfast.squash(s, eps=eps, kind=kind.strip('`"')))
    assert len(rows) == 6


def assert_readme_says(*said: str) -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert [each for each in said if each not in text] == []


def test_speeds_and_memory_in_the_readme_are_those_of_the_records() -> None:
    results = Results(record.load(ROOT / "benchmarks" / "results" / "amd-epyc-zen-4-2-threads.json")[1])
    forward, both = Case(), Case(direction="forward+backward")
    speeds = [results.speedup(case, COMPILED) for case in results.cases if case.op == forward.op]
    known = [speed for speed in speeds if speed is not None]
    memory = [results.memory(both, name) or 0 for name in ("capsfast cpp", EAGER, COMPILED)]
    ours, eager, compiled = (size / 2**20 for size in memory)
    adopted = json.loads((ROOT / "docs" / "records" / "accelerate.json").read_text(encoding="utf-8"))
    networks = [f"{found['ratio']:.1f}" for found in adopted["networks"] if found["dtype"] == "float32"]
    assert_readme_says(
        f"capsfast is {results.speedup(both, COMPILED):.1f} times as fast",
        f"forward alone {results.speedup(forward, COMPILED):.1f} times",
        f"takes {ours:.1f} MiB beyond inputs and gradients",
        f"eager PyTorch takes {eager:.0f} MiB, compiled {compiled:.0f} MiB",
        f"[{' and '.join(networks)} times as fast]",
        f"the {len(known)} cases",
        f"capsfast was {min(known):.1f} to {max(known):.1f} times as fast",
    )


def test_speeds_on_a_gpu_in_the_readme_are_those_of_the_records() -> None:
    folder = ROOT / "benchmarks" / "results"
    graphs, eager = (Results(record.load(folder / f"{name}.json")[1]) for name in ("nvidia-h200-graphs", "nvidia-h200"))
    ours = ("capsfast triton", "capsfast cuda")

    def us(case: Case, *names: str) -> float:
        return min(1e6 * found for name in names if (found := graphs.of(case, name, "graph")))

    forward, both, one, wide = Case(), Case(direction="forward+backward"), Case(B=1), Case(D=32, K=32)
    em = Case(direction="forward+backward", op="routing", routing="em")
    assert_readme_says(
        f"the faster backend takes {us(both, *ours):.0f} µs",
        f"{us(both, COMPILED) / us(both, *ours):.1f} times as fast as `torch.compile`",
        f"and {us(forward, *ours):.0f} µs forward alone, {us(forward, COMPILED) / us(forward, *ours):.1f} times",
        f"one sample ({us(one, COMPILED):.0f} µs, capsfast {us(one, *ours):.0f})",
        f"D = K = 32 forward ({us(wide, COMPILED):.0f}, {us(wide, *ours):.0f})",
        f"({1e3 * eager.seconds(em, COMPILED):.1f} ms, {1e3 * eager.seconds(em, ours[0]):.1f})",
    )


def test_times_of_the_order_of_backends_are_those_of_the_record() -> None:
    rows = table_rows(ROOT / "docs" / "routing.md", "| call |")
    results = Results(record.load(ROOT / "benchmarks" / "results" / "nvidia-h200-graphs.json")[1])
    changes: dict[str, dict[str, Any]] = {
        "J = 32": {"J": 32},
        "D = K = 32": {"D": 32, "K": 32},
        "given votes": {"op": "route_votes", "K": 0},
        "time of the host": {},
        "16 bits": {"dtype": "bfloat16"},
        "B = 16": {"B": 16},
        "B = 128": {},
        "B = 1": {"B": 1},
        "I = 256": {"B": 1024, "I": 256},
        "I = 9216": {"I": 9216},
    }
    seen = 0
    for call, _, *shown in rows:
        found = [change for name, change in changes.items() if re.search(rf"{name}(?!\d)", call)]
        cases = [Case(**each, direction=direction) for each in found for direction in ("forward", "forward+backward")]
        field = "host" if "host" in call else "graph"
        for name, times in zip(("triton", "cuda"), shown, strict=True):
            us = [1e6 * results.of(case, f"capsfast {name}", field) for case in cases]
            assert times == " / ".join(f"{each:.0f}" for each in us), call
            seen += bool(times)
    assert seen == 20


def texts(*files: Path) -> set[str]:
    """All strings of Python files, with … instead of values."""
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                found.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_troubleshooting_quotes_messages_of_the_sources() -> None:
    said = texts(ROOT / "setup.py", *(ROOT / "capsfast").rglob("*.py"))
    quoted = [row[0].strip("`") for row in table_rows(ROOT / "docs" / "troubleshooting.md", "| message |")]
    assert len(quoted) >= 25 and all(len(quote.replace("…", "")) > 12 for quote in quoted)
    assert [quote for quote in quoted if not any(quote in text for text in said)] == []
