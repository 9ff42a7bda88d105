"""The rows of the compatibility matrix: the test file of each, what must hold, and notes for users."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One line of the table in docs/matrix.md."""

    file: str
    """`test_<file>.py` beside this one."""
    title: str
    holds: str
    notes: tuple[str, ...] = ()


ROWS = (
    Row(
        "compile",
        "`torch.compile(fullgraph=True)`, default and dynamic shapes",
        "outputs and gradients equal those of eager mode; no graph break; at most one recompilation per elimination "
        "round",
        (
            "To train with a full graph, use a `Schedule`, which draws the noise outside of the graph. Without one, "
            "every forward counts as a step and its draw breaks the graph.",
            "If the model's class has a forward of its own, the first step compiles two graphs: torch compiles the "
            "draw, which is a forward pre-hook, separately.",
        ),
    ),
    Row(
        "autocast",
        "autocast to bf16, and to fp16 with `GradScaler`",
        "200 steps without NaN; logits, probabilities and statistics stay in float32; an overflow moves no logit",
        ("Call `schedule.step()` after every `scaler.step(optimizer)`, even if the scaler skipped the step.",),
    ),
    Row(
        "checkpointing",
        "activation checkpointing, reentrant and non-reentrant; the compiler's memory budget",
        "losses, penalties, statistics and gradients equal those of a run without it",
        (
            "Use a `Schedule`: it draws once per step, whatever is recomputed, and does not count recomputed calls "
            "twice.",
        ),
    ),
    Row(
        "accumulation",
        "gradient accumulation and clipping",
        "one draw per optimizer step; equal micro-batches give the step of one batch",
        (
            "The micro-batches of a step share one draw.",
            "Divide `loss + flexact.penalty(model)` by the number of micro-batches; the penalty uses the mean of the "
            "statistics seen so far. Call `schedule.step()` once per optimizer step.",
        ),
    ),
    Row(
        "ddp",
        "DDP, 2 and 3 gloo ranks",
        "logits bit-identical on all ranks; statistics averaged; equal to one process with the whole batch within 1e-5",
        (
            "All ranks draw the same noise.",
            "All ranks need the same batch size. As for any network, equality with one process requires synchronised "
            "batch norm.",
        ),
    ),
    Row(
        "fsdp",
        "FSDP2, `fully_shard`, 2 gloo ranks",
        "trains like one process within 1e-5, saves, loads, resumes bit-identically, extracts",
        (
            "Order: `convert`, `fully_shard`, `param_groups`, `Schedule`. Functions that read a sharded model "
            "(`selection`, `Recorder`, `Recorder.record`, `commit`) gather its logits, so call them on every rank.",
            "With a mixed-precision policy, first call `fully_shard(site)` on each `FlexAct` without that policy. "
            "Logits in half precision raise an error.",
            "`extract` raises for a sharded model. Collect the state with `get_model_state_dict`, load it into a model "
            "converted in the same way, and extract that one.",
        ),
    ),
    Row(
        "travelling",
        "EMA (`AveragedModel`), `deepcopy`, pickle, `torch.save`, `state_dict` to safetensors and back",
        "temperature, alive masks and commitment are preserved",
        (
            "`AveragedModel(use_buffers=True)` would average the masks, which raises an error. The default, "
            "`use_buffers=False`, copies them. The candidate that a trial is training is preserved by `deepcopy` and "
            "pickle only: [see the caveats](caveats.md#during-training).",
        ),
    ),
    Row(
        "cuda_graphs",
        "CUDA graphs",
        "a captured step replays with fresh noise, and is reproducible with the same seed",
        (
            "Warm up with whole steps, including `schedule.step()`. Capture forward, backward and the optimizer's step "
            "together, and call `schedule.step()` between replays. Recapture after each drop, after a rewind, for "
            'each candidate of a trial, and at the end of a warm-up with `init="original"`.',
        ),
    ),
    Row(
        "export",
        "`torch.export`, ONNX, `torch.jit`, `torch.ao` int8 of the extracted model",
        "outputs equal those of a plain network built by hand with the same functions",
        ("`torch.jit.script` does not support transformers' models, converted or not: BERT is traced.",),
    ),
    Row(
        "func",
        "`torch.func`: `grad`, `vmap`, `functional_call`, `hessian`, `jvp`; double backward",
        "results equal those of autograd through the blend in plain torch",
        (
            "Statistics are not collected inside a transform: if the policy needs them, train with `backward()`.",
            "torch's fused attention has no second derivative: use transformers' `attn_implementation='eager'` for "
            "one. A site that is fused with its batch norm (`convert(fuse=True)` on a GPU) has none either, and "
            "raises.",
        ),
    ),
    Row(
        "devices",
        "meta device, `torch.device` contexts, `model.half()`, `.to()`",
        "trains; logits and statistics stay in float32, the weights move as requested",
    ),
)
