// Linear layers by cuBLASLt: out [N, OC] = inp [N, C] weight^T [C, OC] + bias, and their gradients. All row-major.
//
// Products are summed in float32 (float inputs are not rounded to TF32) and in the same order from run to run. The bias, GELU
// and their gradients are cuBLASLt's epilogues where it has them for the types, the shape and the pointers' alignment, which
// is asked once for each; elsewhere (odd sizes, for one) they are kernels of our own around the plain product, so any shape
// works.
#pragma once
#include <cublasLt.h>

#include <compare>
#include <map>
#include <type_traits>

#include "llmc/cuda/bias.cuh"
#include "llmc/cuda/gelu.cuh"

// cuBLASLt is column-major, where a row-major matrix is its own transpose: D [m, n] = op(A) [m, k] op(B) [k, n] (+ D), then
// the epilogue. Matrices are dense: the leading dimension is the number of rows.
struct MatmulShape {
    cudaDataType_t type, type_out;  // of A and B; of D, bias and aux
    bool transpose_a, transpose_b, add;
    long m, n, k;
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;

    auto operator<=>(const MatmulShape&) const = default;
};

struct MatmulPointers {
    const void *a, *b;
    void* d;
    const void* bias = nullptr;  // [m], or its gradient (BGRADB: [n])
    const void* aux = nullptr;   // [m, n]: what GELU was given
};

// The bytes that each pointer is a multiple of, 256 at most.
struct MatmulAlignment {
    uint32_t a, b, d, bias, aux;

    auto operator<=>(const MatmulAlignment&) const = default;
};

struct MatmulPlan {
    bool found = false;  // whether cuBLASLt can do it
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace = 0;  // bytes
};

// The device's handle of cuBLASLt, the plans made so far, and 32 MiB for the sums of split products for each stream.
struct Matmuls {
    static constexpr size_t workspace_bytes = size_t(32) << 20;

    cublasLtHandle_t handle = nullptr;
    std::map<std::pair<MatmulShape, MatmulAlignment>, MatmulPlan> plans;
    std::map<cudaStream_t, void*> workspaces;

    Matmuls() = default;
    Matmuls(const Matmuls&) = delete;
    Matmuls& operator=(const Matmuls&) = delete;
    ~Matmuls() {
        for (const auto& [stream, workspace] : workspaces) cudaFree(workspace);
        if (handle) cublasLtDestroy(handle);
    }
};

namespace cuda {

template <class E>
constexpr cudaDataType_t matmul_type = std::is_same_v<E, float>  ? CUDA_R_32F
                                       : std::is_same_v<E, bf16> ? CUDA_R_16BF
                                                                 : CUDA_R_16F;

inline void matmul_check(cublasStatus_t status, const char* call, const MatmulShape& shape) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    const char* hint = status == CUBLAS_STATUS_ALLOC_FAILED || status == CUBLAS_STATUS_NOT_INITIALIZED
                           ? "is the GPU's memory full (then a smaller --micro-batch helps), or its driver older than the toolkit?"
                       : status == CUBLAS_STATUS_ARCH_MISMATCH || status == CUBLAS_STATUS_NOT_SUPPORTED
                           ? "this cuBLASLt cannot do it on this GPU: it must be an sm_80 or later, and the toolkit as new"
                           : "CUBLASLT_LOG_LEVEL=1 says more";
    const auto name = [](cudaDataType_t type) { return type == CUDA_R_32F ? "fp32" : type == CUDA_R_16BF ? "bf16" : "fp16"; };
    fail("%s failed with %s for a %s product [%ld, %ld] x [%ld, %ld] into %s, epilogue %d: %s", call, cublasLtGetStatusName(status),
         name(shape.type), shape.m, shape.k, shape.k, shape.n, name(shape.type_out), int(shape.epilogue), hint);
}

inline uint32_t pointer_alignment(const void* pointer) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer) | 256;
    return uint32_t(address & -address);
}

// Before cuBLASLt is asked for an algorithm too: it looks at the alignment of these.
inline void matmul_pointers_set(MatmulPlan& plan, const MatmulShape& shape, const MatmulPointers& at) {
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
        matmul_check(cublasLtMatmulDescSetAttribute(&plan.operation, attribute, &value, sizeof value),
                     "cublasLtMatmulDescSetAttribute", shape);
    };
    if (at.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, at.bias);
    if (at.aux) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, at.aux);
}

inline MatmulPlan matmul_plan_make(cublasLtHandle_t handle, const MatmulShape& s, const MatmulAlignment& alignment,
                                   const MatmulPointers& at) {
    MatmulPlan plan;
    const auto checked = [&](cublasStatus_t status, const char* call) { matmul_check(status, call, s); };
    checked(cublasLtMatmulDescInit(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescInit");
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
        checked(cublasLtMatmulDescSetAttribute(&plan.operation, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, int32_t(s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N));
    set(CUBLASLT_MATMUL_DESC_TRANSB, int32_t(s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N));
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t(s.epilogue));
    if (at.bias) set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t(s.type_out));
    if (at.aux) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, int64_t(s.m));
    matmul_pointers_set(plan, s, at);
    const auto layout = [&](cublasLtMatrixLayoutOpaque_t& matrix, cudaDataType_t type, long rows, long columns) {
        checked(cublasLtMatrixLayoutInit(&matrix, type, uint64_t(rows), uint64_t(columns), rows), "cublasLtMatrixLayoutInit");
    };
    layout(plan.a, s.type, s.transpose_a ? s.k : s.m, s.transpose_a ? s.m : s.k);
    layout(plan.b, s.type, s.transpose_b ? s.n : s.k, s.transpose_b ? s.k : s.n);
    layout(plan.d, s.type_out, s.m, s.n);

    cublasLtMatmulPreferenceOpaque_t preference;
    checked(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
        checked(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value),
                "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(Matmuls::workspace_bytes));
    // the sums of a product that is split over k stay in float32
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment.a);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment.b);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment.d);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment.d);

    cublasLtMatmulHeuristicResult_t result{};
    int count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, &plan.operation, &plan.a, &plan.b, &plan.d, &plan.d,
                                                           &preference, 1, &result, &count);
    if (status == CUBLAS_STATUS_SUCCESS) status = count == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : result.state;
    const bool refused = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
    if (refused && s.epilogue != CUBLASLT_EPILOGUE_DEFAULT) return plan;
    checked(status, "cublasLtMatmulAlgoGetHeuristic");
    plan.found = true;
    plan.algorithm = result.algo;
    plan.workspace = result.workspaceSize;
    return plan;
}

