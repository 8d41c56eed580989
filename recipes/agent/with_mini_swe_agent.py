"""mini-swe-agent in a toy repository: product.py must hold the product, which its test checks.

The package mini-swe-agent, with its DefaultAgent, LitellmModel and LocalEnvironment. The model's
commands run in a temporary folder, as the user who trains.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

task = json.load(sys.stdin)
(question,) = task["prompt"]
temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)
(folder / "product.py").write_text("VALUE = 0\n")
(folder / "test.py").write_text(f"import product\nassert product.VALUE == {task['ground_truth']}\n")

os.environ |= {
    "MSWEA_GLOBAL_CONFIG_DIR": str(folder / ".config"),
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",  # the model has no price
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else litellm downloads a list of prices
}
from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.environments.local import LocalEnvironment  # noqa: E402
from minisweagent.models.litellm_model import LitellmModel  # noqa: E402

agent = DefaultAgent(
    LitellmModel(
        model_name="openai/policy",  # reads OPENAI_BASE_URL and OPENAI_API_KEY
        observation_template="{{ output.output[:9] }}",  # errors of the shell are long
        format_error_template="?",
    ),
    LocalEnvironment(cwd=str(folder)),
    system_template="",
    instance_template="{{ task }} in product.py:",
    step_limit=3,
)
end = agent.run(question["content"])
tested = subprocess.run([sys.executable, "test.py"], cwd=folder, capture_output=True, text=True)
print(tested.stderr)
submitted = end.get("exit_status") == "Submitted"
score = float(submitted and tested.returncode == 0)
print(json.dumps({"score": score, "submitted": float(submitted), "calls": agent.n_calls}))
