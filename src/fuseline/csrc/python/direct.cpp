// Ops called from Python without torch.ops in between: positional arguments in the schema's order become the dispatcher's
// stack here, which takes a microsecond less than torch's general way.
//
// A function answers None where it does not take its arguments (subclasses of Tensor, symbolic sizes, another type, a
// tracer, a device without kernels, float64 on CUDA); its caller then goes through torch.ops, or runs the reference.

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>

#include <memory>
#include <string>
#include <vector>

namespace {

enum class Kind { tensor, integer, real, boolean, text, integers, dtype, other };

struct Parameter {
    Kind kind;
    bool optional;
    c10::IValue otherwise;  // where it is not given
};

struct Op {
    c10::OperatorHandle handle;
    std::vector<Parameter> parameters;
    size_t required = 0;  // of them
};

bool devices[2] = {false, false};  // CPU and CUDA, once their kernels are loaded

bool has_kernels(const at::Tensor& x) {
    if (x.is_cuda()) return devices[1] && x.scalar_type() != at::kDouble;
    return x.is_cpu() && devices[0];
}

bool convert(PyObject* given, const Parameter& parameter, torch::jit::Stack& stack) {
    if (given == Py_None) {
        if (parameter.optional) stack.emplace_back();
        return parameter.optional;
    }
    switch (parameter.kind) {
        case Kind::tensor:
            if (!THPVariable_CheckExact(given) || !has_kernels(THPVariable_Unpack(given))) return false;
            stack.emplace_back(THPVariable_Unpack(given));
            return true;
        case Kind::integer:
            if (!PyLong_CheckExact(given)) return false;
            stack.emplace_back(static_cast<int64_t>(PyLong_AsLongLong(given)));
            return true;
        case Kind::real:
            if (!PyFloat_CheckExact(given) && !PyLong_CheckExact(given)) return false;
            stack.emplace_back(PyFloat_CheckExact(given) ? PyFloat_AS_DOUBLE(given) : PyLong_AsDouble(given));
            return true;
        case Kind::boolean:
            if (!PyBool_Check(given)) return false;
            stack.emplace_back(given == Py_True);
            return true;
        case Kind::text: {
            Py_ssize_t length = 0;
            const char* text = PyUnicode_CheckExact(given) ? PyUnicode_AsUTF8AndSize(given, &length) : nullptr;
            if (text == nullptr) return false;
            stack.emplace_back(std::string(text, static_cast<size_t>(length)));
            return true;
        }
        case Kind::integers: {
            const bool tuple = PyTuple_CheckExact(given);
            if (!tuple && !PyList_CheckExact(given)) return false;
            const Py_ssize_t count = tuple ? PyTuple_GET_SIZE(given) : PyList_GET_SIZE(given);
            c10::List<int64_t> list;
            for (Py_ssize_t i = 0; i < count; ++i) {
                PyObject* one = tuple ? PyTuple_GET_ITEM(given, i) : PyList_GET_ITEM(given, i);
                if (!PyLong_CheckExact(one)) return false;
                list.push_back(PyLong_AsLongLong(one));
            }
            stack.emplace_back(std::move(list));
            return true;
        }
        case Kind::dtype:
            if (!THPDtype_Check(given)) return false;
            stack.emplace_back(static_cast<int64_t>(reinterpret_cast<THPDtype*>(given)->scalar_type));
            return true;
        case Kind::other:
            return false;
    }
    return false;
}

struct WithoutGil {
    PyThreadState* state = PyEval_SaveThread();
    ~WithoutGil() { PyEval_RestoreThread(state); }
};

constexpr const char* kCapsule = "fuseline.op";

PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    const Op& op = *static_cast<Op*>(PyCapsule_GetPointer(self, kCapsule));
    const size_t total = op.parameters.size(), named = static_cast<size_t>(count);
    if (named > total || named < op.required || at::impl::torch_function_mode_enabled() ||
        c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer)) {
        Py_RETURN_NONE;
    }
    torch::jit::Stack stack;
    stack.reserve(total);
    for (size_t i = 0; i < total; ++i) {
        if (i >= named) {
            stack.push_back(op.parameters[i].otherwise);
        } else if (!convert(given[i], op.parameters[i], stack)) {
            Py_RETURN_NONE;
        }
    }
    if (PyErr_Occurred() != nullptr) return nullptr;  // an int that is none of 64 bits
    {
        const WithoutGil released;
        op.handle.callBoxed(stack);
    }
    if (stack.size() == 1) return THPVariable_Wrap(stack[0].toTensor());
    PyObject* results = PyTuple_New(static_cast<Py_ssize_t>(stack.size()));
    for (size_t i = 0; results != nullptr && i < stack.size(); ++i) {
        PyTuple_SET_ITEM(results, static_cast<Py_ssize_t>(i), THPVariable_Wrap(stack[i].toTensor()));
    }
    return results;
    END_HANDLE_TH_ERRORS
}

Kind kind_of(const c10::TypePtr& type) {
    switch (type->kind()) {
        case c10::TypeKind::TensorType:
            return Kind::tensor;
        case c10::TypeKind::IntType:
        case c10::TypeKind::SymIntType:
            return Kind::integer;
        case c10::TypeKind::FloatType:
            return Kind::real;
        case c10::TypeKind::BoolType:
            return Kind::boolean;
        case c10::TypeKind::StringType:
            return Kind::text;
        case c10::TypeKind::ScalarTypeType:
            return Kind::dtype;
        case c10::TypeKind::ListType:
            return kind_of(type->expectRef<c10::ListType>().getElementType()) == Kind::integer ? Kind::integers
                                                                                              : Kind::other;
        default:
            return Kind::other;
    }
}

