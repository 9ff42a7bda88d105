/* A site as one node of autograd, without Python: the kernels of its forward and of its backward, and their buffers.
   `chain.py` describes a chain, and `extension.py` compiles this file. */

#include <Python.h>

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/cat.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/object_ptr.h>

#include "batch_norm_source.h"
#include "pass_operators.h"
#include "passes.h"
#include "site_node.h"

namespace {

/* A pass that runs alone, on several tensors that are concatenated, and others. */
struct Joined : torch::CustomClassHolder {
    Pass pass;
    std::vector<int64_t> outputs;
    std::vector<at::ScalarType> dtypes; /* of the others */
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

/* make(inputs, forward, restore, backward, x, statistics, saved, gradients, again, is_flat, kind): return a chain for
   inputs like these. */
PyObject *make(PyObject *, PyObject *arguments) {
    HANDLE_TH_ERRORS
    PyObject *inputs, *forward, *restore, *backward, *saved, *gradients, *again, *kind;
    long long x, statistics;
    int is_flat;
    if (!PyArg_ParseTuple(arguments, "OOOOLLOOOpO", &inputs, &forward, &restore, &backward, &x, &statistics, &saved,
                          &gradients, &again, &is_flat, &kind))
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
    for (const auto &one : given) chain->sizes.push_back(one.sizes().vec());
    chain->strides = given[0].strides().vec(), chain->kind = Reference(kind);
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
    }
    if (!inputs[0].is_non_overlapping_and_dense()) return {};
    const at::TensorList every(inputs);
    const auto count = chain->gradients.size();
    return Site::apply(every.slice(0, count), Constants{every.slice(count)}, chain);
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

/* Whether gradients are enabled, outside of torch.func, traces and dispatch modes. */
bool is_eager() {
    using at::DispatchKey;
    return at::GradMode::is_enabled() && !c10::impl::TorchDispatchModeTLS::stack_len() &&
           !c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode) &&
           !c10::impl::tls_is_dispatch_key_included(DispatchKey::Tracer);
}

/* Whether a chain ran for a call with inputs like these. */
bool serves(const Chain &chain, const std::vector<Tensor> &inputs) {
    const Tensor &h = inputs[0];
    if (chain.is_flat ? h.numel() != c10::multiply_integers(chain.sizes[0])
                      : h.sizes() != chain.sizes[0] || h.strides() != chain.strides)
        return false;
    bool needs_gradients = false;
    for (size_t i = 0; i < inputs.size(); i++) {
        const bool is_residual = i && inputs[i].dim() == 4;
        if ((i && inputs[i].sizes() != chain.sizes[i]) || (is_residual && inputs[i].strides() != chain.strides))
            return false;
        needs_gradients |= i < chain.gradients.size() && inputs[i].requires_grad();
    }
    return needs_gradients;
}

/* Return the rows of a site in the table of the probabilities of all sites. */
Tensor own_part(const Tensor &table, int64_t first_row, const std::vector<int64_t> &sizes) {
    at::AutoDispatchBelowADInplaceOrView guard; /* faster, and the table has no graph */
    return table.narrow(0, first_row, sizes[0]).narrow(1, 0, sizes[1]);
}

/* The tensors in a list or a tuple. */
std::vector<Tensor> items(PyObject *sequence) {
    std::vector<Tensor> found;
    const auto count = PySequence_Fast_GET_SIZE(sequence);
    found.reserve(count);
    for (Py_ssize_t i = 0; i < count; i++) found.push_back(tensor(PySequence_Fast_GET_ITEM(sequence, i)));
    return found;
}

int64_t version(const Tensor &one) { return one.is_inference() ? -1 : one._version(); }

/* repeat(chains, kind, h, logits, is_committed, read, dropped_at, alive_version, table, first_row, temperature,
   with_gradients, running): run a call of a site again with one of the chains that ran for earlier calls. Return x, the
   sensitivities, or None if there are none or checkpointing recomputes the call, and the number of elements per sample
   and row; None if the call is not like an earlier one.

   read: the id of the logits and how often they were written to when the table was computed. alive_version: how often
   `dropped_at` was written to when the site read it. */
PyObject *repeat(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    TORCH_CHECK_TYPE(count == 13 && PyTuple_Check(arguments[0]), "expected a tuple of chains and 12 more arguments");
    PyObject *chains = arguments[0], *read = arguments[5];
    if (!THPVariable_CheckExact(arguments[2]) || !THPVariable_CheckExact(arguments[3]) || !PyTuple_Check(read) ||
        !is_eager())
        Py_RETURN_NONE;
    const Tensor h = tensor(arguments[2]);
    Tensor logits = tensor(arguments[3]);
    const bool is_committed = arguments[4] == Py_True;
    if (PyLong_AsVoidPtr(PyTuple_GET_ITEM(read, 0)) != arguments[3] ||
        number(PyTuple_GET_ITEM(read, 1)) != version(logits) || number(arguments[7]) != version(tensor(arguments[6])))
        Py_RETURN_NONE;
    if (is_committed) logits = logits.detach();
    const auto with_gradients = items(arguments[11]), running = items(arguments[12]);
    variable_list from;
    if (arguments[1] == Py_None && (h.scalar_type() == at::kHalf || h.scalar_type() == at::kBFloat16))
        if (!at::SavedTensorDefaultHooks::get_hooks()) from = source(h);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(chains); i++) {
        const auto chain = held_chain(PyTuple_GET_ITEM(chains, i));
        const auto first = 2 + with_gradients.size(); /* the position of the probabilities */
        if (chain->is_slower || chain->restore.empty() != from.empty() ||
            chain->need_logits != logits.requires_grad() ||
            chain->dtypes.size() != first + 2 + running.size() + from.size())
            continue;
        const int is_same_kind = PyObject_RichCompareBool(chain->kind.object, arguments[1], Py_EQ);
        if (is_same_kind < 0) return nullptr;
        if (!is_same_kind) continue;
        std::vector<Tensor> inputs{h, logits};
        inputs.reserve(chain->dtypes.size());
        inputs.insert(inputs.end(), with_gradients.begin(), with_gradients.end());
        inputs.push_back(own_part(tensor(arguments[8]), number(arguments[9]), chain->sizes[first]));
        inputs.push_back(tensor(arguments[10]));
        inputs.insert(inputs.end(), running.begin(), running.end());
        inputs.insert(inputs.end(), from.begin(), from.end());
        if (!serves(*chain, inputs)) continue;
        const auto found = applied(chain, inputs);
        if (found.empty()) Py_RETURN_NONE;
        const bool gathers = found[1].numel() && torch::autograd::get_current_graph_task_id() == -1;
        const int64_t samples = h.dim() ? std::max<int64_t>(h.size(0), 1) : 1;
        const int64_t rows = chain->sizes[first][0];
        const THPObjectPtr width(PyLong_FromLongLong(std::max<int64_t>(h.numel() / (samples * rows), 1)));
        const THPObjectPtr x(THPVariable_Wrap(found[0]));
        const THPObjectPtr sensitivities(gathers ? THPVariable_Wrap(found[1]) : Py_NewRef(Py_None));
        return PyTuple_Pack(3, x.get(), sensitivities.get(), width.get());
    }
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

/* make_joined(pass, outputs, others): return a pass for `run_joined` and `move`, for others like these. */
PyObject *make_joined(PyObject *, PyObject *arguments) {
    HANDLE_TH_ERRORS
    PyObject *described, *outputs, *others;
    if (!PyArg_ParseTuple(arguments, "OOO", &described, &outputs, &others)) return nullptr;
    auto joined = c10::make_intrusive<Joined>();
    joined->pass = pass(described), joined->outputs = numbers(outputs);
    for (const auto &one : list<Tensor>(others, tensor)) joined->dtypes.push_back(one.scalar_type());
    return capsule(std::move(joined));
    END_HANDLE_TH_ERRORS
}

bool of_dtype(const Tensor &tensor, at::ScalarType dtype) { return tensor.scalar_type() == dtype; }

/* Run a pass on the concatenation of the parts, flattened, and on the others, a tuple. Return its outputs; nothing if the
   kernels do not support a dtype or an address. */
variable_list run_on(PyObject *own, std::vector<Tensor> parts, PyObject *others) {
    const auto *joined = static_cast<Joined *>(PyCapsule_GetPointer(own, Name<Joined>));
    if (!joined) throw python_error();
    for (auto &one : parts) one = one.reshape(-1);
    TORCH_CHECK_VALUE(!parts.empty(), "expected tensors to concatenate");
    const c10::DeviceGuard on_device(parts[0].device());
    std::vector<Tensor> tensors{at::cat(parts)};
    if (tensors[0].scalar_type() != at::kFloat) return {};
    for (auto &one : list<Tensor>(others, tensor)) tensors.push_back(std::move(one));
    if (!std::equal(tensors.begin() + 1, tensors.end(), joined->dtypes.begin(), joined->dtypes.end(), of_dtype)) return {};
    add_buffers(joined->pass, tensors);
    if (launch(joined->pass, tensors, static_cast<int>(tensors[0].get_device()))) return {};
    variable_list found;
    for (const auto position : joined->outputs) found.push_back(tensors[position]);
    return found;
}

/* run_joined(pass, parts, others): return the outputs of `run_on` as a tuple, or None. */
PyObject *run_joined(PyObject *, PyObject *arguments) {
    HANDLE_TH_ERRORS
    PyObject *own, *parts, *others;
    if (!PyArg_ParseTuple(arguments, "OOO", &own, &parts, &others)) return nullptr;
    at::NoGradGuard no_grad;
    const auto outputs = run_on(own, list<Tensor>(parts, tensor), others);
    if (outputs.empty()) Py_RETURN_NONE;
    PyObject *found = PyTuple_New(outputs.size());
    for (size_t i = 0; i < outputs.size(); i++) PyTuple_SET_ITEM(found, i, THPVariable_Wrap(outputs[i]));
    return found;
    END_HANDLE_TH_ERRORS
}

/* move(pass, logits, parts, others): see `PolicyKernels.move`. The pass runs on the gradients of the logits and the
   parts. */
PyObject *move(PyObject *, PyObject *arguments) {
    HANDLE_TH_ERRORS
    PyObject *own, *given, *parts, *others;
    if (!PyArg_ParseTuple(arguments, "OOOO", &own, &given, &parts, &others)) return nullptr;
    at::NoGradGuard no_grad;
    const auto logits = list<Tensor>(given, tensor);
    const auto plain = [](const Tensor &one) {
        return one.defined() && one.layout() == at::kStrided && one.scalar_type() == at::kFloat &&
               !one.unsafeGetTensorImpl()->is_python_dispatch(); /* as sharded tensors are */
    };
    std::vector<Tensor> values;
    std::vector<int64_t> sizes;
    for (const auto &one : logits) {
        if (!plain(one) || !plain(one.grad())) Py_RETURN_FALSE;
        values.push_back(one.grad());
        sizes.push_back(one.numel());
    }
    for (auto &one : list<Tensor>(parts, tensor)) values.push_back(std::move(one));
    const auto outputs = run_on(own, std::move(values), others);
    if (outputs.empty()) Py_RETURN_FALSE;
    if (logits.size() == 1)
        logits[0].sub_(outputs[0]); /* takes half as long */
    else
        at::_foreach_sub_(logits, outputs[0].split_with_sizes(sizes));
    for (const auto &one : logits) one.mutable_grad().reset();
    Py_RETURN_TRUE;
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
    {"move", move, METH_VARARGS, nullptr},
    {"connect", connect, METH_VARARGS, nullptr},
    {"set_first_run", set_first_run, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "chain", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_chain() { return PyModule_Create(&module); }
