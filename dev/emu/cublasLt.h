// cuBLASLt's names over the host's BLAS: what llmc/cuda/matmul.cuh calls, on the emulated device.
//
// A product is put on its stream. When its turn comes, sgemm computes it on float copies; alpha, beta and the epilogue follow
// in float, and the result is rounded once. An algorithm holds for what the heuristic was asked about and no more: other
// shapes, pointers less aligned than promised, too little workspace or an output that overlaps an input end with a sentence.
//
// What the library refuses is refused with its status. Where the library may choose, this one is the narrower: epilogues only
// for pointers and leading dimensions of whole 16 bytes, GELU only for 16-bit types. So the ways around are walked too.
#pragma once
#include <cblas.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <optional>
#include <vector>

enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
enum cublasStatus_t {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_ARCH_MISMATCH = 8,
    CUBLAS_STATUS_NOT_SUPPORTED = 15
};
enum cublasLtEpilogue_t {
    CUBLASLT_EPILOGUE_DEFAULT = 1,
    CUBLASLT_EPILOGUE_BIAS = 4,
    CUBLASLT_EPILOGUE_GELU_AUX = 32 | 128,
    CUBLASLT_EPILOGUE_GELU_AUX_BIAS = 32 | 128 | 4,
    CUBLASLT_EPILOGUE_DGELU = 64 | 128,
    CUBLASLT_EPILOGUE_BGRADA = 256,
    CUBLASLT_EPILOGUE_BGRADB = 512
};
enum cublasLtMatmulDescAttributes_t {
    CUBLASLT_MATMUL_DESC_TRANSA = 3,
    CUBLASLT_MATMUL_DESC_TRANSB = 4,
    CUBLASLT_MATMUL_DESC_EPILOGUE = 7,
    CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER = 11,
    CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD = 12,
    CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26
};
enum cublasLtMatmulPreferenceAttributes_t {
    CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1,
    CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
};
enum cublasLtReductionScheme_t { CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2 };

struct cublasLtContext {};
typedef cublasLtContext* cublasLtHandle_t;

struct cublasLtMatrixLayoutOpaque_t {
    cudaDataType_t type;
    uint64_t rows, columns;
    int64_t ld;

    bool operator==(const cublasLtMatrixLayoutOpaque_t&) const = default;
};
typedef cublasLtMatrixLayoutOpaque_t* cublasLtMatrixLayout_t;

struct cublasLtMatmulDescOpaque_t {
    cublasComputeType_t compute_type;
    cudaDataType_t scale_type;
    int32_t transpose_a, transpose_b, bias_type;
    uint32_t epilogue;
    int64_t aux_ld;
    char *bias, *aux;

    bool operator==(const cublasLtMatmulDescOpaque_t&) const = default;
};
typedef cublasLtMatmulDescOpaque_t* cublasLtMatmulDesc_t;

struct cublasLtMatmulPreferenceOpaque_t {
    uint64_t workspace;
    uint32_t reductions, align_a, align_b, align_c, align_d;
};
typedef cublasLtMatmulPreferenceOpaque_t* cublasLtMatmulPreference_t;

struct cublasLtMatmulAlgo_t {  // what it was chosen for
    cublasLtMatmulDescOpaque_t operation;
    cublasLtMatrixLayoutOpaque_t a, b, c, d;
    uint32_t align_a, align_b, align_c, align_d, align_bias, align_aux;
    size_t workspace;
};

struct cublasLtMatmulHeuristicResult_t {
    cublasLtMatmulAlgo_t algo;
    size_t workspaceSize;
    cublasStatus_t state;
    float wavesCount;
};

namespace emu::blas {

inline size_t type_bytes(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }

inline size_t matrix_bytes(const cublasLtMatrixLayoutOpaque_t& m) {
    return ((m.columns - 1) * size_t(m.ld) + m.rows) * type_bytes(m.type);
}

// As far as it can matter.
inline uint32_t alignment(const void* pointer) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(pointer) | 256;
    return uint32_t(address & -address);
}

inline bool takes_bias(uint32_t epilogue) { return epilogue & (4 | 256 | 512); }
inline bool takes_aux(uint32_t epilogue) { return epilogue & 128; }

// The reductions' bias is as long as D has columns (B) or rows (A), as the others' is.
inline size_t bias_length(uint32_t epilogue, const cublasLtMatrixLayoutOpaque_t& d) {
    return epilogue == CUBLASLT_EPILOGUE_BGRADB ? d.columns : d.rows;
}

