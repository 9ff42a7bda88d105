"""Tests of resuming: a run that is saved, loaded in a new process and resumed has bit-identical losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import forked

STEPS = 40

RUN = """
import json, sys
import torch, flexact
from torch import nn
from torch.nn import functional as F

folder, policy, form, cut, resumes = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5] == "resume"
STEPS = 40

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return F.relu(self.norm(self.second(F.relu(self.first(x)))) + x)

torch.manual_seed(0 if not resumes else 99)
policies = {
    "default": flexact.FlexConfig(policy=flexact.Policy(noise=1.0)),
    "paper": flexact.FlexConfig.paper(),
    "channel": flexact.FlexConfig(granularity="channel", policy=flexact.Policy(noise=1.0, forward="hard")),
}
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Block(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1))
model = flexact.convert(model, config=policies[policy], example_inputs=torch.zeros(2, 4))
optimizer = torch.optim.Adam(flexact.param_groups(model, weight_decay=1e-3), lr=0.02)
schedule = flexact.Schedule(model, total_steps=STEPS, optimizer=optimizer)

def save():
    if form == "safetensors":
        from safetensors.torch import save_file
        save_file(model.state_dict(), f"{folder}/model.safetensors")
    else:
        torch.save(model.state_dict(), f"{folder}/model.pt")
    torch.save({"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, f"{folder}/rest.pt")

def load():
    if form == "safetensors":
        from safetensors.torch import load_file
        model.load_state_dict(load_file(f"{folder}/model.safetensors"))
    else:
        model.load_state_dict(torch.load(f"{folder}/model.pt", weights_only=True))
    rest = torch.load(f"{folder}/rest.pt", weights_only=True)
    optimizer.load_state_dict(rest["optimizer"])
    schedule.load_state_dict(rest["schedule"])

if resumes:
    load()
losses = []
for step in range(cut if resumes else 0, STEPS):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 4, generator=generator)
    loss = (model(x) - x.prod(1, keepdim=True)).square().mean()
    (loss + flexact.penalty(model)).backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    losses.append(loss.item().hex())
    if step + 1 == cut and not resumes:
        save()
print(json.dumps({"losses": losses, "selection": flexact.selection(model).to_dict()}))
"""


@pytest.mark.parametrize(
    ("policy", "form", "cut"),
    [("default", "safetensors", 15), ("default", "torch", 33), ("paper", "torch", 15), ("channel", "safetensors", 15)],
)
def test_a_resumed_run_equals_an_uninterrupted_one(policy: str, form: str, cut: int, tmp_path: Path) -> None:
    program = tmp_path / "run.py"
    program.write_text(RUN)

    def run(mode: str) -> dict[str, Any]:
        (printed,) = forked.outputs(forked.Program(program, tmp_path, policy, form, cut, mode))
        return json.loads(printed)

    whole, rest = run("whole"), run("resume")
    assert len(whole["losses"]) == STEPS
    assert rest["losses"] == whole["losses"][cut:]
    assert rest["selection"] == whole["selection"]
    assert len(set(whole["losses"])) == STEPS
    assert all(row["committed"] for row in rest["selection"]["rows"])
