"""The matrix's rows: the file of tests behind each, what must hold in it, and what a user has to know."""

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
        "outputs and gradients of eager mode; no graph break; at most one recompilation an elimination round",
        (
            "In training a whole graph needs a `Schedule`, which makes the draw outside of it; without one a step is a "
            "forward, and its draw breaks the graph. The same holds for `FlexConfig(draw_per='forward')`.",
            "The first step compiles two graphs where the model's class has a forward of its own: torch compiles the "
            "draw, a forward pre-hook, apart.",
        ),
    ),
    Row(
        "autocast",
        "autocast to bf16, and to fp16 with `GradScaler`",
        "200 steps without NaN; logits, probabilities and statistics in float32; an overflow moves no logit",
        (
            "Call `schedule.step()` after every `scaler.step(optimizer)`, also after one that was skipped. With fp16 "
            "use optimizers without `fused=True`: a fused one unscales, and passes an overflow over, inside its own "
            "step, after the `Schedule` has read the gradients.",
        ),
    ),
    Row(
        "checkpointing",
        "activation checkpointing, reentrant and not; the compiler's memory budget",
        "losses, penalties, statistics and gradients of a run without it",
        (
            "Use a `Schedule`: its draw is the step's, whatever is recomputed, and recomputed calls are not counted "
            "twice.",
        ),
    ),
    Row(
        "accumulation",
        "gradient accumulation and clipping",
        "one draw an optimizer step, or one a micro-batch; equal micro-batches make the step of one batch",
        (
            "`FlexConfig(draw_per='step')`, the default, lets the micro-batches of a step share its draw; "
            "`draw_per='forward'` gives each its own, the first that of the step.",
            "Divide `loss + flexact.penalty(model)` by the number of micro-batches; the penalty's statistics are the "
            "mean over those seen so far. Call `schedule.step()` once an optimizer step.",
        ),
    ),
    Row(
        "ddp",
        "DDP, 2 and 3 gloo ranks",
        "logits bit-identical on all ranks; statistics averaged; one process with the whole batch gives the same "
        "within 1e-5",
        (
            "`FlexConfig(noise_across_ranks='shared')`, the default, draws the same noise on all ranks; `'per_rank'` "
            "one each, and the logits still stay identical.",
            "The ranks' batches must be of one size. As for any network, batch norm has to be synchronised for the "
            "equality with one process.",
        ),
    ),
    Row(
        "fsdp",
        "FSDP2, `fully_shard`, 2 gloo ranks",
        "trains as one process does within 1e-5, saves, loads, goes on bit for bit, extracts",
        (
            "Order: `convert`, `fully_shard`, `param_groups`, `Schedule`. Reading a sharded model (`selection`, "
            "`Recorder.record`, `commit`) gathers its logits: call it on every rank.",
            "With a mixed-precision policy call `fully_shard(site)` on each `FlexAct` first, without that policy; "
            "logits in half precision are an error that says so.",
            "`extract` of a sharded model is an error that says what to do: collect the state with "
            "`get_model_state_dict`, load it into a model converted in the same way, extract that one.",
        ),
    ),
    Row(
        "travelling",
        "EMA (`AveragedModel`), `deepcopy`, pickle, `torch.save`, `state_dict` to safetensors and back",
        "temperature, alive masks and commitment travel along",
        (
            "`AveragedModel(use_buffers=True)` averages masks, which is an error that says so; the default, "
            "`use_buffers=False`, copies them.",
        ),
    ),
    Row(
        "cuda_graphs",
        "CUDA graphs",
        "a captured step replays with fresh noise, and repeats with the same seed",
        (
            "Warm up with whole steps, `schedule.step()` included. Capture forward, backward and the optimizer's step "
            "together, call `schedule.step()` between replays, and capture anew when a candidate was dropped, or a "
            'warm-up with `init="original"` ended.',
        ),
    ),
    Row(
        "export",
        "`torch.export`, ONNX, `torch.jit`, `torch.ao` int8 of the extracted model",
        "outputs of the plain network, built by hand with the same functions",
        ("`torch.jit.script` does not take transformers' models, converted or not: BERT is traced.",),
    ),
    Row(
        "func",
        "`torch.func`: `grad`, `vmap`, `functional_call`, `hessian`, `jvp`; double backward",
        "what autograd gives through the plainly written blend",
        (
            "Inside a transform no statistics are gathered: train with `backward()` where the policy needs them.",
            "torch's fused attention has no second derivative: use transformers' `attn_implementation='eager'` for "
            "one. Nor has a site that was fused with its batch norm (`convert(fuse=True)` on a GPU), which is an error "
            "that says so.",
        ),
    ),
    Row(
        "devices",
        "meta device, `torch.device` contexts, `model.half()`, `.to()`",
        "trains; logits and statistics stay in float32, the weights go where they were sent",
    ),
)
