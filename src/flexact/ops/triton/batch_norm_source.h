/* What a batch norm saved to compute its output. `restoring.py` finds the same without the extension. */

#pragma once

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/version.h>

namespace {

using at::Tensor;
using torch::autograd::variable_list;

/* Return what a batch norm in training saved to compute its output h, and its bias, in the order of `restoring.Source`;
   nothing if the node of h is another one. */
template <typename Norm> variable_list saved_by(const Tensor &h) {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 8
    return {}; /* has_hooks is missing, and Python does not call this */
#else
    const auto *norm = dynamic_cast<const Norm *>(h.grad_fn().get());
    if (!norm || !norm->training || norm->input_.has_hooks()) return {};
    const auto *bias = dynamic_cast<const torch::autograd::AccumulateGrad *>(norm->next_edge(2).function.get());
    if (!bias) return {};
    try {
        if (!norm->running_mean_.unpack().defined()) return {}; /* as in Python */
        return {norm->input_.unpack(), norm->result1_.unpack(h.grad_fn()), norm->result2_.unpack(h.grad_fn()),
                norm->weight_.unpack(), bias->variable};
    } catch (const std::exception &) { /* y was written to, or the graph was freed */
        return {};
    }
#endif
}

/* The same as `restoring.source_of`, of which it leaves the checks of dtype and hooks to the caller. */
variable_list source(const Tensor &h) {
    if (h._version() || !h.grad_fn()) return {};
    auto found = saved_by<torch::autograd::generated::NativeBatchNormBackward0>(h);
    if (found.empty()) found = saved_by<torch::autograd::generated::CudnnBatchNormBackward0>(h);
    if (found.empty() || !found[3].defined()) return {};
    const auto &y = found[0];
    const bool is_supported = found[1].scalar_type() == at::kFloat && found[2].scalar_type() == at::kFloat &&
                              y.scalar_type() == h.scalar_type() && y.sizes() == h.sizes() &&
                              y.strides() == h.strides() &&
                              (y.is_contiguous() || y.is_contiguous(at::MemoryFormat::ChannelsLast)) &&
                              found[3].is_contiguous() && found[4].is_contiguous() && y.numel() &&
                              found[3].storage().nbytes() && found[4].storage().nbytes(); /* else freed, as in Python */
    return is_supported ? found : variable_list();
}

}  // namespace