inline cublasStatus_t status_of(const cublasLtMatmulAlgo_t& p) {
    const cublasLtMatmulDescOpaque_t& op = p.operation;
    const bool ta = op.transpose_a == CUBLAS_OP_T, tb = op.transpose_b == CUBLAS_OP_T;
    const uint64_t k = ta ? p.a.rows : p.a.columns;
    if ((ta ? p.a.columns : p.a.rows) != p.d.rows || (tb ? p.b.rows : p.b.columns) != p.d.columns ||
        (tb ? p.b.columns : p.b.rows) != k || p.c.rows != p.d.rows || p.c.columns != p.d.columns)
        return CUBLAS_STATUS_INVALID_VALUE;
    for (const cublasLtMatrixLayoutOpaque_t& m : {p.a, p.b, p.c, p.d})
        if (m.rows == 0 || m.columns == 0 || m.ld < int64_t(m.rows)) return CUBLAS_STATUS_INVALID_VALUE;
    if (takes_bias(op.epilogue) && !op.bias) return CUBLAS_STATUS_INVALID_VALUE;
    if (takes_aux(op.epilogue) && (!op.aux || op.aux_ld % 8 || op.aux_ld < int64_t(p.d.rows))) return CUBLAS_STATUS_INVALID_VALUE;
    if (op.compute_type != CUBLAS_COMPUTE_32F || op.scale_type != CUDA_R_32F || p.a.type != p.b.type || p.c.type != p.d.type ||
        (p.d.type != p.a.type && p.d.type != CUDA_R_32F) || (op.bias_type != -1 && op.bias_type != int(p.d.type)))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (op.epilogue == CUBLASLT_EPILOGUE_DEFAULT) return CUBLAS_STATUS_SUCCESS;
    if (takes_aux(op.epilogue) && (p.d.type == CUDA_R_32F || p.align_aux < 16)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (takes_bias(op.epilogue) && p.align_bias < 16) return CUBLAS_STATUS_NOT_SUPPORTED;
    for (const cublasLtMatrixLayoutOpaque_t& m : {p.a, p.b, p.c, p.d})
        if (size_t(m.ld) * type_bytes(m.type) % 16) return CUBLAS_STATUS_NOT_SUPPORTED;
    return std::min({p.align_a, p.align_b, p.align_c, p.align_d}) < 16 ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
}

inline void range_check(const char* what, const void* at, size_t bytes, bool now) {
    const std::string error = device_range_error(at, bytes, now);
    if (!error.empty()) throw Error(text("cublasLtMatmul: %s: ", what) + error);
}

inline void alignment_check(const char* what, const void* at, uint32_t promised) {
    if (alignment(at) < promised)
        throw Error(text("cublasLtMatmul: %s is at %p, the algorithm was chosen for multiples of %u bytes", what, at, promised));
}

inline void load(float* to, const void* from, cudaDataType_t type, size_t n) {
    if (type == CUDA_R_32F) memcpy(to, from, n * sizeof(float));
    else if (type == CUDA_R_16BF) std::copy_n(static_cast<const __nv_bfloat16*>(from), n, to);
    else std::copy_n(static_cast<const __half*>(from), n, to);
}
inline void store(void* to, const float* from, cudaDataType_t type, size_t n) {
    if (type == CUDA_R_32F) memcpy(to, from, n * sizeof(float));
    else if (type == CUDA_R_16BF) std::copy_n(from, n, static_cast<__nv_bfloat16*>(to));
    else std::copy_n(from, n, static_cast<__half*>(to));
}

// Without the gaps between columns.
inline std::vector<float> matrix_load(const char* at, const cublasLtMatrixLayoutOpaque_t& m) {
    std::vector<float> values(m.rows * m.columns);
    for (size_t j = 0; j < m.columns; j++)
        load(&values[j * m.rows], at + j * size_t(m.ld) * type_bytes(m.type), m.type, m.rows);
    return values;
}

inline float gelu_tanh(float x) { return std::tanh(0.7978845608f * (x + 0.044715f * x * x * x)); }
inline float gelu(float x) { return 0.5f * x * (1.0f + gelu_tanh(x)); }
inline float gelu_slope(float x) {
    const float t = gelu_tanh(x);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.7978845608f * (1.0f + 3.0f * 0.044715f * x * x);
}

struct Buffers {
    const char *a, *b, *c;
    char *d, *workspace;
};

inline void buffers_check(const cublasLtMatmulAlgo_t& p, const Buffers& at, bool now) {
    const cublasLtMatmulDescOpaque_t& op = p.operation;
    const size_t size = type_bytes(p.d.type);
    range_check("A", at.a, matrix_bytes(p.a), now);
    range_check("B", at.b, matrix_bytes(p.b), now);
    if (at.c) range_check("C", at.c, matrix_bytes(p.c), now);
    range_check("D", at.d, matrix_bytes(p.d), now);
    if (takes_bias(op.epilogue)) range_check("the bias", op.bias, bias_length(op.epilogue, p.d) * size, now);
    if (takes_aux(op.epilogue))
        range_check("the auxiliary matrix", op.aux, ((p.d.columns - 1) * size_t(op.aux_ld) + p.d.rows) * size, now);
    if (p.workspace) range_check("the workspace", at.workspace, p.workspace, now);
}

// sum [n] = the sums over k of op(X) [n, k], dense.
inline void reduce(const char* sums, cudaDataType_t type, const std::vector<float>& x, size_t n, bool k_is_outer) {
    const size_t k = x.size() / n;
    std::vector<float> sum(n, 0.0f);
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < k; j++) sum[i] += x[k_is_outer ? j * n + i : i * k + j];
    store(const_cast<char*>(sums), sum.data(), type, n);
}

