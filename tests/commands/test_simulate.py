"""`sglang-dspark simulate` prints a table, draws a picture, and refuses a policy or a machine that it does not know."""

from __future__ import annotations

import json

from typer import Typer
from typer.testing import CliRunner

from sglang_dspark.commands.simulate import simulate as command


def test_the_command_prints_a_table_and_draws_its_pictures(tmp_path):
    app = Typer()
    app.command()(command)
    call = ["--loads", "1,8", "--policies", "off,static-2,causal,oracle", "--steps", "20", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    assert "causal" in result.output and "load 8" in result.output
    assert (tmp_path / "simulate_gpu.png").read_bytes()[:4] == b"\x89PNG"
    rows = json.loads((tmp_path / "simulate_gpu.json").read_text())["results"]
    assert len(rows) == 8 and {row["load"] for row in rows} == {"1", "8"}
    wrong = CliRunner().invoke(app, ["--policies", "statik"])
    assert wrong.exit_code == 2 and "statik" in wrong.output
    assert CliRunner().invoke(app, ["--machine", "abacus"]).exit_code == 2
