"""Thousands of requests made from the API's own description: none may break the server."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.paged_runner import PagedScriptedRunner
from tests.serve.running import running_server
from tests.serve.test_limits_and_faults import metrics

CASES = 5000
CASES_PER_OPERATION = 450


@pytest.mark.slow
async def test_no_request_makes_a_server_error(tmp_path: Path) -> None:
    command = shutil.which("schemathesis")
    if command is None:
        pytest.skip("the command schemathesis is not installed")
    with running_server(PagedScriptedRunner(), engine_options={"prefix_cache": True}) as server:
        options = f"--checks not_a_server_error -n {CASES_PER_OPERATION} --mode all --phases coverage,fuzzing --seed 1"
        run = subprocess.run(
            [command, "run", f"{server.url}/openapi.json", *options.split(), "--suppress-health-check", "all"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        found = await metrics(server)
    assert run.returncode == 0, run.stdout[-3000:]
    counts = {name: value for name, value in found.items() if name.startswith("resin_http_requests_total{")}
    assert sum(counts.values()) >= CASES
    assert not [name for name in counts if 'status="5' in name]
    assert found["resin_http_active_sessions"] == found["resin_http_queue_depth"] == 0
