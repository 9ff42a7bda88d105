/* A chain of passes as a node of autograd. `chain.py` describes a chain. */

#pragma once

#include <Python.h>

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/object_ptr.h>

#include "passes.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/* Where the gradient of an input is: a tensor of the backward pass, or `length` elements of it if that is not 0. */
struct Gradient {
    int64_t position, offset, length;

    bool operator==(const Gradient &other) const {
        return position == other.position && offset == other.offset && length == other.length;
    }
};

struct Chain : torch::CustomClassHolder {
    std::vector<at::ScalarType> dtypes; /* of the inputs */
    std::vector<bool> aligned;          /* whether the address of an input must be a multiple of 16 */
    int device;
    std::vector<Pass> forward;
    std::vector<Pass> restore; /* at most one, from saved tensors to one that takes the place of the first of them */
    Pass backward; /* its inputs are the gradient of x and the saved tensors */
    int64_t x, statistics;
    std::vector<int64_t> saved;
    std::vector<Gradient> gradients;    /* of the first inputs */
    Reference again{nullptr};           /* a function for a backward with create_graph=True */
    mutable bool is_slower = false;     /* than Python, because such a backward ran */
    std::vector<std::vector<int64_t>> sizes; /* of the inputs */
    std::vector<int64_t> strides;       /* of the first input */
    bool is_flat;                       /* whether it serves any first input with as many elements */
    Reference kind{nullptr};            /* distinguishes it from others of the same site */
    bool need_logits;
};

using ChainPtr = c10::intrusive_ptr<Chain>;

/* Whether a kernel needs an address of an input that is a multiple of 16. */
bool must_be_aligned(const Chain &chain, size_t input) {
    std::vector<uint64_t> every(chain.dtypes.size(), 0);
    every[input] = 8;
    const auto fails = [](const Pass &pass, const std::vector<uint64_t> &from) {
        std::vector<uint64_t> own;
        for (const auto position : pass.takes) own.push_back(from[position]);
        own.resize(own.size() + pass.buffers.size());
        return driver.check(pass.kernels, pass.count, own.data()) != 0;
    };
    bool found = false;
    for (const auto &pass : chain.forward) {
        found |= fails(pass, every);
        every.resize(every.size() + pass.buffers.size());
    }
    std::vector<uint64_t> saved;
    for (const auto position : chain.saved) saved.push_back(every[position]);
    for (const auto &pass : chain.restore) found |= fails(pass, saved);
    saved.insert(saved.begin(), 0);
    return found || fails(chain.backward, saved);
}

/* Return the gradients of a backward with create_graph=True, from Python. */
variable_list again(const Chain &chain, const Tensor &delta, const variable_list &saved) {
    const Lock lock;
    chain.is_slower = true;
    THPObjectPtr arguments(PyTuple_New(1 + saved.size()));
    PyTuple_SET_ITEM(arguments.get(), 0, THPVariable_Wrap(delta));
    for (size_t i = 0; i < saved.size(); i++) PyTuple_SET_ITEM(arguments.get(), i + 1, THPVariable_Wrap(saved[i]));
    THPObjectPtr result(PyObject_Call(chain.again.object, arguments.get(), nullptr));
    if (!result) {
        python_error error;
        error.persist();
        throw error;
    }
    TORCH_CHECK_TYPE(PyTuple_Check(result.get()), "expected a tuple of gradients");
    variable_list found;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(result.get()); i++) {
        PyObject *one = PyTuple_GET_ITEM(result.get(), i);
        found.push_back(THPVariable_Check(one) ? THPVariable_Unpack(one) : Tensor());
    }
    return found;
}

/* Replace the first saved tensor by one that a pass computes, with the graph of the first input of this node. */
void restore(const Pass &pass, variable_list &saved, int device) {
    {
        at::AutoDispatchBelowADInplaceOrView guard;
        const c10::DeviceGuard on_device(saved[0].device());
        auto own = taken(pass, saved);
        add_buffers(pass, own);
        launch(pass, own, device);
        saved[0] = own[pass.takes.size()];
    }
    if (at::GradMode::is_enabled())
        torch::autograd::impl::set_gradient_edge(saved[0], torch::autograd::get_current_node()->next_edge(0));
}

/* Inputs without gradients. The type hides them from the node, which would store the metadata of each. */
struct Constants {
    at::TensorList tensors;
};

struct Site : torch::autograd::Function<Site> {
    static variable_list forward(AutogradContext *ctx, at::TensorList inputs, Constants constants,
                                 const ChainPtr &chain) {
        at::AutoDispatchBelowADInplaceOrView guard;
        const c10::DeviceGuard on_device(inputs[0].device());
        std::vector<Tensor> every;
        every.reserve(32);
        every.insert(every.end(), inputs.begin(), inputs.end());
        every.insert(every.end(), constants.tensors.begin(), constants.tensors.end());
        for (const auto &pass : chain->forward) {
            auto own = taken(pass, every);
            add_buffers(pass, own);
            launch(pass, own, chain->device);
            every.insert(every.end(), own.begin() + pass.takes.size(), own.end());
        }
        variable_list saved;
        for (const auto position : chain->saved) saved.push_back(every[position]);
        ctx->save_for_backward(std::move(saved));
        ctx->set_materialize_grads(false);
        ctx->saved_data["chain"] = c10::IValue::make_capsule(chain);
        ctx->mark_non_differentiable({every[chain->statistics]});
        return {every[chain->x], every[chain->statistics]};
    }

    static variable_list backward(AutogradContext *ctx, variable_list upstream) {
        const auto held = ctx->saved_data["chain"].toCapsule();
        const auto &chain = static_cast<const Chain &>(*held);
        variable_list found(chain.gradients.size() + 2);
        if (!upstream[0].defined()) return found;
        auto saved = ctx->get_saved_variables();
        for (const auto &pass : chain.restore) restore(pass, saved, chain.device);
        if (at::GradMode::is_enabled()) {
            auto given = again(chain, upstream[0], saved);
            std::move(given.begin(), given.end(), found.begin());
            return found;
        }
        at::AutoDispatchBelowADInplaceOrView guard;
        const c10::DeviceGuard on_device(saved[0].device());
        const Tensor h = saved[0];
        Tensor delta = upstream[0];
        if (delta.strides() != h.strides() || delta._is_zerotensor() || delta.is_neg())
            delta = at::empty_like(h).copy_(delta);
        saved.insert(saved.begin(), delta);
        auto tensors = taken(chain.backward, saved);
        add_buffers(chain.backward, tensors);
        if (launch(chain.backward, tensors, chain.device)) {
            tensors[0] = at::empty_like(h).copy_(delta);
            launch(chain.backward, tensors, chain.device);
        }
        for (size_t i = 0; i < chain.gradients.size(); i++) {
            const auto &own = chain.gradients[i];
            if (!ctx->needs_input_grad(i)) continue;
            /* Two views of one part would share memory as the .grad of two parameters, so the same one is returned. */
            for (size_t j = 0; j < i && !found[i].defined(); j++)
                if (own == chain.gradients[j]) found[i] = found[j];
            if (found[i].defined()) continue;
            found[i] = own.length ? tensors[own.position].narrow(0, own.offset, own.length) : tensors[own.position];
        }
        return found;
    }
};

}  // namespace
