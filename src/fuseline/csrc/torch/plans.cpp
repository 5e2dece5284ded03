// Which kernel would take a problem on a GPU, as the launchers decide it (kernels/plans/), for any GPU and on any machine:
// fuseline/ops/plans asks.

#include <torch/library.h>

#include <string>
#include <tuple>

#include "plans/argmax_step.h"
#include "plans/attention_backward.h"
#include "plans/cross_entropy.h"
#include "plans/decode_attention.h"
#include "plans/decode_step.h"
#include "plans/embedding.h"
#include "plans/gelu.h"
#include "plans/glu.h"
#include "plans/linear.h"
#include "plans/norm_backward.h"
#include "plans/norm_forward.h"
#include "plans/optimizer.h"
#include "plans/small_layer.h"
#include "plans/softmax.h"

namespace fuseline::plans_op {
namespace {

// A kernel's name ("" where none takes the problem), the reason, and numbers: grid, threads of a block that share a row, rows of
// a block, blocks that share a row, bytes of shared memory, what is refused where the device does not hold such blocks, bytes of
// workspace, and the elements of an access of kernels that do not go by rows (else 0).
using Planned = std::tuple<std::string, std::string, std::vector<int64_t>>;

Device device_of(at::IntArrayRef numbers) {
    TORCH_CHECK_VALUE(numbers.size() == 6, "a plan's device has 6 numbers: multiprocessors, shared memory of a block and of a "
                      "multiprocessor in bytes, memory in GB/s, clusters (0 or 1), products of warpgroups (0 or 1); not ",
                      numbers.size(), ".");
    Device device;
    device.processors = int(numbers[0]), device.shared_a_block = int(numbers[1]), device.shared_a_processor = int(numbers[2]);
    device.memory_gbs = int(numbers[3]), device.clusters = numbers[4] != 0, device.warpgroups = numbers[5] != 0;
    return device;
}

void check(int64_t rows, int64_t n, int64_t element_size, int64_t refused) {
    TORCH_CHECK_VALUE(rows > 0 && n > 0, "a plan is made for one row and one element at least, not ", rows, " rows of ", n, ".");
    TORCH_CHECK_VALUE(element_size == 2 || element_size == 4, "kernels take elements of 2 or 4 bytes, not ", element_size, ".");
    TORCH_CHECK_VALUE(refused >= 0 && refused <= 2, "refused is 0, 1 or 2, not ", refused, ".");
}

Planned by_rows(const std::string& kernel, const char* reason, const LaunchShape& shape, int64_t refusable, size_t workspace = 0) {
    if (shape.grid == 0) return {"", "no kernel takes this problem", {}};
    return {kernel, reason,
            {shape.grid, shape.threads, shape.beside, shape.cluster, int64_t(shape.shared), refusable, int64_t(workspace), 0}};
}

// `Plan`: one of kernels/plans, of softmax or the loss.
template <class Plan>
Planned planned(const Plan& plan, const std::string& kernel) {
    return by_rows(kernel, plan.reason, plan.shape, int64_t(plan.refusable));
}

int in_line(int64_t address) { return int(address % 128); }

Planned softmax_forward(at::IntArrayRef device, int64_t rows, int64_t n, int64_t element_size, at::IntArrayRef addresses,
                        double scale, bool causal, bool masked, bool mask_vectors, bool fp16, int64_t refused) {
    check(rows, n, element_size, refused);
    TORCH_CHECK_VALUE(addresses.size() == 2, "softmax's forward has the addresses of x and y, not ", addresses.size(), ".");
    const SoftmaxForwardProblem problem{int(element_size), rows,   n,      in_line(addresses[0]), in_line(addresses[1]),
                                        float(scale),      causal, masked, mask_vectors,          fp16};
    const SoftmaxPlan plan = plan_softmax_forward(problem, device_of(device), Refused(refused));
    return planned(plan, plan.kernel == SoftmaxKernel::masked ? "softmax_masked_rows"
                                                              : std::string("softmax_forward_") + name_of(plan.kernel));
}

Planned softmax_backward(at::IntArrayRef device, int64_t rows, int64_t n, int64_t element_size, at::IntArrayRef addresses,
                         bool fp16, int64_t refused) {
    check(rows, n, element_size, refused);
    TORCH_CHECK_VALUE(addresses.size() == 3, "softmax's backward has the addresses of grad_out, y and grad_x, not ",
                      addresses.size(), ".");
    const SoftmaxBackwardProblem problem{int(element_size),     rows, n, in_line(addresses[0]), in_line(addresses[1]),
                                         in_line(addresses[2]), fp16};
    const SoftmaxPlan plan = plan_softmax_backward(problem, device_of(device), Refused(refused));
    return planned(plan, std::string("softmax_backward_") + name_of(plan.kernel));
}

// `grad`: the gradient is written together with the loss. `plain`: without cap, label smoothing and class weights.
Planned cross_entropy(at::IntArrayRef device, int64_t rows, int64_t n, int64_t element_size, at::IntArrayRef addresses,
                      bool grad, bool plain, bool fp16, int64_t refused) {
    check(rows, n, element_size, refused);
    TORCH_CHECK_VALUE(addresses.size() == 2, "cross_entropy has the addresses of logits and grad, not ", addresses.size(), ".");
    const CrossEntropyProblem problem{int(element_size), rows, n, n, in_line(addresses[0]), grad ? in_line(addresses[1]) : 0,
                                      grad,              plain, fp16};
    const CrossEntropyPlan plan = plan_cross_entropy(problem, device_of(device), Refused(refused));
    return planned(plan, name_of(plan.kernel));
}

Planned by_elements(const std::string& kernel, const char* reason, const LaunchShape& shape, size_t workspace, int wide) {
    return {kernel, reason, {shape.grid, shape.threads * shape.beside, 1, 1, int64_t(shape.shared), 0, int64_t(workspace), wide}};
}

int aligned_to(int64_t address) { return address % 16 == 0 ? 16 : address % 16 == 8 ? 8 : 1; }

// All tensors are at `address`. `bias_gradient`: of the backward that makes it.
Planned gelu(at::IntArrayRef device, int64_t rows, int64_t n, int64_t element_size, int64_t address, bool bias,
             bool bias_gradient, bool fp16) {
    check(rows, n, element_size, 0);
    const GeluProblem problem{int(element_size), rows, n, aligned_to(address), bias, bias_gradient, fp16};
    const GeluPlan plan = plan_gelu(problem, device_of(device));
    return by_elements(name_of(plan.kernel), plan.reason, plan.shape, plan.workspace, plan.wide);
}

// All tensors are at `address`. `halves`: gate and up are halves of the rows of one tensor.
Planned glu(at::IntArrayRef device, int64_t rows, int64_t n, int64_t element_size, int64_t address, bool halves) {
    check(rows, n, element_size, 0);
    const bool whole = address % kGluAccess == 0 && (!halves || n * element_size % kGluAccess == 0);
    const GluPlan plan = plan_glu({int(element_size), rows, n, halves, whole}, device_of(device));
    return by_elements("glu", plan.reason, plan.shape, 0, plan.wide);
}

// All tensors are at `address`; `rows` of the table, n elements each. `backward`: of the table's gradient.
Planned embedding(at::IntArrayRef device, int64_t items, int64_t n, int64_t element_size, int64_t address, int64_t rows,
                  bool positions, bool fp16, bool backward) {
    check(items, n, element_size, 0);
    TORCH_CHECK_VALUE(rows > 0, "a table has one row at least, not ", rows, ".");
    const bool vectors = address % 16 == 0 && n * element_size % 16 == 0;
    const EmbeddingProblem problem{int(element_size), items, n, rows, vectors ? int(16 / element_size) : 1, positions, fp16};
    if (backward) {
        const EmbeddingBackwardPlan plan = plan_embedding_backward(problem, device_of(device));
        return by_elements("embedding_row_sums", plan.reason, plan.shape, embedding_workspace(items, n), problem.wide);
    }
    EmbeddingForwardPlan plan = plan_embedding_forward(problem, device_of(device));
    plan.shape.grid *= plan.slices;
    return by_elements("embedding_forward", plan.reason, plan.shape, 0, problem.wide);
}

// x [m, k] and the weight [n, k]. `whole`: they begin at multiples of 16 bytes.
Planned linear(at::IntArrayRef device, int64_t m, int64_t n, int64_t k, c10::string_view format, bool bf16, bool whole,
               int64_t group_size, bool zero_points) {
    check(m, n, 2, 0);
    TORCH_CHECK_VALUE(format == "plain" || format == "int8" || format == "int4", "format is '", format,
                      "'; it is 'plain', 'int8' or 'int4'.");
    LinearProblem problem{format == "plain" ? FUSELINE_WEIGHT_16 : format == "int8" ? FUSELINE_WEIGHT_INT8 : FUSELINE_WEIGHT_INT4,
                          bf16, m, n, k};
    while (problem.int4() && (int64_t(32) << problem.group_shift) < group_size) ++problem.group_shift;
    problem.zeros = problem.int4() && zero_points;
    problem.x_vectors = whole && k % 8 == 0;
    problem.weight_vectors = !problem.plain() || problem.x_vectors;
    problem.workspace = m > kRowsWithoutWorkspace;
    const Device on = device_of(device);
    LinearPlan plan;
    if (m <= most_linear_rows(problem.format, n, k)) plan = plan_linear(problem, on, EstimatedResidents{problem, on});
    if (plan.kernel == LinearKernel::unsupported) return {"", plan.reason, {}};
    const int elements = problem.plain() ? 8 : problem.int4() ? 32 : 16;  // of 16 bytes
    return {name_of(plan.kernel), plan.reason,
            {plan.shape.grid, plan.shape.threads, 1, plan.shape.cluster, int64_t(plan.shape.shared), 0, int64_t(plan.workspace),
             elements}};
}

void check_norm(int64_t rows, int64_t n, at::IntArrayRef sizes, int64_t refused) {
    TORCH_CHECK_VALUE(sizes.size() == 2, "a norm has two sizes of elements, of what is normalized and of y, not ",
                      sizes.size(), ".");
    check(rows, n, sizes[0], refused);
    TORCH_CHECK_VALUE(sizes[1] == sizes[0] || sizes[1] == 2, "y has elements of ", sizes[0], " or of 2 bytes, not of ",
                      sizes[1], ".");
}

// `element_sizes`: of what is normalized, and of y. All tensors of rows are at `address`, weights at multiples of 16 bytes.
// `of`: a NormOf. `refused`: whether the device refuses clusters of more than 8 blocks.
Planned norm_forward(at::IntArrayRef device, int64_t rows, int64_t n, at::IntArrayRef element_sizes, int64_t address, bool fp16,
                     bool centred, int64_t of, bool drops, bool fp32_weights, int64_t refused) {
    check_norm(rows, n, element_sizes, refused);
    TORCH_CHECK_VALUE(of >= 0 && of <= 2, "a norm is of x (0), of a sum (1), or of one with a mask or a bias (2), not ", of, ".");
    NormForwardProblem problem{};
    problem.x_size = int(element_sizes[0]), problem.y_size = int(element_sizes[1]), problem.fp16 = fp16;
    problem.rows = rows, problem.n = n, problem.centred = centred, problem.of = NormOf(of), problem.drops = drops;
    problem.fp32_weights = fp32_weights && problem.y_size == 2;
    problem.rows_aligned = address % 16 == 0, problem.weights_aligned = true;
    const NormForwardPlan plan = plan_norm_forward(problem, device_of(device), {refused == 0});
    return by_rows(name_of(plan.kernel), plan.reason, plan.shape, plan.shape.cluster > kMaxCluster);
}

// As above; `given` says what there is, or is wanted: a mask, grad_sum, and the gradients of x, of the branch, of weight, bias
// and x_bias.
Planned norm_backward(at::IntArrayRef device, int64_t rows, int64_t n, at::IntArrayRef element_sizes, int64_t address,
                      bool fp16, bool centred, bool fp32_weights, const c10::List<bool>& given, int64_t refused) {
    check_norm(rows, n, element_sizes, refused);
    TORCH_CHECK_VALUE(given.size() == 7, "a norm's backward is told of 7 things that there are or are not, not of ",
                      given.size(), ".");
    NormBackwardProblem problem{};
    problem.x_size = int(element_sizes[0]), problem.y_size = int(element_sizes[1]), problem.rows = rows, problem.n = n;
    problem.fp16 = fp16, problem.centred = centred, problem.fp32_weights = fp32_weights, problem.weighted = true;
    problem.rows_aligned = address % 16 == 0, problem.weight_aligned = true;
    problem.drops = given[0], problem.grad_sum = given[1], problem.grad_x = given[2], problem.grad_dropped = given[3];
    problem.grad_weight = given[4], problem.grad_bias = given[5], problem.grad_x_bias = given[6];
    const NormBackwardPlan plan = plan_norm_backward(problem, device_of(device), {refused == 0});
    return by_rows(name_of(plan.kernel), plan.reason, plan.shape, plan.shape.cluster > kMaxCluster, plan.workspace);
}

// What many rows of a norm of one dtype get for a layout that is asked for, in numbers that are the same for layouts which are
// one at this length; none where no kernel takes the layout. `layout`: as fuseline_plan_override takes it.
std::vector<int64_t> norm_layout(at::IntArrayRef device, int64_t n, int64_t element_size, bool centred, int64_t of, bool backward,
                                 at::IntArrayRef layout) {
    constexpr int64_t kRows = 1 << 14;
    check(kRows, n, element_size, 0);
    TORCH_CHECK_VALUE(of >= 0 && of <= 2, "a norm is of x (0), of a sum (1), or of one with a mask or a bias (2), not ", of, ".");
    TORCH_CHECK_VALUE(layout.size() == 5, "a layout has 5 numbers, not ", layout.size(), ".");
    RowOverride& asked = row_overrides[FUSELINE_MANY_NORMS + 4 * of + 2 * int(!centred) + int(backward)];
    const RowOverride before = asked;
    asked = {true, {INT64_MAX, int(layout[0]), int(layout[1]), int(layout[2]), int(layout[3]), RowKernel(layout[4])}};
    std::vector<int64_t> numbers;
    const auto add = [&](int kernel, const LaunchShape& shape, std::initializer_list<int64_t> more) {
        if (shape.grid == 0) return;
        numbers = {kernel, shape.grid, shape.threads, shape.beside, shape.cluster, int64_t(shape.shared)};
        numbers.insert(numbers.end(), more);
    };
    if (backward) {
        NormBackwardProblem p{};
        p.x_size = p.y_size = int(element_size), p.rows = kRows, p.n = n, p.centred = centred;
        p.weighted = p.rows_aligned = p.weight_aligned = p.grad_x = p.grad_weight = true, p.fp32_weights = element_size == 4;
        p.grad_bias = centred, p.grad_sum = of > 0, p.drops = p.grad_dropped = p.grad_x_bias = of == 2;
        const NormBackwardPlan plan = plan_norm_backward(p, device_of(device));
        add(int(plan.kernel), plan.shape, {plan.slots, plan.stages});
    } else {
        NormForwardProblem p{};
        p.x_size = p.y_size = int(element_size), p.rows = kRows, p.n = n, p.centred = centred, p.of = NormOf(of);
        p.rows_aligned = p.weights_aligned = true, p.drops = of == 2;
        const NormForwardPlan plan = plan_norm_forward(p, device_of(device));
        add(int(plan.kernel), plan.shape, {plan.held, plan.early, plan.part, plan.light, plan.leaves});
    }
    asked = before;
    return numbers;
}

// Launches by name; the reason; bytes of workspace, and of each launch blocks, threads, blocks of a cluster and bytes of shared
// memory.
using PlannedLaunches = std::tuple<std::vector<std::string>, std::string, std::vector<int64_t>>;

template <class Plan>
PlannedLaunches launches_of(const Plan& plan) {
    PlannedLaunches said{{}, plan.reason, {int64_t(plan.workspace)}};
    for (const auto& by : plan) {
        std::get<0>(said).emplace_back(name_of(by.kernel));
        const int64_t numbers[] = {by.shape.grid, by.shape.threads, by.shape.cluster, int64_t(by.shape.shared)};
        std::get<2>(said).insert(std::get<2>(said).end(), numbers, numbers + 4);
    }
    return said;
}

// A call of whole tensors; all gradients of q, k and v are wanted. `sizes`: batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim.
// `kinds`: dtype, causal, mask. `window`: left, right. `mask_dims`: those of batch, heads, queries and keys in which the mask has
// more than one entry. `packed`: sequences and the longest of queries and keys, or zeros.
PlannedLaunches attention(at::IntArrayRef device, at::IntArrayRef sizes, at::IntArrayRef kinds, at::IntArrayRef window,
                          const c10::List<bool>& mask_dims, at::IntArrayRef packed, double soft_cap, double dropout, bool sinks,
                          bool mask_gradient, bool backward) {
    TORCH_CHECK_VALUE(sizes.size() == 6 && kinds.size() == 3 && window.size() == 2 && mask_dims.size() == 4 && packed.size() == 3,
                      "attention is told of 6 sizes, 3 kinds, 2 ends of a window, 4 dimensions of a mask and 3 of packing.");
    char* const at = reinterpret_cast<char*>(int64_t(1) << 40);  // where tensors stand, and how far rows are apart, is as it likes
    fuseline_attention_gradients g{};
    fuseline_attention& c = g.call;
    c = {int(kinds[0]), int(kinds[1]), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], at, at, at, at};
    for (auto* strides : {&c.q_strides, &c.k_strides, &c.v_strides, &c.out_strides, &g.grad_out_strides}) {
        std::fill(*strides, *strides + 3, 8);
    }
    c.window_left = window[0], c.window_right = window[1], c.softmax_scale = 1, c.soft_cap = soft_cap, c.dropout = dropout;
    c.seed = reinterpret_cast<int64_t*>(at), c.mask_kind = int(kinds[2]), c.mask = at;
    for (int i = 0; i < 4; ++i) c.mask_strides[i] = g.grad_mask_strides[i] = mask_dims[i];
    if (packed[0] > 0) c.cu_seqlens_q = c.cu_seqlens_k = reinterpret_cast<int32_t*>(at);
    c.sequences = packed[0], c.max_seqlen_q = packed[1], c.max_seqlen_k = packed[2];
    g.grad_out = g.grad_q = g.grad_k = g.grad_v = at;
    if (mask_gradient) g.grad_mask = at;
    if (sinks) c.sinks = g.grad_sinks = reinterpret_cast<float*>(at);
    return launches_of(backward ? plan_attention_backward(g, device_of(device)) : plan_attention_forward(c, device_of(device)));
}

// `sizes`: batch, seqlen, embed_dim, num_heads, num_kv_heads, head_dim, out_dim. `shared`: one projection for all heads.
// `captured`: into a graph. All gradients are wanted, of two biases as well.
PlannedLaunches self_attention_layer(at::IntArrayRef device, at::IntArrayRef sizes, int64_t dtype, bool tf32, bool shared,
                                     bool captured, bool backward) {
    TORCH_CHECK_VALUE(sizes.size() == 7, "a self-attention layer has 7 sizes, not ", sizes.size(), ".");
    fuseline_small_layer layer{};
    layer.batch = sizes[0], layer.seqlen = sizes[1], layer.embed_dim = sizes[2], layer.num_heads = sizes[3];
    layer.num_kv_heads = sizes[4], layer.head_dim = sizes[5], layer.out_dim = sizes[6];
    layer.dtype = int(dtype), layer.tf32 = tf32, layer.shared_projection = shared;
    const Device on = device_of(device);
    if (!backward) {
        return launches_of(plan_small_layer_forward(layer, on, [=] { return captured; }, EstimatedSmallLayers{on}));
    }
    void* const at = reinterpret_cast<void*>(int64_t(1) << 40);
    return launches_of(plan_small_layer_backward(layer, {at, at, at, at, at, at, at, at}, on));
}

// `sizes`: batch, heads, kv_heads, head_dim, and the most positions of a row. `cache`: a fuseline_cache_kind.
Planned decode_attention(at::IntArrayRef device, at::IntArrayRef sizes, int64_t dtype, int64_t cache) {
    TORCH_CHECK_VALUE(sizes.size() == 5, "a decoding step of attention has 5 sizes, not ", sizes.size(), ".");
    fuseline_decode call{};
    call.batch = sizes[0], call.heads = sizes[1], call.kv_heads = sizes[2], call.head_dim = sizes[3], call.count = sizes[4];
    call.dtype = int(dtype), call.cache = int(cache);
    const DecodeAttentionPlan plan = plan_decode_attention(call, device_of(device));
    if (plan.code != 0) return {"", plan.reason, {}};
    return {"decode_attention", plan.reason,
            {plan.shape.grid, plan.shape.threads, 0, plan.shape.cluster, 0, 0, plan.partials * int64_t(sizeof(float)), 0}};
}

// `sizes`: layers, embed_dim, heads, kv_heads, head_dim, ffn_dim, vocab_size. Plans are the same for every norm, and for every
// activation but SwiGLU.
Planned decode_step(at::IntArrayRef device, at::IntArrayRef sizes, int64_t dtype, bool swiglu) {
    TORCH_CHECK_VALUE(sizes.size() == 7, "a decoding step has 7 sizes, not ", sizes.size(), ".");
    fuseline_step call{};
    call.num_layers = sizes[0], call.embed_dim = sizes[1], call.heads = sizes[2], call.kv_heads = sizes[3];
    call.head_dim = sizes[4], call.ffn_dim = sizes[5], call.vocab_size = sizes[6], call.dtype = int(dtype);
    call.norm = FUSELINE_NORM_RMS, call.activation = swiglu ? FUSELINE_ACTIVATION_SWIGLU : FUSELINE_ACTIVATION_GELU;
    const StepPlan plan = plan_decode_step(call, device_of(device));
    if (plan.code != 0) return {"", plan.reason, {}};
    return {"decode_step", plan.reason,
            {plan.shape.grid, plan.shape.threads, 0, 1, int64_t(plan.shape.shared), 0, plan.workspace, 0}};
}

// Logits [rows, n], which may begin anywhere.
Planned argmax_step(at::IntArrayRef device, int64_t rows, int64_t n, int64_t element_size) {
    check(rows, n, element_size, 0);
    const ArgmaxStepPlan plan = plan_argmax_step(rows, n, int(element_size), device_of(device));
    return by_rows("argmax_step", plan.reason, plan.shape, 0);
}

// `counts`: elements of each parameter.
PlannedLaunches adamw(at::IntArrayRef counts, int64_t dtype) {
    return launches_of(plan_adamw(int64_t(counts.size()), [&](int64_t i) { return counts[i]; }, int(dtype)));
}

PlannedLaunches gradient_norm(at::IntArrayRef device, at::IntArrayRef counts, at::IntArrayRef dtypes) {
    TORCH_CHECK_VALUE(counts.size() == dtypes.size(), counts.size(), " gradients have ", dtypes.size(), " dtypes; each has one.");
    return launches_of(plan_gradient_norm(int64_t(counts.size()), [&](int64_t i) { return counts[i]; },
                                          [&](int64_t i) { return int(dtypes[i]); }, device_of(device)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fuseline, m) {
    m.def("plan_adamw(int[] counts, int dtype) -> (str[], str, int[])", adamw);
    m.def("plan_gradient_norm(int[] device, int[] counts, int[] dtypes) -> (str[], str, int[])", gradient_norm);
    m.def("plan_self_attention_layer(int[] device, int[] sizes, int dtype, bool tf32, bool shared, bool captured, "
          "bool backward) -> (str[], str, int[])", self_attention_layer);
    m.def("plan_decode_step(int[] device, int[] sizes, int dtype, bool swiglu) -> (str, str, int[])", decode_step);
    m.def("plan_argmax_step(int[] device, int rows, int n, int element_size) -> (str, str, int[])", argmax_step);
    m.def("plan_attention(int[] device, int[] sizes, int[] kinds, int[] window, bool[] mask_dims, int[] packed, float soft_cap, "
          "float dropout, bool sinks, bool mask_gradient, bool backward) -> (str[], str, int[])", attention);
    m.def("plan_decode_attention(int[] device, int[] sizes, int dtype, int cache) -> (str, str, int[])", decode_attention);
    m.def("plan_softmax_forward(int[] device, int rows, int n, int element_size, int[] addresses, float scale, bool causal, "
          "bool masked, bool mask_vectors, bool fp16, int refused) -> (str, str, int[])", softmax_forward);
    m.def("plan_softmax_backward(int[] device, int rows, int n, int element_size, int[] addresses, bool fp16, "
          "int refused) -> (str, str, int[])", softmax_backward);
    m.def("plan_cross_entropy(int[] device, int rows, int n, int element_size, int[] addresses, bool grad, bool plain, "
          "bool fp16, int refused) -> (str, str, int[])", cross_entropy);
    m.def("plan_gelu(int[] device, int rows, int n, int element_size, int address, bool bias, bool bias_gradient, bool fp16) -> "
          "(str, str, int[])", gelu);
    m.def("plan_norm_forward(int[] device, int rows, int n, int[] element_sizes, int address, bool fp16, bool centred, int of, "
          "bool drops, bool fp32_weights, int refused) -> (str, str, int[])", norm_forward);
    m.def("plan_norm_backward(int[] device, int rows, int n, int[] element_sizes, int address, bool fp16, "
          "bool centred, bool fp32_weights, bool[] given, int refused) -> (str, str, int[])", norm_backward);
    m.def("plan_norm_layout(int[] device, int n, int element_size, bool centred, int of, bool backward, int[] layout) -> int[]",
          norm_layout);
    m.def("plan_glu(int[] device, int rows, int n, int element_size, int address, bool halves) -> (str, str, int[])", glu);
    m.def("plan_embedding(int[] device, int items, int n, int element_size, int address, int rows, bool positions, bool fp16, "
          "bool backward) -> (str, str, int[])", embedding);
    m.def("plan_linear(int[] device, int m, int n, int k, str format, bool bf16, bool whole, int group_size, "
          "bool zero_points) -> (str, str, int[])", linear);
}

}  // namespace fuseline::plans_op
