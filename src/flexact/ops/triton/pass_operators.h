/* Passes as operators of a compiled graph. `pass_operators.py` defines the operators, and runs a pass the first time. */

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

#include "passes.h"

namespace {

/* A pass that runs as an operator of a compiled graph. */
struct Recorded {
    Pass pass;
    std::vector<int64_t> outputs;
};
std::mutex recorded_lock;
std::unordered_map<int, std::unordered_map<std::string, Recorded>> recorded; /* by device and plan */
PyObject *first_run = nullptr; /* of pass_operators.py */

std::vector<Tensor> run_first(const std::string &plan, const std::vector<Tensor> &tensors, int device) {
    const Lock lock;
    TORCH_CHECK(first_run, "flexact's extension is not connected");
    THPObjectPtr arguments(PyTuple_New(1 + tensors.size()));
    PyTuple_SET_ITEM(arguments.get(), 0, PyUnicode_FromStringAndSize(plan.data(), plan.size()));
    for (size_t i = 0; i < tensors.size(); i++)
        PyTuple_SET_ITEM(arguments.get(), i + 1, THPVariable_Wrap(tensors[i]));
    THPObjectPtr found(PyObject_Call(first_run, arguments.get(), nullptr));
    PyObject *outputs, *described, *positions;
    if (!found || !PyArg_ParseTuple(found.get(), "OOO", &outputs, &described, &positions)) {
        python_error error;
        error.persist();
        throw error;
    }
    if (described != Py_None) {
        Recorded own{pass(described), numbers(positions)};
        const std::lock_guard<std::mutex> guard(recorded_lock);
        recorded[device].try_emplace(plan, std::move(own));
    }
    return list<Tensor>(outputs, tensor);
}

/* The operators of pass_operators.py: the plan, then tensors, some of which may be missing. */
void run_recorded(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    const auto count = op.schema().arguments().size();
    const auto arguments = torch::jit::last(*stack, count);
    const std::string plan = arguments[0].toStringRef();
    std::vector<Tensor> tensors;
    for (size_t i = 1; i < count; i++)
        if (arguments[i].isTensor()) tensors.push_back(arguments[i].toTensor());
    torch::jit::drop(*stack, count);
    const int device = tensors[0].get_device();
    const Recorded *known = nullptr;
    {
        const std::lock_guard<std::mutex> guard(recorded_lock);
        const auto &own = recorded[device];
        const auto found = own.find(plan);
        if (found != own.end()) known = &found->second; /* none is ever removed */
    }
    std::vector<Tensor> outputs;
    if (known) {
        const c10::DeviceGuard on_device(tensors[0].device());
        auto every = tensors;
        add_buffers(known->pass, every);
        if (!launch(known->pass, every, device))
            for (const auto position : known->outputs) outputs.push_back(every[position]);
    }
    if (outputs.empty()) outputs = run_first(plan, tensors, device);
    if (op.schema().returns()[0].type()->kind() == c10::TypeKind::TensorType)
        torch::jit::push(*stack, std::move(outputs[0]));
    else
        torch::jit::push(*stack, std::move(outputs));
}

void add_operators(torch::Library &library) {
    for (const auto *name : {"triton_pass", "triton_moments"})
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_recorded>());
}
TORCH_LIBRARY_IMPL(flexact, CUDA, library) { add_operators(library); }
TORCH_LIBRARY_IMPL(flexact, CPU, library) { add_operators(library); } /* for the tests without a GPU */

/* set_first_run(function): set the function that runs an operator for the first time. */
PyObject *set_first_run(PyObject *, PyObject *function) {
    Py_INCREF(function);
    first_run = function;
    Py_RETURN_NONE;
}

}  // namespace