inline void compute(const cublasLtMatmulAlgo_t& p, const Buffers& at, float alpha, float beta) {
    const cublasLtMatmulDescOpaque_t& op = p.operation;
    const size_t m = p.d.rows, n = p.d.columns, size = type_bytes(p.d.type);
    const bool ta = op.transpose_a == CUBLAS_OP_T, tb = op.transpose_b == CUBLAS_OP_T;
    const std::vector<float> a = matrix_load(at.a, p.a), b = matrix_load(at.b, p.b);
    std::vector<float> sum = beta == 0 ? std::vector<float>(m * n) : matrix_load(at.c, p.c);
    if (p.workspace) memset(at.workspace, 0xff, p.workspace);
    cblas_sgemm(CblasColMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, int(m), int(n),
                int(ta ? p.a.rows : p.a.columns), alpha, a.data(), int(p.a.rows), b.data(), int(p.b.rows), beta, sum.data(),
                int(m));
    std::vector<float> bias(m, 0.0f), aux(m);
    if (op.epilogue & 4) load(bias.data(), op.bias, p.d.type, m);
    for (size_t j = 0; j < n; j++) {
        float* column = &sum[j * m];
        char* aux_at = op.aux + j * size_t(op.aux_ld) * size;
        for (size_t i = 0; op.epilogue & 4 && i < m; i++) column[i] += bias[i];
        if (op.epilogue & 32) {
            store(aux_at, column, p.d.type, m);
            for (size_t i = 0; i < m; i++) column[i] = gelu(column[i]);
        }
        if (op.epilogue & 64) {
            load(aux.data(), aux_at, p.d.type, m);
            for (size_t i = 0; i < m; i++) column[i] *= gelu_slope(aux[i]);
        }
        store(at.d + j * size_t(p.d.ld) * size, column, p.d.type, m);
    }
    if (op.epilogue == CUBLASLT_EPILOGUE_BGRADA) reduce(op.bias, p.d.type, a, m, !ta);
    if (op.epilogue == CUBLASLT_EPILOGUE_BGRADB) reduce(op.bias, p.d.type, b, n, tb);
}

template <class T>
cublasStatus_t attribute_set(T& to, const void* from, size_t bytes) {
    if (!from || bytes != sizeof(T)) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&to, from, bytes);
    return CUBLAS_STATUS_SUCCESS;
}

}  // namespace emu::blas

inline const char* cublasLtGetStatusName(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
        case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
        default: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
}

