// cuBLASLt proposes several algorithms for a product, its best guess first. The guess is not always the fastest: of GPT-2's
// products on an H200 one algorithm further down is up to 1.25 times as fast. Here the algorithm of each problem can be
// chosen; `fuseline.ops.products` measures the proposals and keeps the choices.
//
// The library is the one that torch has loaded. It is called through its C interface, so that this file is built without
// CUDA's headers.

#include "product.h"

#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <array>
#include <map>
#include <mutex>
#include <set>
#include <vector>

namespace fuseline::product_op {
namespace {

constexpr const char* kName = "product";
constexpr int kMostProposals = 8;
constexpr size_t kMostWorkspace = size_t(32) << 20;  // as torch gives it on Hopper
constexpr uintptr_t kAlignment = 256;                // what proposals may rely on unless told otherwise

// ---- the library ----

constexpr int kFloat16 = 2, kBFloat16 = 14, kFloat32 = 0, kFloat32Sums = 68;
constexpr int kTransposedA = 3, kTransposedB = 4, kEpilogue = 7, kBiasPointer = 8, kWorkspaceBytes = 1;
constexpr uint32_t kNoEpilogue = 1, kAddBias = 4;

struct Proposal {
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
};

struct Library {
    int (*create)(void**);
    size_t (*version)();
    int (*description)(void**, int, int);
    int (*set_description)(void*, int, const void*, size_t);
    int (*layout)(void**, int, uint64_t, uint64_t, int64_t);
    int (*preference)(void**);
    int (*set_preference)(void*, int, const void*, size_t);
    int (*drop_preference)(void*);
    int (*propose)(void*, void*, void*, void*, void*, void*, void*, int, Proposal*, int*);
    int (*multiply)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*, void*,
                    void*, const void*, void*, size_t, void*);
    bool there = false;

    Library() {
        void* opened = nullptr;
        for (const char* name : {"libcublasLt.so.14", "libcublasLt.so.13", "libcublasLt.so.12"}) {
            if (opened == nullptr) opened = dlopen(name, RTLD_NOLOAD | RTLD_LAZY);
        }
        if (opened == nullptr) return;
        there = true;
        const auto find = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(opened, name));
            there = there && function != nullptr;
        };
        find(create, "cublasLtCreate");
        find(version, "cublasLtGetVersion");
        find(description, "cublasLtMatmulDescCreate");
        find(set_description, "cublasLtMatmulDescSetAttribute");
        find(layout, "cublasLtMatrixLayoutCreate");
        find(preference, "cublasLtMatmulPreferenceCreate");
        find(set_preference, "cublasLtMatmulPreferenceSetAttribute");
        find(drop_preference, "cublasLtMatmulPreferenceDestroy");
        find(propose, "cublasLtMatmulAlgoGetHeuristic");
        find(multiply, "cublasLtMatmul");
    }
};

const Library& library() {
    static const Library opened;
    return opened;
}

void check(int status) { TORCH_CHECK(status == 0, kName, ": cuBLASLt answered ", status, "."); }

// ---- problems ----

// dtype, turned_left, turned_right, whether there is a bias, m, n, k, whether the result is of float32.
using Problem = std::array<int64_t, 8>;

struct Prepared {
    void *description = nullptr, *left = nullptr, *right = nullptr, *out = nullptr;
    std::vector<Proposal> proposals;
};

// Rows of torch's matrices are columns of the library's: it multiplies the transposes, right first.
Prepared prepare(const Problem& p, void* handle) {
    const auto [dtype, turned_left, turned_right, has_bias, m, n, k, wide] = p;
    const Library& lt = library();
    Prepared made;
    check(lt.description(&made.description, kFloat32Sums, kFloat32));
    const auto set = [&](int attribute, auto value) {
        check(lt.set_description(made.description, attribute, &value, sizeof(value)));
    };
    set(kTransposedA, int32_t(turned_right));
    set(kTransposedB, int32_t(turned_left));
    set(kEpilogue, has_bias ? kAddBias : kNoEpilogue);
    const auto layout = [&](void** to, int type, int64_t rows, int64_t columns) {
        check(lt.layout(to, type, uint64_t(columns), uint64_t(rows), columns));
    };
    layout(&made.left, int(dtype), turned_left ? k : m, turned_left ? m : k);
    layout(&made.right, int(dtype), turned_right ? n : k, turned_right ? k : n);
    layout(&made.out, wide ? kFloat32 : int(dtype), m, n);
    void* preference = nullptr;
    check(lt.preference(&preference));
    check(lt.set_preference(preference, kWorkspaceBytes, &kMostWorkspace, sizeof(kMostWorkspace)));
    std::array<Proposal, kMostProposals> found{};
    int count = 0;
    const int status = lt.propose(handle, made.description, made.right, made.left, made.out, made.out, preference,
                                  kMostProposals, found.data(), &count);
    lt.drop_preference(preference);
    for (int i = 0; status == 0 && i < count; ++i) {
        if (found[i].status == 0) made.proposals.push_back(found[i]);
    }
    return made;
}

