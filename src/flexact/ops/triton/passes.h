/* A pass: kernels that are launched together, and the tensors that they use. `passes.py` describes it. */

#pragma once

#include <Python.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

using at::Tensor;

constexpr int MISALIGNED = -1; /* of driver.c */

/* Functions of driver.c, and of the part of PyTorch that only exists with CUDA. */
struct Driver {
    int (*launch)(const void *kernels, int count, const uint64_t *addresses, int device, void *stream);
    int (*check)(const void *kernels, int count, const uint64_t *addresses);
    const char *(*error_text)(int error);
    int32_t (*current_stream)(int32_t device, void **stream); /* may be null */
};
Driver driver;

/* A tensor that a pass allocates: like one of its tensors, or of a shape in float32. */
struct Buffer {
    int64_t like;
    std::vector<int64_t> shape;
};

/* A reference to a Python object. */
struct Reference {
    PyObject *object = nullptr;

    explicit Reference(PyObject *given) : object(given) { Py_XINCREF(object); }
    Reference(Reference &&other) noexcept : object(std::exchange(other.object, nullptr)) {}
    Reference &operator=(Reference &&other) noexcept { return std::swap(object, other.object), *this; }
    Reference(const Reference &) = delete;
    ~Reference() {
        if (!object || !Py_IsInitialized()) return;
        const auto state = PyGILState_Ensure();
        Py_DECREF(object);
        PyGILState_Release(state);
    }
};

struct Pass {
    std::vector<int64_t> takes; /* the positions of its inputs among the tensors of the chain */
    std::vector<Buffer> buffers;
    const void *kernels;
    int count;
    Reference keeper{nullptr}; /* keeps the kernels alive */
};

uint64_t address(const Tensor &tensor) { return reinterpret_cast<uint64_t>(tensor.data_ptr()); }

void add_buffers(const Pass &pass, std::vector<Tensor> &tensors) {
    const auto options = tensors[0].options().requires_grad(false).dtype(at::kFloat);
    for (const auto &buffer : pass.buffers)
        tensors.push_back(buffer.like < 0 ? at::empty(buffer.shape, options) : at::empty_like(tensors[buffer.like]));
}

/* Return 0 or MISALIGNED; throw the driver's errors. */
int launch(const Pass &pass, const std::vector<Tensor> &tensors, int device) {
    void *stream = nullptr;
    TORCH_CHECK(!driver.current_stream || !driver.current_stream(device, &stream), "the current stream is unknown");
    std::vector<uint64_t> addresses;
    addresses.reserve(tensors.size());
    for (const auto &one : tensors) addresses.push_back(address(one));
    const int error = driver.launch(pass.kernels, pass.count, addresses.data(), device, stream);
    TORCH_CHECK(!error || error == MISALIGNED, "CUDA error: ", driver.error_text(error));
    return error;
}

std::vector<Tensor> taken(const Pass &pass, const std::vector<Tensor> &every) {
    std::vector<Tensor> found;
    found.reserve(pass.takes.size() + pass.buffers.size());
    for (const auto position : pass.takes) found.push_back(every[position]);
    return found;
}

/* Holds the interpreter's lock. */
struct Lock {
    PyGILState_STATE state = PyGILState_Ensure();
    ~Lock() { PyGILState_Release(state); }
};

/* The following read a description. Each raises a Python error if an item is of another type. */
int64_t number(PyObject *item) {
    const auto found = PyLong_AsLongLong(item);
    if (PyErr_Occurred()) throw python_error();
    return found;
}

template <typename Item, typename Read> std::vector<Item> list(PyObject *tuple, Read read) {
    TORCH_CHECK_TYPE(PyTuple_Check(tuple), "expected a tuple");
    std::vector<Item> found;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) found.push_back(read(PyTuple_GET_ITEM(tuple, i)));
    return found;
}

std::vector<int64_t> numbers(PyObject *tuple) { return list<int64_t>(tuple, number); }

Buffer buffer(PyObject *item) { return PyTuple_Check(item) ? Buffer{-1, numbers(item)} : Buffer{number(item), {}}; }

Pass pass(PyObject *item) {
    TORCH_CHECK_TYPE(PyTuple_Check(item) && PyTuple_GET_SIZE(item) == 5, "expected a pass");
    return {numbers(PyTuple_GET_ITEM(item, 0)), list<Buffer>(PyTuple_GET_ITEM(item, 1), buffer),
            reinterpret_cast<const void *>(number(PyTuple_GET_ITEM(item, 2))),
            static_cast<int>(number(PyTuple_GET_ITEM(item, 3))), Reference(PyTuple_GET_ITEM(item, 4))};
}

Tensor tensor(PyObject *item) {
    TORCH_CHECK_TYPE(THPVariable_Check(item), "expected a tensor");
    return THPVariable_Unpack(item);
}

}  // namespace