PyMethodDef call_def = {"op", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, nullptr};

// make(name): the op of that name as a function of positional arguments. Its results are tensors.
PyObject* make(PyObject*, PyObject* name) {
    HANDLE_TH_ERRORS
    const char* text = PyUnicode_AsUTF8(name);
    if (text == nullptr) return nullptr;
    auto op = std::make_unique<Op>(Op{c10::Dispatcher::singleton().findSchemaOrThrow(text, ""), {}});
    for (const c10::Argument& argument : op->handle.schema().arguments()) {
        const bool optional = argument.real_type()->kind() == c10::TypeKind::OptionalType;
        const c10::TypePtr type =
            optional ? argument.real_type()->expectRef<c10::OptionalType>().getElementType() : argument.real_type();
        op->parameters.push_back({kind_of(type), optional, argument.default_value().value_or(c10::IValue())});
        if (!argument.default_value().has_value()) op->required = op->parameters.size();
    }
    // Never freed: ops stay for as long as the process.
    PyObject* capsule = PyCapsule_New(op.release(), kCapsule, nullptr);
    PyObject* function = capsule == nullptr ? nullptr : PyCFunction_NewEx(&call_def, capsule, nullptr);
    Py_XDECREF(capsule);
    return function;
    END_HANDLE_TH_ERRORS
}

// enable(device): tensors on "cpu" or "cuda" have kernels.
PyObject* enable(PyObject*, PyObject* device) {
    const char* text = PyUnicode_AsUTF8(device);
    if (text == nullptr) return nullptr;
    devices[std::string(text) == "cuda"] = true;
    Py_RETURN_NONE;
}

// Calls see(value) for what the dictionary `name` of each of the modules, given by their __dict__, holds. False where
// see is, or a module has no such dictionary.
template <typename See>
bool each_held(PyObject* modules, PyObject* name, const See& see) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(modules); ++i) {
        PyObject* held = PyDict_GetItemWithError(PyList_GET_ITEM(modules, i), name);
        if (held == nullptr || !PyDict_Check(held)) return false;
        PyObject* value = nullptr;
        for (Py_ssize_t at = 0; PyDict_Next(held, &at, nullptr, &value);) {
            if (!see(value)) return false;
        }
    }
    return true;
}

PyObject* bytes_of(const void* from, size_t bytes) {
    return PyBytes_FromStringAndSize(static_cast<const char*>(from), static_cast<Py_ssize_t>(bytes));
}

// standing(parents, children, with_parameters, with_buffers, all): lists of modules, given by their __dict__, and of the
// parents' children. Returns the addresses of all parameters and buffers, and the modes of all modules and parameters,
// each as bytes; None where the children are others, or something is not as torch's modules have it.
PyObject* standing(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    static PyObject* const names[] = {
        PyUnicode_InternFromString("_modules"), PyUnicode_InternFromString("_parameters"),
        PyUnicode_InternFromString("_buffers"), PyUnicode_InternFromString("training")};
    if (count != 5) Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < count; ++i) {
        if (!PyList_CheckExact(given[i])) Py_RETURN_NONE;
        for (Py_ssize_t j = 0; i != 1 && j < PyList_GET_SIZE(given[i]); ++j) {
            if (!PyDict_Check(PyList_GET_ITEM(given[i], j))) Py_RETURN_NONE;
        }
    }
    PyObject *parents = given[0], *children = given[1], *all = given[4];
    Py_ssize_t child = 0;
    const bool same = each_held(parents, names[0], [&](PyObject* value) {
        return child < PyList_GET_SIZE(children) && PyList_GET_ITEM(children, child++) == value;
    });
    std::vector<const void*> places;
    std::string modes;
    const auto see = [&](PyObject* value, bool parameter) {
        if (value == Py_None) return true;
        if (!THPVariable_CheckExact(value)) return false;
        const at::Tensor& tensor = THPVariable_Unpack(value);
        places.push_back(tensor.const_data_ptr());
        if (parameter) modes.push_back(tensor.requires_grad() ? 1 : 0);
        return true;
    };
    if (!same || child != PyList_GET_SIZE(children) ||
        !each_held(given[2], names[1], [&](PyObject* value) { return see(value, true); }) ||
        !each_held(given[3], names[2], [&](PyObject* value) { return see(value, false); })) {
        if (PyErr_Occurred() != nullptr) return nullptr;
        Py_RETURN_NONE;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(all); ++i) {
        PyObject* training = PyDict_GetItemWithError(PyList_GET_ITEM(all, i), names[3]);
        if (training == nullptr || !PyBool_Check(training)) {
            if (PyErr_Occurred() != nullptr) return nullptr;
            Py_RETURN_NONE;
        }
        modes.push_back(training == Py_True ? 1 : 0);
    }
    PyObject* lie = bytes_of(places.data(), places.size() * sizeof(void*));
    return Py_BuildValue("NN", lie, bytes_of(modes.data(), modes.size()));
    END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"make", make, METH_O, nullptr},
    {"enable", enable, METH_O, nullptr},
    {"standing", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(standing)), METH_FASTCALL, nullptr},
    {}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fuseline_direct", nullptr, -1, methods};

}  // namespace

PyMODINIT_FUNC PyInit_fuseline_direct() { return PyModule_Create(&module); }