// All that is known, of each device.
struct Products {
    std::mutex mutex;
    std::map<int, void*> handles;                             // of devices
    std::map<std::pair<int, Problem>, Prepared> prepared;     // device, problem
    std::map<std::pair<int, Problem>, int64_t> chosen;
    std::set<std::pair<int, Problem>> seen;

    Prepared& of(const Problem& problem, int device) {
        void*& handle = handles[device];
        if (handle == nullptr) check(library().create(&handle));
        const auto [at, is_new] = prepared.try_emplace({device, problem});
        if (is_new) at->second = prepare(problem, handle);
        return at->second;
    }
};

Products& products() {
    static Products* const all = new Products;  // outlives the library's own end
    return *all;
}

bool fits(const Tensor& x) {
    return x.dim() == 2 && x.is_contiguous() && x.size(1) % 8 == 0 && x.numel() > 0 &&
           reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kAlignment == 0;
}

// The problem, or none for what torch's own product takes.
std::optional<Problem> problem_of(const Tensor& left, bool turned_left, const Tensor& right, bool turned_right,
                                  const std::optional<Tensor>& bias, at::ScalarType out_type) {
    const auto type = left.scalar_type();
    if (!left.is_cuda() || (type != at::kHalf && type != at::kBFloat16) || !fits(left) || !fits(right) || !library().there) {
        return std::nullopt;
    }
    const int64_t n = right.size(turned_right ? 0 : 1);
    if (n % 8 != 0) return std::nullopt;
    if (bias.has_value() && (!bias->is_contiguous() || bias->scalar_type() != type ||
                             reinterpret_cast<uintptr_t>(bias->const_data_ptr()) % 16 != 0)) {
        return std::nullopt;
    }
    if (out_type != type && (out_type != at::kFloat || bias.has_value())) return std::nullopt;
    return Problem{type == at::kHalf ? kFloat16 : kBFloat16, turned_left, turned_right, bias.has_value(),
                   left.size(turned_left ? 1 : 0), n, left.size(turned_left ? 0 : 1), out_type != type};
}

// By one of the proposals. An undefined tensor where there is none of that number.
Tensor multiplied(const Problem& problem, const Tensor& left, const Tensor& right, const std::optional<Tensor>& bias,
                  int64_t algorithm) {
    const Library& lt = library();
    Products& all = products();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const Prepared& made = all.of(problem, left.get_device());
    if (algorithm < 0 || algorithm >= int64_t(made.proposals.size())) return {};
    const Proposal& proposal = made.proposals[algorithm];
    const auto type = problem[7] ? at::kFloat : left.scalar_type();
    const Tensor out = at::empty({problem[4], problem[5]}, left.options().dtype(type));
    const Tensor scratch = at::empty({int64_t(proposal.workspace)}, left.options().dtype(at::kByte));
    if (bias.has_value()) {
        const void* const at = bias->const_data_ptr();
        check(lt.set_description(made.description, kBiasPointer, &at, sizeof(at)));
    }
    const float one = 1.f, zero = 0.f;
    check(lt.multiply(all.handles[left.get_device()], made.description, &one, right.const_data_ptr(), made.right,
                      left.const_data_ptr(), made.left, &zero, out.const_data_ptr(), made.out, out.mutable_data_ptr(),
                      made.out, proposal.algorithm, scratch.mutable_data_ptr(), proposal.workspace, current_stream(left)));
    return out;
}

