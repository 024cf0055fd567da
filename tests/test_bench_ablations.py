"""The ablations, the theory and the transition matrices at their smallest size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastgnl import GNLObjective

BENCH = Path(__file__).parents[1] / "bench"
sys.path.insert(0, str(BENCH))
try:
    import theory
    from ablations import FULL, ROWS, VARIANTS, Outcome, disagreements, line, outcome
finally:
    sys.path.pop(0)


def run(script, *args):
    command = [sys.executable, str(BENCH / script), *map(str, args)]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)


def test_ablations_are_noted_and_not_run_again(tmp_path):
    found, out = tmp_path / "found.jsonl", tmp_path / "rows.json"
    options = ("--seeds", 1, "--epochs", 2, "--rates", 0.4, "--rows", "argmax", "L_PRI", "--jobs", 1)
    files = ("--tables", "coverage", "loss", "--found", found, "--json", out)
    done = run("ablations.py", *options, *files)
    assert done.returncode == 0, done.stderr
    noted = found.read_text().splitlines()
    assert [json.loads(each)["variant"] for each in noted] == ["full", "argmax", "L_PRI"]
    rows = json.loads(out.read_text())
    assert len(rows) == 4
    assert all(0 < row["last epoch"] <= row["best epoch"] for row in rows)
    # A run noted as failed is shown as such, and nothing runs again.
    failed = {name: json.loads(noted[2])[name] for name in ("data", "variant", "rate", "seed", "epochs")}
    found.write_text("".join(f"{each}\n" for each in [*noted[:2], json.dumps(failed | {"failed": "not finite"})]))
    before = found.read_text()
    done = run("ablations.py", *options, *files)
    assert done.returncode == 0, done.stderr
    assert found.read_text() == before
    assert json.loads(out.read_text())[2]["last epoch"] == "collapsed 1/1"


def test_every_variant_is_one_of_the_method():
    for name, variant in VARIANTS.items():
        if variant.transition_input != "none":
            GNLObjective(10, 4, **variant.options)
        assert any(row.variant == name for row in ROWS)
    assert {row.table for row in ROWS if row.paper == FULL and row.variant == "full"} == {"hyper", "coverage", "loss"}


def test_another_order_of_rows_is_found():
    rows = [row for row in ROWS if row.variant in ("full", "no E-step", "L_PRI") and row.table == "loss"]
    good, bad, gone = Outcome(3, 0, 97.0, 0.1, 98.0), Outcome(3, 0, 90.0, 0.1, 98.0), outcome([{"failed": "x"}] * 3)
    names = ("full", "no E-step", "L_PRI")

    def found(*outcomes):
        of = {("digits", name, 0.4): each for name, each in zip(names, outcomes, strict=True)}
        return [(each["better in the paper"][:2], each["than"][:2]) for each in disagreements(rows, "digits", 0.4, of)]

    assert found(good, bad, gone) == []
    assert found(bad, good, gone) == [("#6", "#5")]
    assert found(good, gone, bad) == [("#5", "#2")]
    shown = line(rows[0], "digits", 0.4, {("digits", name, 0.4): gone for name in names})
    assert shown["last epoch"] == "collapsed 3/3"
    assert shown["to full"] is None


def test_theory(tmp_path):
    done = run("theory.py", "--draws", 60, "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stderr + done.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == len(theory.PRINTED)
    assert {row["holds"] for row in rows} == {"yes"}
    assert "<svg" in (tmp_path / "rows.svg").read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda g: abs(theory.error(np.full((2, 2), 0.25), np.eye(2)) - 0.5),  # Lemma 1 without its 2
        lambda g: float("nan"),
    ],
)
def test_a_wrong_statement_fails(wrong, monkeypatch, tmp_path):
    claim = theory.Claim("wrong", "-", wrong)
    row = theory.examine(claim, 5, 0)
    assert (row["holds"], row["as expected"]) == ("NO", "NO")
    monkeypatch.setattr(theory, "PRINTED", (claim,))
    monkeypatch.setattr(theory, "LIMITS", theory.LIMITS[:1])
    with pytest.raises(SystemExit) as left:
        theory.main(theory.Config(draws=5, json=tmp_path / "rows.json"))
    assert left.value.code == 1


def test_transition(tmp_path):
    out = tmp_path / "rows.json"
    methods = ("gnl", "gnl-no-estep", "forward", "volminnet", "causalnl")
    options = ("--seeds", 1, "--epochs", 2, "--rates", 0.4, "--methods", *methods)
    done = run("transition.py", *options, "--jobs", 1, "--found", tmp_path / "found.jsonl", "--json", out)
    assert done.returncode == 0, done.stderr
    first, *rows = json.loads(out.read_text())
    assert first["method"].startswith("identity")
    assert first["accuracy"] is None
    assert first["MSE x100"] > 1
    assert len(rows) == len(methods)
    assert all(row["MSE x100"] > 0 and row["accuracy"] > 0 for row in rows)
    assert [row["MSE x100, head"] is not None for row in rows] == [name.startswith("gnl") for name in methods]
