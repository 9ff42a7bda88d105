/* A site as one node of autograd, without Python: the kernels of its forward and of its backward, and their buffers.
   `chain.py` describes a chain, and `extension.py` compiles this file. */

#include <Python.h>

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/cat.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/object_ptr.h>

#include "batch_norm_source.h"
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
    mutable bool is_slower = false;     /* than Python, because such a backward ran */
    std::vector<int64_t> sizes, strides; /* of the first input */
    std::vector<int64_t> table;         /* the sizes of the probabilities of a site that is not fused */
    bool is_flat;                       /* whether it serves any first input with as many elements */
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

/* make(inputs, forward, restore, backward, x, statistics, saved, gradients, again, is_flat): return a chain for inputs
   like these. */
PyObject *make(PyObject *, PyObject *arguments) {
    HANDLE_TH_ERRORS
    PyObject *inputs, *forward, *restore, *backward, *saved, *gradients, *again;
    long long x, statistics;
    int is_flat;
    if (!PyArg_ParseTuple(arguments, "OOOOLLOOOp", &inputs, &forward, &restore, &backward, &x, &statistics, &saved,
                          &gradients, &again, &is_flat))
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
    chain->sizes = given[0].sizes().vec(), chain->strides = given[0].strides().vec();
    chain->table = given.at(2).sizes().vec();
    chain->is_flat = is_flat, chain->need_logits = given[1].requires_grad();
    return capsule(std::move(chain));
    END_HANDLE_TH_ERRORS
}

/* Return x and its statistics; nothing if the chain does not support the inputs. */
variable_list applied(const ChainPtr &chain, std::vector<Tensor> &inputs) {
    TORCH_CHECK_VALUE(inputs.size() == chain->dtypes.size(), "expected ", chain->dtypes.size(), " inputs");
    for (size_t i = 0; i < inputs.size(); i++) {
        auto &one = inputs[i];
        if (one.scalar_type() != chain->dtypes[i] || one.get_device() != chain->device || one._is_zerotensor() ||
            one.is_neg() || one._fw_grad(0).defined() || (chain->aligned[i] && address(one) % 16))
            return {};
        if (i < chain->gradients.size()) continue;
        if (!one.is_non_overlapping_and_dense()) return {};
        if (one.requires_grad()) one = one.detach(); /* it must not become an input of the node */
    }
    if (!inputs[0].is_non_overlapping_and_dense()) return {};
    return Site::apply(at::TensorList(inputs), chain);
}

ChainPtr held_chain(PyObject *item) {
    auto *pointer = static_cast<Chain *>(PyCapsule_GetPointer(item, Name<Chain>));
    if (!pointer) throw python_error();
    return ChainPtr::reclaim_copy(pointer);
}

/* apply(chain, *inputs): return x and its statistics; None if the chain does not support the inputs. */
PyObject *apply(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count > 0, "expected a chain");
    std::vector<Tensor> inputs;
    inputs.reserve(count - 1);
    for (Py_ssize_t i = 1; i < count; i++) inputs.push_back(tensor(arguments[i]));
    const auto found = applied(held_chain(arguments[0]), inputs);
    if (found.empty()) Py_RETURN_NONE;
    const THPObjectPtr x(THPVariable_Wrap(found[0])), statistics(THPVariable_Wrap(found[1]));
    return PyTuple_Pack(2, x.get(), statistics.get());
    END_HANDLE_TH_ERRORS
}

/* source_of(h): the same as `source`, as a tuple; None if there is none. */
PyObject *source_of(PyObject *, PyObject *item) {
    HANDLE_TH_ERRORS
    const auto found = source(tensor(item));
    if (found.empty()) Py_RETURN_NONE;
    PyObject *own = PyTuple_New(found.size());
    for (size_t i = 0; i < found.size(); i++) PyTuple_SET_ITEM(own, i, THPVariable_Wrap(found[i]));
    return own;
    END_HANDLE_TH_ERRORS
}