Tensor by_torch(const Tensor& left, bool turned_left, const Tensor& right, bool turned_right,
                const std::optional<Tensor>& bias, at::ScalarType out_type) {
    const Tensor a = turned_left ? left.t() : left, b = turned_right ? right.t() : right;
    if (bias.has_value()) return at::addmm(bias->contiguous(), a, b).to(out_type);
    const bool wide = left.is_cuda() && out_type == at::kFloat && left.scalar_type() != at::kFloat;
    return wide ? at::mm(a, b, out_type) : at::mm(a, b).to(out_type);
}

// ---- what measures ----

Problem problem_of(at::IntArrayRef numbers) {
    TORCH_CHECK_VALUE(numbers.size() == std::tuple_size_v<Problem>, kName, ": a problem has ", std::tuple_size_v<Problem>,
                      " numbers, not ", numbers.size(), ".");
    Problem problem;
    std::copy(numbers.begin(), numbers.end(), problem.begin());
    return problem;
}

// Problems that a device computed and nobody has chosen for, one after another.
std::vector<int64_t> new_problems(int64_t device) {
    Products& all = products();
    const std::lock_guard<std::mutex> lock(all.mutex);
    std::vector<int64_t> numbers;
    for (const auto& [where, problem] : all.seen) {
        if (where != device || all.chosen.count({where, problem})) continue;
        numbers.insert(numbers.end(), problem.begin(), problem.end());
    }
    return numbers;
}

void choose(int64_t device, at::IntArrayRef numbers, int64_t algorithm) {
    Products& all = products();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.chosen[{int(device), problem_of(numbers)}] = algorithm;
}

void forget() {
    Products& all = products();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.chosen.clear();
    all.seen.clear();
}

int64_t library_version() { return library().there ? int64_t(library().version()) : 0; }

// By the proposal of that number; empty where there is none.
Tensor by_algorithm(const Tensor& left, bool turned_left, const Tensor& right, bool turned_right,
                    const std::optional<Tensor>& bias, int64_t algorithm, bool wide) {
    const c10::DeviceGuard guard(left.device());
    const auto problem = problem_of(left, turned_left, right, turned_right, bias, wide ? at::kFloat : left.scalar_type());
    TORCH_CHECK_VALUE(problem.has_value(), kName, ": these matrices go to torch's own product.");
    const Tensor out = multiplied(*problem, left, right, bias, algorithm);
    return out.defined() ? out : at::empty({0}, left.options());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    m.def("product_new_problems(int device) -> int[]", new_problems);
    m.def("product_choose(int device, int[] problem, int algorithm) -> ()", choose);
    m.def("product_forget() -> ()", forget);
    m.def("product_library_version() -> int", library_version);
    m.def("product_by_algorithm(Tensor left, bool turned_left, Tensor right, bool turned_right, Tensor? bias, int algorithm, "
          "bool wide=False) -> Tensor");
}

TORCH_LIBRARY_IMPL(fuseline, CUDA, m) { m.impl("product_by_algorithm", by_algorithm); }

}  // namespace fuseline::product_op

namespace fuseline {

Tensor product(const Tensor& left, bool turned_left, const Tensor& right, bool turned_right,
               const std::optional<Tensor>& bias, std::optional<at::ScalarType> out_type) {
    using namespace product_op;
    const auto type = out_type.value_or(left.scalar_type());
    if (is_turned(left) || is_turned(right)) {
        const auto upright = [](const Tensor& x) { return is_turned(x) ? x.t() : x; };
        return product(upright(left), turned_left != is_turned(left), upright(right), turned_right != is_turned(right), bias,
                       type);
    }
    const auto problem = problem_of(left, turned_left, right, turned_right, bias, type);
    // Choices are of this machine and this day: where bits are to repeat in another process, none is taken.
    if (!problem.has_value() || at::globalContext().deterministicAlgorithms()) {
        return by_torch(left, turned_left, right, turned_right, bias, type);
    }
    Products& all = products();
    int64_t algorithm = -1;
    {
        const std::lock_guard<std::mutex> lock(all.mutex);
        const std::pair<int, Problem> here = {left.get_device(), *problem};
        const auto found = all.chosen.find(here);
        if (found != all.chosen.end()) {
            algorithm = found->second;
        } else {
            all.seen.insert(here);
        }
    }
    const Tensor out = algorithm < 0 ? Tensor() : multiplied(*problem, left, right, bias, algorithm);
    return out.defined() ? out : by_torch(left, turned_left, right, turned_right, bias, type);
}

}  // namespace fuseline