inline cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    *handle = new cublasLtContext;
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatrixLayoutInit(cublasLtMatrixLayout_t layout, cudaDataType_t type, uint64_t rows, uint64_t columns,
                                               int64_t ld) {
    *layout = {type, rows, columns, ld};
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmulDescInit(cublasLtMatmulDesc_t operation, cublasComputeType_t compute, cudaDataType_t scale) {
    *operation = {compute, scale, CUBLAS_OP_N, CUBLAS_OP_N, -1, CUBLASLT_EPILOGUE_DEFAULT, 0, nullptr, nullptr};
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                                     const void* value, size_t bytes) {
    using emu::blas::attribute_set;
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_TRANSA: return attribute_set(operation->transpose_a, value, bytes);
        case CUBLASLT_MATMUL_DESC_TRANSB: return attribute_set(operation->transpose_b, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE: return attribute_set(operation->epilogue, value, bytes);
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return attribute_set(operation->bias, value, bytes);
        case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return attribute_set(operation->bias_type, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return attribute_set(operation->aux, value, bytes);
        case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return attribute_set(operation->aux_ld, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

inline cublasStatus_t cublasLtMatmulPreferenceInit(cublasLtMatmulPreference_t preference) {
    *preference = {0, 7, 256, 256, 256, 256};
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                           cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                           size_t bytes) {
    using emu::blas::attribute_set;
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return attribute_set(preference->workspace, value, bytes);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return attribute_set(preference->reductions, value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return attribute_set(preference->align_a, value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return attribute_set(preference->align_b, value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return attribute_set(preference->align_c, value, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return attribute_set(preference->align_d, value, bytes);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                                     cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
                                                     cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int requested,
                                                     cublasLtMatmulHeuristicResult_t* results, int* count) {
    *count = 0;
    if (!handle || requested < 1) return CUBLAS_STATUS_INVALID_VALUE;
    const cublasLtMatmulPreferenceOpaque_t& want = *preference;
    const size_t split = std::min(d->rows * d->columns * sizeof(float), size_t(1) << 20);
    const cublasLtMatmulAlgo_t algorithm = {*operation, *a, *b, *c, *d, want.align_a, want.align_b, want.align_c, want.align_d,
                                            emu::blas::alignment(operation->bias), emu::blas::alignment(operation->aux),
                                            want.workspace < split ? 0 : split};
    const cublasStatus_t status = emu::blas::status_of(algorithm);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    results[0] = {algorithm, algorithm.workspace, CUBLAS_STATUS_SUCCESS, 1.0f};
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void* alpha, const void* a,
                                     cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                                     const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                                     cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* chosen, void* workspace,
                                     size_t workspace_bytes, cudaStream_t stream) {
    using namespace emu::blas;
    if (!handle || !chosen) return CUBLAS_STATUS_INVALID_VALUE;
    cublasLtMatmulAlgo_t p = *chosen;
    p.operation.bias = operation->bias;
    p.operation.aux = operation->aux;
    if (p.operation != *operation || p.a != *a_layout || p.b != *b_layout || p.c != *c_layout || p.d != *d_layout)
        throw emu::Error("cublasLtMatmul: the algorithm was chosen for another product");
    if (workspace_bytes < p.workspace) return CUBLAS_STATUS_INVALID_VALUE;
    float scale, add;
    memcpy(&scale, alpha, sizeof scale);
    memcpy(&add, beta, sizeof add);
    const Buffers at = {static_cast<const char*>(a), static_cast<const char*>(b), add == 0 ? nullptr : static_cast<const char*>(c),
                        static_cast<char*>(d), static_cast<char*>(workspace)};
    alignment_check("A", a, p.align_a);
    alignment_check("B", b, p.align_b);
    if (at.c) alignment_check("C", c, p.align_c);
    alignment_check("D", d, p.align_d);
    if (takes_bias(operation->epilogue)) alignment_check("the bias", operation->bias, p.align_bias);
    if (takes_aux(operation->epilogue)) alignment_check("the auxiliary matrix", operation->aux, p.align_aux);
    if (p.workspace) alignment_check("the workspace", workspace, 256);
    buffers_check(p, at, false);
    const auto overlaps = [&](const char* from, const cublasLtMatrixLayoutOpaque_t& m) {
        return at.d < from + matrix_bytes(m) && from < at.d + matrix_bytes(p.d);
    };
    if (overlaps(at.a, p.a) || overlaps(at.b, p.b) || (at.c && at.c != at.d && overlaps(at.c, p.c)))
        throw emu::Error("cublasLtMatmul: the output overlaps an input");
    emu::enqueue(stream, [=] {
        buffers_check(p, at, true);
        compute(p, at, scale, add);
    });
    return CUBLAS_STATUS_SUCCESS;
}