/* Whether operations on ordinary tensors run here as they are, with gradients: outside of torch.func, traces and modes. */
bool is_eager() {
    using at::DispatchKey;
    return at::GradMode::is_enabled() && !c10::impl::TorchDispatchModeTLS::stack_len() &&
           !c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode) &&
           !c10::impl::tls_is_dispatch_key_included(DispatchKey::Tracer);
}

/* Whether a chain ran for a call like this one. source: empty if h is saved. */
bool serves(const Chain &chain, const Tensor &h, const Tensor &logits, const variable_list &source) {
    return !chain.is_slower && chain.restore.empty() == source.empty() && chain.need_logits == logits.requires_grad() &&
           (chain.need_logits || h.requires_grad()) &&
           (chain.is_flat ? h.numel() == c10::multiply_integers(chain.sizes)
                          : h.sizes() == chain.sizes && h.strides() == chain.strides);
}

/* Return the rows of a site in the table of the probabilities of all sites. */
Tensor own_part(const Tensor &table, int64_t first_row, const std::vector<int64_t> &sizes) {
    at::AutoDispatchBelowADInplaceOrView guard; /* a view that autograd tracks takes longer, and the table has no graph */
    return table.narrow(0, first_row, sizes[0]).narrow(1, 0, sizes[1]);
}

int64_t version(const Tensor &one) { return one.is_inference() ? -1 : one._version(); }

/* repeat(chains, h, logits, read, dropped_at, alive_version, table, first_row, temperature): run a call of a site that
   is not fused again with one of the chains that ran for earlier calls. Return x, the sensitivities, or None if there
   are none or checkpointing recomputes the call, and the number of elements per sample and row; None if the call is not
   like an earlier one.

   read: the id of the logits and how often they were written to when the table was computed. alive_version: how often
   `dropped_at` was written to when the site read it. */
PyObject *repeat(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 9 && PyTuple_Check(arguments[0]), "expected a tuple of chains and 8 more arguments");
    PyObject *chains = arguments[0], *read = arguments[3];
    if (!THPVariable_CheckExact(arguments[1]) || !THPVariable_CheckExact(arguments[2]) || !PyTuple_Check(read) ||
        !is_eager())
        Py_RETURN_NONE;
    const Tensor h = tensor(arguments[1]), logits = tensor(arguments[2]);
    if (PyLong_AsVoidPtr(PyTuple_GET_ITEM(read, 0)) != arguments[2] ||
        number(PyTuple_GET_ITEM(read, 1)) != version(logits) ||
        number(arguments[5]) != version(tensor(arguments[4])))
        Py_RETURN_NONE;
    variable_list from;
    if (h.scalar_type() == at::kHalf || h.scalar_type() == at::kBFloat16)
        if (!at::SavedTensorDefaultHooks::get_hooks()) from = source(h);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(chains); i++) {
        const auto chain = held_chain(PyTuple_GET_ITEM(chains, i));
        if (!serves(*chain, h, logits, from)) continue;
        std::vector<Tensor> inputs;
        inputs.reserve(chain->dtypes.size());
        inputs.push_back(h), inputs.push_back(logits);
        inputs.push_back(own_part(tensor(arguments[6]), number(arguments[7]), chain->table));
        inputs.push_back(tensor(arguments[8]));
        std::move(from.begin(), from.end(), std::back_inserter(inputs));
        const auto found = applied(chain, inputs);
        if (found.empty()) Py_RETURN_NONE;
        const bool gathers = found[1].numel() && torch::autograd::get_current_graph_task_id() == -1;
        const int64_t samples = h.dim() ? h.size(0) : h.numel(); /* of a scalar the width is 1 */
        const THPObjectPtr width(PyLong_FromLongLong(std::max<int64_t>(h.numel() / (samples * chain->table[0]), 1)));
        const THPObjectPtr x(THPVariable_Wrap(found[0]));
        const THPObjectPtr sensitivities(gathers ? THPVariable_Wrap(found[1]) : Py_NewRef(Py_None));
        return PyTuple_Pack(3, x.get(), sensitivities.get(), width.get());
    }
    Py_RETURN_NONE;
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
    {"repeat", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(repeat)), METH_FASTCALL, nullptr},
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