// False: cuBLASLt does not have this epilogue here, and nothing was done. A product without one works or fails.
inline bool matmul_run(const MatmulShape& shape, const MatmulPointers& at, Stream stream) {
    std::shared_ptr<Matmuls>& matmuls = stream.device->matmuls;
    if (!matmuls) {
        matmuls = std::make_shared<Matmuls>();
        matmul_check(cublasLtCreate(&matmuls->handle), "cublasLtCreate", shape);
    }
    const MatmulAlignment alignment = {pointer_alignment(at.a), pointer_alignment(at.b), pointer_alignment(at.d),
                                       pointer_alignment(at.bias), pointer_alignment(at.aux)};
    const auto [entry, fresh] = matmuls->plans.try_emplace({shape, alignment});
    MatmulPlan& plan = entry->second;
    if (fresh) plan = matmul_plan_make(matmuls->handle, shape, alignment, at);
    if (!plan.found) return false;
    if (!fresh) matmul_pointers_set(plan, shape, at);
    void*& workspace = matmuls->workspaces[stream.handle];
    if (!workspace) cuda_check(cudaMalloc(&workspace, Matmuls::workspace_bytes), "cudaMalloc");
    const float one = 1.0f, beta = shape.add ? 1.0f : 0.0f;
    matmul_check(cublasLtMatmul(matmuls->handle, &plan.operation, &one, at.a, &plan.a, at.b, &plan.b, &beta, at.d, &plan.d, at.d,
                                &plan.d, &plan.algorithm, workspace, plan.workspace, stream.handle),
                 "cublasLtMatmul", shape);
    return true;
}

inline MatmulShape with_epilogue(MatmulShape shape, cublasLtEpilogue_t epilogue) {
    shape.epilogue = epilogue;
    return shape;
}

// out [N, OC] = inp [N, C] weight^T + bias (null: none). With pre_gelu [N, OC] that goes there, and out = gelu(pre_gelu).
template <class E>
void matmul_forward(E* out, std::type_identity_t<E>* pre_gelu, const E* inp, const E* weight, const std::type_identity_t<E>* bias,
                    long N, int C, int OC, Stream stream) {
    if (N == 0) return;
    MatmulShape shape = {matmul_type<E>, matmul_type<E>, true, false, false, OC, N, C};
    if (pre_gelu) {
        const auto epilogue = bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
        if (matmul_run(with_epilogue(shape, epilogue), {weight, inp, out, bias, pre_gelu}, stream)) return;
    }
    E* product = pre_gelu ? pre_gelu : out;
    if (!bias || !matmul_run(with_epilogue(shape, CUBLASLT_EPILOGUE_BIAS), {weight, inp, product, bias}, stream)) {
        if (bias) bias_fill(product, bias, N, OC, stream);
        shape.add = bias != nullptr;
        matmul_run(shape, {weight, inp, product}, stream);
    }
    if (pre_gelu) gelu_forward(out, pre_gelu, size_t(N) * OC, stream);
}

// dinp [N, C] = dout [N, OC] weight [OC, C], times gelu'(pre_gelu) if pre_gelu [N, C] is given.
template <class E>
void matmul_backward_input(E* dinp, const E* dout, const E* weight, const std::type_identity_t<E>* pre_gelu, long N, int C, int OC,
                           Stream stream) {
    if (N == 0) return;
    const MatmulShape shape = {matmul_type<E>, matmul_type<E>, false, false, false, C, N, OC};
    if (pre_gelu &&
        matmul_run(with_epilogue(shape, CUBLASLT_EPILOGUE_DGELU), {weight, dout, dinp, nullptr, pre_gelu}, stream)) {
        return;
    }
    matmul_run(shape, {weight, dout, dinp}, stream);
    if (pre_gelu) gelu_backward(dinp, dinp, pre_gelu, size_t(N) * C, stream);
}

// dweight [OC, C] (+)= dout^T inp; dbias [OC] (null: not wanted) (+)= the sum of dout's rows. cuBLASLt has no epilogue that
// adds to dbias.
template <class E>
void matmul_backward_weight(float* dweight, float* dbias, const E* dout, const E* inp, long N, int C, int OC, bool accumulate,
                            Stream stream) {
    if (N == 0) {
        if (!accumulate) device_zero(dweight, size_t(OC) * C * sizeof(float), stream);
    } else {
        const MatmulShape shape = {matmul_type<E>, CUDA_R_32F, false, true, accumulate, C, OC, N};
        if (dbias && !accumulate &&
            matmul_run(with_epilogue(shape, CUBLASLT_EPILOGUE_BGRADB), {inp, dout, dweight, dbias}, stream)) {
            return;
        }
        matmul_run(shape, {inp, dout, dweight}, stream);
    }
    if (dbias) bias_backward(dbias, dout, N, OC, accumulate, stream);
}

}  // namespace cuda
