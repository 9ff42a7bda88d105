/* A site as one node of autograd, without Python: the kernels of its forward and of its backward, and their buffers.
   `chain.py` describes a chain, and `extension.py` compiles this file. */

#include <Python.h>

#include <ATen/ops/cat.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/version.h>

#include "pass_operators.h"
#include "passes.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/* A pass that runs alone, on several tensors that are concatenated, and others. */
struct Joined : torch::CustomClassHolder {
    Pass pass;
    std::vector<int64_t> outputs;
};

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

struct Site : torch::autograd::Function<Site> {
    static variable_list forward(AutogradContext *ctx, at::TensorList inputs, const ChainPtr &chain) {
        at::AutoDispatchBelowADInplaceOrView guard;
        const c10::DeviceGuard on_device(inputs[0].device());
        std::vector<Tensor> every(inputs.begin(), inputs.end());
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
        variable_list found(chain.dtypes.size() + 1);
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

Gradient gradient(PyObject *item) {
    const auto all = numbers(item);
    return {all.at(0), all.at(1), all.at(2)};
}

template <typename Held> constexpr const char *Name = nullptr;
template <> constexpr const char *Name<Chain> = "flexact.chain";
template <> constexpr const char *Name<Joined> = "flexact.pass";

template <typename Held> PyObject *capsule(c10::intrusive_ptr<Held> held) {
    return PyCapsule_New(held.release(), Name<Held>, [](PyObject *own) {
        c10::intrusive_ptr<Held>::reclaim(static_cast<Held *>(PyCapsule_GetPointer(own, Name<Held>)));
    });
}

/* make(inputs, forward, restore, backward, x, statistics, saved, gradients, again): return a chain for inputs like these. */
PyObject *make(PyObject *, PyObject *arguments) {
    HANDLE_TH_ERRORS
    PyObject *inputs, *forward, *restore, *backward, *saved, *gradients, *again;
    long long x, statistics;
    if (!PyArg_ParseTuple(arguments, "OOOOLLOOO", &inputs, &forward, &restore, &backward, &x, &statistics, &saved,
                          &gradients, &again))
        return nullptr;
    auto chain = c10::make_intrusive<Chain>();
    const auto given = list<Tensor>(inputs, tensor);
    for (const auto &one : given) chain->dtypes.push_back(one.scalar_type());
    chain->device = static_cast<int>(given.at(0).get_device());
    chain->forward = list<Pass>(forward, pass);
    chain->restore = list<Pass>(restore, pass);
    chain->backward = pass(backward);
    chain->x = x, chain->statistics = statistics;
    chain->saved = numbers(saved);
    chain->gradients = list<Gradient>(gradients, gradient);
    for (size_t i = 0; i < given.size(); i++) chain->aligned.push_back(must_be_aligned(*chain, i));
    chain->again = Reference(again);
    return capsule(std::move(chain));
    END_HANDLE_TH_ERRORS
}

/* apply(chain, *inputs): return x and its statistics; None if the chain does not support the inputs. */
PyObject *apply(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count > 0, "expected a chain");
    auto *pointer = static_cast<Chain *>(PyCapsule_GetPointer(arguments[0], Name<Chain>));
    if (!pointer) return nullptr;
    const auto chain = ChainPtr::reclaim_copy(pointer);
    std::vector<Tensor> inputs;
    inputs.reserve(count - 1);
    TORCH_CHECK_VALUE(static_cast<size_t>(count - 1) == chain->dtypes.size(), "expected ", chain->dtypes.size(), " inputs");
    for (Py_ssize_t i = 1; i < count; i++) {
        inputs.push_back(tensor(arguments[i]));
        const auto &one = inputs.back();
        if (one.scalar_type() != chain->dtypes[i - 1] || one.get_device() != chain->device || one._is_zerotensor() ||
            one.is_neg() || one._fw_grad(0).defined() || (chain->aligned[i - 1] && address(one) % 16))
            Py_RETURN_NONE;
        /* The others must not become inputs of the node. */
        if (inputs.size() > chain->gradients.size() && one.requires_grad()) inputs.back() = one.detach();
    }
    if (!inputs[0].is_non_overlapping_and_dense()) Py_RETURN_NONE;
    const auto found = Site::apply(at::TensorList(inputs), chain);
    PyObject *x = THPVariable_Wrap(found[0]), *statistics = THPVariable_Wrap(found[1]);
    PyObject *both = PyTuple_Pack(2, x, statistics);
    Py_DECREF(x), Py_DECREF(statistics);
    return both;
    END_HANDLE_TH_ERRORS
}

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

/* source_of(h): the same as `restoring.source_of`, as a tuple. */
PyObject *source_of(PyObject *, PyObject *item) {
    HANDLE_TH_ERRORS
    const Tensor h = tensor(item);
    if (h._version() || !h.grad_fn()) Py_RETURN_NONE;
    auto found = saved_by<torch::autograd::generated::NativeBatchNormBackward0>(h);
    if (found.empty()) found = saved_by<torch::autograd::generated::CudnnBatchNormBackward0>(h);
    if (found.empty() || !found[3].defined()) Py_RETURN_NONE;
    const auto &y = found[0];
    const bool is_supported = found[1].scalar_type() == at::kFloat && found[2].scalar_type() == at::kFloat &&
                              y.scalar_type() == h.scalar_type() && y.sizes() == h.sizes() &&
                              y.strides() == h.strides() &&
                              (y.is_contiguous() || y.is_contiguous(at::MemoryFormat::ChannelsLast)) &&
                              found[3].is_contiguous() && found[4].is_contiguous() && y.numel() &&
                              found[3].storage().nbytes() && found[4].storage().nbytes(); /* else freed, as in Python */
    if (!is_supported) Py_RETURN_NONE;
    PyObject *source = PyTuple_New(found.size());
    for (size_t i = 0; i < found.size(); i++) PyTuple_SET_ITEM(source, i, THPVariable_Wrap(found[i]));
    return source;
    END_HANDLE_TH_ERRORS
}

/* make_joined(pass, outputs): return a pass for `run_joined`. */
PyObject *make_joined(PyObject *, PyObject *arguments) {
    HANDLE_TH_ERRORS
    PyObject *described, *outputs;
    if (!PyArg_ParseTuple(arguments, "OO", &described, &outputs)) return nullptr;
    auto joined = c10::make_intrusive<Joined>();
    joined->pass = pass(described), joined->outputs = numbers(outputs);
    return capsule(std::move(joined));
    END_HANDLE_TH_ERRORS
}

/* run_joined(pass, parts, others): run it on the concatenation of the parts, flattened, and on the others. Return its
   outputs; None if a kernel does not support an address. */
PyObject *run_joined(PyObject *, PyObject *arguments) {
    HANDLE_TH_ERRORS
    PyObject *own, *parts, *others;
    if (!PyArg_ParseTuple(arguments, "OOO", &own, &parts, &others)) return nullptr;
    const auto *joined = static_cast<Joined *>(PyCapsule_GetPointer(own, Name<Joined>));
    if (!joined) return nullptr;
    at::NoGradGuard no_grad;
    auto flat = list<Tensor>(parts, tensor);
    for (auto &one : flat) one = one.reshape(-1);
    TORCH_CHECK_VALUE(!flat.empty(), "expected tensors to concatenate");
    const c10::DeviceGuard on_device(flat[0].device());
    std::vector<Tensor> tensors{at::cat(flat)};
    for (auto &one : list<Tensor>(others, tensor)) tensors.push_back(std::move(one));
    add_buffers(joined->pass, tensors);
    if (launch(joined->pass, tensors, static_cast<int>(tensors[0].get_device()))) Py_RETURN_NONE;
    PyObject *found = PyTuple_New(joined->outputs.size());
    for (size_t i = 0; i < joined->outputs.size(); i++)
        PyTuple_SET_ITEM(found, i, THPVariable_Wrap(tensors[joined->outputs[i]]));
    return found;
    END_HANDLE_TH_ERRORS
}

/* connect(launch, check, error_text, current_stream): set the addresses of the functions of `Driver`. */
PyObject *connect(PyObject *, PyObject *arguments) {
    unsigned long long launch, check, error_text, current_stream;
    if (!PyArg_ParseTuple(arguments, "KKKK", &launch, &check, &error_text, &current_stream)) return nullptr;
    driver.launch = reinterpret_cast<decltype(driver.launch)>(launch);
    driver.check = reinterpret_cast<decltype(driver.check)>(check);
    driver.error_text = reinterpret_cast<decltype(driver.error_text)>(error_text);
    driver.current_stream = reinterpret_cast<decltype(driver.current_stream)>(current_stream);
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"make", make, METH_VARARGS, nullptr},
    {"apply", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(apply)), METH_FASTCALL, nullptr},
    {"source_of", source_of, METH_O, nullptr},
    {"make_joined", make_joined, METH_VARARGS, nullptr},
    {"run_joined", run_joined, METH_VARARGS, nullptr},
    {"connect", connect, METH_VARARGS, nullptr},
    {"set_first_run", set_first_run, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "chain", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_chain() { return PyModule_Create(&module); }
